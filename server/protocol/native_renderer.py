"""Outputs of one sequence as the events of `/generate_stream`, POST and GET. Knows no aiohttp."""

from __future__ import annotations

from typing import Any

import orjson

from core.errors import NoriaError
from core.outputs import FinishReason, StepOutput
from server import sse
from server.protocol.errors import error_body
from server.protocol.tally import Tally


class NativeRenderer:
    """Events without names, ended by `[DONE]`.

    Every token with text is an event; the final one carries the reason, the usage and the text that was still held.
    """

    keep_alive = sse.KEEP_ALIVE

    def __init__(self, sequence_id: str, tally: Tally, request_id: str = "") -> None:
        self._sequence_id = sequence_id
        self._tally = tally
        self._request_id = request_id
        self._tail = b',"sequence_id":' + orjson.dumps(sequence_id) + b"}\n\n"

    def write(self, outputs: list[tuple[int, StepOutput]], *, merges: bool = False) -> bytes:
        parts = []
        for text, _, final in split(outputs, self._tally, merges=merges):
            if final is None:
                parts.append(b'data: {"token":' + sse.escape(orjson.dumps(text)) + self._tail)
            else:
                parts.append(sse.event(final_data(text, self._sequence_id, final, self._tally)))
        return b"".join(parts)

    def end(self) -> bytes:
        return sse.DONE

    def fail(self, error: NoriaError) -> bytes:
        return sse.event(error_body(error, self._request_id)) + sse.DONE


class EventSourceRenderer:
    """Named events with ids for the browser's `EventSource`; the name of the last one says that it is the last."""

    keep_alive = sse.KEEP_ALIVE

    def __init__(self, sequence_id: str, tally: Tally, request_id: str = "") -> None:
        self._sequence_id = sequence_id
        self._tally = tally
        self._request_id = request_id

    def write(self, outputs: list[tuple[int, StepOutput]], *, merges: bool = False) -> bytes:
        parts = []
        for text, count, final in split(outputs, self._tally, merges=merges):
            if final is None:
                data = orjson.dumps({"token": text, "sequence_id": self._sequence_id})
                parts.append(sse.named_event(b"token", sse.escape(data), count))
            else:
                data = final_data(text, self._sequence_id, final, self._tally)
                parts.append(sse.named_event(b"done", data, count))
        return b"".join(parts)

    def end(self) -> bytes:
        return b""

    def fail(self, error: NoriaError) -> bytes:
        return sse.named_event(b"error", error_body(error, self._request_id))


def split(
    outputs: list[tuple[int, StepOutput]], tally: Tally, *, merges: bool
) -> list[tuple[str, int, StepOutput | None]]:
    """What becomes an event of its own: (text, tokens so far, the final output or None).

    A final output that ends by length holds a token like any other, so its text is an event before the final one; at a
    stop it is the text that was still held. With `merges`, texts that wait are joined into one event.
    """
    events: list[tuple[str, int, StepOutput | None]] = []
    held, held_count = "", 0
    for index, output in outputs:
        tally.observe(index, output)
        text, count = output.text, output.num_output_tokens
        is_final = output.finish_reason is not None
        if merges and not is_final:
            held, held_count = held + text, count
            continue
        if held:
            events.append((held, held_count, None))
            held = ""
        if text and output.finish_reason in (None, FinishReason.LENGTH):
            events.append((text, count, None))
            text = ""
        if is_final:
            events.append((text, count, output))
    if held:
        events.append((held, held_count, None))
    return events


def final_data(text: str, sequence_id: str, output: StepOutput, tally: Tally) -> bytes:
    assert output.finish_reason is not None
    final: dict[str, Any] = {
        "token": text,
        "sequence_id": sequence_id,
        "finish_reason": output.finish_reason.value,
        "usage": tally.usage(),
    }
    return sse.escape(orjson.dumps(final))
