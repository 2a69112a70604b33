"""The shapes of answers below /admin. Knows no aiohttp."""

from __future__ import annotations

from typing import Literal

from server.protocol.answers import Exact


class ModelReport(Exact):
    """Times are means since the start, over all loads; null before there is anything to tell.

    `tokens_per_s` counts generated tokens over the time of the model's own steps, `cost_per_million_tokens` is what
    that time costs at `price_per_hour`. `memory_mib`: weights, activations and KV cache; null while it is not loaded.
    """

    id: str
    object: Literal["model_report"]
    aliases: list[str]
    is_default: bool
    state: Literal["unloaded", "loading", "loaded", "unloading", "failed"]
    message: str
    progress: float | None
    pinned: bool
    seconds_to_load: float | None
    memory_mib: float | None
    loads: int
    unloads: int
    requests: int
    waiting: int
    idle_s: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    generated_tokens: int
    tokens_per_s: float | None
    cost_per_million_tokens: float | None


class ModelReports(Exact):
    """`budget_mib` is what loaded models may take together, null with one model; `used_mib` what they take."""

    object: Literal["list"]
    budget_mib: float | None
    used_mib: float
    price_per_hour: float | None
    data: list[ModelReport]
