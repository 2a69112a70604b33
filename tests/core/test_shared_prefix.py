"""Prompts with the same beginning compute it once, also when they arrive together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from dummy_engine import end_of, make_engine, make_sequence, run_to_end, solo_text, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import EngineConfig, KVCacheConfig, ModelConfig
from core.engine import Engine
from core.outputs import FinishReason, StepOutput
from core.sampling_params import SamplingParams

SIZE = 4
PREFIX = "A prefix of sixty-four characters, which all of these prompts have."[:64]


def run_counting(engine: Engine) -> tuple[list[StepOutput], int]:
    """The outputs, and how many prompt tokens were computed for them."""
    outputs: list[StepOutput] = []
    num_computed = 0
    while engine.has_work:
        outputs += engine.step()
        engine.check_invariants()
        num_computed += engine.stats(is_after_step=True).num_prefill_tokens
    return outputs, num_computed


def num_distinct(prompts: list[str]) -> int:
    """Tokens of all prompts, where a beginning that several share counts once."""
    return len({prompt[: end + 1] for prompt in prompts for end in range(len(prompt))})


@pytest.mark.parametrize("budget", [100, 512, 2048, 8192])
def test_thirty_two_prompts_that_arrive_together_compute_their_prefix_once(budget: int) -> None:
    prompts = [PREFIX * 16 + f"{i:02} ends in its own way. The end." for i in range(32)]
    engine, _ = make_engine(num_blocks=4096, block_size=16, max_batched_tokens=budget)
    for i, prompt in enumerate(prompts):
        engine.add(make_sequence(f"s{i}", prompt))
    outputs, num_computed = run_counting(engine)
    assert num_distinct(prompts) <= num_computed <= 1024 + 32 * 32
    assert engine.stats().num_blocks_cached == 64 + 32 * 3  # the last with the end of an answer
    for i, prompt in enumerate(prompts):
        assert text_of(outputs, f"s{i}") == solo_text(prompt.encode(), 8)


def test_one_step_computes_a_prefix_and_all_who_share_it() -> None:
    engine, _ = make_engine(num_blocks=256, block_size=16, max_batched_tokens=512)
    for i in range(32):
        engine.add(make_sequence(f"s{i}", PREFIX + f"{i:02}"))
    outputs = engine.step()
    assert len(outputs) == 32
    assert engine.stats(is_after_step=True).num_prefill_tokens == 64 + 32 * 2
    assert [output.num_cached_tokens for output in outputs] == [0] + [64] * 31


@settings(deadline=None, max_examples=60)
@given(
    prompts=st.lists(st.text("ab", min_size=1, max_size=40), min_size=1, max_size=12),
    budget=st.integers(4, 80),
    batch_size=st.integers(1, 12),
    waits=st.lists(st.integers(0, 3), min_size=12, max_size=12),
)
def test_no_more_is_computed_than_what_differs_and_the_last_token_of_each(
    prompts: list[str], budget: int, batch_size: int, waits: list[int]
) -> None:
    engine, _ = make_engine(
        num_blocks=1024, block_size=SIZE, max_batched_tokens=budget, batch_size=batch_size
    )
    outputs: list[StepOutput] = []
    num_computed = 0
    for i, (prompt, wait) in enumerate(zip(prompts, waits, strict=False)):
        engine.add(make_sequence(f"s{i}", prompt))
        for _ in range(wait if engine.has_work else 0):
            outputs += engine.step()
            num_computed += engine.stats(is_after_step=True).num_prefill_tokens
    more, count = run_counting(engine)
    assert num_computed + count <= num_distinct(prompts) + len(prompts)
    for i, prompt in enumerate(prompts):
        assert text_of(outputs + more, f"s{i}") == solo_text(prompt.encode(), 8)


def test_a_prefix_that_ends_inside_a_block_is_computed_once() -> None:
    engine, _ = make_engine(num_blocks=256, block_size=16, max_batched_tokens=512)
    prompts = [PREFIX[:58] + f"{i:02}" for i in range(32)]
    for i, prompt in enumerate(prompts):
        engine.add(make_sequence(f"s{i}", prompt))
    assert len(engine.step()) == 1  # the others wait for what they will copy
    assert len(engine.step()) == 32
    assert engine.stats(is_after_step=True).num_prefill_tokens <= 31 * 2
    outputs = run_to_end(engine)
    assert [end_of(outputs, f"s{i}").num_cached_tokens for i in (1, 9, 10)] == [59, 59, 58]


def test_choices_of_one_prompt_compute_its_last_token_only() -> None:
    engine, _ = make_engine(num_blocks=256, block_size=16, max_batched_tokens=512)
    for i in range(8):
        engine.add(make_sequence(f"s{i}", PREFIX[:60]))
    outputs, num_computed = run_counting(engine)
    assert num_computed == 60 + 7
    for i in range(8):
        assert text_of(outputs, f"s{i}") == solo_text(PREFIX[:60].encode(), 8)


def test_the_next_turn_goes_on_where_the_last_one_ended() -> None:
    engine, _ = make_engine(num_blocks=256, block_size=16)
    engine.add(make_sequence("first", PREFIX[:50]))
    first = text_of(run_to_end(engine), "first")
    engine.add(make_sequence("second", PREFIX[:50] + first + " And?"))
    (end, *_) = engine.step()
    assert end.num_cached_tokens == 50 + 8 - 1  # the last token of an answer is never computed


def test_what_only_this_step_computes_is_not_copied_in_it() -> None:
    """Under policy static nobody waits: all are computed from their whole blocks on."""
    engine, _ = make_engine(num_blocks=256, block_size=16, policy="static")
    for name in "ab":
        engine.add(make_sequence(name, PREFIX[:60] + name))
    outputs, num_computed = run_counting(engine)
    assert num_computed == 61 + 13
    assert text_of(outputs, "b") == solo_text((PREFIX[:60] + "b").encode(), 8)


def test_what_a_row_of_this_step_shares_with_another_of_it_is_not_copied_in_it() -> None:
    """The second shares a block that the first computes in this step: nothing of it is there to copy yet."""
    text = PREFIX[:38].encode()
    prompts = [text, text[:34] + b"xy", text[:29] + b"z"]
    engine, _ = make_engine(num_blocks=64, block_size=16)
    for i, prompt in enumerate(prompts):
        engine.add(make_sequence(f"s{i}", prompt.decode()))
    outputs, _ = run_counting(engine)
    for i, prompt in enumerate(prompts):
        assert text_of(outputs, f"s{i}") == solo_text(prompt, 8)


def test_a_full_pool_admits_without_a_copy_rather_than_not_at_all() -> None:
    """The block to copy from is the only one that is left: it is overwritten instead."""
    engine, _ = make_engine(num_blocks=2, block_size=16, max_context=32)
    engine.add(make_sequence("a", PREFIX[:20], max_tokens=4))
    run_to_end(engine)
    assert engine.stats().num_blocks_cached == 2
    engine.add(make_sequence("b", PREFIX[:10] + "other", max_tokens=17))
    outputs = run_to_end(engine)
    assert text_of(outputs, "b") == solo_text((PREFIX[:10] + "other").encode(), 17)


def test_those_who_share_go_on_when_the_first_is_aborted_half_way() -> None:
    engine, _ = make_engine(num_blocks=256, block_size=16, max_batched_tokens=32)
    for name in "abc":
        engine.add(make_sequence(name, PREFIX + name))
    engine.step()
    assert engine.abort("a") is not None
    outputs, num_computed = run_counting(engine)
    assert num_computed == 32 + 2  # the other half of the prefix, and the letters
    for name in "bc":
        assert text_of(outputs, name) == solo_text((PREFIX + name).encode(), 8)


def test_what_a_failed_step_promised_is_not_found_afterwards() -> None:
    engine, runner = make_engine(
        num_blocks=256, block_size=16, max_batched_tokens=512, batch_size=2
    )
    runner.failing_steps = {0}
    for name in "abc":
        engine.add(make_sequence(name, PREFIX + name))
    outputs = run_to_end(engine)
    assert [end_of(outputs, name).finish_reason for name in "ab"] == [FinishReason.ERROR] * 2
    assert end_of(outputs, "c").num_cached_tokens == 0
    assert text_of(outputs, "c") == solo_text((PREFIX + "c").encode(), 8)


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("num_shared", [80, 91])
def test_rows_attend_to_blocks_that_others_have_written_or_write_in_the_same_step(
    tiny_model: Callable[..., Path], num_shared: int, family: str, kernels: str
) -> None:
    shared = [3 + 7 * i % 90 for i in range(num_shared)]
    prompts = [[*shared, 5 + i, 9] for i in range(8)]
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)

    def generate(prefix_caching: bool) -> list[list[float]]:
        engine = Engine.from_config(
            ModelConfig(name=str(tiny_model(family)), dtype="float32"),
            EngineConfig(device="cpu", kernels=kernels, prefix_caching=prefix_caching),  # type: ignore[arg-type]
            KVCacheConfig(num_blocks=400),
        )
        generations = engine.generate(prompts, params)
        assert [g.num_cached_tokens for g in generations[1:]] == [num_shared * prefix_caching] * 7
        return [[entry.logprob for entry in g.logprobs or ()] for g in generations]

    for shared_step, alone in zip(generate(True), generate(False), strict=True):
        assert shared_step == pytest.approx(alone, abs=1e-4)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("num_shared", [75, 89])
def test_copied_keys_and_values_have_the_bits_that_computing_gives(
    tiny_model: Callable[..., Path], num_shared: int, kv_dtype: Literal["auto", "int8"]
) -> None:
    shared = [3 + 7 * i % 90 for i in range(num_shared)]
    prompts = [[*shared, 5 + i, 9, 4, 2 + i] for i in range(6)]
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)

    def generate(prefix_caching: bool) -> list[object]:
        engine = Engine.from_config(
            ModelConfig(name=str(tiny_model("llama", head_dim=16)), dtype="float32"),
            EngineConfig(device="cpu", prefix_caching=prefix_caching),
            KVCacheConfig(num_blocks=400, dtype=kv_dtype),
        )
        if not engine.runner.has_fixed_bits:
            pytest.skip("bits depend on the batch without the compiled kernels")
        generations = engine.generate(prompts, params)
        assert [g.num_cached_tokens for g in generations[1:]] == [num_shared * prefix_caching] * 5
        return [g.logprobs for g in generations]

    assert generate(True) == generate(False)
