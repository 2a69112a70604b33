"""`Errand`: work beside the steps, done in the step thread a bit at a time.

What must see or change blocks has to run where they are owned, between two steps; what takes longer than a step may
wait is a generator that gives way after each bit. Knows no inbox and no engine. Used by `Lane`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from core.engine import Engine

Bits = Generator[None, None, Any]
Work = Callable[["Engine"], Bits]


class Errand:
    """`future` gets what the generator returns, or what it raises. One that has begun cannot be cancelled."""

    def __init__(self, work: Work) -> None:
        self.future: Future[Any] = Future()
        self._work = work
        self._bits: Bits | None = None

    def advance(self, engine: Engine) -> bool:
        """One bit more; false when nothing is left to do. Never raises."""
        if self._bits is None and not self.future.set_running_or_notify_cancel():
            return False
        try:
            if self._bits is None:
                self._bits = self._work(engine)
            next(self._bits)
        except StopIteration as end:
            self.future.set_result(end.value)
            return False
        except Exception as error:
            self.future.set_exception(error)
            return False
        return True

    def fail(self, error: Exception) -> None:
        """Nobody will do it, or the rest of it. What it holds is let go."""
        if self._bits is not None:
            self._bits.close()
            self.future.set_exception(error)
        elif self.future.set_running_or_notify_cancel():
            self.future.set_exception(error)


def at_once(function: Callable[[Engine], Any]) -> Work:
    """Work that is short enough to be done in one go."""

    def work(engine: Engine) -> Bits:
        return function(engine)
        yield

    return work
