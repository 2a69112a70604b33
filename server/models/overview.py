"""What several backends are together, and how news of a loading thread reach the event loop. Pure functions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from core.lane import Phase, Report
from core.outputs import StepStats
from server.backends.base import Backend, BackendStatus


def status(
    phase: Phase, message: str, progress: float | None, backends: Sequence[Backend]
) -> BackendStatus:
    """The heartbeat is that of the model whose last turn is longest ago; one stale step makes all stale, because
    they share the thread."""
    each = [backend.status() for backend in backends]
    ages = [one.heartbeat_age_s for one in each if one.heartbeat_age_s is not None]
    is_stale = any(one.is_step_stale for one in each)
    return BackendStatus(phase, message, progress, max(ages, default=None), is_stale)


def stats(backends: Sequence[Backend]) -> StepStats:
    """The sums of what is held and done by loaded models."""
    each = [backend.stats() for backend in backends]
    return StepStats(
        num_running=sum(one.num_running for one in each),
        num_waiting=sum(one.num_waiting for one in each),
        num_waiting_prompt_tokens=sum(one.num_waiting_prompt_tokens for one in each),
        num_blocks_used=sum(one.num_blocks_used for one in each),
        num_blocks_cached=sum(one.num_blocks_cached for one in each),
        num_blocks_free=sum(one.num_blocks_free for one in each),
        total_preemptions=sum(one.total_preemptions for one in each),
    )


def posting(tell: Callable[[str, float | None], None]) -> Report:
    """A report for another thread, told on the loop."""
    loop = asyncio.get_running_loop()

    def report(message: str, progress: float | None = None) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, message, progress)

    return report


def both(first: Report, second: Report) -> Report:
    def report(message: str, progress: float | None = None) -> None:
        first(message, progress)
        second(message, progress)

    return report
