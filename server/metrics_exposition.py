"""How the plain state of `server/metrics.py` becomes families of the Prometheus client. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from core.outputs import StepStats
from server.backends.base import Residence, ServedModel
from server.metrics_table import Counter, Histogram

Labels = tuple[str, ...]


def counter_family(
    name: str,
    text: str,
    common: Mapping[str, str],
    labels: Labels,
    children: Mapping[Labels, Counter],
) -> Metric:
    family = CounterMetricFamily(name, text, labels=[*common, *labels])
    for values, child in children.items():
        family.add_metric([*common.values(), *values], child.value)
    return family


def histogram_family(
    name: str,
    text: str,
    common: Mapping[str, str],
    labels: Labels,
    children: Mapping[Labels, Histogram],
) -> Metric:
    family = HistogramMetricFamily(name, text, labels=[*common, *labels])
    for values, child in children.items():
        family.add_metric([*common.values(), *values], child.cumulative(), child.total)
    return family


def gauge(
    name: str,
    text: str,
    common: Mapping[str, str],
    values: float | Mapping[str, float],
    label: str = "",
) -> Metric:
    """One gauge, or one per value of `label`."""
    if not isinstance(values, Mapping):
        family = GaugeMetricFamily(name, text, labels=list(common))
        family.add_metric(list(common.values()), values)
        return family
    family = GaugeMetricFamily(name, text, labels=[*common, label])
    for value, number in values.items():
        family.add_metric([*common.values(), value], number)
    return family


def state_gauges(stats: StepStats, common: Mapping[str, str]) -> Iterator[Metric]:
    """What is true now, from the last `StepStats`."""
    running, waiting = stats.num_running, stats.num_waiting
    yield gauge("vllm:num_requests_running", "Sequences in the batch", common, running)
    yield gauge("vllm:num_requests_waiting", "Waiting sequences", common, waiting)
    reasons = {"capacity": float(waiting), "deferred": 0.0}
    yield gauge(
        "vllm:num_requests_waiting_by_reason", "Waiting sequences", common, reasons, "reason"
    )
    used, cached, free = stats.num_blocks_used, stats.num_blocks_cached, stats.num_blocks_free
    capacity = used + cached + free
    usage = used / capacity if capacity else 0.0
    yield gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1", common, usage)
    yield gauge("vllm:gpu_cache_usage_perc", "Share of KV blocks in use, 0 to 1", common, usage)
    blocks = {"used": float(used), "cached": float(cached), "free": float(free)}
    yield gauge("noria:kv_blocks", "KV blocks by state", common, blocks, "state")
    yield gauge("noria:kv_blocks_capacity", "Size of the KV pool in blocks", common, capacity)
    tokens = stats.num_waiting_prompt_tokens
    yield gauge("noria:waiting_prompt_tokens", "Prompt tokens in the queue", common, tokens)


def constant_gauges(
    model: ServedModel, common: Mapping[str, str], info: Mapping[str, str]
) -> Iterator[Metric]:
    """Facts of the loaded model, as labels of a constant 1."""
    plan = model.plan
    sizes = {"block_size": str(plan.block_size), "num_gpu_blocks": str(plan.num_blocks)}
    cache = {
        **sizes,
        "cache_dtype": info.get("kv_dtype", info.get("dtype", "")),
        "num_cpu_blocks": "0",
    }
    yield gauge("vllm:cache_config_info", "The KV cache", {**common, **cache}, 1.0)
    facts = {
        "version": info.get("version", ""),
        "device": info.get("device", ""),
        "dtype": info.get("dtype", ""),
        "weights": info.get("weights", ""),
        "block_size": str(plan.block_size),
        "num_blocks": str(plan.num_blocks),
        "max_model_len": str(model.max_model_len),
    }
    yield gauge("noria:info", "What runs here", {**common, **facts}, 1.0)


def residence_gauges(residence: Residence, base: Mapping[str, str]) -> Iterator[Metric]:
    """Whether one of several models is loaded, and what that takes."""
    yield gauge("noria:model_loaded", "1 while the model is loaded", base, residence.is_loaded)
    text = "Weights, activations and KV cache of the model while it is loaded"
    yield gauge("noria:model_memory_bytes", text, base, residence.memory_bytes)
    text = "Requests that wait until the model is loaded"
    yield gauge("noria:model_waiting_requests", text, base, residence.num_waiting)
    if residence.load_s is not None:
        text = "Seconds that the last load of the model took"
        yield gauge("noria:model_load_seconds", text, base, residence.load_s)
