"""What this machine can do at most, measured with plain torch: reading memory, and multiplying 16-bit and int8 numbers.

Used by `step.py`, in the same run as what is compared with it: a machine's speed drifts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

READ_BYTES = 512 * 2**20  # far beyond any cache
# (rows, inputs, outputs): the best of them counts. Three of a small model's layers, and a square one.
PRODUCTS = ((512, 576, 1536), (1024, 576, 3072), (1024, 1536, 576), (2048, 2048, 2048))
MIN_TIME_S = 0.25


@dataclass(frozen=True, slots=True)
class Limits:
    """Best of several tries with all compute threads. A processor without instructions for bfloat16 multiplies in
    float32, which is its limit then; int8 is None where torch's product is slower than that."""

    read_gb_per_s: float
    bf16_gflop_per_s: float
    int8_gflop_per_s: float | None


def measure_limits() -> Limits:
    dtypes = (torch.bfloat16, torch.float32)
    of_16_bits = max(gflop_per_s(dtype, *shape) for dtype in dtypes for shape in PRODUCTS)
    of_int8 = int8_gflop_per_s(*PRODUCTS[-1])
    is_limit = of_int8 is not None and of_int8 > of_16_bits
    return Limits(read_gb_per_s(), of_16_bits, of_int8 if is_limit else None)


def best_of(a: Limits, b: Limits) -> Limits:
    """Of two measurements in one run: a limit is the best that was seen."""
    return Limits(
        max(a.read_gb_per_s, b.read_gb_per_s),
        max(a.bf16_gflop_per_s, b.bf16_gflop_per_s),
        max(a.int8_gflop_per_s or 0.0, b.int8_gflop_per_s or 0.0) or None,
    )


def read_gb_per_s() -> float:
    """A sum over 512 MiB of float32."""
    numbers = torch.ones(READ_BYTES // 4)
    return READ_BYTES / best_s(numbers.sum) / 1e9


def gflop_per_s(dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> float:
    """oneDNN's product with weights packed once, where torch has it."""
    x = torch.randn(rows, inputs).to(dtype)
    weight = torch.randn(outputs, inputs).to(dtype)
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        product = torch.ops.mkldnn._linear_pointwise
        seconds = best_s(lambda: product(x, packed, None, "none", [], ""))
    except (AttributeError, RuntimeError):
        seconds = best_s(lambda: torch.nn.functional.linear(x, weight))
    return 2 * rows * inputs * outputs / seconds / 1e9


def int8_gflop_per_s(rows: int, inputs: int, outputs: int) -> float | None:
    x = torch.randint(-127, 127, (rows, inputs), dtype=torch.int8)
    weight = torch.randint(-127, 127, (inputs, outputs), dtype=torch.int8)
    try:
        seconds = best_s(lambda: torch._int_mm(x, weight))
    except (AttributeError, RuntimeError):
        return None
    return 2 * rows * inputs * outputs / seconds / 1e9


def best_s(call: Callable[[], object], tries: int = 3) -> float:
    """Seconds per call in the best of `tries` rounds of at least `MIN_TIME_S` together."""
    call()
    start_s = time.perf_counter()
    call()
    once_s = time.perf_counter() - start_s
    if once_s > 4 * MIN_TIME_S:  # so slow that it is no limit of anything
        return once_s
    calls = max(1, int(MIN_TIME_S / tries / max(once_s, 1e-7)))
    rounds: list[float] = []
    for _ in range(tries):
        start_s = time.perf_counter()
        for _ in range(calls):
            call()
        rounds.append((time.perf_counter() - start_s) / calls)
    return min(rounds)
