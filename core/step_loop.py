"""`StepLoop`: the one thread that loads the model, owns every sequence, block and tensor, and steps the engine.

The same thread loads and computes because each thread that opens a parallel region gets an OpenMP team of its own, and
two teams ruin each other. Others only put commands into the inbox and read the heartbeat (`lane.py`). Knows no asyncio:
it is given `deliver`, a plain callable. Used by `server/backends/native.py`; several engines share a thread in
`turns.py`.
"""

from __future__ import annotations

import gc
import threading

from core.engine import Engine
from core.lane import DEAD, SHUTDOWN, Deliver, Lane, Load, OnPhase, Phase, Report, Stopped

__all__ = ["Deliver", "Load", "OnPhase", "Phase", "Report", "StepLoop"]


class StepLoop(Lane):
    """A lane with a thread of its own. Starts with `start`, ends with `stop`."""

    def __init__(self, load: Load, deliver: Deliver, on_phase: OnPhase) -> None:
        super().__init__(deliver, on_phase)
        self._load = load
        self._thread = threading.Thread(target=self._main, name="noria-step", daemon=False)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the thread; false if it is still running after the timeout."""
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def _main(self) -> None:
        error = DEAD
        try:
            self._engine = engine = self._load_engine()
            self._tell("ready", "")
            self._run(engine)
            error = SHUTDOWN
        except Stopped:
            error = SHUTDOWN
        except BaseException as failure:
            self._tell_dead(failure)
        finally:
            self._end(error)

    def _load_engine(self) -> Engine:
        gc.disable()  # imports make hundreds of thousands of objects that stay: walking them took a third of a start
        try:
            engine = self._load(self._report)
            gc.collect()
            gc.freeze()  # what loading made lives for ever: later collections need not walk it
        finally:
            gc.enable()
        return engine

    def _run(self, engine: Engine) -> None:
        """Sleeps, without polling, while there is neither a command nor work."""
        while True:
            with self._condition:
                while not self._is_due():
                    self._condition.wait()
            if not self._turn(engine):
                return
