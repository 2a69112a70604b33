"""A client of Anthropic's streams that accepts nothing but their documented order of events."""

from __future__ import annotations

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
REASONS = {"end_turn", "max_tokens", "stop_sequence"}


@dataclass(slots=True)
class MessageStream:
    message: dict[str, Any] = field(default_factory=dict)
    texts: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None
    num_pings: int = 0  # they may come at any time

    @property
    def text(self) -> str:
        return "".join(self.texts)


def read_message_stream(body: bytes, *, may_fail: bool = False, step: int = 5) -> MessageStream:
    """The events of one answer with one block of text; usage and reason are put into the message."""
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
    start, block, *rest = [event for event in data if event != ping]
    assert start["type"] == "message_start"
    stream.message = check_message(start["message"], is_whole=False)
    assert start["message"]["content"] == []
    assert block == {
        "type": "content_block_start",
        "index": 0,
        "content_block": {"type": "text", "text": ""},
    }
    if stream.error is None:
        *rest, stop, last, end = rest
        assert stop == {"type": "content_block_stop", "index": 0}
        assert last["type"] == "message_delta"
        assert set(last["delta"]) == {"stop_reason", "stop_sequence"}
        assert end == {"type": "message_stop"}
        before = stream.message["usage"]
        for name in ("input_tokens", "cache_read_input_tokens"):
            assert before[name] == last["usage"][name]
        stream.message |= {**last["delta"], "usage": last["usage"]}
    for delta in rest:
        assert set(delta) == {"type", "index", "delta"}
        assert (delta["type"], delta["index"]) == ("content_block_delta", 0)
        assert delta["delta"]["type"] == "text_delta"
        assert delta["delta"]["text"], "an empty delta"
        stream.texts.append(delta["delta"]["text"])
    if stream.error is None:
        stream.message["content"] = [{"type": "text", "text": stream.text}]
        check_message(stream.message)
    return stream


def check_message(message: dict[str, Any], *, is_whole: bool = True) -> dict[str, Any]:
    assert (message["type"], message["role"]) == ("message", "assistant")
    assert message["id"].startswith("msg_")
    assert isinstance(message["model"], str)
    usage = message["usage"]
    names = ("input_tokens", "output_tokens", "cache_read_input_tokens")
    assert all(type(usage[name]) is int and usage[name] >= 0 for name in names)
    if is_whole:
        assert [block["type"] for block in message["content"]] == ["text"]
        assert message["stop_reason"] in REASONS
        has_sequence = isinstance(message["stop_sequence"], str)
        assert has_sequence == (message["stop_reason"] == "stop_sequence")
    else:
        assert message["stop_reason"] is None
    return dict(message)


def check_message_error(envelope: dict[str, Any]) -> dict[str, Any]:
    assert set(envelope) == {"type", "error", "request_id"}
    assert envelope["type"] == "error"
    error = envelope["error"]
    assert set(error) == {"type", "message"}
    assert error["type"] in TYPES
    assert 0 < len(error["message"]) <= 520
    return dict(error)
