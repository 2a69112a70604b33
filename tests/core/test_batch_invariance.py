"""A sequence's tokens and log-probabilities do not depend on who else is computed, nor on what the cache held before.

Real kernels on tiny random models; `test_parity.py` compares with the library, this compares us with ourselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from core.config import EngineConfig, KVCacheConfig, ModelConfig
from core.engine import Engine
from core.sampling_params import SamplingParams
from core.sequence import Sequence

NUM_NEW = 12
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True, logprobs=3)
TOLERANCE = 1e-4


def make_engine(folder: Path, dtype: str = "float32") -> Engine:
    return Engine.from_config(
        ModelConfig(name=str(folder), dtype=dtype),
        EngineConfig(device="cpu", max_batched_tokens=48),
        KVCacheConfig(num_blocks=400),
    )


def prompt(length: int, start: int) -> list[int]:
    return [3 + (start + 7 * i) % 90 for i in range(length)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_tokens_are_the_same_alone_at_once_and_staggered(
    tiny_model: Callable[..., Path], family: str, dtype: str
) -> None:
    """B056, B143"""
    engine = make_engine(tiny_model(family), dtype)
    prompts = [prompt(5 + 9 * i, i) for i in range(12)]
    alone = [engine.generate([ids], PARAMS)[0].token_ids for ids in prompts]
    assert [g.token_ids for g in engine.generate(prompts, PARAMS)] == alone

    waiting = [Sequence(f"s{i}", list(ids), PARAMS) for i, ids in enumerate(prompts)]
    staggered = list(waiting)
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop(0))
        engine.step()
        engine.check_invariants()
    assert [list(sequence.token_ids[-NUM_NEW:]) for sequence in staggered] == alone


def test_logprobs_do_not_depend_on_what_the_cache_held(tiny_model: Callable[..., Path]) -> None:
    """B066"""
    shared = prompt(90, 1)
    prompts = {"q": shared, "qx": [*shared, 11, 12], "qy": [*shared, 30]}
    folder = tiny_model("llama")
    values: dict[str, list[float]] = {}
    for order in itertools.permutations(prompts):
        engine = make_engine(folder)
        for turn, name in enumerate((*order, *order)):
            generation = engine.generate([prompts[name]], PARAMS)[0]
            assert (generation.num_cached_tokens > 0) == (turn > 0)
            found = [
                value
                for entry in generation.logprobs
                for _, value in (*entry.top, (0, entry.logprob))
            ]
            assert found == pytest.approx(values.setdefault(name, found), abs=TOLERANCE)
