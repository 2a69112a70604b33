"""A client of Anthropic's streams that accepts nothing but their documented order of events."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from strict_clients import read_events

TYPES = {
    "invalid_request_error",
    "authentication_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
}
REASONS = {"end_turn", "max_tokens", "stop_sequence", "tool_use"}
DELTAS = {"text_delta": "text", "thinking_delta": "thinking", "input_json_delta": "partial_json"}


@dataclass(slots=True)
class MessageStream:
    message: dict[str, Any] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)  # of calls and thoughts
    error: dict[str, Any] | None = None
    num_pings: int = 0  # they may come at any time

    @property
    def text(self) -> str:
        return "".join(self.texts)


def read_message_stream(body: bytes, *, may_fail: bool = False, step: int = 5) -> MessageStream:
    """The events of one answer; its blocks, usage and reason are put into the message."""
    events = read_events(body, step=step, allows_names=True)
    for event in events:
        assert event.name == event.data["type"], "an event is named by its type"
        assert event.id is None
    stream, data = MessageStream(), [event.data for event in events]
    if data and data[-1]["type"] == "error":
        assert may_fail, data[-1]
        stream.error = check_message_error(data.pop())
        if not data:
            return stream
    ping = {"type": "ping"}
    stream.num_pings = data.count(ping)
    start, *rest = [event for event in data if event != ping]
    assert start["type"] == "message_start"
    stream.message = check_message(start["message"], is_whole=False)
    assert start["message"]["content"] == []
    if stream.error is None:
        *rest, last, end = rest
        assert last["type"] == "message_delta"
        assert set(last["delta"]) == {"stop_reason", "stop_sequence"}
        assert end == {"type": "message_stop"}
        before = stream.message["usage"]
        for name in ("input_tokens", "cache_read_input_tokens"):
            assert before[name] == last["usage"][name]
        stream.message |= {**last["delta"], "usage": last["usage"]}
    blocks: list[dict[str, Any]] = []
    while rest:
        blocks.append(_read_block(rest, len(blocks), stream))
    if stream.error is None:
        stream.message["content"] = blocks
        check_message(stream.message)
    return stream


def _read_block(rest: list[dict[str, Any]], index: int, stream: MessageStream) -> dict[str, Any]:
    """Takes the events of one block away, and gives it as they tell it."""
    begun = rest.pop(0)
    assert (begun["type"], begun["index"]) == ("content_block_start", index)
    block = dict(begun["content_block"])
    told = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
    kind = told[block["type"]]
    texts = []
    while rest and rest[0]["type"] == "content_block_delta":
        delta = rest.pop(0)
        assert set(delta) == {"type", "index", "delta"}
        assert (delta["index"], delta["delta"]["type"]) == (index, kind)
        text = delta["delta"][DELTAS[kind]]
        assert text, "an empty delta"
        texts.append(text)
    (stream.texts if kind == "text_delta" else stream.pieces).extend(texts)
    if rest or stream.error is None:
        assert rest.pop(0) == {"type": "content_block_stop", "index": index}
    if kind != "input_json_delta":
        assert block[DELTAS[kind]] == ""
        return {**block, DELTAS[kind]: "".join(texts)}
    assert block["input"] == {}
    try:
        return {**block, "input": json.loads("".join(texts))}
    except ValueError:  # cut off
        assert stream.message["stop_reason"] != "tool_use"
        return block


def check_message(message: dict[str, Any], *, is_whole: bool = True) -> dict[str, Any]:
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["id"].startswith("msg_")
    assert isinstance(message["model"], str)
    usage = message["usage"]
    names = ("input_tokens", "output_tokens", "cache_read_input_tokens")
    assert all(type(usage[name]) is int and usage[name] >= 0 for name in names)
    if is_whole:
        for block in message["content"]:
            check_block(block)
        assert message["stop_reason"] in REASONS
        has_sequence = isinstance(message["stop_sequence"], str)
        assert has_sequence == (message["stop_reason"] == "stop_sequence")
    else:
        assert message["stop_reason"] is None
    return dict(message)


def check_block(block: dict[str, Any]) -> None:
    if block["type"] == "tool_use":
        assert set(block) == {"type", "id", "name", "input"}
        assert block["id"].startswith("toolu_")
        assert isinstance(block["input"], dict)
    elif block["type"] == "thinking":
        assert set(block) == {"type", "thinking", "signature"}
    else:
        assert (block["type"], set(block)) == ("text", {"type", "text"})


def check_message_error(envelope: dict[str, Any]) -> dict[str, Any]:
    assert set(envelope) == {"type", "error", "request_id"}
    assert envelope["type"] == "error"
    error = envelope["error"]
    assert set(error) == {"type", "message"}
    assert error["type"] in TYPES
    assert 0 < len(error["message"]) <= 520
    return dict(error)
