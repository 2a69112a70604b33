"""What `/admin/models` tells of several models. Pure."""

from __future__ import annotations

import time
from typing import Any

from core.config import MIB
from core.outputs import StepStats
from server.models.figures import figures
from server.models.slot import Slot, used_bytes

NO_STEPS = StepStats(0, 0, 0, 0, 0, 0)


def report_slot(slot: Slot, price_per_hour: float | None, *, is_default: bool) -> dict[str, Any]:
    """One model as `ModelReport` of `server/protocol/admin_answers.py`."""
    is_used = slot.num_leases > 0 or slot.state != "loaded"
    idle_s = None if is_used else round(time.monotonic() - slot.used_s, 3)
    return {
        "id": slot.name,
        "object": "model_report",
        "aliases": list(slot.aliases),
        "is_default": is_default,
        "state": slot.state,
        "message": slot.message,
        "progress": slot.progress if slot.state == "loading" else None,
        "pinned": slot.is_pinned,
        "seconds_to_load": _rounded(slot.load_s, 3),
        "memory_mib": round(used_bytes([slot]) / MIB, 1) or None,
        "loads": int(slot.metrics.total("noria:model_loads", "loaded")),
        "unloads": int(slot.metrics.sum_of("noria:model_unloads")),
        "requests": slot.num_leases,
        "waiting": slot.num_waiting,
        "idle_s": idle_s,
        **figures(slot.metrics, price_per_hour),
    }


def sample_slot(slot: Slot) -> dict[str, Any]:
    """One model as `/stats/stream` tells of it. `waiting` counts those that wait for it to be loaded too."""
    stats = NO_STEPS if slot.backend is None else slot.backend.stats()
    return {
        "state": slot.state,
        "progress": slot.progress if slot.state == "loading" else None,
        "running": stats.num_running,
        "waiting": stats.num_waiting + slot.num_waiting,
        "blocks": {
            "used": stats.num_blocks_used,
            "cached": stats.num_blocks_cached,
            "free": stats.num_blocks_free,
        },
        "generated_tokens": int(slot.metrics.total("vllm:generation_tokens")),
    }


def report_all(
    slots: list[Slot], budget_bytes: int, price_per_hour: float | None
) -> dict[str, Any]:
    """All models as `ModelReports`; the first is the default."""
    return {
        "object": "list",
        "budget_mib": round(budget_bytes / MIB, 1) if budget_bytes else None,
        "used_mib": round(used_bytes(slots) / MIB, 1),
        "price_per_hour": price_per_hour,
        "data": [report_slot(slot, price_per_hour, is_default=slot is slots[0]) for slot in slots],
    }


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
