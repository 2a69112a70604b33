"""How a model does, read from the metrics that are kept anyway. Pure."""

from __future__ import annotations

from typing import Any

from server.metrics import Metrics

_STEP_KINDS = ("prefill", "decode", "mixed")


def figures(metrics: Metrics, price_per_hour: float | None) -> dict[str, Any]:
    """How a model does, and what its tokens cost."""
    steps = [metrics.histogram("noria:step_duration_seconds", kind) for kind in _STEP_KINDS]
    steps_s = sum(each.total for each in steps)
    num_tokens = int(metrics.total("vllm:generation_tokens"))
    per_token_s = steps_s / num_tokens if num_tokens else None
    cost = None
    if per_token_s is not None and price_per_hour is not None:
        cost = round(1e6 * per_token_s * price_per_hour / 3600, 4)
    return {
        "ttft_ms": _mean_ms(metrics, "vllm:time_to_first_token_seconds"),
        "tpot_ms": _mean_ms(metrics, "vllm:request_time_per_output_token_seconds"),
        "generated_tokens": num_tokens,
        "tokens_per_s": round(1 / per_token_s, 1) if per_token_s else None,
        "cost_per_million_tokens": cost,
    }


def _mean_ms(metrics: Metrics, name: str) -> float | None:
    histogram = metrics.histogram(name)
    number = sum(histogram.counts)
    return round(1e3 * histogram.total / number, 3) if number else None
