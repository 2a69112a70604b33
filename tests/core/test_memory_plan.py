"""Memory becomes blocks in one place: which bound decides, and what is said where nothing fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from core.config import (
    MIB,
    EngineConfig,
    KVCacheConfig,
    MemoryPlan,
    ModelConfig,
    ModelShape,
    plan_memory,
    render_plan,
)
from core.errors import ConfigError

SHAPE = ModelShape(
    num_layers=30,
    num_kv_heads=3,
    head_dim=64,
    vocab_size=49152,
    max_context=8192,
    kv_bytes_per_token=23_040,
    weights_bytes=256 * MIB,
    eos_token_ids=(2,),
)
GIB = 1024 * MIB


def plan(
    available: int = 20 * GIB,
    device: Any = "cpu",
    batch_size: int = 32,
    max_model_len: Any = "auto",
    **kv_cache: Any,
) -> MemoryPlan:
    return plan_memory(
        SHAPE,
        EngineConfig(batch_size=batch_size),
        KVCacheConfig(**kv_cache),
        ModelConfig(max_model_len=max_model_len),
        available,
        device,
    )


def test_a_cache_in_8_bits_holds_nearly_twice_the_tokens_and_says_so() -> None:
    whole, narrow = plan(4 * GIB), plan(4 * GIB, dtype="int8")
    assert narrow.bytes_per_block == 16 * 2 * 30 * 3 * (64 + 4)
    assert narrow.num_tokens / whole.num_tokens == pytest.approx(128 / 68, rel=0.01)
    before = narrow.kv_bytes // SHAPE.kv_bytes_per_token
    assert f"would hold {before:,} in as much memory" in render_plan(narrow, SHAPE)[2]
    assert before == pytest.approx(whole.num_tokens, rel=0.01)


def test_a_cache_in_8_bits_needs_heads_that_fit_the_vectors() -> None:
    odd, cache = replace(SHAPE, head_dim=18), KVCacheConfig(dtype="int8")
    with pytest.raises(ConfigError, match=r"kv_cache\.dtype.* have 18"):
        plan_memory(odd, EngineConfig(), cache, ModelConfig(), 20 * GIB, "cpu")


def test_on_a_cpu_three_tenths_of_what_is_left_up_to_four_gib() -> None:
    small = plan(8 * GIB)
    assert small.decided_by == "kv_cache.memory_fraction"
    left = small.available_bytes - small.weights_bytes - small.activation_bytes
    assert 0 <= 0.3 * left - small.kv_bytes < small.bytes_per_block
    large = plan(20 * GIB)
    assert large.decided_by == "kv_cache.max_memory_mib"
    assert 4 * GIB - large.kv_bytes < large.bytes_per_block


def test_on_cuda_nine_tenths_and_no_upper_bound() -> None:
    assert plan(4 * GIB, "cuda").memory_fraction == 0.9
    assert plan(4 * GIB, "cuda").max_memory_bytes is None


def test_a_pool_is_never_larger_than_every_seat_at_full_context() -> None:
    decided = plan(batch_size=2)
    assert decided.decided_by == "engine.batch_size x context"
    assert decided.num_tokens == 2 * 8192
    assert plan(batch_size=2, max_model_len=1000).num_blocks == 2 * 63


def test_asked_blocks_win() -> None:
    decided = plan(num_blocks=40)
    assert (decided.num_blocks, decided.decided_by) == (40, "kv_cache.num_blocks")
    assert decided.max_model_len == 640
    assert plan(num_blocks=1000).max_model_len == 8192
    assert plan(num_blocks=1000).max_concurrency == 1000 / 512


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 1000, "num_blocks": 10}, "160 is the largest that does"),
        ({"max_model_len": 9000}, r"model\.max_model_len is 9000; this model accepts 1 to 8192"),
        ({"max_model_len": 0}, r"model\.max_model_len is 0"),
        ({"num_blocks": 0}, r"kv_cache\.num_blocks is 0"),
        ({"num_blocks": 10**7}, r"kv_cache\.num_blocks 10,000,000 needs"),
        ({"memory_fraction": 1.5}, r"kv_cache\.memory_fraction is 1\.5"),
        ({"memory_fraction": 0}, r"kv_cache\.memory_fraction"),
        ({"max_memory_mib": 0}, r"kv_cache\.max_memory_mib"),
        ({"block_size": 0}, r"kv_cache\.block_size"),
        ({"batch_size": 0}, r"engine\.batch_size"),
        ({"available": 100 * MIB}, "holds not one block"),
        ({"max_model_len": 8192, "max_memory_mib": 50}, r"raise kv_cache\.max_memory_mib"),
    ],
)
def test_what_cannot_be_names_the_setting_and_what_fits(
    settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**settings)


def test_the_sum_is_written_out_term_by_term() -> None:
    lines = "\n".join(render_plan(plan(num_blocks=1000), SHAPE))
    assert "weights 256 MiB" in lines
    assert "368,640 = 23,040" in lines
    assert "1,000 blocks x 16 = 16,000 tokens" in lines
    assert "Maximum concurrency for 8,192 tokens per request: 1.95x" in lines
