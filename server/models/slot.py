"""`Slot`: one of several configured models: whether it is loaded, who uses it, who waits for it. Plain state and the
rules that need nothing else; `pool.py` decides and acts. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from core.errors import NoriaError
from server.backends.base import Residence, ServedModel
from server.backends.native import NativeBackend
from server.config import ServerConfig
from server.config_models import ModelEntry, public_name
from server.metrics import Metrics
from server.models.lease import Lease, ModelCard

RETRY_AFTER_S = 5.0  # after a load that failed, requests are refused for so long
UNAVAILABLE = "The model could not be loaded; /admin/models says why."
State = Literal["unloaded", "loading", "loaded", "unloading", "failed"]


@dataclass(slots=True, eq=False)
class Slot:
    """`is_closing`: it was chosen to be unloaded, so new requests wait. `memory_bytes` is what it takes when loaded,
    0 until known. `used_s` is when it was last asked for or let go, monotonic."""

    entry: ModelEntry
    name: str
    aliases: tuple[str, ...]
    metrics: Metrics
    is_pinned: bool
    created: int
    state: State = "unloaded"
    message: str = ""
    progress: float | None = None
    backend: NativeBackend | None = None
    is_closing: bool = False
    num_leases: int = 0
    waiters: deque[asyncio.Future[Lease]] = field(default_factory=deque)
    used_s: float = 0.0
    failed_s: float = 0.0
    memory_bytes: int = 0
    max_model_len: int | None = None
    load_s: float | None = None
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    loading: asyncio.Task[None] | None = None

    @property
    def is_resident(self) -> bool:
        """Whether it takes memory now: while it loads, from when there is room for it."""
        return self.state in ("loaded", "unloading") or (
            self.state == "loading" and self.backend is not None
        )

    @property
    def is_open(self) -> bool:
        """Whether a request may have it at once."""
        return self.state == "loaded" and not self.is_closing

    @property
    def num_waiting(self) -> int:
        return sum(not waiter.done() for waiter in self.waiters)

    def lease(self) -> Lease:
        assert self.backend is not None
        self.num_leases += 1
        self.is_idle.clear()
        self.used_s = time.monotonic()
        model: ServedModel = self.backend.served_model()
        return Lease(self.backend, model, self.metrics, True, self._let_go)

    def _let_go(self) -> None:
        self.num_leases -= 1
        self.used_s = time.monotonic()
        if not self.num_leases:
            self.is_idle.set()

    def serve_waiters(self) -> None:
        """It is loaded: everybody who waited for it has it."""
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_result(self.lease())

    def fail_waiters(self, error: NoriaError) -> None:
        while self.waiters:
            waiter = self.waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)

    def tell(self, message: str, progress: float | None = None) -> None:
        """Where loading is."""
        if self.state == "loading":
            self.message, self.progress = message, progress

    def card(self) -> ModelCard:
        return ModelCard(self.name, self.name, self.created, self.max_model_len, self.aliases)

    def residence(self) -> Residence:
        is_loaded = self.state in ("loaded", "unloading")
        return Residence(
            is_loaded, self.memory_bytes if is_loaded else 0, self.num_waiting, self.load_s
        )

    def short(self) -> dict[str, Any]:
        """For `/health`."""
        told: dict[str, Any] = {"state": self.state}
        if self.state == "loading" and self.progress is not None:
            told["progress"] = round(self.progress, 4)
        if self.state in ("loading", "failed"):
            told["message"] = self.message
        return told


def used_bytes(slots: Iterable[Slot]) -> int:
    return sum(slot.memory_bytes for slot in slots if slot.is_resident)


def choose_victim(slots: Iterable[Slot], wanted: Slot) -> Slot | None:
    """Who must go to make room for another: the least recently used of those that nobody uses, else the least recently
    used of those in use, which then serves no new requests. Never a pinned one."""
    candidates = [
        slot
        for slot in slots
        if slot is not wanted and slot.state == "loaded" and not slot.is_pinned
    ]
    return min(candidates, key=lambda slot: (slot.num_leases > 0, slot.used_s), default=None)


def make_slots(config: ServerConfig, metrics: Metrics) -> list[Slot]:
    """One for each of `models`. The first is the default: it also answers to `server.model_aliases`, and has `metrics`
    itself; the others' are beside them."""
    slots: list[Slot] = []
    for entry in config.models:
        name = public_name(entry)
        is_default = not slots
        slot = Slot(
            entry,
            name,
            (*entry.aliases, *(config.server.model_aliases if is_default else ())),
            metrics if is_default else metrics.beside(metrics.engine, name),
            entry.pinned,
            int(time.time()),
        )
        slot.metrics.residence = slot.residence
        slots.append(slot)
    return slots
