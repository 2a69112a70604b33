"""What a stream counts as: first text, tokens, rates and failures (B151 to B155)."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from loadtest.sse_client import RequestRecord, SseEvent


def event(payload: object, name: str = "") -> SseEvent:
    data = payload if isinstance(payload, bytes) else orjson.dumps(payload)
    return SseEvent(data, name)


def chat(delta: dict[str, Any], usage: object = None, finish_reason: str | None = None) -> SseEvent:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return event({"choices": [choice], "usage": usage})


def usage(completion_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 41, "completion_tokens": completion_tokens}


def record_of(*timed: tuple[float, SseEvent], end_s: float = 10.0) -> RequestRecord:
    """A request sent at second 0."""
    record = RequestRecord(sent_s=0.0)
    for now_s, item in timed:
        if not record.take(item, now_s):
            break
    record.end(end_s)
    return record


def test_the_first_text_and_not_the_role_chunk_ends_the_time_to_first_token() -> None:
    """B151."""
    record = record_of(
        (1.0, chat({"role": "assistant", "content": ""})),
        (2.0, chat({"content": "a"})),
        (3.0, chat({}, finish_reason="stop")),
    )
    assert record.ttft_s == 2.0
    assert record.is_ok


def test_tokens_come_from_usage_however_many_a_chunk_holds() -> None:
    """B151: 4 tokens in each of 2 chunks are 8 tokens."""
    record = record_of(
        (1.0, chat({"content": "a b c d"})),
        (2.0, chat({"content": "e f g h"}, finish_reason="length")),
        (2.0, event({"choices": [], "usage": usage(8)})),
        (2.0, event(b"[DONE]")),
    )
    assert record.num_output_tokens == 8
    assert record.is_counted_by_server


def test_chunks_are_counted_where_the_server_sends_no_usage() -> None:
    record = record_of(
        (1.0, chat({"content": "a"})), (2.0, chat({"content": "b"})), (3.0, event(b"[DONE]"))
    )
    assert record.num_output_tokens == 2
    assert not record.is_counted_by_server


def test_time_per_token_spans_first_to_last_text() -> None:
    """B152: the wait before the first text and the silence behind the last are not decoding."""
    record = record_of(
        (5.0, chat({"content": "a"})),
        (6.0, chat({"content": "b"}, finish_reason="length")),
        (8.0, event({"choices": [], "usage": usage(11)})),
        (9.0, event(b"[DONE]")),
    )
    assert record.tpot_s == pytest.approx(0.1)


def test_tokens_held_back_before_the_first_text_do_not_inflate_the_rate() -> None:
    """B152: the first text stands for 6 of 10 tokens, so 4 tokens took the 2 seconds."""
    record = record_of(
        (5.0, chat({"content": "abcdef"}, usage(6))),
        (7.0, chat({"content": "g"}, usage(10), finish_reason="stop")),
        (7.0, event(b"[DONE]")),
    )
    assert record.tpot_s == pytest.approx(0.5)


def test_an_answer_in_one_piece_has_no_rate() -> None:
    record = record_of((5.0, chat({"content": "abc"}, usage(3), finish_reason="stop")))
    assert record.tpot_s is None
    assert record.gaps_s == []


@pytest.mark.parametrize(
    "bad",
    [
        event({"error": {"message": "broken", "type": "server_error", "param": None, "code": "x"}}),
        event({"error": {"message": "broken"}}, name="error"),
        event(b"not json"),
        event(b""),
        event([1]),
    ],
)
def test_an_error_event_is_a_failed_request(bad: SseEvent) -> None:
    """B153."""
    record = record_of((1.0, chat({"content": "a"})), (2.0, bad), (2.0, event(b"[DONE]")))
    assert not record.is_ok


def test_a_null_error_is_no_error() -> None:
    record = record_of((1.0, event({"token": "a", "error": None})), (2.0, event(b"[DONE]")))
    assert record.is_ok


def test_a_stream_that_just_ends_is_a_failed_request() -> None:
    """B153."""
    record = record_of((1.0, chat({"content": "a"})))
    assert record.error is not None
    assert "cut" in record.error


def test_an_answer_without_tokens_is_a_failed_request() -> None:
    assert record_of((1.0, event(b"[DONE]"))).error == "no tokens"


def test_prompt_tokens_are_the_servers_and_unknown_without_them() -> None:
    """B155."""
    known = record_of((1.0, chat({"content": "a"}, usage(1))), (1.0, event(b"[DONE]")))
    unknown = record_of((1.0, chat({"content": "a"})), (1.0, event(b"[DONE]")))
    assert known.num_prompt_tokens == 41
    assert unknown.num_prompt_tokens is None


def test_a_native_stream_is_read() -> None:
    record = record_of(
        (1.0, event({"token": " Also", "sequence_id": "s"})),
        (
            2.0,
            event({"token": "", "sequence_id": "s", "finish_reason": "length", "usage": usage(1)}),
        ),
        (2.0, event(b"[DONE]")),
    )
    assert (record.text, record.finish_reasons, record.is_ok) == (" Also", ["length"], True)


def test_the_get_stream_ends_with_its_done_event() -> None:
    record = record_of(
        (1.0, event({"token": "a"}, name="token")),
        (2.0, event({"token": "b", "finish_reason": "stop", "usage": usage(2)}, name="done")),
        (3.0, event(b"never read")),
    )
    assert (record.text, record.is_ok) == ("ab", True)
