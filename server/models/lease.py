"""`Lease`, a request's hold on a loaded model, and `Models`, where it gets one. `OneModel` is the usual, trivial case.

All of it lives on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from core.config import MIB
from core.errors import ModelNotFound, ModelPinned
from server.backends.base import Backend, ServedModel
from server.metrics import Metrics
from server.models.figures import figures

_THE_ONLY = "This server serves one model, which stays. Set models to serve several."


@dataclass(slots=True)
class Lease:
    """A model that stays loaded until `release`, and what computes and counts for it."""

    backend: Backend
    model: ServedModel
    metrics: Metrics
    is_one_of_several: bool = False
    on_release: Callable[[], None] | None = None

    def release(self) -> None:
        """Idempotent."""
        on_release, self.on_release = self.on_release, None
        if on_release is not None:
            on_release()


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What `/v1/models` tells of a model. `max_model_len` None: it was never loaded, so nobody knows."""

    name: str
    root: str
    created: int
    max_model_len: int | None
    aliases: tuple[str, ...] = ()


class Models(Protocol):
    """Where requests find their model."""

    def only(self) -> Lease | None:
        """The model behind every request, whatever it asks for; None where the request must say which. Raises
        `ModelLoading` or `EngineDead` where there is none."""

    async def acquire(self, name: str | None) -> Lease:
        """The model of this name, or the default one, as soon as it is loaded. The caller releases it."""

    def resident(self, name: str | None) -> Lease | None:
        """The model of this name, or the default one, if it is loaded: asking loads nothing. The caller releases it."""

    def cards(self) -> list[ModelCard]: ...

    def states(self) -> dict[str, dict[str, Any]]:
        """State, and progress of loading, by name; empty where there is one model only."""

    def samples(self) -> dict[str, dict[str, Any]]:
        """What `/stats/stream` tells of each of several models, by name; empty where there is one model only."""

    def report(self) -> dict[str, Any]:
        """`ModelReports` of `server/protocol/admin_answers.py`."""

    async def load(self, name: str, *, pinned: bool | None = None) -> dict[str, Any]:
        """Loads a model, and pins it or lets it go, if asked to; its `ModelReport`. Raises `ModelUnavailable`."""

    async def unload(self, name: str) -> dict[str, Any]:
        """Unloads a model when its answers have ended; its `ModelReport`. Raises `ModelPinned`."""


class OneModel:
    """`Models` over the backend that serves everything."""

    def __init__(
        self, backend: Backend, metrics: Metrics, price_per_hour: float | None = None
    ) -> None:
        self._backend, self._metrics = backend, metrics
        self._price_per_hour = price_per_hour

    def only(self) -> Lease:
        return Lease(self._backend, self._backend.served_model(), self._metrics)

    async def acquire(self, name: str | None) -> Lease:
        return self.only()

    def resident(self, name: str | None) -> Lease:
        return self.only()

    def cards(self) -> list[ModelCard]:
        model = self._backend.served_model()
        return [
            ModelCard(model.name, model.root, model.created, model.max_model_len, model.aliases)
        ]

    def states(self) -> dict[str, dict[str, Any]]:
        return {}

    def samples(self) -> dict[str, dict[str, Any]]:
        return {}

    def report(self) -> dict[str, Any]:
        model = self._backend.served_model()
        taken = model.plan.total_bytes / MIB
        return {
            "object": "list",
            "budget_mib": None,
            "used_mib": round(taken, 1),
            "price_per_hour": self._price_per_hour,
            "data": [self._report_model(model)],
        }

    def _report_model(self, model: ServedModel) -> dict[str, Any]:
        stats = self._backend.stats()
        startup_s = self._metrics.startup_s
        return {
            "id": model.name,
            "object": "model_report",
            "aliases": list(model.aliases),
            "is_default": True,
            "state": "loaded",
            "message": "",
            "progress": None,
            "pinned": True,
            "seconds_to_load": round(sum(startup_s.values()) - startup_s.get("total", 0.0), 3),
            "memory_mib": round(model.plan.total_bytes / MIB, 1),
            "loads": 1,
            "unloads": 0,
            "requests": stats.num_running + stats.num_waiting,
            "waiting": 0,
            "idle_s": None,
            **figures(self._metrics, self._price_per_hour),
        }

    async def load(self, name: str, *, pinned: bool | None = None) -> dict[str, Any]:
        find_card(name, self.cards())
        if pinned is False:
            raise ModelPinned(_THE_ONLY, param="pinned")
        return self._report_model(self._backend.served_model())

    async def unload(self, name: str) -> dict[str, Any]:
        find_card(name, self.cards())
        raise ModelPinned(_THE_ONLY, param="model")


def find_card(name: str, cards: list[ModelCard]) -> ModelCard:
    """By name or alias. Raises `ModelNotFound`."""
    for card in cards:
        if name == card.name or name in card.aliases:
            return card
    if cards and "*" in cards[0].aliases:
        return cards[0]
    raise ModelNotFound("The model does not exist here; see /v1/models.", param="model")
