"""`in_thread`: await a call that blocks for long and cannot be interrupted, such as the start of another engine."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def _in_its_own(work: Callable[[], None]) -> None:
    threading.Thread(target=work, name="noria-blocking", daemon=True).start()


async def in_thread(
    function: Callable[[], T], start: Callable[[Callable[[], None]], None] = _in_its_own
) -> T:
    """The result of a call in a thread of its own, or where `start` has it run. Unlike an executor's, the thread keeps
    no process alive, and a cancelled wait leaves it behind."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(settle, result, failure)

    start(work)
    return await future
