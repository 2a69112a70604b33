"""Drawing one id per row: kept as the library keeps, drawn where the number lies, whichever way a row goes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from core.model.draw import Filters, Scratch, best_token, best_tokens, draw, uniform
from core.model.nucleus import draw_from_kept, keep
from core.sampling_params import SamplingParams


def make_logits(
    rows: int = 1, width: int = 1000, seed: int = 0, scale: float = 3.0
) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def expected_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    scores = logits / params.temperature
    if params.top_k > 0:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return torch.softmax(scores.double(), -1)[0]


@pytest.mark.parametrize("k", [1, 20, 128, 700, 1024])
def test_best_tokens_gives_what_topk_gives(k: int) -> None:
    scores = make_logits(3, 49152)
    values, ids = best_tokens(scores, k)
    expected = torch.topk(scores, k)
    assert torch.equal(values, expected.values)
    assert torch.equal(ids, expected.indices)


def test_choices_positions_and_seeds_have_numbers_of_their_own() -> None:
    numbers = {uniform(s, c, p) for s in range(20) for c in range(20) for p in range(20)}
    assert len(numbers) == 8000
    assert all(0 <= number < 1 for number in numbers)
    assert abs(sum(numbers) / 8000 - 0.5) < 0.02


@given(st.integers(0, 2**63 - 1), st.integers(0, 127), st.integers(0, 2**31))
def test_a_random_number_is_a_function_of_its_arguments(
    seed: int, choice: int, position: int
) -> None:
    number = uniform(seed, choice, position)
    assert 0 <= number < 1
    assert number == uniform(seed, choice, position)


FILTERS = [
    SamplingParams(top_k=40),
    SamplingParams(top_k=128),
    SamplingParams(top_k=500, top_p=0.9),
    SamplingParams(top_k=20000),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=0.99),
    SamplingParams(min_p=0.01),
    SamplingParams(min_p=0.3, top_p=0.9),
    SamplingParams(temperature=1.9, top_p=0.97),
    SamplingParams(temperature=1.9, top_p=0.9, top_k=700, min_p=0.05),
]


@pytest.mark.parametrize("width", [1000, 49152])
@pytest.mark.parametrize("params", FILTERS)
def test_tokens_are_kept_as_the_library_keeps_them(params: SamplingParams, width: int) -> None:
    logits = make_logits(1, width, scale=1.5)
    expected = expected_distribution(logits, params) > 0
    probabilities = torch.softmax(logits / params.temperature, -1)[0].numpy()
    kept = torch.from_numpy(keep(probabilities, params.top_k, params.top_p, params.min_p)) > 0
    allowed = 1 + int(expected.sum()) // 10_000  # sums in another order may move the border
    assert int((kept != expected).sum()) <= allowed


@pytest.mark.parametrize("width", [1000, 49152])
@pytest.mark.parametrize("params", FILTERS)
def test_draws_invert_the_distribution_of_what_is_kept(params: SamplingParams, width: int) -> None:
    """Whichever way a row goes, by rank or by id, each number gives the token in whose share it lies."""
    logits = make_logits(1, width, scale=1.5)
    expected = expected_distribution(logits, params)
    numbers = [0.0, 0.25, 0.5, 0.75, 0.999]
    scaled = (logits - logits.max()) / params.temperature
    scaled = torch.nn.functional.pad(scaled, (0, -width % 256), value=-torch.inf)
    filters = [Filters(params.top_k, params.top_p, params.min_p)] * len(numbers)
    drawn = draw(scaled.expand(len(numbers), -1).contiguous(), filters, numbers, Scratch()).tolist()
    by_rank = torch.sort(logits[0], descending=True, stable=True).indices.tolist()
    order = by_rank if drawn[0] == by_rank[0] else list(range(width))
    ends = torch.cumsum(expected[order], 0)
    for number, token_id in zip(numbers, drawn, strict=True):
        place = order.index(token_id)
        low = ends[place - 1].item() if place else 0.0
        assert low - 1e-5 <= number <= ends[place].item() + 1e-5


def test_equal_tokens_at_the_border_are_kept_up_to_the_limit_lower_ids_first() -> None:
    probabilities = torch.tensor([0.1, 0.2, 0.1, 0.2, 0.1, 0.1, 0.2]).numpy()
    assert keep(probabilities, 2, 1.0, 0.0).nonzero()[0].tolist() == [1, 3]
    assert keep(probabilities, 4, 1.0, 0.0).nonzero()[0].tolist() == [0, 1, 3, 6]
    assert keep(probabilities, 0, 0.65, 0.0).nonzero()[0].tolist() == [0, 1, 3, 6]
    assert keep(probabilities, 0, 1.0, 0.6).nonzero()[0].tolist() == [1, 3, 6]
    assert draw_from_kept(probabilities, 0, 0.65, 0.0, 1 - 2.0**-53) == 6


@pytest.mark.parametrize("number", [0.0, 0.3, 1 - 2.0**-53])
def test_an_open_draw_inverts_the_distribution_in_order_of_ids(number: float) -> None:
    scores = torch.full((1, 512), -torch.inf)
    scores[0, [3, 4, 300]] = 0.0
    expected = {0.0: 3, 0.3: 3, 1 - 2.0**-53: 300}[number]
    assert draw(scores, [Filters(0, 1.0, 0.0)], [number], Scratch()).tolist() == [expected]


def test_best_token_reports_what_is_not_finite() -> None:
    scores = torch.zeros(3, 256)
    scores[0, 9], scores[1, 9], scores[2] = math.nan, math.inf, -math.inf
    best, _ = best_token(scores)
    assert not torch.isfinite(best).any()
