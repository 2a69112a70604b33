"""An open loop: requests come when they come, whether or not earlier ones have ended, as users do.

Arrivals are Poisson with a fixed seed. A closed loop slows down with its server and so hides how long people would
wait; this one does not. Latencies count from the moment a request was due, so that a late client hides nothing either.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence

import aiohttp

from loadtest.closed_loop import LoopResult, PlannedRequest, open_session, stream_request
from loadtest.sse_client import RequestRecord
from loadtest.target import Target


def arrivals_s(num_requests: int, rate: float, seed: str) -> list[float]:
    """Seconds from the start at which requests are due; `rate` per second on average, exponential gaps."""
    rng = random.Random(f"arrivals-{seed}")
    moments: list[float] = []
    now_s = 0.0
    for _ in range(num_requests):
        moments.append(now_s)
        now_s += rng.expovariate(rate)
    return moments


async def run_open_loop(
    target: Target,
    planned: Sequence[PlannedRequest],
    rate: float,
    seed: str,
    *,
    timeout_s: float,
    time_limit_s: float = float("inf"),
) -> LoopResult:
    """Sends all planned requests, each when it is due. Bounds as in a closed loop."""
    start_s = time.perf_counter()
    moments = arrivals_s(len(planned), rate, seed)
    async with open_session() as session:
        tasks = [
            asyncio.create_task(
                _send(session, target, request, start_s + due_s, timeout_s, start_s + time_limit_s)
            )
            for request, due_s in zip(planned, moments, strict=True)
        ]
        records = [record for record in await asyncio.gather(*tasks) if record is not None]
    wall_s = time.perf_counter() - start_s
    return LoopResult(tuple(records), wall_s, len(planned) - len(records))


async def _send(
    session: aiohttp.ClientSession,
    target: Target,
    planned: PlannedRequest,
    due_s: float,
    timeout_s: float,
    deadline_s: float,
) -> RequestRecord | None:
    await asyncio.sleep(max(0.0, min(due_s, deadline_s) - time.perf_counter()))
    left_s = deadline_s - time.perf_counter()
    if left_s <= 0:
        return None
    record = await stream_request(session, target, planned, min(timeout_s, left_s))
    record.late_s = max(0.0, record.sent_s - due_s)
    record.sent_s -= record.late_s
    return record
