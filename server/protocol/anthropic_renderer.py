"""Outputs of one sequence as a message of Anthropic's API: as its events, or joined as one answer.

Knows no aiohttp. The events of a stream: `message_start`, `content_block_start`, `ping`, one `content_block_delta` a
token, `content_block_stop`, `message_delta` with reason and usage, `message_stop`. A `ping` may come at any time, the
first one before the message too. A failure is an `error` event, and the last.
"""

from __future__ import annotations

import uuid
from typing import Any

import orjson

from core.errors import NoriaError
from core.outputs import FinishReason, StepOutput
from server import sse
from server.protocol.anthropic_errors import anthropic_error_body
from server.protocol.tally import Tally

_DELTA = (
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":'
)
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageRenderer:
    """`write`, `end` and `fail` for a stream, `add` and `body` for a single answer."""

    keep_alive = _PING

    def __init__(self, model_name: str, tally: Tally, request_id: str = "") -> None:
        self._tally = tally
        self._request_id = request_id
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model_name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
        self._has_started = False
        self._texts: list[str] = []
        self._final: StepOutput | None = None

    def write(self, outputs: list[tuple[int, StepOutput]], *, merges: bool = False) -> bytes:
        """Events for what can be said; the first output opens the message, whose usage is known only then."""
        self.add(outputs)
        if not outputs:
            return b""
        texts = ["".join(self._texts)] if merges else self._texts
        parts = [b"" if self._has_started else self._start()]
        parts += [_DELTA + sse.escape(orjson.dumps(text)) + b"}}\n\n" for text in texts if text]
        self._texts = []
        return b"".join(parts)

    def end(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return (
            _event({"type": "content_block_stop", "index": 0})
            + _event({**delta, "timings": self._tally.timings()})
            + _event({"type": "message_stop"})
        )

    def fail(self, error: NoriaError) -> bytes:
        return sse.named_event(b"error", anthropic_error_body(error, self._request_id))

    def add(self, outputs: list[tuple[int, StepOutput]]) -> None:
        for index, output in outputs:
            self._tally.observe(index, output)
            if output.text:
                self._texts.append(output.text)
            if output.finish_reason is not None:
                self._final = output

    def body(self) -> bytes:
        """The whole answer, when the sequence has ended."""
        answer = {
            **self._message,
            "content": [{"type": "text", "text": "".join(self._texts)}],
            **self._stop(),
            "usage": self._usage(),
            "timings": self._tally.timings(),
        }
        return orjson.dumps(answer)

    def _start(self) -> bytes:
        self._has_started = True
        usage = {**self._usage(), "output_tokens": 0}
        block = {"type": "text", "text": ""}
        return (
            _event({"type": "message_start", "message": {**self._message, "usage": usage}})
            + _event({"type": "content_block_start", "index": 0, "content_block": block})
            + _PING
        )

    def _stop(self) -> dict[str, Any]:
        final = self._final
        assert final is not None
        if final.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(final.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": final.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _usage(self) -> dict[str, Any]:
        """All input is the sum of the three: what came from the prefix cache is not counted twice."""
        cached = self._tally.num_cached_tokens
        return {
            "input_tokens": self._tally.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._tally.num_output_tokens(0),
        }


def _event(data: dict[str, Any]) -> bytes:
    return sse.named_event(data["type"].encode(), sse.escape(orjson.dumps(data)))
