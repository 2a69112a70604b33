"""Parity: whatever the batch, the chunks, the cache or the pool, greedy tokens are those of `transformers` alone.

The engine computes mixed batches; the library then computes each finished sequence alone, in one forward in float32
with its plain attention. If every token is the library's best after those before it, the sequence is what the library's
`generate` gives. A sequence may differ only where the two best logits lie within 1e-4, and at most 1 % of all may.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import families
import pytest
import torch

from core.config import EngineConfig, KVCacheConfig, ModelConfig
from core.engine import Engine
from core.sampling_params import SamplingParams

NEAR_TIE = 1e-4
MAX_SHARE = 0.01
FAMILIES = [*families.FAST, *families.GENERAL]


@dataclass(frozen=True)
class Case:
    """One column of the matrix. `is_alone`: one sequence at a time; else all at once."""

    max_batched_tokens: int = 512
    num_blocks: int = 2000
    is_alone: bool = False
    kernels: str = "auto"

    def __str__(self) -> str:
        chunks = "chunks of 16" if self.max_batched_tokens == 16 else "whole"
        pool = "40 blocks" if self.num_blocks == 40 else "large pool"
        return f"{chunks}, {pool}, {'alone' if self.is_alone else 'together'}"


EVERY_CASE = [
    Case(max_batched_tokens, num_blocks, is_alone)
    for max_batched_tokens in (512, 16)
    for num_blocks in (2000, 40)
    for is_alone in (False, True)
]


@dataclass
class Tally:
    """Sequences compared so far, and those that differ at a near tie. The library computes each text only once."""

    reference: Any
    vocabulary: int
    num_compared: int = 0
    num_differing: int = 0
    verdicts: dict[tuple[int, ...], bool] = field(default_factory=dict)

    def compare(self, prompt: list[int], output: list[int]) -> None:
        key = (len(prompt), *prompt, *output)
        if key not in self.verdicts:
            self.verdicts[key] = self._is_same(prompt, output)
        self.num_compared += 1
        self.num_differing += not self.verdicts[key]

    def _is_same(self, prompt: list[int], output: list[int]) -> bool:
        ids = torch.tensor([prompt + output])
        keep = len(output) + 1
        with torch.inference_mode():
            logits = self.reference(ids, use_cache=False, logits_to_keep=keep).logits[0]
        for i, token in enumerate(output):
            row = logits[i, : self.vocabulary].float()
            best = row.topk(2)
            if token == int(best.indices[0]):
                continue
            gap = float(best.values[0] - best.values[1])
            assert token == int(best.indices[1]) and gap <= NEAR_TIE, (  # noqa: PT018
                f"token {i} after {len(prompt)}: {token} instead of {int(best.indices[0])}, gap {gap}"
            )
            return False
        return True

    def check(self) -> None:
        assert self.num_compared > 0
        assert self.num_differing <= MAX_SHARE * self.num_compared, self.num_differing


def make_engine(folder: Path, case: Case, batch_size: int) -> Engine:
    engine = EngineConfig(
        device="cpu",
        kernels=case.kernels,
        batch_size=batch_size,
        max_batched_tokens=case.max_batched_tokens,
    )
    model = ModelConfig(name=str(folder), dtype="float32")
    return Engine.from_config(model, engine, KVCacheConfig(num_blocks=case.num_blocks))


def make_prompts(lengths: list[int], vocabulary: int) -> list[list[int]]:
    """Random ids; every third prompt begins like the one before it, so that neighbours share blocks, too."""
    generator = torch.Generator().manual_seed(11)
    prompts: list[list[int]] = []
    for i, length in enumerate(lengths):
        ids = torch.randint(3, vocabulary, (length,), generator=generator).tolist()
        if i % 3 == 2:
            shared = prompts[-1][: length - 1]
            ids[: len(shared)] = shared
        prompts.append(ids)
    return prompts


def run(
    engine: Engine, prompts: list[list[int]], num_new: int, *, is_alone: bool
) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_new, ignore_eos=True)
    batches = [[prompt] for prompt in prompts] if is_alone else [prompts]
    outputs = [g.token_ids for batch in batches for g in engine.generate(batch, params)]
    engine.check_invariants()
    assert all(len(output) == num_new for output in outputs)
    return outputs


def check_case(
    folder: Path, case: Case, prompts: list[list[int]], num_new: int, tally: Tally
) -> Engine:
    """Cold, then again with prefix hits: both are compared."""
    engine = make_engine(folder, case, batch_size=32)
    cold = run(engine, prompts, num_new, is_alone=case.is_alone)
    hits_before = engine.stats().total_prefix_hits
    warm = run(engine, prompts, num_new, is_alone=case.is_alone)
    if case.num_blocks > 40:
        assert engine.stats().total_prefix_hits > hits_before
    for prompt, first, second in zip(prompts, cold, warm, strict=True):
        tally.compare(prompt, first)
        tally.compare(prompt, second)
    return engine


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_chunked_in_a_crowded_pool_equals_the_library(
    tiny_model: Callable[..., Path], family: str
) -> None:
    """The quick version: ragged prompts in chunks of 16, 40 blocks, twice, so with preemption and prefix hits."""
    folder = tiny_model(family)
    reference = families.load_reference(folder)
    lengths = [1, 17, 20, 33, 5, 100, 9, 16, 40, 31, 32, 3]
    prompts = make_prompts(lengths, families.NUM_TOKENS)
    tally = Tally(reference, families.NUM_TOKENS)
    engine = check_case(folder, Case(16, 40), prompts, 64, tally)
    assert engine.stats().total_preemptions > 0
    tally.check()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "gpt_oss"])
def test_the_plain_torch_kernels_equal_the_library_too(
    tiny_model: Callable[..., Path], family: str
) -> None:
    """`engine.kernels: torch`, which serves where there is no compiler."""
    folder = tiny_model(family)
    tally = Tally(families.load_reference(folder), families.NUM_TOKENS)
    prompts = make_prompts([1, 60, 17, 33], families.NUM_TOKENS)
    check_case(folder, Case(16, 40, kernels="torch"), prompts, 16, tally)
    tally.check()


def test_the_default_model_equals_generate(default_model_folder: Path) -> None:
    """Real text through the library's own `generate`, and random prompts through one forward each."""
    reference = families.load_reference(default_model_folder)
    tally = Tally(reference, 49152)
    prompts = make_prompts([1, 40, 300, 7], 49152)
    engine = check_case(default_model_folder, Case(64, 40), prompts, 6, tally)
    prompt = engine.tokenizer.encode_chat(
        [{"role": "user", "content": "What is the capital of France?"}]
    )
    expected = families.greedy(reference, prompt, 8)
    assert run(engine, [prompt], 8, is_alone=True) == [expected]
    assert "Paris" in engine.tokenizer.decode(expected)
    tally.check()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["default", *FAMILIES])
def test_the_whole_matrix_equals_the_library(
    default_model_folder: Path, tiny_model: Callable[..., Path], family: str
) -> None:
    """32 prompts of 1 to 300 tokens: whole and in chunks, cold and with hits, with and without preemption, alone and
    32 at a time."""
    folder = default_model_folder if family == "default" else tiny_model(family)
    reference = families.load_reference(folder)
    vocabulary = 49152 if family == "default" else families.NUM_TOKENS
    lengths = [1, 2, 15, 16, 17, 300, 299, 31, 32, 33, *range(40, 300, 12)][:32]
    prompts = make_prompts(lengths, vocabulary)
    tally = Tally(reference, vocabulary)
    for case in EVERY_CASE:
        chosen = prompts[::4] if case.is_alone else prompts
        engine = check_case(folder, case, chosen, 40, tally)
        if case.num_blocks == 40 and not case.is_alone:
            assert engine.stats().total_preemptions > 0, str(case)
    tally.check()
