"""The same bits whatever the batch: a request's tokens and log-probabilities depend on nothing but the request.

The fast decoder on a CPU with compiled kernels. Each request is answered alone, cold, in one chunk; then in random
company, in small chunks, with prefix hits, and in a pool so small that most are preempted. Equality is of bits: lists
of floats are compared as they are.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from core.config import CacheConfig, EngineConfig, KVCacheConfig, KVDtype, ModelConfig
from core.engine import Engine
from core.generation import Generation
from core.model.loader import load_model
from core.model.runner import ModelRunner
from core.sampling_params import SamplingParams

VOCABULARY = 49152


def make_requests(
    count: int, longest: int, seed: int
) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts log-uniform in length, every fourth beginning like the one before; greedy and seeded in turn."""
    generator = random.Random(seed)
    prompts: list[list[int]] = []
    params: list[SamplingParams] = []
    for i in range(count):
        length = max(1, round(longest ** generator.random()))
        prompt = [generator.randrange(3, VOCABULARY) for _ in range(length)]
        if i % 4 == 3:
            shared = prompts[-1][: length - 1]
            prompt[: len(shared)] = shared
        prompts.append(prompt)
        sampled = {"temperature": 0.9, "top_p": 0.95, "seed": i} if i % 2 else {"temperature": 0.0}
        tokens = generator.randint(2, 60)
        params.append(SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=2, **sampled))
    return prompts, params


def bits(generation: Generation) -> tuple[object, ...]:
    assert generation.logprobs is not None
    return tuple(generation.token_ids), tuple(generation.logprobs)


def check(
    folder: Path, held_as: str, kv_dtype: KVDtype, count: int, longest: int, seed: int = 5
) -> None:
    prompts, params = make_requests(count, longest, seed)
    num_blocks = [-(-(len(p) + s.max_tokens) // 16) for p, s in zip(prompts, params, strict=True)]
    is_quantized = held_as in ("int8", "int4")
    precision = {"quantization" if is_quantized else "dtype": held_as}
    loaded = load_model(
        ModelConfig(name=str(folder), **precision),  # type: ignore[arg-type]
        EngineConfig(device="cpu", kernels="c"),
        KVCacheConfig(num_blocks=sum(num_blocks) + 128, dtype=kv_dtype),
        lambda message, fraction=None: None,
    )
    assert loaded.path == "fast"

    def engine(chunk: int, *, cache: bool, num_blocks: int | None = None) -> Engine:
        runner = loaded.runner
        if num_blocks is not None:
            assert isinstance(runner, ModelRunner)
            cache_config = CacheConfig(16, num_blocks, kv_dtype)
            runner = ModelRunner(runner.model, runner.shape, cache_config)
        config = EngineConfig(batch_size=16, max_batched_tokens=chunk, prefix_caching=cache)
        return Engine(config, runner, loaded.tokenizer)

    alone = engine(4096, cache=False)
    expected = [bits(alone.generate([p], [s])[0]) for p, s in zip(prompts, params, strict=True)]
    crowded = engine(48, cache=True, num_blocks=max(num_blocks))  # enough for the longest one alone
    roomy = engine(512, cache=True)
    for label, company in (
        ("cold in chunks of 512", roomy),
        ("cached", roomy),
        ("cold in chunks of 16", engine(16, cache=False)),
        ("crowded", crowded),
    ):
        got = [bits(g) for g in company.generate(prompts, params)]
        different = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
        assert not different, f"{label}: {len(different)} of {count} differ, first {different[0]}"
    assert crowded.stats().total_preemptions > 0


@pytest.mark.parametrize(
    ("held_as", "kv_dtype"),
    [
        ("bfloat16", "auto"),
        ("float32", "auto"),
        ("bfloat16", "int8"),
        ("int8", "auto"),
        ("int4", "int8"),
    ],
)
def test_a_request_gets_the_same_bits_alone_and_in_any_company(
    default_model_folder: Path, held_as: str, kv_dtype: KVDtype
) -> None:
    """B056, B066: the quick version."""
    check(default_model_folder, held_as, kv_dtype, count=8, longest=60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("held_as", "kv_dtype", "part"),
    [
        *(("bfloat16", "auto", part) for part in range(10)),
        ("float32", "auto", 0),
        ("int8", "auto", 0),
        ("bfloat16", "int8", 0),
    ],
)
def test_two_hundred_requests_get_the_same_bits_alone_and_in_any_company(
    default_model_folder: Path, held_as: str, kv_dtype: KVDtype, part: int
) -> None:
    """2,000 requests in bfloat16, in parts that say early which of them differ."""
    check(default_model_folder, held_as, kv_dtype, count=200, longest=1500, seed=100 + part)
