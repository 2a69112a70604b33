"""Settings of the engine and the sizes derived from them. No I/O, no torch.

The keys are those of `config.yaml`. `plan_memory` is the one place where memory becomes blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

Policy = Literal["continuous", "static", "single"]


class ModelConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which model, and how it is held."""

    name: str = "smollm2-135m-instruct"
    revision: str | None = None
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    max_model_len: int | Literal["auto"] = "auto"
    chat_template: str | None = None
    generation_defaults: bool = True
    cache_dir: str = "auto"


class EngineConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Scheduling and the step loop."""

    backend: Literal["native"] = "native"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "c", "torch"] = "auto"
    threads: int | Literal["auto"] = "auto"
    batch_size: int = 32
    max_batched_tokens: int = 512
    policy: Policy = "continuous"
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


@dataclass(frozen=True, slots=True)
class CacheConfig:
    """The pool as it was decided: what `engine.cache_config` shows."""

    block_size: int
    num_blocks: int

    @property
    def num_tokens(self) -> int:
        return self.block_size * self.num_blocks


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

    @property
    def kv_bytes(self) -> int:
        return self.num_blocks * self.bytes_per_block

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """How many requests of `max_model_len` tokens fit at once."""
        return self.num_blocks / -(-self.max_model_len // self.block_size)
