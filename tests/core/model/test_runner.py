"""The runner over a tiny model: batches of sequences in, tokens out, with the C kernels and without."""

from __future__ import annotations

import pytest
import torch
from tiny_decoders import CONFIGS, build, prompts

from core.batch import Batch
from core.config import CacheConfig, ModelShape
from core.model.attention import choose_kernels
from core.model.kv_cache import KVCache
from core.model.runner import ModelRunner
from core.model.threads import available_cores
from core.model.token_chooser import TokenChooser
from core.sampling_params import SamplingParams
from core.sequence import Sequence, SequenceStatus

BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(params=["auto", "torch"])
def pair(request: pytest.FixtureRequest):
    """(the library's model, a runner over the same weights)."""
    theirs, decoder = build(CONFIGS["llama"], choose_kernels(torch.device("cpu"), request.param)[0])
    shape = ModelShape(3, 2, 16, 160, 4096, 2 * 3 * 2 * 16 * 4, decoder.weights_bytes, (0,))
    return theirs, ModelRunner(decoder, shape, CacheConfig(BLOCK_SIZE, 200))


def sequence(ids: list[int], first_block: int, params: SamplingParams = GREEDY) -> Sequence:
    made = Sequence(str(first_block), list(ids), params)
    made.block_ids = [first_block + i for i in range(-(-len(ids) // BLOCK_SIZE))]
    return made


def step(runner: ModelRunner, sequences: list[Sequence], counts: list[int]) -> list[int | None]:
    """One step as the engine takes it; the sequences advance."""
    batch = Batch(tuple(sequences), tuple(counts))
    tokens = runner.sample(batch, runner.run(batch))
    for one, count, drawn in zip(sequences, counts, tokens, strict=True):
        one.num_computed_tokens += 0 if one.is_finished else count
        for token in drawn:
            assert token.failure is None
            one.token_ids.append(token.token_id)
            if len(one.token_ids) > len(one.block_ids) * BLOCK_SIZE:
                one.block_ids.append(one.block_ids[-1] + 1)
    return [drawn[0].token_id if drawn else None for drawn in tokens]


def greedy(theirs, ids: list[int], count: int) -> list[int]:
    ids = list(ids)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(theirs(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-count:]


def test_chunks_and_decoding_rows_share_steps_and_give_the_librarys_tokens(pair) -> None:
    """Rows of an unfinished prefill are never sampled (B123)."""
    theirs, runner = pair
    runner.warm_up()
    long, short = prompts(30, 5)
    first, second = sequence(long, 0), sequence(short, 50)
    assert step(runner, [first], [13]) == [None]
    assert step(runner, [first, second], [13, 5])[0] is None
    assert None not in step(runner, [second, first], [1, 4])
    for _ in range(6):
        step(runner, [second, first], [1, 1])
    assert first.token_ids[30:] == greedy(theirs, long, 7)
    assert second.token_ids[5:] == greedy(theirs, short, 8)


def test_a_sequence_that_comes_back_with_other_blocks_is_read_from_them(pair) -> None:
    theirs, runner = pair
    (ids,) = prompts(11)
    one = sequence(ids, 0)
    step(runner, [one], [11])
    one.num_computed_tokens, one.num_table_cuts = 0, 1
    one.block_ids = [90, 7, 30]
    step(runner, [one], [12])
    step(runner, [one], [1])
    assert one.token_ids[11:] == greedy(theirs, ids, 3)


def test_a_finished_sequence_is_computed_again_and_not_sampled(pair) -> None:
    theirs, runner = pair
    ids, other = prompts(6, 9)
    done, running = sequence(ids, 0), sequence(other, 20)
    step(runner, [done, running], [6, 9])
    done.status = SequenceStatus.FINISHED
    done.num_computed_tokens = len(done.token_ids) - 1
    assert step(runner, [done, running], [1, 1])[0] is None
    assert running.token_ids[9:] == greedy(theirs, other, 2)


def test_a_row_that_is_not_finite_fails_alone(pair) -> None:
    """B149"""
    _, runner = pair
    ids, other = prompts(6, 9)
    batch = Batch((sequence(ids, 0), sequence(other, 20)), (6, 9))
    logits = runner.run(batch)
    with torch.inference_mode():
        logits.logits[0, 3] = torch.nan
    (first,), (second,) = runner.sample(batch, logits)
    assert first.failure == "non_finite"
    assert second.failure is None


def test_ids_beyond_the_vocabulary_are_never_chosen(pair) -> None:
    _, runner = pair
    runner.shape = ModelShape(3, 2, 16, 100, 4096, 1, 1, (0,))
    runner._chooser = TokenChooser(100, (0,), getattr(runner.model, "compiled", None))
    batch = Batch((sequence(prompts(6)[0], 0),), (6,))
    logits = runner.run(batch)
    with torch.inference_mode():
        logits.logits[0, 100:] = 1e9
    assert runner.sample(batch, logits)[0][0].token_id < 100


def test_a_token_id_out_of_range_stops_the_step_before_memory_is_read(pair) -> None:
    _, runner = pair
    with pytest.raises(AssertionError):
        runner.run(Batch((sequence([1, 2, 160], 0),), (3,)))
    with pytest.raises(AssertionError):
        runner.run(Batch((sequence([1, 2, 3], 200),), (3,)))


def test_cores_are_those_the_process_may_use() -> None:
    assert available_cores() >= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_blocks_are_copied_whole_as_they_were_before(dtype: torch.dtype) -> None:
    cache = KVCache.allocate(2, 6, 3, 4, 8, dtype, value_head_dim=5)
    for layer in cache.layers:
        for tensor in layer.tensors():
            numbers = torch.arange(tensor.numel()) % 100
            tensor.copy_(numbers.view(tensor.shape))
    before = [bytes(cache.read_blocks([block_id])) for block_id in range(6)]
    cache.copy_blocks([(0, 3), (3, 4), (0, 5)])
    after = [bytes(cache.read_blocks([block_id])) for block_id in range(6)]
    assert after == [before[place] for place in (0, 1, 2, 0, 3, 0)]
