"""`ModelPool`: several models behind one backend, loaded as they are asked for and unloaded to make room.

A request for a model that is not loaded waits for it, in the order of arrival; nothing that was taken is ever dropped
for another's sake: a model is unloaded only after its answers have ended. Changes happen one after the other, under one
lock. Lives on the event loop; `core/turns.py` has the thread that loads and the thread that steps.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from core.config import MIB
from core.errors import (
    Draining,
    EngineDead,
    ModelLoading,
    ModelNotFound,
    ModelPinned,
    ModelUnavailable,
    QueueFull,
    QueueTimeout,
)
from core.lane import Phase
from core.outputs import StepStats
from server.backends.base import BackendStatus, GenerationRequest, RequestRecord, ServedModel
from server.backends.loading import LoadingSteps
from server.backends.queue_stream import QueueStream
from server.config import ServerConfig
from server.metrics import Metrics
from server.models import overview
from server.models.lease import Lease, ModelCard
from server.models.report import report_all, report_slot, sample_slot
from server.models.residents import Residents
from server.models.slot import RETRY_AFTER_S, UNAVAILABLE, Slot, make_slots


class ModelPool:
    """Implements `Backend`, for what asks of all models together, and `Models`. The first model is the default."""

    name = "native"

    def __init__(self, config: ServerConfig, metrics: Metrics, steps: LoadingSteps) -> None:
        """`metrics` are those of the default model; the others' are made beside them."""
        self._config = config
        self._slots = {slot.name: slot for slot in make_slots(config, metrics)}
        self._default = next(iter(self._slots.values()))
        self._residents = Residents(config, list(self._slots.values()), steps)
        self._is_draining = False
        self._opening: asyncio.Task[None] | None = None

    # --- life ---

    async def start(self) -> None:
        self._residents.turns.start()
        self._opening = self._residents.spawn(self._open())
        if self._config.keep_alive_s:
            self._residents.spawn(self._residents.expire())

    async def _open(self) -> None:
        """Loads what is pinned, then the default if what is pinned leaves room. Raises what keeps a model from being
        loaded."""
        pinned = [slot for slot in self._slots.values() if slot.is_pinned]
        for slot in dict.fromkeys([*pinned, self._default]):
            self._residents.want(slot)
            assert slot.loading is not None
            await slot.loading
            if slot.state == "failed" and (slot.is_pinned or not pinned):
                raise ModelUnavailable(f"{slot.name}: {slot.message}")

    async def loaded(self) -> None:
        assert self._opening is not None
        await asyncio.shield(self._opening)

    def start_lines(self) -> tuple[str, ...]:
        budget = f"models: {', '.join(self._slots)}; loaded ones share {self._residents.budget_bytes / MIB:,.0f} MiB"
        backends = [slot.backend for slot in self._slots.values() if slot.is_open]
        return (budget, *(line for each in backends if each for line in each.start_lines()))

    def begin_drain(self) -> None:
        self._is_draining = True
        for slot in self._slots.values():
            slot.fail_waiters(Draining("The server is shutting down.", retry_after_s=5))
            if slot.backend is not None:
                slot.backend.begin_drain()

    async def stop(self, timeout_s: float) -> None:
        """May be called again with a shorter time, also after a cancelled call."""
        self.begin_drain()
        await self._residents.stop(timeout_s)

    # --- all models together ---

    def status(self) -> BackendStatus:
        phase, message, progress = self._phase()
        backends = [slot.backend for slot in self._slots.values() if slot.backend is not None]
        return overview.status(phase, message, progress, backends)

    def _phase(self) -> tuple[Phase, str, float | None]:
        opening = self._opening
        if self._is_draining:
            return "draining", "", None
        if opening is None or not opening.done():
            first = next((s for s in self._slots.values() if s.state == "loading"), self._default)
            return "loading", f"{first.name}: {first.message}", first.progress
        if opening.cancelled() or not self._residents.turns.is_alive:
            return "dead", "The engine has stopped.", None
        if (error := opening.exception()) is not None:
            return "dead", str(error), None
        return "ready", "ready", None

    def stats(self) -> StepStats:
        return overview.stats([s.backend for s in self._slots.values() if s.backend is not None])

    def served_model(self) -> ServedModel:
        """The default one."""
        if self._default.backend is None:
            raise ModelLoading("The default model is not loaded.", retry_after_s=2)
        return self._default.backend.served_model()

    def submit(
        self,
        requests: list[GenerationRequest],
        *,
        request_id: str,
        route: str,
        record: RequestRecord | None = None,
    ) -> QueueStream:
        """To the default model, without a lease. Routes ask their lease instead."""
        if self._default.backend is None:
            raise ModelLoading("The default model is not loaded.", retry_after_s=2)
        return self._default.backend.submit(
            requests, request_id=request_id, route=route, record=record
        )

    def cards(self) -> list[ModelCard]:
        return [slot.card() for slot in self._slots.values()]

    def states(self) -> dict[str, dict[str, Any]]:
        return {name: slot.short() for name, slot in self._slots.items()}

    def samples(self) -> dict[str, dict[str, Any]]:
        return {name: sample_slot(slot) for name, slot in self._slots.items()}

    # --- requests ---

    def only(self) -> Lease | None:
        return None

    async def acquire(self, name: str | None) -> Lease:
        self._refuse_if_closed()
        slot = self.find(name)
        self._residents.notice_death(slot)
        if slot.state == "failed":
            left_s = slot.failed_s + RETRY_AFTER_S - time.monotonic()
            if left_s > 0:  # one that cannot be loaded must not keep the others from being loaded
                raise ModelUnavailable(UNAVAILABLE, retry_after_s=left_s)
        return slot.lease() if slot.is_open else await self._wait(slot)

    def resident(self, name: str | None) -> Lease | None:
        self._refuse_if_closed()
        slot = self.find(name)
        self._residents.notice_death(slot)
        return slot.lease() if slot.is_open else None

    def find(self, name: str | None) -> Slot:
        """By name or alias; the default where there is no name. Raises `ModelNotFound`."""
        if name is None or (slot := self._slots.get(name)) is None:
            for slot in self._slots.values():
                if name is None or name in slot.aliases:
                    return slot
            if "*" in self._default.aliases:
                return self._default
            raise ModelNotFound("The model does not exist here; see /v1/models.", param="model")
        return slot

    def _refuse_if_closed(self) -> None:
        if self._is_draining:
            self._default.metrics.observe_rejection("draining")
            raise Draining("The server is shutting down.", retry_after_s=5)
        if not self._residents.turns.is_alive:
            raise EngineDead("The engine has stopped and cannot answer.")

    async def _wait(self, slot: Slot) -> Lease:
        config = self._config.engine
        if slot.num_waiting >= config.max_waiting:
            slot.metrics.observe_rejection("queue_full")
            raise QueueFull("The queue is full: too many requests wait for this model to load.")
        waiter: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()
        slot.waiters.append(waiter)
        self._residents.want(slot)
        try:
            async with asyncio.timeout(config.queue_timeout_s or None):
                return await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                waiter.result().release()  # it came at the moment when nobody wanted it any more
            if not isinstance(error, TimeoutError):
                raise
            slot.metrics.observe_rejection("queue_timeout")
            raise QueueTimeout("The request waited too long for its model to load.") from None

    # --- what an operator asks for ---

    def report(self) -> dict[str, Any]:
        price = self._config.price_per_hour
        return report_all(list(self._slots.values()), self._residents.budget_bytes, price)

    def _report(self, slot: Slot) -> dict[str, Any]:
        price = self._config.price_per_hour
        return report_slot(slot, price, is_default=slot is self._default)

    async def load(self, name: str, *, pinned: bool | None = None) -> dict[str, Any]:
        """See `Models`. The error says why."""
        slot = self.find(name)
        slot.failed_s = -RETRY_AFTER_S  # whoever asks like this wants it tried now
        try:
            (await self.acquire(name)).release()
        except ModelUnavailable:
            raise ModelUnavailable(f"{slot.name} could not be loaded: {slot.message}") from None
        slot.is_pinned = slot.is_pinned if pinned is None else pinned
        return self._report(slot)

    async def unload(self, name: str) -> dict[str, Any]:
        """See `Models`."""
        slot = self.find(name)
        if slot.is_pinned:
            raise ModelPinned(
                "The model is pinned; load it with pinned: false first.", param="model"
            )
        await self._residents.unload(slot, "asked")
        return self._report(slot)
