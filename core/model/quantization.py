"""Weights and activations as small whole numbers, defined in plain torch: what the C kernels must give, bit by bit.

A weight matrix keeps one float scale per output. In int8 its integers are -127 to 127. In int4 the integers of 32
inputs of one output are `half * step + minimum`, with half from 0 to 15, and with step (1 to 17) and minimum whole
numbers themselves: a matrix of 4.5 bits a weight whose products are those of int8, exact and so independent of their
order. (Scales under a scale are the idea of llama.cpp's K-quants.) Activations are in block floating point, found when
they are used: int8 with one scale per row, below which every 64 inputs have a power of two of their own, so that a few
large ones cost the others nothing; sums of products of such numbers are exact too. Knows matrices, no models. Used by
`linear.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from core.pace import give_way

Quantization = Literal["none", "int8", "int4"]

GROUP_INPUTS = 32  # of an output, with one step and one minimum
SHIFT_INPUTS = 64  # of a row of activations, with one exponent
MAX_EXPONENT = 8
MAX_STEP = 17  # 15 steps of it span 255 of the 255 integers
_ROWS_AT_ONCE = 128  # of a matrix: temporaries stay in the processor's cache


@dataclass(frozen=True, slots=True)
class Int8Weight:
    values: Tensor  # (outputs, inputs) int8
    scale: Tensor  # (outputs,) float32


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """`inputs` is padded to whole groups with halves, steps and minima that give zero."""

    halves: Tensor  # (outputs, inputs) uint8, 0 to 15
    step: Tensor  # (outputs, inputs / 32) uint8, 1 to 17
    minimum: Tensor  # (outputs, inputs / 32) int8
    scale: Tensor  # (outputs,) float32

    def as_int8(self, inputs: int) -> Int8Weight:
        """The same numbers, a byte each."""
        outputs = self.halves.shape[0]
        grouped = self.halves.view(outputs, -1, GROUP_INPUTS).to(torch.int16)
        values = grouped * self.step[..., None] + self.minimum[..., None]
        return Int8Weight(
            values.to(torch.int8).view(outputs, -1)[:, :inputs].contiguous(), self.scale
        )


def quantize_int8(weight: Tensor) -> Int8Weight:
    """weight: (outputs, inputs), any float dtype."""
    values = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], device=weight.device)
    for start in range(0, weight.shape[0], _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        integers, scale[rows] = _to_integers(weight[rows].float())
        values[rows] = integers.to(torch.int8)
        give_way()
    return Int8Weight(values, scale)


def quantize_int4(weight: Tensor) -> Int4Weight:
    """weight: (outputs, inputs), any float dtype. Steps and minima are those of the least squared error among a few."""
    outputs, inputs = weight.shape
    groups = -(-inputs // GROUP_INPUTS)
    halves = torch.empty(outputs, groups * GROUP_INPUTS, dtype=torch.uint8, device=weight.device)
    step = torch.empty(outputs, groups, dtype=torch.uint8, device=weight.device)
    minimum = torch.empty(outputs, groups, dtype=torch.int8, device=weight.device)
    scale = torch.empty(outputs, device=weight.device)
    for start in range(0, outputs, _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        part = weight[rows].float()
        part = torch.nn.functional.pad(part, (0, groups * GROUP_INPUTS - inputs))
        scale[rows] = part.abs().amax(dim=1) / 127
        target = part / scale[rows].clamp(min=1e-30)[:, None]
        found = _fit_groups(target.view(-1, groups, GROUP_INPUTS))
        halves[rows] = found[0].flatten(1).to(torch.uint8)
        step[rows], minimum[rows] = found[1].to(torch.uint8), found[2].to(torch.int8)
        give_way()
    return Int4Weight(halves, step, minimum, scale)


def _fit_groups(target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """target: (rows, groups, 32), -127 to 127. Returns (halves, step, minimum), as floats.

    Steps around a fifteenth of the range are tried, each with the range in the middle of its 16 places. The one that
    leaves the least once the mean of what it leaves went into the minimum is taken.
    """
    low, high = target.amin(dim=2), target.amax(dim=2)
    first = ((high - low) / 15).round_()
    best_step, best_minimum, least = first, first, torch.full_like(first, torch.inf)
    for change in (0, -1, 1):
        step = (first + change).clamp_(1, MAX_STEP)
        start = (low + high - 15 * step) / 2
        left = target - start[..., None]
        halves = torch.mul(left, step.reciprocal()[..., None]).round_().clamp_(0, 15)
        left.addcmul_(halves, step[..., None], value=-1)
        mean = left.mean(dim=2)
        error = left.square_().mean(dim=2) - mean * mean
        is_better = error < least
        least = torch.where(is_better, error, least)
        best_step = torch.where(is_better, step, best_step)
        best_minimum = torch.where(is_better, start + mean, best_minimum)
    minimum = best_minimum.round_().clamp_(-127, 127)
    top = torch.div(127 - minimum, best_step, rounding_mode="floor").clamp_(max=15)
    halves = ((target - minimum[..., None]) / best_step[..., None]).round_().clamp_(min=0)
    return torch.minimum(halves, top[..., None]), best_step, minimum


def _to_integers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of float32 as whole numbers, still float32, and their scales; NaN as the scale where a row is not finite."""
    most = x.abs().amax(dim=1)
    is_finite = torch.isfinite(most)
    inverse = torch.where(is_finite & (most > 0), 127.0 / most, 0.0)
    scale = torch.where(is_finite, most / 127.0, torch.nan)
    return (x.nan_to_num(0.0, 0.0, 0.0) * inverse[:, None]).round(), scale


