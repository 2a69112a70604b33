"""A client of OpenAI's response streams that accepts nothing but their documented order of events."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from strict_clients import check_error, read_events

START = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
]
END = ["response.output_text.done", "response.content_part.done", "response.output_item.done"]
DELTA = "response.output_text.delta"


@dataclass(slots=True)
class ResponseStream:
    response: dict[str, Any] = field(default_factory=dict)
    deltas: list[dict[str, Any]] = field(default_factory=list)
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
    kinds = [event["type"] for event in data]
    assert kinds[:4] == START
    item_id = data[2]["item"]["id"]
    count = len(data) - 4 - (0 if stream.error else 4)
    stream.deltas = data[4 : 4 + count]
    for delta in stream.deltas:
        assert (delta["type"], delta["item_id"]) == (DELTA, item_id)
        assert (delta["output_index"], delta["content_index"]) == (0, 0)
        assert delta["delta"], "an empty delta"
        assert isinstance(delta["logprobs"], list)
    if stream.error is not None:
        return stream
    done, part, item, last = data[4 + count :]
    assert kinds[4 + count : -1] == END
    assert last["type"] == f"response.{last['response']['status']}"
    stream.response = check_response(last["response"])
    assert stream.response["id"] == data[0]["response"]["id"]
    assert stream.response["output"] == [item["item"]]
    assert item["item"]["content"] == [part["part"]]
    assert done["text"] == part["part"]["text"] == stream.text
    assert [entry for delta in stream.deltas for entry in delta["logprobs"]] == done["logprobs"][
        : sum(len(delta["logprobs"]) for delta in stream.deltas)
    ]
    return stream


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
        (item,) = response["output"]
        assert (item["type"], item["role"], item["status"]) == ("message", "assistant", status)
        assert [part["type"] for part in item["content"]] == ["output_text"]
    return dict(response)
