"""What the ladder reads out of a server's log."""

from __future__ import annotations

import pytest

from loadtest.timeline import read_log, refilled_share, wasted_seat_share


def step(at_s: float, number: int, rows: str) -> str:
    count = len(rows.split("=")) - 1
    return f'{{"time": {at_s}, "event": "step {number}: {count} sequences, 9 tokens: {rows}"}}'


def request(at_s: float, label: str, **fields: float) -> str:
    base = {"total_ms": 1000, "ttft_ms": 400, "prefill_ms": 100, "decode_ms": 500, "generated": 6}
    pairs = "".join(f', "{key}": {value}' for key, value in (base | fields).items())
    return f'{{"time": {at_s}, "event": "request", "id": "{label}", "status": 200{pairs}}}'


# a and b share a batch; a ends first and keeps its seat until b has ended; c waits for both
STATIC = [
    "not json",
    step(10.0, 1, "x-a=4/4 x-b=4/4"),
    step(10.1, 2, "x-a=1/5 x-b=1/5"),
    step(10.2, 3, "x-a=1/6 (finished) x-b=1/6"),
    step(10.3, 4, "x-a=1/6 (finished) x-b=1/7"),
    step(10.4, 5, "x-c=4/4"),
    request(10.3, "x-a"),
    request(10.45, "x-b"),
    request(10.6, "x-c"),
    request(10.6, "warm-up-1"),
]


def test_moments_are_counted_back_from_the_line_of_the_request() -> None:
    requests, steps = read_log(STATIC, "x-")
    assert [r.label for r in requests] == ["x-a", "x-b", "x-c"]
    first = requests[0]
    assert first.arrival_s == 0
    assert first.scheduled_s == pytest.approx(0.3)
    assert first.first_token_s == pytest.approx(0.4)
    assert first.end_s == pytest.approx(0.9)
    assert first.num_tokens == 6
    assert len(steps) == 5


def test_a_seat_is_kept_until_the_first_step_without_its_request() -> None:
    requests, _ = read_log(STATIC, "x-")
    assert requests[0].seat_end_s == pytest.approx(10.4 - 9.3)
    assert requests[2].seat_end_s is None


def test_rows_of_ended_requests_are_waste() -> None:
    _, steps = read_log(STATIC, "x-")
    assert wasted_seat_share(steps) == pytest.approx(2 / 9)
    assert wasted_seat_share([]) is None


def test_a_freed_seat_is_refilled_at_the_next_step_or_not() -> None:
    _, static = read_log(STATIC, "x-")
    assert refilled_share(static) == 0.5  # a's seat was not, b's was
    continuous = [
        step(10.0, 1, "x-a=4/4 x-b=4/4"),
        step(10.1, 2, "x-b=1/5 x-c=4/4"),
        request(10.3, "x-a"),
    ]
    assert refilled_share(read_log(continuous, "x-")[1]) == 1
    assert refilled_share([]) is None


def test_a_log_without_intervals_still_gives_ends() -> None:
    line = '{"time": 5.0, "event": "request", "id": "v-0", "status": 200, "total_ms": 2000}'
    requests, steps = read_log([line], "v-")
    assert (requests[0].end_s, requests[0].first_token_s, steps) == (2, None, [])