def to_block_floats(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """x: (rows, inputs) float32, which is nearly `integers * 2^shift * scale`.

    Returns integers (rows, groups, 64), -127 to 127 in int8 and zeros behind the last input; shifts (rows, groups)
    int32, from 0 on and so small that every sum of products with int8 fits 32 bits; scales (rows,) float32: NaN where
    a row is not finite.
    """
    inputs = x.shape[1]
    top = next(e for e in range(MAX_EXPONENT, -1, -1) if e == 0 or 127 * 127 * inputs << e < 2**31)
    missing = -inputs % SHIFT_INPUTS
    grouped = torch.nn.functional.pad(x, (0, missing)).view(x.shape[0], -1, SHIFT_INPUTS)
    largest = grouped.abs().amax(dim=2)
    most = largest.amax(dim=1)
    is_finite = torch.isfinite(most)
    # a division: `127.0 / most` would be a product with the reciprocal, and ties would fall otherwise than in C
    inverse = torch.full_like(most, 127.0) / most
    inverse = torch.where(is_finite & (most > 1e-30), inverse, 0.0)
    scale = torch.where(is_finite, most / 127.0 / 2**top, torch.nan)
    # bits of floats, subtracted, are in units of the exponent the logarithm of the quotient, rounded down
    below = (most.view(torch.int32)[:, None] - largest.view(torch.int32)) >> 23
    exponent = below.clamp(0, top)
    factor = inverse[:, None] * (1 << exponent)
    integers = (grouped.nan_to_num(0.0, 0.0, 0.0) * factor[:, :, None]).round()
    return integers.to(torch.int8), top - exponent, scale


def multiply(x: Tensor, weight: Int8Weight) -> Tensor:
    """x: (rows, inputs) -> float32 (rows, outputs): integers times integers, then both scales."""
    integers, shifts, row_scale = to_block_floats(x.float())
    inputs, outputs = x.shape[1], weight.values.shape[0]
    sums = torch.zeros(x.shape[0], outputs, dtype=torch.int32, device=x.device)
    for g, start in enumerate(range(0, inputs, SHIFT_INPUTS)):
        part = weight.values[:, start : start + SHIFT_INPUTS].T
        sums += torch._int_mm(integers[:, g, : part.shape[0]], part) << shifts[:, g, None]
    return sums.float() * row_scale[:, None] * weight.scale
