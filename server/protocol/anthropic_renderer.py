"""Outputs of one sequence as a message of Anthropic's API: as its events, or joined as one answer.

Knows no aiohttp. The events of a stream: `message_start`, `ping`, for each block `content_block_start`, one
`content_block_delta` a token and `content_block_stop`, then `message_delta` with reason and usage, `message_stop`. A
`ping` may come at any time, the first one before the message too. A failure is an `error` event, and the last.
"""

from __future__ import annotations

import uuid
from typing import Any

import orjson

from core.errors import NoriaError
from core.outputs import StepOutput
from server import sse
from server.protocol.answer_blocks import AnswerBlocks, Block, Change
from server.protocol.anthropic_errors import anthropic_error_body
from server.protocol.tally import Tally

_DELTAS = {
    "text": b'{"type":"text_delta","text":',
    "thoughts": b'{"type":"thinking_delta","thinking":',
    "call": b'{"type":"input_json_delta","partial_json":',
}
_PING = b'event: ping\ndata: {"type":"ping"}\n\n'


class MessageRenderer:
    """`write`, `end` and `fail` for a stream, `add` and `body` for a single answer."""

    keep_alive = _PING

    def __init__(
        self, model_name: str, tally: Tally, answer: AnswerBlocks, request_id: str = ""
    ) -> None:
        self._tally = tally
        self._answer = answer
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
        self._open = -1  # the block being told
        self._delta = b""  # the constant part of its events

    def write(self, outputs: list[tuple[int, StepOutput]], *, merges: bool = False) -> bytes:
        """Events for what can be said; the first output opens the message, whose usage is known only then."""
        self.add(outputs)
        if not outputs:
            return b""
        parts = [b"" if self._has_started else self._start()]
        parts += [self._change(change) for change in self._answer.take(merges=merges)]
        return b"".join(parts)

    def end(self) -> bytes:
        delta = {"type": "message_delta", "delta": self._stop(), "usage": self._usage()}
        return (
            self._close()
            + _event({**delta, "timings": self._tally.timings()})
            + _event({"type": "message_stop"})
        )

    def fail(self, error: NoriaError) -> bytes:
        return sse.named_event(b"error", anthropic_error_body(error, self._request_id))

    def add(self, outputs: list[tuple[int, StepOutput]]) -> None:
        for index, output in outputs:
            self._tally.observe(index, output)
            self._answer.add(output)

    def body(self) -> bytes:
        """The whole answer, when the sequence has ended."""
        answer = {
            **self._message,
            "content": [_whole(block) for block in self._answer.blocks],
            **self._stop(),
            "usage": self._usage(),
            "timings": self._tally.timings(),
        }
        return orjson.dumps(answer)

    def _start(self) -> bytes:
        self._has_started = True
        usage = {**self._usage(), "output_tokens": 0}
        message = {**self._message, "usage": usage}
        return _event({"type": "message_start", "message": message}) + _PING

    def _change(self, change: Change) -> bytes:
        opened = b""
        if change.at != self._open:
            opened = self._close()
            self._open = change.at
            block = self._answer.blocks[change.at]
            opened += _event(
                {"type": "content_block_start", "index": self._open, "content_block": _bare(block)}
            )
            self._delta = (
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,"delta":%b'
                % (self._open, _DELTAS[block.kind])
            )
        if not change.text:
            return opened
        return b"%b%b%b}}\n\n" % (opened, self._delta, sse.escape(orjson.dumps(change.text)))

    def _close(self) -> bytes:
        if self._open < 0:
            return b""
        return _event({"type": "content_block_stop", "index": self._open})

    def _stop(self) -> dict[str, Any]:
        answer = self._answer
        assert answer.final is not None
        sequence = None
        if answer.is_length:
            reason = "max_tokens"
        elif answer.is_call:
            reason = "tool_use"
        elif isinstance(answer.final.stop_reason, str):
            reason, sequence = "stop_sequence", answer.final.stop_reason
        else:
            reason = "end_turn"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _usage(self) -> dict[str, Any]:
        """All input is the sum of the three: what came from the prefix cache is not counted twice."""
        cached = self._tally.num_cached_tokens
        return {
            "input_tokens": self._tally.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self._tally.num_output_tokens(0),
        }


def _bare(block: Block) -> dict[str, Any]:
    """A block before it says anything."""
    if block.kind == "text":
        return {"type": "text", "text": ""}
    if block.kind == "thoughts":
        return {"type": "thinking", "thinking": "", "signature": ""}
    call_id = "toolu_" + block.call_id.removeprefix("call_")
    return {"type": "tool_use", "id": call_id, "name": block.name, "input": {}}


def _whole(block: Block) -> dict[str, Any]:
    if block.kind == "text":
        return {"type": "text", "text": block.text}
    if block.kind == "thoughts":
        return {**_bare(block), "thinking": block.text}
    try:
        given = orjson.loads(block.text)
    except ValueError:  # cut off, or not what the model was asked for
        given = None
    return {**_bare(block), "input": given if isinstance(given, dict) else {}}


def _event(data: dict[str, Any]) -> bytes:
    return sse.named_event(data["type"].encode(), sse.escape(orjson.dumps(data)))
