"""`Residents`: brings models into memory and takes them out again, one change after the other, under one lock.

Lives on the event loop. `core/turns.py` has the thread that loads and the thread that steps; `pool.py` knows requests.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, Literal, TypeVar

import msgspec

from core.config import MIB
from core.errors import ConfigError, Draining, InternalError, ModelUnavailable, NoriaError
from core.turns import Turns
from server.backends.blocking import in_thread
from server.backends.loading import LoadingSteps
from server.backends.native import JOIN_GRACE_S, NativeBackend
from server.config import ServerConfig
from server.config_models import in_terms_of_entries
from server.logs import event
from server.models.overview import both, posting
from server.models.slot import RETRY_AFTER_S, UNAVAILABLE, Slot, choose_victim, used_bytes

T = TypeVar("T")
AUTO_SHARE = 0.8  # of the memory that is free at the start
_log = logging.getLogger("noria.models")


def budget_of(setting: int | Literal["auto"], free_bytes: int) -> int:
    """What `models_memory_mib` means where so much is free at the start. Bytes."""
    return int(AUTO_SHARE * free_bytes) if setting == "auto" else setting * MIB


class Residents:
    """The models in memory. `budget_bytes` is 0 until it is known."""

    def __init__(self, config: ServerConfig, slots: list[Slot], steps: LoadingSteps) -> None:
        self._config, self._slots, self._steps = config, slots, steps
        self.turns = Turns(lambda: steps.prepare(config), steps.trim, config.models_load_share)
        self.budget_bytes = 0
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def stop(self, timeout_s: float) -> None:
        for task in self._tasks:
            task.cancel()
        backends = [slot.backend for slot in self._slots if slot.backend is not None]
        await asyncio.gather(*(backend.stop(timeout_s) for backend in backends))
        self.turns.stop()
        deadline_s = time.monotonic() + JOIN_GRACE_S
        while self.turns.is_alive and time.monotonic() < deadline_s:  # noqa: ASYNC110
            await asyncio.sleep(0.005)  # a thread cannot be awaited; only while stopping

    async def unload(self, slot: Slot, reason: str) -> None:
        """When its answers have ended. Once begun it is done, also if whoever asked does not wait for it: half of it
        would leave an engine that nobody knows, or a model that is for ever about to go."""

        async def change() -> None:
            async with self._changing:
                if slot.state == "loaded":
                    await self._unload(slot, reason)

        await asyncio.shield(self.spawn(change()))

    def want(self, slot: Slot) -> None:
        if slot.loading is None:
            slot.loading = self.spawn(self._bring_in(slot))

    async def _bring_in(self, slot: Slot) -> None:
        try:
            async with self._changing:
                await self._load_or_fail(slot)
        finally:
            slot.loading = None
        if slot.num_waiting:  # they came while what failed was put away
            self.want(slot)

    async def _load_or_fail(self, slot: Slot) -> None:
        try:
            if not slot.is_open:
                await self._load(slot)
            slot.serve_waiters()
        except Exception as error:
            if not isinstance(error, NoriaError):
                _log.exception("loading %s failed", slot.name)
                error = InternalError("The model could not be loaded after an internal error.")
            await self._fail(slot, error)

    async def _load(self, slot: Slot) -> None:
        started_s = time.monotonic()
        slot.state, slot.progress = "loading", None
        slot.tell("waiting for room")
        config = msgspec.structs.replace(self._config, model=slot.entry)
        budget_bytes = await self._find_budget()
        report = posting(slot.tell)
        if not slot.memory_bytes:
            slot.memory_bytes = await self._in_loading_thread(
                lambda: self._steps.needed_bytes(config, budget_bytes, report)
            )
        await self._make_room(slot, budget_bytes)
        load = self._steps.make_load(config, budget_bytes, slot.aliases)
        slot.backend = NativeBackend(
            config.engine,
            lambda tell: load(both(tell, report)),
            slot.metrics,
            config.log.stats_interval_s,
            make_lane=self.turns.lane,
            label=slot.name,
        )
        await slot.backend.start()
        await slot.backend.loaded()
        model = slot.backend.served_model()
        slot.memory_bytes, slot.max_model_len = model.plan.total_bytes, model.max_model_len
        slot.load_s = time.monotonic() - started_s
        slot.state, slot.message, slot.is_closing = "loaded", "", False
        slot.used_s = time.monotonic()
        slot.metrics.observe_load("loaded")
        mib = f"{slot.memory_bytes / MIB:.0f}"
        event(_log, logging.INFO, "model loaded", model=slot.name, seconds=slot.load_s, mib=mib)

    async def _make_room(self, wanted: Slot, budget_bytes: int) -> None:
        slots = self._slots
        others = [slot for slot in slots if slot is not wanted]
        while used_bytes(others) + wanted.memory_bytes > budget_bytes:
            left_bytes = budget_bytes - used_bytes(slot for slot in others if slot.is_pinned)
            victim = choose_victim(slots, wanted)
            if victim is None or wanted.memory_bytes > left_bytes:  # nobody goes in vain
                raise ConfigError(
                    f"{wanted.name} needs {wanted.memory_bytes / MIB:,.0f} MiB; of models_memory_mib "
                    f"{budget_bytes / MIB:,.0f} what is pinned leaves {left_bytes / MIB:,.0f}."
                )
            wanted.tell(f"waiting for {victim.name} to be unloaded")
            await self._unload(victim, "pressure")

    async def _unload(self, slot: Slot, reason: str) -> None:
        """Waits until nobody uses it. Only while `_changing` is held."""
        slot.is_closing = True
        if slot.num_leases:
            await slot.is_idle.wait()
        slot.state = "unloading"
        await self._discard(slot, is_for_another=reason == "pressure")
        slot.state, slot.is_closing = "unloaded", False
        slot.metrics.observe_unload(reason)
        event(_log, logging.INFO, "model unloaded", model=slot.name, reason=reason)
        if slot.num_waiting:
            self.want(slot)

    async def _discard(self, slot: Slot, *, is_for_another: bool = False) -> None:
        """Stops what computes for the model and gives its memory back. Only while `_changing` is held."""
        backend, slot.backend = slot.backend, None
        if backend is None:
            return
        await backend.stop(JOIN_GRACE_S)
        if slot.backend is None:
            slot.metrics.watch(None)
        engine = backend.release()
        if engine is not None:
            self.turns.dispose(engine, is_for_another=is_for_another)
            del engine
            await self._in_loading_thread(lambda: None)  # behind the disposal

    async def _fail(self, slot: Slot, error: NoriaError) -> None:
        place = self._slots.index(slot)  # loading speaks of `model`, whose place an entry has taken
        slot.message = in_terms_of_entries(error.message, place)
        slot.state, slot.is_closing = "failed", False
        slot.metrics.observe_load("failed")
        event(_log, logging.ERROR, "model failed", model=slot.name, reason=slot.message)
        slot.failed_s = time.monotonic()
        unavailable = ModelUnavailable(UNAVAILABLE, retry_after_s=RETRY_AFTER_S)
        slot.fail_waiters(error if isinstance(error, Draining) else unavailable)
        await self._discard(slot)

    def notice_death(self, slot: Slot) -> None:
        """A model whose engine has died is loaded again for the next request; its answers have got their errors."""
        if slot.state != "loaded" or slot.backend is None or slot.backend.status().phase != "dead":
            return
        slot.state, slot.message = "failed", "The engine has stopped after an internal error."
        slot.metrics.observe_unload("failed")

        async def put_away() -> None:
            async with (
                self._changing
            ):  # a load beside it would count on memory that is not free yet
                await self._discard(slot)

        self.spawn(put_away())

    async def expire(self) -> None:
        """Unloads what nobody has used for `keep_alive_s`."""
        keep_s = self._config.keep_alive_s
        while True:
            await asyncio.sleep(keep_s / 8)
            for slot in self._slots:
                async with self._changing:
                    is_idle = slot.is_open and not slot.is_pinned and not slot.num_leases
                    if is_idle and time.monotonic() - slot.used_s >= keep_s:
                        await self._unload(slot, "idle")

    async def _find_budget(self) -> int:
        if not self.budget_bytes:
            free = await self._in_loading_thread(lambda: self._steps.free_bytes(self._config))
            self.budget_bytes = budget_of(self._config.models_memory_mib, free)
        return self.budget_bytes

    async def _in_loading_thread(self, function: Callable[[], T]) -> T:
        return await in_thread(function, self.turns.run)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
