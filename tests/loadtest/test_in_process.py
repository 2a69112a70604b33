"""The commands that drive an engine themselves, over the dummy model."""

from __future__ import annotations

import argparse
import random
from types import SimpleNamespace

import pytest
import yaml

from core.config import EngineConfig, SpeculativeConfig
from core.dummy_runner import ByteTokenizer, make_dummy_runner
from core.engine import Engine
from core.outputs import StepOutput
from loadtest import growth, kv_cache, paging, phases, script_rate, speculation, step
from loadtest.in_process import make_sequence
from loadtest.limits import Limits
from loadtest.paging import StepSample


def make_engine(**engine: object) -> Engine:
    config = EngineConfig(prefix_caching=False, max_batched_tokens=2048, **engine)  # type: ignore[arg-type]
    return Engine(config, make_dummy_runner(), ByteTokenizer())


def test_both_ways_choose_the_same_tokens() -> None:
    figures = kv_cache.measure_at(make_engine(), list(b"a prompt of some length"), 8)
    assert figures["is_same"] is True
    assert figures["tokens"] == 8


def test_kv_usage_rises_with_the_answers_and_falls_to_nothing() -> None:
    engine = make_engine(batch_size=2)
    block_size = engine.cache_config.block_size
    sequences = [make_sequence(str(i), list(b"prompt"), 3 * block_size) for i in range(3)]
    samples = paging.run(engine, sequences, 128)
    assert max(sample.num_running for sample in samples) == 2
    assert all(sample.held <= sample.paged <= sample.reserved for sample in samples[:-1])
    assert (samples[-1].paged, samples[-1].num_running) == (0, 0)


def test_waste_is_room_without_tokens() -> None:
    figures = paging.summarize([StepSample(1, 24, 32, 96), StepSample(0, 0, 0, 0)], 64)
    assert figures == {
        "steps": 2,
        "peak_usage": 0.5,
        "end_usage": 0,
        "paged_waste": 0.25,
        "reserved_waste": 0.75,
    }


def test_growth_times_answers_that_end_at_the_context_asked_for_and_leaves_nothing_behind() -> None:
    engine = make_engine(batch_size=2)
    seen: list[tuple[int, int]] = []
    run = engine.step

    def step() -> list[StepOutput]:
        outputs = run()
        stats = engine.stats(is_after_step=True)
        seen.append((stats.num_sequences, stats.num_waiting))
        return outputs

    engine.step = step  # type: ignore[method-assign]
    assert growth.decode_s(engine, random.Random(0), 2, 256, num_before=40, num_waiting=5) > 0
    assert len(seen) >= 40 + growth.STEPS
    assert seen[-1] == (2, 5)
    assert not engine.has_work
    assert engine.stats().num_blocks_used == 0


def test_decode_is_measured_at_its_full_batch() -> None:
    engine = make_engine(batch_size=4)
    rng = random.Random(0)
    assert phases.decode_s(engine, rng, 3, 5) > 0
    assert phases.prefill_s(engine, rng, 32) > 0
    assert not engine.has_work


def test_a_prompt_that_takes_two_steps_is_not_called_one() -> None:
    engine = Engine(EngineConfig(max_batched_tokens=16), make_dummy_runner(), ByteTokenizer())
    with pytest.raises(AssertionError, match="more than one step"):
        phases.prefill_s(engine, random.Random(0), 64)


def test_every_part_of_a_step_is_told_and_none_is_lost() -> None:
    engine = make_engine(batch_size=4)
    stopwatch = step.Stopwatch(engine)
    try:
        runs = stopwatch.decode(random.Random(0), 3, 32, 5)
        prefill = stopwatch.prefill(random.Random(0), 48)
    finally:
        stopwatch.close()
    assert len(runs) >= 5
    for parts in [*runs, prefill]:
        inside = {"schedule", "inputs", "sample", "update", "hand-over"}
        assert set(parts) == inside | {"step"}
        assert sum(parts[part] for part in inside) == pytest.approx(parts["step"], rel=0.3)
    assert not engine.has_work


def test_rates_follow_from_work_and_time() -> None:
    work = step.Work(
        linear_bytes=60 * 10**6,
        head_bytes=40 * 10**6,
        kv_bytes=5 * 10**6,
        linear_flops=10**9,
        head_flops=10**9,
    )
    limits = Limits(read_gb_per_s=10.0, bf16_gflop_per_s=200.0, int8_gflop_per_s=None)
    parts = {"linear": 0.01, "head": 0.002, "attention": 0.001, "step": 0.02}
    decode = step.rates("decode", work, parts, limits)
    assert decode["linear_of_bf16_peak"] == 0.5
    assert decode["step_of_weights_read"] == 2
    assert decode["attention_of_bandwidth"] == 0.5
    assert step.rates("prefill", work, parts, limits)["prefill_of_bf16_peak"] == 0.5


def test_a_script_keeps_so_many_sequences_running_and_counts_their_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = make_engine(batch_size=4)
    most = 0
    plain = engine.step

    def watched() -> object:
        nonlocal most
        outputs = plain()
        most = max(most, engine.stats(is_after_step=True).num_sequences)
        return outputs

    engine.step = watched  # type: ignore[method-assign, assignment]
    clock = SimpleNamespace(perf_counter=iter([10.0, 12.0]).__next__)
    monkeypatch.setattr(script_rate, "time", clock)
    rate = script_rate.run(engine, random.Random(0), 3, 7, 8, 16)
    assert (most, engine.has_work) == (3, False)
    assert rate == 7 * 16 / 2


def test_a_pair_with_and_without_drafts_answers_with_the_same_tokens() -> None:
    plain = make_engine()
    args = argparse.Namespace(max_tokens=12, temperature=0.5, pairs=2)
    figures = speculation.measure(
        plain, speculation.beside(plain, SpeculativeConfig()), ["abcabcabc", "b"], 2, args
    )
    assert (figures["clients"], figures["tokens"]) == (2, 24)
    assert figures["lowest"] <= figures["ratio"] <= figures["highest"]


def test_every_kind_of_work_is_there() -> None:
    tasks = yaml.safe_load(speculation.TASKS.read_text("utf-8"))
    assert set(tasks) == {*speculation.COPYING, "chat"}
    assert all(isinstance(task, str) for each in tasks.values() for task in each)
