"""Work beside steps: its share of the time while there are steps, all of it while there are none."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from core.pace import LONGEST_PAUSE_S, Pace, give_way


def run_in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join(20)
    assert not thread.is_alive()


def work(seconds: float, bit_s: float = 0.003) -> None:
    """Of processor time, giving way after each bit."""
    start_s = time.thread_time()
    while (done_s := time.thread_time() - start_s) < seconds:
        while time.thread_time() - start_s < done_s + bit_s:
            pass
        give_way()


def seconds_of(pace: Pace | None, seconds: float) -> float:
    """How long a thread of this pace takes to work for so many seconds."""
    taken: list[float] = []

    def go() -> None:
        if pace is not None:
            pace.adopt_thread()
        start_s = time.monotonic()
        work(seconds)
        taken.append(time.monotonic() - start_s)

    run_in_thread(go)
    return taken[0]


def test_while_there_are_steps_work_takes_its_share_of_the_time_only() -> None:
    pace = Pace(0.1)
    pace.set_busy()
    assert seconds_of(pace, 0.05) >= 0.4


def test_while_there_are_none_it_does_not_pause() -> None:
    pace = Pace(0.001)  # one pause of it would be seen
    pace.set_busy()
    pace.set_quiet()
    assert seconds_of(pace, 0.01) < LONGEST_PAUSE_S


def test_a_thread_without_a_pace_does_not_pause() -> None:
    start_s = time.monotonic()
    for _ in range(1000):
        give_way()
    assert time.monotonic() - start_s < 1


def test_a_pause_ends_as_soon_as_the_steps_do() -> None:
    pace = Pace(0.001)
    pace.set_busy()
    threading.Timer(0.05, pace.set_quiet).start()
    assert seconds_of(pace, 0.01) < LONGEST_PAUSE_S


def test_what_cannot_be_divided_is_not_followed_by_an_endless_pause() -> None:
    pace = Pace(0.001)
    pace.set_busy()

    def go() -> None:
        pace.adopt_thread()
        while time.thread_time() - pace._since_s < 0.02:
            pass
        start_s = time.monotonic()
        pace.pause()
        pauses.append(time.monotonic() - start_s)

    pauses: list[float] = []
    run_in_thread(go)
    assert 0.9 * LONGEST_PAUSE_S < pauses[0] < 5 * LONGEST_PAUSE_S
