"""Filters that reach far into a distribution, exactly and without sorting it. For one row at a time.

The slow path of `draw.py`, its only caller: a flat distribution, or a `top_k` in the hundreds. numpy only.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Probabilities = NDArray[np.float32]  # (width,), not negative


def draw_from_kept(
    probabilities: Probabilities, top_k: int, top_p: float, min_p: float, number: float
) -> int:
    """The id at which the distribution function of what the filters keep, in order of ids, passes `number`."""
    ends = np.cumsum(keep(probabilities, top_k, top_p, min_p), dtype=np.float64)
    place = int(np.searchsorted(ends, number * ends[-1], side="right"))
    return min(place, int(np.searchsorted(ends, ends[-1])))


def keep(probabilities: Probabilities, top_k: int, top_p: float, min_p: float) -> Probabilities:
    """The probabilities with zeros where top-k, top-p or min-p, in this order, take a token away."""
    kept = probabilities
    if 0 < top_k < len(kept):
        kept = _keep_best(kept, np.ones_like(kept), top_k)
    if top_p < 1:
        kept = _keep_best(kept, kept, top_p * float(np.cumsum(kept, dtype=np.float64)[-1]))
    if min_p > 0:
        kept = np.where(kept >= min_p * kept.max(), kept, np.float32(0))
    return kept


def _keep_best(probabilities: Probabilities, amounts: Probabilities, limit: float) -> Probabilities:
    """Keeps the best tokens until their amounts reach the limit; among equals the lower id is better.

    The upper bits of a positive float order it, so they are the buckets of a histogram; only the bucket in which the
    limit is reached is sorted.
    """
    buckets = probabilities.view(np.int32) >> 16
    per_bucket = np.bincount(buckets, weights=amounts)
    reached = np.cumsum(per_bucket[::-1])
    steps = int(np.searchsorted(reached, limit))
    if steps == len(reached):
        return probabilities  # rounding: all of it is needed
    bucket = len(per_bucket) - 1 - steps
    before = reached[steps - 1] if steps else 0.0
    inside = np.flatnonzero(buckets == bucket)
    ranked = inside[np.argsort(-probabilities[inside], kind="stable")]
    ends = before + np.cumsum(amounts[ranked], dtype=np.float64)
    needed = ranked[: int(np.searchsorted(ends, limit)) + 1]
    kept: Probabilities = np.where(buckets > bucket, probabilities, np.float32(0))
    kept[needed] = probabilities[needed]
    return kept
