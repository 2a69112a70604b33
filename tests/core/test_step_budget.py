"""`engine.target_step_ms`: prompts take what keeps a step near it, whatever steps cost and however noisy they are."""

from __future__ import annotations

import random
import statistics

from dummy_engine import greedy, make_engine

from core.batch import Batch
from core.config import EngineConfig
from core.dummy_runner import ByteTokenizer, make_dummy_runner
from core.engine import Engine
from core.sequence import Sequence
from core.step_budget import MIN_TOKENS

BASE_S, ROW_S, TOKEN_S = 0.008, 0.0005, 0.0004


def chunks_beside_streams(
    target_step_ms: float, num_streams: int, disturbance: float = 0.0
) -> tuple[list[int], list[float]]:
    """Prompt tokens and seconds of each step in which 4,000 prompt tokens are computed beside running streams."""
    now_s = 0.0
    generator = random.Random(3)

    def take_time(step: int, batch: Batch) -> None:
        nonlocal now_s
        rows = sum(count == 1 for count in batch.num_scheduled_tokens)
        cost_s = BASE_S + ROW_S * rows + TOKEN_S * (batch.num_tokens - rows)
        now_s += cost_s * (4 if generator.random() < disturbance else 1)

    runner = make_dummy_runner(num_blocks=2048, max_context=8192, on_run=take_time)
    config = EngineConfig(target_step_ms=target_step_ms)
    engine = Engine(config, runner, ByteTokenizer(), clock=lambda: now_s)
    for i in range(num_streams):
        engine.add(Sequence(f"s{i}", [65 + i] * 10, greedy(4000)))
    for _ in range(20):
        engine.step()
    long = Sequence("long", [64] * 4000, greedy(2))
    engine.add(long)
    chunks, durations_s = [], []
    while not long.num_output_tokens:
        engine.step()
        stats = engine.stats(is_after_step=True)
        assert stats.num_decode_tokens == num_streams
        chunks.append(stats.num_prefill_tokens)
        durations_s.append(stats.duration_s)
    assert sum(chunks) == 4000
    return chunks, durations_s


def test_steps_beside_a_long_prompt_come_near_the_target() -> None:
    for target_ms in (20.0, 36.0, 100.0):
        _, durations_s = chunks_beside_streams(target_ms, 8)
        assert max(durations_s) <= target_ms / 1000 * 1.05
        assert statistics.median(durations_s) >= target_ms / 1000 * 0.9


def test_steps_that_somebody_else_made_long_move_it_little() -> None:
    quiet, _ = chunks_beside_streams(36.0, 8)
    noisy, _ = chunks_beside_streams(36.0, 8, disturbance=0.1)
    assert 0.7 * statistics.median(quiet) <= statistics.median(noisy)
    assert max(noisy) <= 1.5 * max(quiet)


def test_a_prompt_gets_on_when_the_decodes_alone_take_longer_than_the_target() -> None:
    chunks, _ = chunks_beside_streams(1.0, 8)
    assert min(chunks[:-1]) == max(chunks) == MIN_TOKENS


def test_nothing_is_held_back_without_a_target_or_without_streams() -> None:
    assert max(chunks_beside_streams(0.0, 8)[0]) == EngineConfig().max_batched_tokens - 8
    assert max(chunks_beside_streams(1.0, 0)[0]) == EngineConfig().max_batched_tokens


def test_prompts_are_finished_one_after_the_other_in_order_of_arrival() -> None:
    engine, _ = make_engine(max_batched_tokens=64, num_blocks=1024, prefix_caching=False)
    sequences = [Sequence(f"s{i}", [65] * 100, greedy(40)) for i in range(6)]
    for sequence in sequences:
        engine.add(sequence)
    while not all(sequence.num_output_tokens for sequence in sequences):
        engine.step()
        begun = [s for s in sequences if 0 < s.num_computed_tokens < s.num_prompt_tokens]
        assert len(begun) <= 1
