"""From scores to one id per row: the best token, the k best, and seeded draws with or without filters.

Nothing here knows requests or sequences; `sampler.py` is the only caller. Every function treats each row by itself,
with an order of sums that does not depend on how many rows there are, so that a row's result has the same bits alone
and beside any neighbours. Rows have a width that is a multiple of `LANE`, padded with -inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from core.model.nucleus import draw_from_kept

LANE = 256
_GROUPS = 16
_NUM_BEST = 128  # how many of the best are looked at before a row is looked at as a whole
_MASK64 = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Filters:
    """What a row keeps, applied in this order; the neutral values are 0, 1.0 and 0.0."""

    top_k: int
    top_p: float
    min_p: float

    @property
    def is_open(self) -> bool:
        return self.top_k <= 0 and self.top_p >= 1 and self.min_p <= 0


@dataclass(slots=True)
class Scratch:
    """Wide float32 buffers that are kept between steps: fresh memory costs more than the arithmetic done in it."""

    _buffers: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str, rows: int, width: int, device: torch.device) -> Tensor:
        """(rows, width), with whatever was in it before. Valid until the same name is taken again."""
        buffer = self._buffers.get(name)
        if (
            buffer is None
            or buffer.shape[0] < rows
            or buffer.shape[1] != width
            or buffer.device != device
        ):
            buffer = torch.empty(rows, width, dtype=torch.float32, device=device)
            self._buffers[name] = buffer
        return buffer[:rows]


def uniform(seed: int, choice_index: int, position: int) -> float:
    """A number in [0, 1) with 53 bits that is a function of its arguments alone.

    Integer hashing after splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014).
    """
    state = _mix(seed + 0x9E3779B97F4A7C15)
    state = _mix(state + 0x9E3779B97F4A7C15 * (choice_index + 1))
    state = _mix(state + 0x9E3779B97F4A7C15 * (position + 1))
    return (state >> 11) * 2.0**-53


def _mix(value: int) -> int:
    value &= _MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK64
    return value ^ (value >> 31)


def best_token(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Per row the greatest score and the lowest id that has it. NaN counts as greatest.

    scores: (rows, width). Two levels, because the library's argmax over long rows is many times slower than its amax.
    """
    rows, width = scores.shape
    lanes = scores.view(rows, width // LANE, LANE)
    lane_best = lanes.amax(-1)  # (rows, lanes)
    lane = lane_best.argmax(-1)  # (rows,)
    row = torch.arange(rows, device=scores.device)
    inside = lanes[row, lane].argmax(-1)
    return lane_best[row, lane], lane * LANE + inside


def best_tokens(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Per row the k greatest scores, best first, and their ids: `torch.topk`, several times faster on wide rows.

    The k best lie in the k groups with the greatest maxima, so only those are searched. Among equals at the border the
    choice is arbitrary but always the same for the same row.
    """
    rows, width = scores.shape
    num_groups = width // _GROUPS
    if k * 2 > num_groups:
        values, ids = torch.topk(scores, min(k, width), dim=-1)
        return values, ids
    groups = scores.view(rows, _GROUPS, num_groups)  # group g holds ids g, g + num_groups, ...
    chosen = torch.topk(groups.amax(1), k, dim=-1, sorted=False).indices  # (rows, k)
    members = chosen[:, None, :].expand(rows, _GROUPS, k)
    candidates = groups.gather(2, members).reshape(rows, _GROUPS * k)
    values, place = torch.topk(candidates, k, dim=-1)
    ids = torch.div(place, k, rounding_mode="floor") * num_groups + chosen.gather(1, place % k)
    return values, ids


def draw(
    scores: Tensor, filters: Sequence[Filters], numbers: Sequence[float], scratch: Scratch
) -> Tensor:
    """One id per row by inverting a distribution function at `numbers`.

    scores: (rows, width), already divided by the temperature and shifted so that the best is 0. Returns (rows,) int64.
    Rows without filters are inverted in order of ids, rows with filters in order of rank if the best few are enough
    (nearly always), else in order of ids; which way a row goes depends on nothing but the row.
    """
    rows, width = scores.shape
    probabilities = scratch.take("probabilities", rows, width, scores.device)
    torch.softmax(scores, dim=-1, out=probabilities)
    ids = torch.zeros(rows, dtype=torch.int64, device=scores.device)
    open_rows = [row for row, chosen in enumerate(filters) if chosen.is_open]
    rest = [row for row, chosen in enumerate(filters) if not chosen.is_open]
    if open_rows:
        ids[open_rows] = _draw_from_all(
            _rows(probabilities, open_rows), [numbers[row] for row in open_rows]
        )
    near = [row for row in rest if filters[row].top_k <= min(_NUM_BEST, width)]
    if near:
        drawn, is_covered = _draw_from_best(
            _rows(scores, near),
            _rows(probabilities, near),
            [filters[row] for row in near],
            [numbers[row] for row in near],
        )
        ids[near] = drawn
        covered = {row for row, flag in zip(near, is_covered, strict=True) if flag}
        rest = [row for row in rest if row not in covered]
    for row in rest:
        chosen = filters[row]
        ids[row] = draw_from_kept(
            probabilities[row].cpu().numpy(),
            chosen.top_k,
            chosen.top_p,
            chosen.min_p,
            numbers[row],
        )
    return ids


def _rows(values: Tensor, rows: list[int]) -> Tensor:
    return values if len(rows) == values.shape[0] else values[rows]


def _draw_from_all(probabilities: Tensor, numbers: list[float]) -> Tensor:
    """In order of ids, two levels: first the lane, then the token in it. probabilities: (rows, width)."""
    rows, width = probabilities.shape
    device = probabilities.device
    lanes = probabilities.view(rows, width // LANE, LANE)
    lane_ends = lanes.sum(-1).double().cumsum(-1)  # (rows, lanes)
    number = torch.tensor(numbers, dtype=torch.float64, device=device)[:, None]
    lane, rest = _invert(lane_ends, number * lane_ends[:, -1:])
    row = torch.arange(rows, device=device)
    inside, _ = _invert(lanes[row, lane].double().cumsum(-1), rest)
    return lane * LANE + inside


def _invert(ends: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """The first place whose end lies above the target, and how far the target reaches into it.

    ends: (rows, places), not falling. Rounding may put the target at the very end: then the last place with any mass.
    """
    last = torch.searchsorted(ends, ends[:, -1:].contiguous())  # first place that reaches the total
    place = torch.minimum(torch.searchsorted(ends, target, right=True), last)
    start = torch.where(place > 0, ends.gather(1, (place - 1).clamp_min(0)), 0.0)
    return place[:, 0], target - start


def _draw_from_best(
    scores: Tensor, probabilities: Tensor, filters: list[Filters], numbers: list[float]
) -> tuple[Tensor, list[bool]]:
    """Draws among the best of each row; a row whose filters reach further is reported as not covered."""
    device, width = scores.device, scores.shape[1]
    values, ids = best_tokens(scores, min(_NUM_BEST, width))
    num_best = values.shape[1]
    mass = probabilities.gather(1, ids).double()  # (rows, num_best)
    limits = torch.tensor(
        [
            (
                f.top_k if f.top_k > 0 else math.inf,
                f.top_p if f.top_p < 1 else math.inf,
                math.log(f.min_p) if f.min_p > 0 else -math.inf,
                number,
            )
            for f, number in zip(filters, numbers, strict=True)
        ],
        dtype=torch.float64,
        device=device,
    )
    top_k, top_p, floor, number = (limits[:, column : column + 1] for column in range(4))
    is_kept = torch.arange(num_best, device=device) < top_k
    mass = mass * is_kept
    ends = mass.cumsum(-1)
    total = torch.where(top_k <= num_best, ends[:, -1:], 1.0)
    is_kept &= ends - mass < top_p * total
    is_kept &= values.double() >= floor
    is_kept &= mass > 0
    is_kept[:, 0] = True
    num_kept = is_kept.sum(-1, keepdim=True)  # what is kept is always a beginning
    end = ends.gather(1, num_kept - 1)
    place = torch.searchsorted(ends, number * end, right=True)
    place = torch.minimum(place, num_kept - 1)
    is_covered = (num_kept < num_best) | (top_k <= num_best) | (num_best == width)
    return ids.gather(1, place)[:, 0], is_covered[:, 0].tolist()
