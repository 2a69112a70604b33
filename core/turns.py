"""`Turns`: several engines in one step thread, which take turns of one step, and one thread that loads them.

There is one step thread because each thread that opens a parallel region gets an OpenMP team of its own, and two teams
ruin each other. Loading has its own thread, so that a model that is being loaded holds up none that serves; `load` must
compute there with one thread only, which is no team, and pauses while there are steps (`pace.py`). What it returns is
handed over ready to step.

Who steps next is decided as in start-time fair queuing (Goyal, Vin, Cheng 1996): each engine with work gets an equal
share of the step thread's time, whatever its steps cost and however many requests it has; one that was idle neither
saves up time nor waits for its share. Used by `server/models/`.
"""

from __future__ import annotations

import gc
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable

from core.engine import Engine
from core.lane import DEAD, SHUTDOWN, Deliver, Lane, Load, OnPhase, Stopped
from core.outputs import OutputError
from core.pace import Pace, give_way

_log = logging.getLogger("noria.engine")


class Turns:
    """Starts with `start`, ends with `stop`. `prepare` runs in the step thread before anything else does, `trim` in the
    loading thread after an engine was disposed of. `load_share`: what the loading thread may take of the time while
    there are steps, as in `pace.py`."""

    def __init__(
        self,
        prepare: Callable[[], None] = lambda: None,
        trim: Callable[[], None] = lambda: None,
        load_share: float = 1.0,
    ) -> None:
        self._prepare, self._trim = prepare, trim
        self._pace = Pace(load_share)
        self._condition = threading.Condition()
        self._lanes: list[SharedLane] = []  # those with an engine; guarded by the condition
        self._is_over = False
        self._now = 0.0  # the start tag of the turn that was given last, in seconds of step time
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_prepared = threading.Event()
        self._threads = (
            threading.Thread(target=self._step, name="noria-step", daemon=False),
            threading.Thread(target=self._work, name="noria-load", daemon=False),
        )

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ends every lane with `shutdown`, as soon as its step is over. Does not wait."""
        with self._condition:
            self._is_over = True
            self._condition.notify()
        self._jobs.put(None)

    def join(self, timeout_s: float | None = None) -> bool:
        """Waits for the step thread; false if it is still running after the timeout."""
        step = self._threads[0]
        if step.ident is not None:
            step.join(timeout_s)
        return not step.is_alive()

    def lane(self, load: Load, deliver: Deliver, on_phase: OnPhase) -> SharedLane:
        """A place for one more engine; it is loaded when the lane is started."""
        return SharedLane(self, load, deliver, on_phase)

    @property
    def is_alive(self) -> bool:
        return self._threads[0].is_alive()

    def run(self, job: Callable[[], None]) -> None:
        """Runs something in the loading thread, behind what was asked of it before. It must not raise."""
        self._jobs.put(job)

    def dispose(self, engine: Engine, *, is_for_another: bool = False) -> None:
        """Drops an engine in the loading thread, where giving back its memory keeps nobody waiting. The caller drops
        every reference of its own first. `is_for_another`: a load follows, which takes the memory again and trims."""
        self._jobs.put(_Disposal(engine, None if is_for_another else self._trim))

    # --- the loading thread ---

    def _work(self) -> None:
        self._is_prepared.wait()
        self._pace.adopt_thread()
        while (job := self._jobs.get()) is not None:
            job()
            give_way()
            del job

    def load(self, lane: SharedLane) -> None:
        """Loads are done one after the other, in the order asked for."""
        with self._condition:
            is_over = self._is_over
        if is_over:
            lane.finish(SHUTDOWN)
        else:
            self._jobs.put(lambda: self._load(lane))

    def _load(self, lane: SharedLane) -> None:
        error = SHUTDOWN
        try:
            engine = lane.load()
            with self._condition:
                if not self._is_over:
                    lane.take_place(engine, self._now)
                    self._lanes.append(lane)
                    self._condition.notify()
                    return
        except Stopped:
            pass
        except BaseException as failure:
            lane.tell_dead(failure)
            error = DEAD
        lane.finish(error)

    # --- the step thread ---

    def _step(self) -> None:
        try:
            self._prepare()
        except BaseException:
            _log.exception("the step thread could not be prepared")
            with self._condition:
                self._is_over = True
        self._is_prepared.set()
        while (lane := self._next()) is not None:
            self._give_turn(lane)
            del lane
        with self._condition:
            lanes, self._lanes = self._lanes, []
        for lane in lanes:
            lane.finish(SHUTDOWN)

    def _next(self) -> SharedLane | None:
        """The lane whose turn it is; sleeps while none is due. None when all is over."""
        with self._condition:
            while not self._is_over:
                due = [lane for lane in self._lanes if lane.is_due()]
                if due:
                    self._pace.set_busy()
                    return min(due, key=lambda lane: max(lane.tag, self._now))
                self._pace.set_quiet()
                self._condition.wait()
            self._pace.set_quiet()
            return None

    def _give_turn(self, lane: SharedLane) -> None:
        self._now = max(lane.tag, self._now)
        started_s = time.monotonic()
        error: OutputError | None = None
        try:
            if not lane.turn():
                error = SHUTDOWN
        except BaseException as failure:
            lane.tell_dead(failure)
            error = DEAD
        lane.tag = self._now + time.monotonic() - started_s
        if error is not None:
            with self._condition:
                self._lanes.remove(lane)
            lane.finish(error)


class SharedLane(Lane):
    """A lane whose engine is loaded and stepped by `Turns`. The life of one load: when it has ended, it is over.

    `tag` is when its next turn would start in a perfectly fair machine, in seconds of step time.
    """

    def __init__(self, turns: Turns, load: Load, deliver: Deliver, on_phase: OnPhase) -> None:
        super().__init__(deliver, on_phase, turns._condition)
        self._turns = turns
        self._load: Load | None = load
        self.tag = 0.0
        self.is_alive = False

    def start(self) -> None:
        self.is_alive = True
        self._turns.load(self)

    def _report(self, message: str, progress: float | None = None) -> None:
        super()._report(message, progress)
        give_way()

    def load(self) -> Engine:
        """In the loading thread."""
        assert self._load is not None
        engine = self._load(self._report)
        self._load = None  # it may hold on to what it made
        return engine

    def take_place(self, engine: Engine, tag: float) -> None:
        """Ready, from now on in the step thread. Only while the condition is held."""
        self._engine, self.tag = engine, tag
        self._tell("ready", "")

    def is_due(self) -> bool:
        return self._is_due()

    def turn(self) -> bool:
        assert self._engine is not None
        return self._turn(self._engine)

    def tell_dead(self, error: BaseException) -> None:
        self._tell_dead(error)

    def finish(self, error: OutputError) -> None:
        """The end of this lane. Nothing of the engine stays here."""
        self._end(error)
        self._engine = None
        self.is_alive = False


class _Disposal:
    """Drops the engine it holds; what reference cycles keep alive is looked for, and found, at once."""

    def __init__(self, engine: Engine, trim: Callable[[], None] | None) -> None:
        self._engine: Engine | None = engine
        self._trim = trim

    def __call__(self) -> None:
        assert self._engine is not None
        runner = weakref.ref(self._engine)
        self._engine = None
        if runner() is not None:
            gc.collect()
        if self._trim is not None:
            self._trim()
