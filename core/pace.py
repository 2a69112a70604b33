"""`Pace`: what computes beside a step thread does so a little at a time while there are steps.

A load takes a core, memory bandwidth and Python's lock from the step thread, and the system's priorities share none of
these well (a thread of low priority that is stopped while it holds the lock stops all). So the loading thread pauses
itself between bits of a few milliseconds: with `give_way`, which costs nothing anywhere else. Knows threads and clocks.
"""

from __future__ import annotations

import threading
import time

BIT_S = 0.002  # of processor time, at least, between two pauses: sleeping costs something too
LONGEST_PAUSE_S = 1.0  # after what could not be divided
_of_this_thread = threading.local()


class Pace:
    """`share`: of the time while there are steps, how much may be computed beside them; 1: all of it."""

    def __init__(self, share: float) -> None:
        self._rest = 1 / share - 1  # of pause for each second of work
        self._is_quiet = threading.Event()
        self._is_quiet.set()
        self._since_s = 0.0

    def set_busy(self) -> None:
        """In the step thread, when it has something to do."""
        if self._is_quiet.is_set():
            self._is_quiet.clear()

    def set_quiet(self) -> None:
        """In the step thread, before it sleeps."""
        self._is_quiet.set()

    def adopt_thread(self) -> None:
        """The calling thread keeps this pace from now on."""
        _of_this_thread.pace = self
        self._since_s = time.thread_time()

    def pause(self) -> None:
        worked_s = time.thread_time() - self._since_s
        if worked_s < BIT_S and not self._is_quiet.is_set():
            return
        self._is_quiet.wait(min(self._rest * worked_s, LONGEST_PAUSE_S))
        self._since_s = time.thread_time()


def give_way() -> None:
    """A place where work may pause: for so long as the thread's pace demands, if it has one. Never while a lock is held
    that a step or the event loop might want."""
    pace: Pace | None = getattr(_of_this_thread, "pace", None)
    if pace is not None:
        pace.pause()


def is_beside_steps() -> bool:
    """Whether this thread works beside one that steps."""
    return getattr(_of_this_thread, "pace", None) is not None
