"""Settings of the engine and the sizes derived from them. No I/O, no torch.

The keys are those of `config.yaml`. `plan_memory` is the one place where memory becomes blocks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import msgspec

from core.errors import ConfigError

MIB = 1 << 20
Policy = Literal["continuous", "static", "single"]
KVDtype = Literal["auto", "int8"]


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model, and how it is held."""

    name: str = "smollm2-135m-instruct"
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    quantization: Literal["none", "int8", "int4"] = "none"
    max_model_len: int | Literal["auto"] = "auto"
    chat_template: str | None = None
    generation_defaults: bool = True
    cache_dir: str = "auto"


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scheduling and the step loop."""

    backend: Literal["native", "vllm"] = "native"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "c", "torch"] = "auto"
    threads: int | Literal["auto"] = "auto"
    batch_size: int = 32
    max_batched_tokens: int = 256
    target_step_ms: float = 0.0
    policy: Policy = "continuous"
    order: Literal["fcfs", "longest_prefix"] = "fcfs"
    prefix_caching: bool = True
    max_waiting: int = 4096
    max_waiting_tokens: int = 0
    queue_timeout_s: float = 0.0
    watchdog_s: float = 60.0


class KVCacheConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The block pool. `memory_fraction` and `max_memory_mib` None mean the device's default."""

    block_size: int = 16
    num_blocks: int | Literal["auto"] = "auto"
    memory_fraction: float | Literal["auto"] = "auto"
    max_memory_mib: int | Literal["auto"] = "auto"
    dtype: KVDtype = "auto"
    snapshot_file: str | None = None
    snapshot_max_mib: int = 1024


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens that are guessed, and computed in one step if the guess was right. Changes speed, never a token.

    `draft_model` guesses with `method` draft: `self:…` is a part of the served model (`self_draft.py`)."""

    method: Literal["off", "lookup", "draft"] = "lookup"
    max_tokens: int = 8
    draft_model: str | None = None


NO_SPECULATION = SpeculativeConfig(method="off")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What scheduling and memory planning need to know of a model.

    `vocab_size` is the smaller of tokenizer size and embedding rows: ids at or above it are never accepted and
    never sampled. `max_context` is the model's own limit. `kv_bytes_per_token` counts K and V over all layers.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_context: int
    kv_bytes_per_token: int
    weights_bytes: int
    eos_token_ids: tuple[int, ...]
    activation_bytes_per_token: int = 0  # of a step, roughly: hidden states and the widest layer

    def kept_bytes_per_token(self, kv_dtype: KVDtype) -> int:
        """K and V of a token as the cache keeps them: in `int8` a byte each, and a float32 scale per token and head."""
        if kv_dtype == "auto":
            return self.kv_bytes_per_token
        return 2 * self.num_layers * self.num_kv_heads * (self.head_dim + 4)


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The pool as it was decided: what `engine.cache_config` shows."""

    block_size: int
    num_blocks: int
    dtype: KVDtype = "auto"

    @property
    def num_tokens(self) -> int:
        return self.block_size * self.num_blocks


@dataclass(frozen=True, slots=True)
class DraftMemory:
    """What a draft model takes beside the served one. Keys and values only where it has its own."""

    weights_bytes: int = 0
    kv_bytes_per_token: int = 0


