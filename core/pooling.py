"""`MeanPool`: a sequence's hidden states, summed as steps compute them, into one vector that stands for its text.

Tokens are added in order of position and one after the other in float64, so that neither chunks nor neighbours change
a bit of the sum. No torch. Filled by the runner, read by `update.py`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class MeanPool:
    """The mean over all tokens of a prompt, scaled to length 1."""

    __slots__ = ("_count", "_total")

    def __init__(self) -> None:
        self._total: NDArray[np.float64] | None = None
        self._count = 0

    def add(self, position: int, rows: NDArray[np.float64]) -> None:
        """`rows` (num_tokens, hidden) are the states from `position` on; position 0 begins anew, after a preemption."""
        if position == 0:
            self._total, self._count = None, 0
        assert position == self._count, "a pooled sequence must compute all of its tokens"
        if self._total is not None:
            rows = np.concatenate([self._total[None], rows])
        self._total = np.add.reduce(rows, axis=0)  # row by row
        self._count = position + len(rows) - (position > 0)

    def embedding(self) -> bytes | None:
        """float32 values, little-endian; None where they are not finite."""
        assert self._total is not None
        norm = float(np.sqrt(np.square(self._total).sum()))
        if not 0 < norm < np.inf:
            return None
        return (self._total / norm).astype("<f4").tobytes()
