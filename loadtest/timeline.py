"""What a server's own log says about each request and each step: when it waited, began, spoke and ended, and its seat.

Reads the lines that Noria writes with `log.format: json` at level debug: one per request (its intervals) and one per
step (the requests in the batch; those already finished, whose seat is kept, are marked). Pure; knows no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import orjson

_STEP = re.compile(r"step \d+: \d+ sequences, \d+ tokens: (.*)")
_ROW = re.compile(r"(\S+)=\d+/\d+( \(finished\))?")


@dataclass(frozen=True, slots=True)
class RequestTimes:
    """Moments in seconds since the first arrival. None where the log does not tell. `seat_end_s` is when its place in
    the batch was free for another; under static batching that is later than its end."""

    label: str
    arrival_s: float
    scheduled_s: float | None
    first_token_s: float | None
    end_s: float
    seat_end_s: float | None
    num_tokens: int
    is_ok: bool


@dataclass(frozen=True, slots=True)
class Step:
    """One step: when it was planned, and who was in the batch, working or kept after the end."""

    at_s: float
    active: frozenset[str]
    kept: frozenset[str]


def read_log(lines: Iterable[str], prefix: str) -> tuple[list[RequestTimes], list[Step]]:
    """Requests whose id begins with `prefix`, in order of their ids, and the steps that held any of them."""
    entries = [entry for line in lines if (entry := _entry(line)) is not None]
    steps = [step for entry in entries if (step := _step(entry, prefix)) is not None]
    seat_ends = _seat_ends(steps)
    requests = [
        _request_times(entry, seat_ends)
        for entry in entries
        if entry.get("event") == "request" and str(entry.get("id", "")).startswith(prefix)
    ]
    if not requests:
        return [], []
    start_s = min(request.arrival_s for request in requests)
    shifted = sorted((_shift(request, start_s) for request in requests), key=lambda r: r.label)
    return shifted, [Step(step.at_s - start_s, step.active, step.kept) for step in steps]


def _entry(line: str) -> dict[str, Any] | None:
    try:
        entry = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("time"), float) else None


def _step(entry: dict[str, Any], prefix: str) -> Step | None:
    match = _STEP.match(str(entry.get("event", "")))
    if match is None:
        return None
    active: set[str] = set()
    kept: set[str] = set()
    for label, is_finished in _ROW.findall(match[1]):
        if label.startswith(prefix):
            (kept if is_finished else active).add(label)
    return Step(entry["time"], frozenset(active), frozenset(kept)) if active or kept else None


def _seat_ends(steps: Sequence[Step]) -> dict[str, float]:
    """When the first step began that no longer held a request; of the last batch, when its last step began."""
    ends = dict.fromkeys(steps[-1].kept, steps[-1].at_s) if steps else {}
    for step, following in pairwise(steps):
        for label in (step.active | step.kept) - (following.active | following.kept):
            ends[label] = following.at_s
    return ends


def _request_times(entry: dict[str, Any], seat_ends: dict[str, float]) -> RequestTimes:
    """The line is written when the answer has ended; its intervals count back and forth from there."""
    label = str(entry["id"])
    arrival_s = entry["time"] - entry["total_ms"] / 1000
    first_token_s = _later(arrival_s, entry.get("ttft_ms"))
    end_s = _later(first_token_s, entry.get("decode_ms")) or entry["time"]
    scheduled_s = _later(first_token_s, -entry["prefill_ms"] if "prefill_ms" in entry else None)
    return RequestTimes(
        label=label,
        arrival_s=arrival_s,
        scheduled_s=scheduled_s,
        first_token_s=first_token_s,
        end_s=end_s,
        seat_end_s=max(end_s, seat_ends[label]) if label in seat_ends else None,
        num_tokens=int(entry.get("generated") or 0),
        is_ok=entry.get("status") == 200,
    )


def _later(moment_s: float | None, interval_ms: float | None) -> float | None:
    return None if moment_s is None or interval_ms is None else moment_s + interval_ms / 1000


def _shift(request: RequestTimes, start_s: float) -> RequestTimes:
    def less(moment_s: float | None) -> float | None:
        return None if moment_s is None else moment_s - start_s

    return RequestTimes(
        label=request.label,
        arrival_s=request.arrival_s - start_s,
        scheduled_s=less(request.scheduled_s),
        first_token_s=less(request.first_token_s),
        end_s=request.end_s - start_s,
        seat_end_s=less(request.seat_end_s),
        num_tokens=request.num_tokens,
        is_ok=request.is_ok,
    )


def wasted_seat_share(steps: Sequence[Step]) -> float | None:
    """Of all rows computed, the share that belonged to requests that had already ended."""
    num_rows = sum(len(step.active) + len(step.kept) for step in steps)
    return sum(len(step.kept) for step in steps) / num_rows if num_rows else None


def refilled_share(steps: Sequence[Step]) -> float | None:
    """Of the seats that became free while others waited, the share that a new request had in the very next step."""
    last_seen = {label: index for index, step in enumerate(steps) for label in step.active}
    first_seen: dict[str, int] = {}
    for index, step in enumerate(steps):
        for label in step.active:
            first_seen.setdefault(label, index)
    freed = refilled = 0
    for index in range(1, len(steps)):
        num_freed = sum(last == index - 1 for last in last_seen.values())
        num_waiting = sum(first >= index for first in first_seen.values())
        num_new = sum(first == index for first in first_seen.values())
        num_countable = min(num_freed, num_waiting)
        freed += num_countable
        refilled += min(num_countable, num_new)
    return refilled / freed if freed else None
