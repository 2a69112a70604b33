"""`VllmBackend`: everything behind the routes stays, and vLLM computes instead of our own step loop.

One task per sequence reads vLLM's tokens (`vllm_follow.py`). When vLLM's engine process dies, its streams end with an
error, readiness turns red, and it is started again, as often as a `RestartBudget` allows.

Lives on the event loop. Knows vLLM only through `VllmEngine`. Made by `server/backends`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from core.config import EngineConfig
from core.errors import EngineDead, ModelLoading, NoriaError, UnsupportedValue
from core.outputs import FinishReason, OutputError, StepOutput, StepStats
from core.sequence import Sequence
from core.step_loop import Phase, Report
from core.update import final_output
from server.backends.base import BackendStatus, GenerationRequest, RequestRecord, ServedModel
from server.backends.blocking import in_thread
from server.backends.ledger import LOADING, Ledger, to_sequence
from server.backends.queue_stream import QueueStream
from server.backends.restart_budget import RestartBudget
from server.backends.vllm_engine import EngineGone, StepCounter, VllmEngine
from server.backends.vllm_follow import follow
from server.backends.vllm_reaper import Reaper
from server.logs import StatsReporter, event
from server.metrics import Metrics

LOOK_EVERY_S = 0.25
STOP_S = 20.0  # for vLLM's processes to end, force included

_EMPTY = StepStats(0, 0, 0, 0, 0, 0)
_SHUTDOWN = OutputError("draining", "shutdown", "The server is shutting down.")
_DIED = OutputError("engine_dead", "engine_dead", "The engine has stopped; this request is lost.")
_BROKEN = OutputError("internal_error", "step", "The engine failed to compute this request.")
_WAITED = OutputError("queue_timeout", "queue_timeout", "The request waited too long in the queue.")
_log = logging.getLogger("noria.backend")


class VllmBackend:
    """Implements `Backend`. `start` runs in a thread of its own and blocks while vLLM loads. `announces`: it tells its
    start lines itself, because the start log is that of another engine."""

    name = "vllm"

    def __init__(
        self,
        config: EngineConfig,
        start: Callable[[Report], VllmEngine],
        counter: StepCounter,
        metrics: Metrics,
        stats_interval_s: float = 10.0,
        budget: RestartBudget | None = None,
        announces: bool = False,
    ) -> None:
        self._config = config
        self._start = start
        self._counter = counter
        self._metrics = metrics
        self._announces = announces
        self._budget = budget or RestartBudget()
        self._reporter = StatsReporter(stats_interval_s, metrics)
        self._reaper = Reaper()
        self._ledger = Ledger(config, metrics, self._reporter)
        self._engine: VllmEngine | None = None
        self._model: ServedModel | None = None
        self._lines: tuple[str, ...] = ()
        self._phase: Phase = "loading"
        self._message = LOADING
        self._is_draining = False
        self._num_lost = 0  # sequences of the engine that has died
        self._stats = _EMPTY
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by sequence id
        self._life: asyncio.Task[None] | None = None  # what loads, or loads again
        self._last_sign_s = 0.0  # of the engine, or of new work for an idle one
        counter.on_stats = self._on_stats

    # --- life ---

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loading_ended = asyncio.Event()
        self._metrics.watch(self)
        self._life = asyncio.create_task(self._load())

    async def loaded(self) -> None:
        await self._loading_ended.wait()
        if self._model is None:
            raise EngineDead(self._message)

    def start_lines(self) -> tuple[str, ...]:
        return self._lines

    def begin_drain(self) -> None:
        self._is_draining = True

    async def stop(self, timeout_s: float) -> None:
        """May be called again with a shorter time, also after a cancelled call."""
        self.begin_drain()
        if self._life is not None:
            self._life.cancel()
        deadline_s = time.monotonic() + timeout_s
        while len(self._ledger) and self._phase == "ready" and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # only while stopping
        self._fail_streams(_SHUTDOWN)
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=1.0)
        self._reporter.close()
        engine, self._engine = self._engine, None
        if self._phase != "dead":
            self._phase, self._message = "dead", "The engine has been stopped."
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_S):
                if engine is not None:
                    await in_thread(engine.shutdown)
        await in_thread(self._reaper.finish)

    async def _load(self) -> None:
        try:
            await self._open()
        except NoriaError as error:
            _log.error("%s", error.message)
            self._phase, self._message = "dead", error.message
        except Exception:
            _log.exception("vLLM could not be started")
            self._phase, self._message = "dead", "vLLM could not be started."
        finally:
            self._loading_ended.set()

    async def _open(self) -> None:
        """Starts an engine and waits until it has answered."""
        engine = await self._watched_start()
        self._engine = engine
        try:
            await engine.open(lambda: self._on_death(engine))
        except EngineGone:
            await self._bury(engine)
            raise EngineDead("vLLM's engine process has ended while it started.") from None
        if self._model is None:  # figures and names outlive an engine
            self._model, self._lines = engine.model, engine.lines
            self._metrics.set_model(engine.model)
            for line in engine.lines if self._announces else ():
                _log.info("beside: %s", line)
        self._metrics.info, self._metrics.startup_s = engine.info, engine.startup_s
        self._phase, self._message = "ready", "ready"

    async def _watched_start(self) -> VllmEngine:
        """The helper learns of every process that comes into being meanwhile, should this one be killed."""
        self._reaper.start()
        starting = asyncio.ensure_future(in_thread(lambda: self._start(self._report)))
        while not starting.done():
            self._reaper.look()
            await asyncio.wait({starting}, timeout=LOOK_EVERY_S)
        self._reaper.look()
        return starting.result()

    def _report(self, message: str, progress: float | None = None) -> None:
        """In the starting thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._tell, message)

    def _tell(self, message: str) -> None:
        if self._phase == "loading" and message != self._message:
            self._message = message
            event(_log, logging.INFO, "loading", step=message)

    # --- death and return ---

    def _on_death(self, engine: VllmEngine) -> None:
        if engine is not self._engine or self._phase != "ready":
            return
        num_lost, self._num_lost = self._num_lost + len(self._ledger), 0
        self._engine, self._phase = None, "loading"
        self._message = "vLLM's engine process has ended; it is being started again."
        self._stats = replace(_EMPTY, num_blocks_free=self._counter.num_blocks)
        self._fail_streams(_DIED)
        event(_log, logging.ERROR, "engine died", lost_requests=num_lost)
        if not self._is_draining:
            self._life = asyncio.create_task(self._come_back(engine))

    async def _come_back(self, engine: VllmEngine) -> None:
        """Until an engine answers, or too many have died."""
        await self._bury(engine)
        died_s = time.monotonic()
        while self._engine is None:
            granted = self._budget.take(time.monotonic())
            if granted is None:
                self._give_up()
                return
            number, pause_s = granted
            event(
                _log,
                logging.WARNING,
                "engine restart",
                restart=number,
                limit=self._budget.limit,
                pause_s=pause_s,
            )
            await asyncio.sleep(pause_s)
            try:
                await self._open()
            except Exception as error:
                self._engine = None
                self._reaper.kill_rest()
                _log.error("vLLM could not be started again: %s", error)
        event(_log, logging.INFO, "engine restarted", seconds=time.monotonic() - died_s)

    async def _bury(self, engine: VllmEngine) -> None:
        """Sockets and threads on this side, and whatever still runs of a dead engine."""
        await in_thread(engine.shutdown)
        self._reaper.kill_rest()

    def _give_up(self) -> None:
        budget = self._budget
        minutes = budget.window_s / 60
        self._message = (
            f"vLLM's engine process has ended {budget.limit + 1} times in {minutes:.0f} minutes."
        )
        self._phase = "dead"
        _log.error("%s It is not started again.", self._message)

    def _fail_streams(self, error: OutputError) -> None:
        for sequence_id in self._ledger.fail(error):
            if sequence_id in self._tasks:
                self._tasks[sequence_id].cancel()

    # --- answers to routes ---

    def status(self) -> BackendStatus:
        age_s = time.monotonic() - self._last_sign_s if self._last_sign_s else None
        is_stale = age_s is not None and bool(self._tasks) and age_s > self._config.watchdog_s
        is_draining = self._is_draining and self._phase != "dead"
        phase: Phase = "draining" if is_draining else self._phase
        return BackendStatus(phase, self._message, None, age_s, is_stale)

    def stats(self) -> StepStats:
        return self._stats

    def served_model(self) -> ServedModel:
        if self._phase == "dead":
            raise EngineDead(self._message)
        if self._model is None or self._phase == "loading":
            raise ModelLoading(self._message, retry_after_s=5)
        return self._model

    def submit(
        self,
        requests: list[GenerationRequest],
        *,
        request_id: str,
        route: str,
        record: RequestRecord | None = None,
    ) -> QueueStream:
        record = record or RequestRecord(request_id=request_id, route=route)
        if any(request.pools for request in requests):
            raise UnsupportedValue("Embeddings need engine.backend: native.", param="input")
        self._ledger.refuse_if_closed(self.status(), len(requests))
        self._ledger.refuse_if_full(requests)
        for request in requests:
            if request.grammar is not None:
                raise UnsupportedValue(
                    "Structured output is not supported by this backend.",
                    param=request.grammar.grammar.param,
                )
        sequences = [to_sequence(request, request_id) for request in requests]
        stream = self._ledger.open(sequences, record, self._close)
        if not self._tasks:
            self._last_sign_s = time.monotonic()
        for sequence in sequences:
            task = asyncio.create_task(self._compute(sequence))
            self._tasks[sequence.sequence_id] = task
            task.add_done_callback(lambda _, i=sequence.sequence_id: self._tasks.pop(i))  # type: ignore[misc]
        return stream

    def _close(self, stream: QueueStream, cause: str) -> None:
        for sequence_id in self._ledger.close(stream, cause):
            self._tasks[sequence_id].cancel()

    # --- one sequence ---

    async def _compute(self, sequence: Sequence) -> None:
        """From submission to exactly one final output."""
        try:
            if self._engine is None:
                raise EngineGone
            await follow(self._engine, sequence, self._take, self._config.queue_timeout_s)
        except asyncio.CancelledError:  # a client that left; vLLM has been told
            self._take(final_output(sequence, FinishReason.ABORT))
        except TimeoutError:
            self._take(final_output(sequence, FinishReason.ERROR, error=_WAITED))
        except EngineGone:
            self._num_lost += 1
            self._take(final_output(sequence, FinishReason.ERROR, error=_DIED))
        except Exception:
            _log.exception("sequence %s: vLLM failed", sequence.sequence_id)
            self._take(final_output(sequence, FinishReason.ERROR, error=_BROKEN))

    def _take(self, output: StepOutput, now_s: float | None = None) -> None:
        self._ledger.take([output], time.monotonic() if now_s is None else now_s)

    def _on_stats(self, stats: StepStats, num_new_tokens: int) -> None:
        now_s = time.monotonic()
        self._last_sign_s = now_s
        self._stats = replace(stats, num_waiting_prompt_tokens=self._ledger.num_waiting_tokens)
        self._ledger.observe_step(self._stats, num_new_tokens, now_s)
