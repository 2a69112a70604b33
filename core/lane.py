"""`Lane`: one engine's place in a step thread: its inbox, its turns, its outputs and its heartbeat.

Others only put commands into the inbox and read the heartbeat; `turn` and `end` belong to the step thread. Who that is:
`step_loop.py` gives an engine a thread of its own, `turns.py` one thread to several engines.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from core.engine import Engine
from core.errand import Errand, Work
from core.errors import EngineDead, NoriaError
from core.outputs import FinishReason, OutputError, StepOutput, StepStats
from core.prefixes.snapshot import save_at_the_end
from core.sequence import Sequence
from core.update import final_output

_log = logging.getLogger("noria.engine")

Phase = Literal["loading", "ready", "draining", "dead"]
Deliver = Callable[[list[StepOutput], StepStats], None]

DEAD = OutputError("engine_dead", "engine_dead", "The engine has stopped and cannot answer.")
SHUTDOWN = OutputError("draining", "shutdown", "The server is shutting down.")
_ADD_FAILED = OutputError("internal_error", "step", "The engine could not take this request.")


class Report(Protocol):
    """How `load` tells what it is doing; `progress` is 0 to 1."""

    def __call__(self, message: str, progress: float | None = None) -> None: ...


class OnPhase(Protocol):
    """Told in the step thread whenever the phase or the loading message changes."""

    def __call__(self, phase: Phase, message: str, progress: float | None = None) -> None: ...


Load = Callable[[Report], Engine]


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """When the loop last went round (monotonic, seconds; 0.0 before the first), and whether it had work then."""

    time_s: float = 0.0
    has_work: bool = False


class Stopped(BaseException):
    """Raised out of `load` through its progress reports when nobody wants the engine any more."""


class Lane:
    """`add`, `abort` and `stop` may be called from any thread at any time.

    Every sequence given to `add` gets exactly one final output, also when loading failed, the thread died or it
    stopped.
    `deliver` is called once per step, and after an inbox drain without a step, so that gauges are right when idle.
    """

    def __init__(
        self, deliver: Deliver, on_phase: OnPhase, condition: threading.Condition | None = None
    ) -> None:
        self._deliver_outputs = deliver
        self._on_phase = on_phase
        self._condition = condition or threading.Condition()
        self._aborts: deque[str] = deque()  # the inbox, guarded by the condition
        self._adds: deque[Sequence] = deque()
        self._new_errands: deque[Errand] = deque()
        self._errands: list[Errand] = []  # taken from the inbox, not yet done
        self._stop_deadline_s: float | None = None
        self._drained: deque[Sequence] = (
            deque()
        )  # taken from the inbox, not yet given to the engine
        self._outputs: list[StepOutput] = []  # not yet delivered
        self._is_draining = False
        self._saving: Errand | None = None  # of the prefix cache, at the end
        self._saving_for_s = 0.0
        self._is_over = False
        self._engine: Engine | None = None
        self._last_stats = StepStats(0, 0, 0, 0, 0, 0)
        self._deliver_s = 0.0
        self.heartbeat = Heartbeat()  # replaced whole, so readers need no lock

    # --- any thread ---

    def add(self, sequences: list[Sequence]) -> None:
        """Queues all of them; they are admitted in order. Before the engine is ready they wait for it."""
        with self._condition:
            if not self._is_over:
                self._adds.extend(sequences)
                self._condition.notify()
                return
        self._hand_over([_unqueued(sequence, DEAD) for sequence in sequences])

    def abort(self, sequence_ids: list[str]) -> None:
        """Ends them at the next step boundary. Unknown and finished ids are ignored."""
        with self._condition:
            self._aborts.extend(sequence_ids)
            self._condition.notify()

    def run_beside(self, work: Work) -> Future[Any]:
        """Runs `work(engine)` in the step thread, a bit at every turn. The future fails with `EngineDead` if the lane
        ends before the work does."""
        errand = Errand(work)
        with self._condition:
            is_over = self._is_over
            if not is_over:
                self._new_errands.append(errand)
                self._condition.notify()
        if is_over:
            errand.fail(EngineDead(DEAD.message))
        return errand.future

    def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Works on until nothing is left or the time is over, then ends the rest with `shutdown`. Does not wait."""
        with self._condition:
            self._stop_deadline_s = time.monotonic() + drain_timeout_s
            self._condition.notify()

    # --- the step thread ---

    def _is_due(self) -> bool:
        """Whether a turn would do anything. Only while the condition is held."""
        engine = self._engine
        if engine is None:
            return False
        if self._new_errands or self._errands:
            return True
        if self._aborts or self._adds or engine.has_work or self._stop_deadline_s is not None:
            return True
        self.heartbeat = Heartbeat(time.monotonic(), has_work=False)
        return False

    def _turn(self, engine: Engine) -> bool:
        """Takes the inbox, steps once if there is work, delivers. False when the lane has come to its end."""
        with self._condition:
            aborts = list(self._aborts)
            self._aborts.clear()
            self._drained.extend(self._adds)
            self._adds.clear()
            self._errands += self._new_errands
            self._new_errands.clear()
            deadline_s = self._stop_deadline_s
            self.heartbeat = Heartbeat(time.monotonic(), bool(self._drained) or engine.has_work)
        self._apply(engine, aborts)
        self._errands = [errand for errand in self._errands if errand.advance(engine)]
        if deadline_s is not None:
            if not self._is_draining:
                self._is_draining = True
                self._tell("draining", "")
            is_done = not engine.has_work and not self._errands
            if is_done or time.monotonic() >= deadline_s:
                return self._save(engine, deadline_s)
        has_stepped = engine.has_work
        if has_stepped:
            self._outputs += engine.step()
        self.heartbeat = Heartbeat(time.monotonic(), engine.has_work)
        self._deliver(self._stats(engine, has_stepped))
        return True

    def _save(self, engine: Engine, deadline_s: float) -> bool:
        """The last turns before the end, which empties the cache: writes the prefix cache to its file, a bit per turn.
        False when that is done, has failed, or somebody is in a hurry and has stopped the lane again."""
        if self._saving is None:
            if engine.snapshots is None:
                return False
            self._saving = Errand(lambda engine: save_at_the_end(engine.snapshots))
            self._saving_for_s = deadline_s
        elif deadline_s != self._saving_for_s:
            self._saving.fail(EngineDead("The server is in a hurry."))
            return False
        return self._saving.advance(engine)

    def _apply(self, engine: Engine, aborts: list[str]) -> None:
        """Aborts first, then adds. An id that is added and aborted in the same drain never reaches the engine."""
        for sequence_id in aborts:
            if (output := engine.abort(sequence_id)) is not None:
                self._outputs.append(output)
        unwanted = set(aborts)
        while self._drained:
            sequence = self._drained[0]
            if sequence.sequence_id in unwanted:
                self._outputs.append(final_output(sequence, FinishReason.ABORT))
            else:
                self._add(engine, sequence)
            self._drained.popleft()

    def _add(self, engine: Engine, sequence: Sequence) -> None:
        try:
            engine.add(sequence)
            return
        except NoriaError as refusal:
            code = refusal.code or "internal_error"
            error = OutputError(code, code, refusal.message)
        except Exception:
            _log.exception("sequence %s could not be added", sequence.sequence_id)
            error = _ADD_FAILED
        self._outputs.append(final_output(sequence, FinishReason.ERROR, error=error))

    def _stats(self, engine: Engine, has_stepped: bool) -> StepStats:
        stats = engine.stats(is_after_step=has_stepped)
        if stats.parts_s:  # the time of a delivery is known, and told, one step later
            stats = replace(stats, parts_s={**stats.parts_s, "deliver": self._deliver_s})
        return stats

    def _deliver(self, stats: StepStats) -> None:
        """An error of the receiver must not cost the engine its thread."""
        started_s = time.monotonic()
        outputs, self._outputs = self._outputs, []
        self._last_stats = stats
        self._hand_over(outputs)
        self._deliver_s = time.monotonic() - started_s

    def _hand_over(self, outputs: list[StepOutput]) -> None:
        try:
            self._deliver_outputs(outputs, self._last_stats)
        except Exception:
            _log.exception("delivering the outputs of a step failed")

    def _report(self, message: str, progress: float | None = None) -> None:
        """What `load` is given to tell its progress. Raises `Stopped` when the time to stop has come."""
        deadline_s = self._stop_deadline_s
        if deadline_s is not None and time.monotonic() >= deadline_s:
            raise Stopped
        self._tell("loading", message, progress)

    def _tell(self, phase: Phase, message: str, progress: float | None = None) -> None:
        try:
            self._on_phase(phase, message, progress)
        except Exception:
            _log.exception("telling the phase failed")

    def _tell_dead(self, error: BaseException) -> None:
        """From an `except` block: what killed the lane goes to the log, a neutral sentence to the others."""
        if isinstance(error, NoriaError):
            _log.error("loading failed: %s", error.message)
            self._tell("dead", error.message)
        else:
            _log.exception("the step loop died")
            self._tell("dead", "The engine has stopped after an internal error.")

    def _end(self, error: OutputError) -> None:
        """The last act: nothing that was ever added stays without its final output."""
        with self._condition:
            self._is_over = True
            unqueued = [*self._drained, *self._adds]
            errands = [*self._errands, *self._new_errands]
            for inbox in (self._drained, self._adds, self._aborts, self._new_errands):
                inbox.clear()
        for errand in errands:
            errand.fail(EngineDead(error.message))
        self._errands.clear()
        stats, engine = self._last_stats, self._engine
        if engine is not None:
            self._outputs += engine.fail_all(error)
            stats = engine.stats()
        self._outputs += [_unqueued(sequence, error) for sequence in unqueued]
        self._deliver(stats)
        self.heartbeat = Heartbeat(time.monotonic(), has_work=False)


def _unqueued(sequence: Sequence, error: OutputError) -> StepOutput:
    return final_output(sequence, FinishReason.ERROR, error=error)