NO_DRAFT = DraftMemory()


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The memory sum, term by term, in bytes and tokens.

    `decided_by` names the bound that won: `kv_cache.num_blocks`, `kv_cache.memory_fraction`,
    `kv_cache.max_memory_mib` or `engine.batch_size x context` (a pool larger than every seat at full context is
    never useful). `max_model_len` is the context of a request after the pool's own limit.
    """

    available_bytes: int
    memory_fraction: float
    max_memory_bytes: int | None
    weights_bytes: int
    activation_bytes: int
    bytes_per_block: int
    block_size: int
    num_blocks: int
    max_model_len: int
    decided_by: str
    kv_dtype: KVDtype = "auto"
    draft: DraftMemory = NO_DRAFT

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def total_bytes(self) -> int:
        """Weights, those of a draft model, activations and KV cache."""
        weights_bytes = self.weights_bytes + self.draft.weights_bytes
        return weights_bytes + self.activation_bytes + self.kv_bytes

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """How many requests of `max_model_len` tokens fit at once."""
        return self.num_blocks / -(-self.max_model_len // self.block_size)


_DEFAULT_FRACTION = {"cpu": 0.3, "cuda": 0.9}
_DEFAULT_MAX_MIB: dict[str, int | None] = {"cpu": 4096, "cuda": None}


def plan_memory(
    shape: ModelShape,
    engine: EngineConfig,
    kv_cache: KVCacheConfig,
    model: ModelConfig,
    available_bytes: int,
    device: Literal["cpu", "cuda"],
    draft: DraftMemory = NO_DRAFT,
) -> MemoryPlan:
    """The one place where memory becomes blocks. `available_bytes` is what is free before the weights are loaded.

    KV bytes = memory_fraction x (available - weights - activations), at most `kv_cache.max_memory_mib` and what
    `batch_size` requests of full context can use. Raises `ConfigError` where a request of the asked length cannot
    fit, naming the largest that does and the setting to change.
    """
    _check_sizes(shape, engine, kv_cache)
    context = _asked_context(model, shape)
    fraction = (
        _DEFAULT_FRACTION[device]
        if kv_cache.memory_fraction == "auto"
        else kv_cache.memory_fraction
    )
    max_mib = (
        _DEFAULT_MAX_MIB[device] if kv_cache.max_memory_mib == "auto" else kv_cache.max_memory_mib
    )
    kept_bytes = shape.kept_bytes_per_token(kv_cache.dtype) + draft.kv_bytes_per_token
    bytes_per_block = kv_cache.block_size * kept_bytes
    activations = engine.max_batched_tokens * shape.activation_bytes_per_token
    activations += 2 * 4 * engine.batch_size * shape.vocab_size  # logits, and a copy in float32
    weights_bytes = shape.weights_bytes + draft.weights_bytes
    remaining = max(0, available_bytes - weights_bytes - activations)

    bounds = {"kv_cache.memory_fraction": int(remaining * fraction) // bytes_per_block}
    if max_mib is not None:
        bounds["kv_cache.max_memory_mib"] = max_mib * MIB // bytes_per_block
    bounds["engine.batch_size x context"] = engine.batch_size * math.ceil(
        context / kv_cache.block_size
    )
    decided_by = min(bounds, key=lambda name: bounds[name])
    num_blocks = bounds[decided_by]
    if kv_cache.num_blocks != "auto":
        num_blocks, decided_by = kv_cache.num_blocks, "kv_cache.num_blocks"
        _check_num_blocks(num_blocks, bytes_per_block, remaining)
    plan = MemoryPlan(
        available_bytes=available_bytes,
        memory_fraction=fraction,
        max_memory_bytes=None if max_mib is None else max_mib * MIB,
        weights_bytes=shape.weights_bytes,
        activation_bytes=activations,
        bytes_per_block=bytes_per_block,
        block_size=kv_cache.block_size,
        num_blocks=num_blocks,
        max_model_len=min(context, num_blocks * kv_cache.block_size),
        decided_by=decided_by,
        kv_dtype=kv_cache.dtype,
        draft=draft,
    )
    _check_fits(plan, model)
    return plan


def _check_sizes(shape: ModelShape, engine: EngineConfig, kv_cache: KVCacheConfig) -> None:
    at_least_one = {
        "engine.batch_size": engine.batch_size,
        "engine.max_batched_tokens": engine.max_batched_tokens,
        "kv_cache.block_size": kv_cache.block_size,
        "kv_cache.num_blocks": kv_cache.num_blocks,
        "kv_cache.max_memory_mib": kv_cache.max_memory_mib,
    }
    for key, value in at_least_one.items():
        if value != "auto" and value < 1:
            raise ConfigError(f"{key} is {value}; it accepts whole numbers from 1.")
    if kv_cache.memory_fraction != "auto" and not 0 < kv_cache.memory_fraction <= 1:
        raise ConfigError(
            f"kv_cache.memory_fraction is {kv_cache.memory_fraction}; it accepts numbers above 0 and up to 1."
        )
    if kv_cache.dtype == "int8" and shape.head_dim % 16:
        raise ConfigError(
            f"kv_cache.dtype: int8 needs heads of a multiple of 16 elements; this model's have {shape.head_dim}."
        )


def _check_num_blocks(num_blocks: int, bytes_per_block: int, remaining_bytes: int) -> None:
    if num_blocks * bytes_per_block > remaining_bytes:
        raise ConfigError(
            f"kv_cache.num_blocks {num_blocks:,} needs {num_blocks * bytes_per_block / MIB:,.0f} MiB; what remains "
            f"beside the weights holds {remaining_bytes // bytes_per_block:,} blocks."
        )


def _asked_context(model: ModelConfig, shape: ModelShape) -> int:
    if model.max_model_len == "auto":
        return shape.max_context
    if not 1 <= model.max_model_len <= shape.max_context:
        raise ConfigError(
            f"model.max_model_len is {model.max_model_len}; this model accepts 1 to {shape.max_context}, or auto."
        )
    return model.max_model_len


def _check_fits(plan: MemoryPlan, model: ModelConfig) -> None:
    settings = {
        "kv_cache.memory_fraction": "raise kv_cache.memory_fraction, or free memory",
        "kv_cache.max_memory_mib": "raise kv_cache.max_memory_mib",
        "kv_cache.num_blocks": "raise kv_cache.num_blocks",
    }
    remedy = settings.get(plan.decided_by, "lower model.max_model_len")
    weights_bytes = plan.weights_bytes + plan.draft.weights_bytes
    if plan.num_blocks < 1:
        raise ConfigError(
            f"The KV cache holds not one block: of {plan.available_bytes / MIB:,.0f} MiB available, weights take "
            f"{weights_bytes / MIB:,.0f} MiB and activations {plan.activation_bytes / MIB:,.0f} MiB; {remedy}."
        )
    if model.max_model_len != "auto" and plan.max_model_len < model.max_model_len:
        raise ConfigError(
            f"model.max_model_len {model.max_model_len} does not fit: the KV cache holds {plan.num_tokens} tokens, so "
            f"{plan.num_tokens} is the largest that does; lower model.max_model_len, or {remedy}."
        )


def render_plan(plan: MemoryPlan, shape: ModelShape) -> list[str]:
    """The memory sum, for `--plan` and the start log: where each number comes from, term by term."""
    bound = "none" if plan.max_memory_bytes is None else f"{plan.max_memory_bytes / MIB:,.0f} MiB"
    per_token = shape.kept_bytes_per_token(plan.kv_dtype)
    blocks_per_request = math.ceil(plan.max_model_len / plan.block_size)
    gain, draft, drafts_kv = "", "", ""
    if plan.draft.weights_bytes:
        digits = 0 if plan.draft.weights_bytes >= MIB else 2
        draft = f" and {plan.draft.weights_bytes / MIB:,.{digits}f} MiB of the draft model"
    if plan.draft.kv_bytes_per_token:
        drafts_kv = f", and {plan.draft.kv_bytes_per_token:,} of the draft model, both"
    if plan.kv_dtype != "auto":
        before = plan.kv_bytes // shape.kv_bytes_per_token
        gain = (
            f"; in {plan.kv_dtype}, where the model's dtype would hold {before:,} in as much memory"
        )
    return [
        f"memory: {plan.available_bytes / MIB:,.0f} MiB available, weights {plan.weights_bytes / MIB:,.0f} MiB{draft}, "
        f"activations {plan.activation_bytes / MIB:,.0f} MiB; of the rest a share of {plan.memory_fraction:g} "
        f"for the KV cache, upper bound {bound}",
        f"bytes per block: {plan.bytes_per_block:,} = {per_token:,} (K and V of a token, {shape.num_layers} layers, "
        f"{shape.num_kv_heads} KV heads of {shape.head_dim}){drafts_kv} x block size {plan.block_size}",
        f"KV cache: {plan.num_blocks:,} blocks x {plan.block_size} = {plan.num_tokens:,} tokens, "
        f"{plan.kv_bytes / MIB:,.0f} MiB, decided by {plan.decided_by}{gain}",
        f"Maximum concurrency for {plan.max_model_len:,} tokens per request: {plan.max_concurrency:.2f}x "
        f"({plan.num_blocks:,} blocks / {blocks_per_request:,})",
    ]
