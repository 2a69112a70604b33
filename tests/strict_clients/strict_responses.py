"""A client of OpenAI's response streams that accepts nothing but their documented order of events."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from strict_clients import check_error, read_events

DELTAS = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
}


@dataclass(slots=True)
class ResponseStream:
    response: dict[str, Any] = field(default_factory=dict)
    deltas: list[dict[str, Any]] = field(default_factory=list)  # of text
    pieces: list[dict[str, Any]] = field(default_factory=list)  # all others
    error: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(delta["delta"] for delta in self.deltas)


def read_response_stream(body: bytes, *, may_fail: bool = False, step: int = 5) -> ResponseStream:
    events = read_events(body, step=step, allows_names=True)
    data = [event.data for event in events]
    assert [event.name for event in events] == [event["type"] for event in data]
    assert [event["sequence_number"] for event in data] == list(range(len(data)))
    stream = ResponseStream()
    if data[-1]["type"] == "error":
        assert may_fail, data[-1]
        last, failed = data.pop(), data.pop()
        stream.error = check_error({"error": last["error"]})
        assert {
            name: last[name] for name in ("code", "message", "param")
        }.items() <= stream.error.items()
        assert failed["type"] == "response.failed"
        assert failed["response"]["error"]["message"] == last["message"]
        stream.response = check_response(failed["response"])
        if len(data) == 1:
            assert data[0]["type"] == "response.created"
            return stream
    begin = [event["type"] for event in data[:2]]
    assert begin == ["response.created", "response.in_progress"]
    last = data.pop() if stream.error is None else None
    items = []
    rest = data[2:]
    while rest:
        items.append(_read_item(rest, len(items), stream))
    if last is None:
        return stream
    assert last["type"] == f"response.{last['response']['status']}"
    stream.response = check_response(last["response"])
    assert stream.response["id"] == data[0]["response"]["id"]
    assert stream.response["output"] == items
    return stream


def _read_item(rest: list[dict[str, Any]], number: int, stream: ResponseStream) -> Any:
    """Takes the events of one item away, and gives it as its last event tells it."""
    added = rest.pop(0)
    assert (added["type"], added["output_index"]) == ("response.output_item.added", number)
    item = added["item"]
    assert item["status"] == "in_progress"
    is_call = item["type"] == "function_call"
    if is_call:
        assert item["arguments"] == ""
    else:
        assert item["content"] == []
        begun = rest.pop(0)
        assert (begun["type"], begun["part"]["text"]) == ("response.content_part.added", "")
        assert begun["item_id"] == item["id"]
    name = DELTAS[item["type"]]
    deltas = []
    while rest and rest[0]["type"] == f"{name}.delta":
        delta = rest.pop(0)
        assert (delta["item_id"], delta["output_index"]) == (item["id"], number)
        assert delta.get("content_index") == (None if is_call else 0)
        assert delta["delta"], "an empty delta"
        assert ("logprobs" in delta) == (item["type"] == "message")
        deltas.append(delta)
    (stream.deltas if item["type"] == "message" else stream.pieces).extend(deltas)
    if not rest:
        assert stream.error is not None
        return None
    done = rest.pop(0)
    assert (done["type"], done["item_id"]) == (f"{name}.done", item["id"])
    text = "".join(delta["delta"] for delta in deltas)
    assert done["arguments" if is_call else "text"] == text
    if not is_call:
        part = rest.pop(0)
        assert part["type"] == "response.content_part.done"
        assert part["part"]["text"] == text
    whole = rest.pop(0)
    assert (whole["type"], whole["output_index"]) == ("response.output_item.done", number)
    found = whole["item"]
    assert (found["id"], found["type"]) == (item["id"], item["type"])
    if is_call:
        assert (found["arguments"], found["name"]) == (text, done["name"])
    else:
        assert found["content"] == [part["part"]]
    if item["type"] == "message":
        logprobs = [entry for delta in deltas for entry in delta["logprobs"]]
        assert logprobs == done["logprobs"][: len(logprobs)]
    return found


def check_response(response: dict[str, Any]) -> dict[str, Any]:
    assert response["object"] == "response"
    assert response["id"].startswith("resp_")
    assert response["store"] is False
    status = response["status"]
    assert (response["error"] is not None) == (status == "failed")
    assert (response["incomplete_details"] is not None) == (status == "incomplete")
    if status in ("completed", "incomplete"):
        usage = response["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        assert usage["input_tokens_details"]["cached_tokens"] >= 0
        for item in response["output"]:
            check_item(item)
        for item in response["output"][:-1]:
            assert item["status"] == "completed"
    return dict(response)


def check_item(item: dict[str, Any]) -> None:
    assert item["status"] in ("completed", "incomplete")
    if item["type"] == "message":
        assert item["role"] == "assistant"
        assert [part["type"] for part in item["content"]] == ["output_text"]
    elif item["type"] == "function_call":
        assert item["call_id"].startswith("call_")
        assert item["id"].startswith("fc_")
        if item["status"] == "completed":
            assert isinstance(json.loads(item["arguments"]), dict)
    else:
        assert item["type"] == "reasoning"
        assert item["summary"] == []
        assert [part["type"] for part in item["content"]] == ["reasoning_text"]
