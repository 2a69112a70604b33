"""`NativeBackend`: where the step thread and the event loop meet, and nowhere else.

Requests become sequences in the inbox of `StepLoop`. Once per step, not once per token, the step thread hands the whole
list of outputs over with `run_coroutine_threadsafe`; on the loop each output goes into the queue of its own request.
The returned future is checked: a hand-over that failed ends its streams with an error, never with silence.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from core.config import EngineConfig
from core.engine import Engine
from core.errand import Work
from core.errors import EngineDead, ModelLoading
from core.outputs import OutputError, StepOutput, StepStats
from core.step_loop import Deliver, Load, OnPhase, Phase, Report, StepLoop
from core.turns import SharedLane
from server.backends.base import BackendStatus, GenerationRequest, RequestRecord, ServedModel
from server.backends.ledger import LOADING, Ledger, to_sequence
from server.backends.queue_stream import QueueStream
from server.logs import StatsReporter, event
from server.metrics import Metrics

JOIN_GRACE_S = 5.0  # for the step that runs when the drain is over
_EMPTY = StepStats(0, 0, 0, 0, 0, 0)
_LOST = OutputError("internal_error", "step", "The server lost the output of this request.")
_STUCK = OutputError("draining", "shutdown", "The server is shutting down.")
_log = logging.getLogger("noria.backend")


@dataclass(frozen=True, slots=True)
class LoadedThings:
    """What loading gives: the engine, what routes may know of the model, and what the start log tells.

    `lines` are log lines in order (versions, model, kernels, memory); `info` the labels of `noria:info`;
    `startup_s` seconds per phase.
    """

    engine: Engine
    model: ServedModel
    lines: tuple[str, ...] = ()
    info: dict[str, str] = field(default_factory=dict)
    startup_s: dict[str, float] = field(default_factory=dict)


class NativeBackend:
    """Implements `Backend` over the step loop. `load` runs in the step thread, or where `make_lane` has it run. `label`
    is the model's name in log lines, where there are several.

    All state here belongs to the event loop; the step thread touches only what the two methods marked so touch.
    """

    name = "native"

    def __init__(
        self,
        config: EngineConfig,
        load: Callable[[Report], LoadedThings],
        metrics: Metrics,
        stats_interval_s: float = 10.0,
        *,
        make_lane: Callable[[Load, Deliver, OnPhase], StepLoop | SharedLane] = StepLoop,
        label: str | None = None,
    ) -> None:
        self._config = config
        self._load = load
        self._metrics = metrics
        self._reporter = StatsReporter(stats_interval_s, metrics, label)
        self._ledger = Ledger(config, metrics, self._reporter)
        self._things: LoadedThings | None = None
        self._phase: Phase = "loading"
        self._message = LOADING
        self._progress: float | None = None
        self._is_draining = False
        self._is_stuck = False
        self._stats = _EMPTY
        self._handover: Future[None] | None = None
        self._watchdog: asyncio.TimerHandle | None = None
        self._step_loop = make_lane(self._load_things, self._deliver, self._on_phase)

    # --- life ---

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loading_ended = asyncio.Event()
        self._metrics.watch(self)
        self._step_loop.start()

    async def loaded(self) -> None:
        await self._loading_ended.wait()
        if self._things is None:
            raise EngineDead(self._message)

    @property
    def things(self) -> LoadedThings:
        """What was loaded, for the start log. Only after `loaded`."""
        assert self._things is not None
        return self._things

    def release(self) -> Engine | None:
        """Lets go of what was loaded, once it has stopped; the engine, if there was one, is the caller's."""
        things, self._things = self._things, None
        return None if things is None else things.engine

    def start_lines(self) -> tuple[str, ...]:
        return self.things.lines

    def begin_drain(self) -> None:
        self._is_draining = True

    async def stop(self, timeout_s: float) -> None:
        """May be called again with a shorter time, also after a cancelled call."""
        self.begin_drain()
        self._step_loop.stop(timeout_s)
        # A model that is still loading holds the thread for as long as it takes, and a stuck step for ever: nobody
        # waits for the first, nor twice for the second.
        is_hopeless = self._phase == "loading" or self._is_stuck
        deadline_s = time.monotonic() + (0.0 if is_hopeless else timeout_s + JOIN_GRACE_S)
        while self._step_loop.is_alive and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # a thread cannot be awaited; only while stopping
        self._is_stuck = self._step_loop.is_alive
        if self._handover is not None and not self._step_loop.is_alive:
            await asyncio.wait([asyncio.wrap_future(self._handover)], timeout=1.0)
        if len(self._ledger):
            _log.error(
                "the step thread did not stop in time; %d sequences are lost", len(self._ledger)
            )
            self._fail_streams(_STUCK)
        self._reporter.close()
        if self._watchdog is not None:
            self._watchdog.cancel()

    def _load_things(self, report: Report) -> Engine:
        """Where the lane loads: in the step thread, or in the one for loading."""
        self._things = self._load(report)
        return self._things.engine

    def _on_phase(self, phase: Phase, message: str, progress: float | None = None) -> None:
        """In the step thread; the change itself happens on the loop."""
        self._post(self._enter_phase, phase, message, progress)

    def _enter_phase(self, phase: Phase, message: str, progress: float | None) -> None:
        if self._phase == "dead":
            return
        if phase == "loading" and message != self._message:
            event(_log, logging.INFO, "loading", model=self._reporter.model, step=message)
        self._phase, self._progress = phase, progress
        self._message = message or self._message
        if phase == "ready" and self._things is not None:
            self._message = "ready"
            self._metrics.set_model(self._things.model)
            self._metrics.info = self._things.info
            self._metrics.startup_s = self._things.startup_s
        if phase != "loading":
            self._loading_ended.set()

    # --- answers to routes ---

    def status(self) -> BackendStatus:
        beat = self._step_loop.heartbeat
        age_s = time.monotonic() - beat.time_s if beat.time_s else None
        is_stale = age_s is not None and beat.has_work and age_s > self._config.watchdog_s
        return BackendStatus(self._current_phase(), self._message, self._progress, age_s, is_stale)

    def _current_phase(self) -> Phase:
        if self._phase == "dead":
            return "dead"
        if self._is_draining:
            return "draining"
        if self._phase == "ready" and not self._step_loop.is_alive:
            return "dead"
        return self._phase

    def stats(self) -> StepStats:
        return self._stats

    def served_model(self) -> ServedModel:
        if self._things is None or self._phase == "loading":
            if self._phase == "dead":
                raise EngineDead(self._message)
            raise ModelLoading(LOADING, retry_after_s=2)
        return self._things.model

    def submit(
        self,
        requests: list[GenerationRequest],
        *,
        request_id: str,
        route: str,
        record: RequestRecord | None = None,
    ) -> QueueStream:
        record = record or RequestRecord(request_id=request_id, route=route)
        self._ledger.refuse_if_closed(self.status(), len(requests))
        self._ledger.refuse_if_full(requests)
        sequences = [to_sequence(request, request_id) for request in requests]
        stream = self._ledger.open(sequences, record, self._close)
        self._arm_watchdog()
        if sequences:
            self._step_loop.add(sequences)
        return stream

    async def run_beside(self, work: Work) -> Any:
        """What `work(engine)` returns, done in the step thread between steps. Raises what it raises, `ModelLoading`
        and `EngineDead`."""
        self.served_model()
        return await asyncio.wrap_future(self._step_loop.run_beside(work))

    def _close(self, stream: QueueStream, cause: str) -> None:
        unfinished = self._ledger.close(stream, cause)
        if unfinished:
            self._step_loop.abort(unfinished)

    # --- the hand-over ---

    def _deliver(self, outputs: list[StepOutput], stats: StepStats) -> None:
        """In the step thread, once per step. A closed loop must not cost the engine its thread."""
        handover = self._receive(outputs, stats, time.monotonic())
        try:
            future = asyncio.run_coroutine_threadsafe(handover, self._loop)
        except RuntimeError:
            handover.close()
            _log.warning("outputs were dropped: the event loop is closed")
            return
        self._handover = future
        future.add_done_callback(self._check_handover)

    def _check_handover(self, future: Future[None]) -> None:
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or error is not None:
            _log.error("a hand-over failed; its streams end with an error", exc_info=error)
            self._post(self._fail_streams, _LOST)

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            _log.warning("the event loop is closed")

    async def _receive(
        self, outputs: list[StepOutput], stats: StepStats, delivered_s: float
    ) -> None:
        """On the loop."""
        self._stats = stats
        self._ledger.receive(outputs, stats, delivered_s)

    def _fail_streams(self, error: OutputError) -> None:
        self._step_loop.abort(self._ledger.fail(error))

    # --- the watchdog ---

    def _arm_watchdog(self) -> None:
        if self._watchdog is None:
            delay_s = self._config.watchdog_s
            self._watchdog = asyncio.get_running_loop().call_later(delay_s, self._check_watchdog)

    def _check_watchdog(self) -> None:
        """Only while there is work: a step that takes longer than the limit gets a line in the log."""
        self._watchdog = None
        if not len(self._ledger):
            return
        status = self.status()
        if status.is_step_stale:
            _log.error(
                "no step has ended for %.0f s although there is work", status.heartbeat_age_s
            )
        self._arm_watchdog()
