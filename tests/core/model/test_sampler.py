"""The sampler against the library's own logits processors, statistics, and the fault cases of sampling."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from core.model.sampler import LOWEST_LOGPROB, Sampler
from core.sampling_params import SamplingParams
from core.sequence import Sequence

VOCAB = 1000
EOS = (0, 2)


def make_sequence(
    params: SamplingParams,
    prompt: tuple[int, ...] = (5, 6, 7),
    output: tuple[int, ...] = (),
    seed: int = 0,
    name: str = "a",
    choice: int = 0,
) -> Sequence:
    sequence = Sequence(name, list(prompt), params, seed=seed, choice_index=choice)
    sequence.token_ids.extend(output)
    return sequence


def make_logits(
    rows: int = 1, width: int = VOCAB, seed: int = 0, scale: float = 3.0
) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def pick(logits: torch.Tensor, sequence: Sequence, vocab: int = VOCAB) -> int:
    (sampled,) = Sampler(vocab, EOS).sample(logits, [sequence])
    assert sampled.failure is None
    return sampled.token_id


def draw_many(logits: torch.Tensor, params: SamplingParams, count: int = 400) -> set[int]:
    rows = logits.expand(count, -1)
    sequences = [make_sequence(params, seed=i, name=str(i)) for i in range(count)]
    return {s.token_id for s in Sampler(logits.shape[1], ()).sample(rows, sequences)}


@pytest.mark.parametrize("width", [1, 3, 256, 257, 1000, 49152])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_token_is_the_first_of_the_greatest(width: int, dtype: torch.dtype) -> None:
    logits = make_logits(3, width).to(dtype)
    sequences = [make_sequence(SamplingParams(temperature=0), name=str(i)) for i in range(3)]
    sampled = Sampler(width, ()).sample(logits, sequences)
    assert [s.token_id for s in sampled] == logits.float().argmax(-1).tolist()


def test_padded_vocabulary_is_never_sampled() -> None:
    """B020"""
    logits = make_logits(1, VOCAB + 64)
    logits[:, VOCAB:] = 50.0
    for temperature in (0.0, 1.7):
        for seed in range(20):
            params = SamplingParams(temperature=temperature, logprobs=20)
            (sampled,) = Sampler(VOCAB, EOS).sample(logits, [make_sequence(params, seed=seed)])
            assert sampled.token_id < VOCAB
            assert sampled.logprobs is not None
            assert all(token_id < VOCAB for token_id, _ in sampled.logprobs.top)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_masks_every_end_id_and_counts_only_output(temperature: float) -> None:
    """B030"""
    logits = make_logits()
    logits[0, [0, 2, 9]] = 80.0
    params = SamplingParams(
        temperature=temperature,
        min_tokens=3,
        max_tokens=7,
        stop_token_ids=(9,),
        logit_bias={0: 60},
    )
    for output in ((), (4,), (4, 4)):
        sequence = make_sequence(params, prompt=(1,) * 50, output=output)
        assert pick(logits, sequence) not in (0, 2, 9)
    assert pick(logits, make_sequence(params, output=(4, 4, 4))) == 0


def test_with_ignore_eos_end_ids_are_ordinary_tokens_but_stop_ids_wait() -> None:
    logits = make_logits()
    logits[0, 9], logits[0, 0] = 90.0, 80.0
    params = SamplingParams(
        temperature=0, min_tokens=3, max_tokens=3, ignore_eos=True, stop_token_ids=(9,)
    )
    assert pick(logits, make_sequence(params)) == 0


@pytest.mark.parametrize("temperature", [3e-5, 2e-8, 1e-38])
@pytest.mark.parametrize("scale", [0.01, 3.0, 1e4])
def test_tiny_temperatures_equal_greedy(temperature: float, scale: float) -> None:
    """B043"""
    logits = make_logits(scale=scale)
    greedy = pick(logits, make_sequence(SamplingParams(temperature=0)))
    for seed in range(5):
        assert (
            pick(logits, make_sequence(SamplingParams(temperature=temperature), seed=seed))
            == greedy
        )


@pytest.mark.parametrize("fields", [{"top_p": 0}, {"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}])
def test_the_narrowest_filters_keep_the_best_token(fields: dict[str, float]) -> None:
    logits = make_logits()
    assert draw_many(logits, SamplingParams(temperature=2, **fields)) == {int(logits.argmax())}


def test_tied_best_tokens_are_resolved_as_greedy_does_under_top_p_zero_and_top_k_one() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [40, 300, 800]] = 7.0
    assert draw_many(logits, SamplingParams(top_p=0)) == {40}
    assert draw_many(logits, SamplingParams(top_k=1)) == {40}


def test_penalties_see_the_scopes_that_clients_expect() -> None:
    """B050"""
    logits = make_logits()
    prompt, output = (11, 12, 11), (12, 13, 13, 700)
    sampler = Sampler(VOCAB, EOS)
    params = SamplingParams(
        temperature=0, repetition_penalty=1.5, presence_penalty=2, frequency_penalty=0.5
    )
    row = logits[0].clone()
    sampler._adjuster(make_sequence(params, prompt, output)).adjust(row)
    expected = RepetitionPenaltyLogitsProcessor(1.5)(
        torch.tensor([prompt + output]), logits.clone()
    )
    for token_id, count in ((12, 1), (13, 2), (700, 1)):
        expected[0, token_id] -= 2 + 0.5 * count
    torch.testing.assert_close(row, expected[0])


def test_repetition_penalty_sees_the_prompt_on_the_first_step_and_presence_does_not() -> None:
    """B050"""
    logits = torch.zeros(1, VOCAB)
    logits[0, 11], logits[0, 20] = 2.0, 1.9
    repetition = SamplingParams(temperature=0, repetition_penalty=1.5)
    presence = SamplingParams(temperature=0, presence_penalty=2)
    assert pick(logits, make_sequence(repetition, prompt=(11, 11))) == 20
    assert pick(logits, make_sequence(presence, prompt=(11, 11))) == 11


def test_penalty_counts_grow_with_the_sequence_and_survive_a_long_history() -> None:
    """B051"""
    params = SamplingParams(temperature=0, frequency_penalty=0.3, repetition_penalty=1.2)
    sampler = Sampler(VOCAB, EOS)
    sequence = make_sequence(params, prompt=tuple(range(100)))
    logits = make_logits()
    for step in range(60):
        (sampled,) = sampler.sample(logits, [sequence])
        fresh = make_sequence(params, tuple(range(100)), tuple(sequence.token_ids[100:]))
        assert sampled.token_id == pick(logits, fresh), step
        sequence.token_ids.append(sampled.token_id)


def test_rows_with_and_without_penalties_do_not_influence_one_another() -> None:
    """B051"""
    logits = make_logits(4)
    kinds = [
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, presence_penalty=2),
        SamplingParams(temperature=0.9, repetition_penalty=1.4),
        SamplingParams(temperature=0.9, top_p=0.8),
    ]
    sequences = [
        make_sequence(params, output=(3, 9), seed=i, name=str(i)) for i, params in enumerate(kinds)
    ]
    together = [s.token_id for s in Sampler(VOCAB, EOS).sample(logits, sequences)]
    alone = [pick(logits[i : i + 1], s) for i, s in enumerate(sequences)]
    assert together == alone
    assert together[0] == int(logits[0].argmax())


def test_the_adjusted_logits_are_not_the_callers() -> None:
    logits = make_logits()
    before = logits.clone()
    pick(logits, make_sequence(SamplingParams(logit_bias={3: 100}, min_tokens=2), output=(3,)))
    assert torch.equal(logits, before)


def test_memory_kept_between_steps_changes_no_answer() -> None:
    """Buffers are reused, also by smaller batches and other kinds of rows."""
    sampler = Sampler(VOCAB, EOS)
    for step in range(12):
        rows = 1 + step * 5 % 7
        logits = make_logits(rows, seed=step)
        sequences = [
            make_sequence(MANY_KINDS[(step + i) % len(MANY_KINDS)], seed=i, name=f"{step}.{i}")
            for i in range(rows)
        ]
        assert sampler.sample(logits, sequences) == Sampler(VOCAB, EOS).sample(logits, sequences)


def test_adjusters_of_finished_sequences_are_forgotten() -> None:
    from core.sequence import SequenceStatus

    sampler = Sampler(VOCAB, EOS)
    for index in range(50):
        sequence = make_sequence(SamplingParams(presence_penalty=1), name=str(index))
        sampler.sample(make_logits(), [sequence])
        sequence.status = SequenceStatus.FINISHED
    assert len(sampler._adjusters) == 1


MANY_KINDS = [
    SamplingParams(temperature=1.1),
    SamplingParams(temperature=0.7, top_p=0.95),
    SamplingParams(temperature=2.0, top_p=0.999),
    SamplingParams(temperature=1.0, top_k=50),
    SamplingParams(temperature=1.5, top_k=30000),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=1.0, min_p=0.001, top_p=0.9, top_k=900),
    SamplingParams(temperature=1.0, logprobs=5),
    SamplingParams(temperature=0, logprobs=0),
    SamplingParams(temperature=1.2, frequency_penalty=1, logprobs=3),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [49152, 50257])
def test_a_row_has_the_same_bits_alone_and_beside_any_neighbours(
    dtype: torch.dtype, width: int
) -> None:
    """B053"""
    rows = 3 * len(MANY_KINDS)
    logits = make_logits(rows, width, scale=2.0).to(dtype)
    sequences = [
        make_sequence(MANY_KINDS[i % len(MANY_KINDS)], output=(8, 8), seed=1234 + i, name=str(i))
        for i in range(rows)
    ]
    together = Sampler(width, EOS).sample(logits, sequences)
    for i in range(0, rows, 3):
        for size in (1, 2, 7):
            part = Sampler(width, EOS).sample(logits[i : i + size], sequences[i : i + size])
            assert part == together[i : i + size]


def test_a_seeded_request_draws_the_same_next_to_unseeded_traffic() -> None:
    """B053"""
    logits = make_logits()
    params = SamplingParams(temperature=1.1)
    drawn = set()
    for run in range(6):
        others = [make_sequence(params, seed=run * 7 + i, name=str(i)) for i in range(run)]
        rows = logits.expand(run + 1, -1)
        drawn.add(
            Sampler(VOCAB, EOS)
            .sample(rows, [*others, make_sequence(params, seed=1234)])[-1]
            .token_id
        )
    assert len(drawn) == 1


def expected_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    scores = logits / params.temperature
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return torch.softmax(scores.double(), -1)[0]


DISTRIBUTIONS = [
    SamplingParams(temperature=1),
    SamplingParams(temperature=0.6),
    SamplingParams(temperature=1, top_k=7),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=1.3, min_p=0.1),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.7, min_p=0.05),
]
WIDE_DISTRIBUTIONS = [SamplingParams(top_p=0.9), SamplingParams(top_k=200), SamplingParams()]


@pytest.mark.parametrize("params", DISTRIBUTIONS)
def test_draws_follow_the_distribution_of_the_library(params: SamplingParams) -> None:
    check_distribution(params, make_logits(1, 64, seed=3, scale=1.5))


@pytest.mark.parametrize("params", WIDE_DISTRIBUTIONS)
def test_draws_from_flat_distributions_follow_the_library(params: SamplingParams) -> None:
    check_distribution(params, make_logits(1, 512, seed=3, scale=0.3))


def check_distribution(params: SamplingParams, logits: torch.Tensor) -> None:
    """Chi-squared over 4,000 draws, cells of at least 5 expected draws; a bound far above the 99.99 % point."""
    count, width = 4000, logits.shape[1]
    expected = expected_distribution(logits, params)
    sequences = [make_sequence(params, seed=i, name=str(i)) for i in range(count)]
    sampled = Sampler(width, ()).sample(logits.expand(count, -1), sequences)
    observed = torch.bincount(torch.tensor([s.token_id for s in sampled]), minlength=width).double()
    assert observed[expected == 0].sum() == 0
    is_big = expected * count >= 5
    statistic = ((observed - expected * count) ** 2 / (expected * count))[is_big].sum().item()
    degrees = int(is_big.sum())
    assert statistic < degrees + 5 * math.sqrt(2 * degrees) + 10


def test_logprobs_are_those_of_the_raw_logits_and_finite() -> None:
    """B059"""
    logits = make_logits()
    logits[0, 500] = -1e30
    params = SamplingParams(
        temperature=0, logprobs=4, min_tokens=5, top_p=0.05, logit_bias={500: 100, 1: -100}
    )
    sequence = make_sequence(params)
    (sampled,) = Sampler(VOCAB, EOS).sample(logits, [sequence])
    table = torch.log_softmax(logits.float(), -1)[0]
    assert sampled.logprobs is not None
    assert sampled.logprobs.token_id == sampled.token_id
    assert sampled.logprobs.logprob == pytest.approx(table[sampled.token_id].item(), abs=1e-5)
    expected = torch.topk(table, 4)
    assert [i for i, _ in sampled.logprobs.top] == expected.indices.tolist()
    assert [v for _, v in sampled.logprobs.top] == pytest.approx(expected.values.tolist(), abs=1e-5)
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = -1e30
    params = SamplingParams(
        temperature=0, logprobs=0, logit_bias={i: -100 for i in range(1000) if i != 7}
    )
    (sampled,) = Sampler(VOCAB, EOS).sample(logits, [make_sequence(params)])
    assert sampled.logprobs is not None
    assert sampled.logprobs.top == ()
    params = SamplingParams(temperature=0, logprobs=20)
    logits = torch.full((1, 8), -1e30)
    logits[0, 0] = 5
    (sampled,) = Sampler(8, ()).sample(logits, [make_sequence(params)])
    assert sampled.logprobs is not None
    assert all(LOWEST_LOGPROB <= value <= 0 for _, value in sampled.logprobs.top)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(top_p=0.9), SamplingParams(logprobs=2)]
)
def test_a_row_with_non_finite_logits_fails_alone(bad: float, params: SamplingParams) -> None:
    """B149"""
    logits = make_logits(3)
    logits[1, 17] = bad
    sequences = [make_sequence(params, seed=i, name=str(i)) for i in range(3)]
    first, second, third = Sampler(VOCAB, EOS).sample(logits, sequences)
    assert second.failure == "non_finite"
    assert first == Sampler(VOCAB, EOS).sample(logits[:1], sequences[:1])[0]
    assert third == Sampler(VOCAB, EOS).sample(logits[2:], sequences[2:])[0]


def test_a_row_whose_every_token_is_masked_fails_alone() -> None:
    logits = make_logits(2, 3)
    masked = SamplingParams(min_tokens=2, stop_token_ids=(1,))
    sequences = [make_sequence(masked, name="a"), make_sequence(SamplingParams(), name="b")]
    first, second = Sampler(3, EOS).sample(logits, sequences)
    assert first.failure == "sampling"
    assert second.failure is None


def test_an_exception_in_a_row_fails_that_row_only() -> None:
    logits = make_logits(3)
    sequences = [
        make_sequence(SamplingParams(temperature=0.5, presence_penalty=1), name=str(i))
        for i in range(3)
    ]
    sequences[1].token_ids[1] = VOCAB + 10_000  # a fault of ours that validation would have caught
    object.__setattr__(sequences[1].params, "repetition_penalty", "broken")
    sampled = Sampler(VOCAB, EOS).sample(logits, sequences)
    assert [s.failure for s in sampled] == [None, "sampling", None]


def test_plain_greedy_is_recognised() -> None:
    sampler = Sampler(VOCAB, EOS)
    bench = SamplingParams(temperature=0, ignore_eos=True, min_tokens=8, max_tokens=8)
    assert sampler.is_plain_greedy(
        [make_sequence(SamplingParams(temperature=0)), make_sequence(bench)]
    )
    for fields in (
        {"temperature": 1.0},
        {"temperature": 0, "logprobs": 0},
        {"temperature": 0, "presence_penalty": 1.0},
        {"temperature": 0, "logit_bias": {4: 1.0}},
        {"temperature": 0, "min_tokens": 2},
    ):
        assert not sampler.is_plain_greedy([make_sequence(SamplingParams(**fields))])


@settings(max_examples=60, deadline=None)
@given(
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.one_of(st.integers(-1, 5), st.integers(0, 2**31 - 1)),
    min_p=st.floats(0, 1),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
    repetition=st.floats(0, 10, exclude_min=True),
    bias=st.dictionaries(st.integers(0, 299), st.floats(-100, 100), max_size=5),
    logprobs=st.one_of(st.none(), st.integers(0, 20)),
    seed=st.integers(0, 2**63 - 1),
    scale=st.sampled_from([0.0, 1e-6, 1.0, 50.0, 1e4]),
)
def test_every_allowed_parameter_gives_a_token_with_finite_logprobs(
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    presence: float,
    frequency: float,
    repetition: float,
    bias: dict[int, float],
    logprobs: int | None,
    seed: int,
    scale: float,
) -> None:
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        presence_penalty=presence,
        frequency_penalty=frequency,
        repetition_penalty=repetition,
        logit_bias=bias,
        logprobs=logprobs,
    )
    logits = make_logits(1, 300, scale=scale).bfloat16()
    sequence = make_sequence(params, prompt=(1, 2, 2), output=(299, 4, 4), seed=seed)
    (sampled,) = Sampler(300, EOS).sample(logits, [sequence])
    assert sampled.failure is None
    assert 0 <= sampled.token_id < 300
    if logprobs is not None:
        assert sampled.logprobs is not None
        assert math.isfinite(sampled.logprobs.logprob)
        assert len(sampled.logprobs.top) == logprobs
