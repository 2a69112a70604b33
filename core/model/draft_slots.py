"""`DraftSlots`: of how many tokens in each block a draft model's own keys and values are there.

The served model computes every token, a draft model only those that it drafts behind. What it has not seen, it computes
when it is asked to draft: so nothing is spent on sequences that nobody drafts for. Counts and ids only. Used by
`ModelDrafter`.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from core.batch import Batch
from core.sequence import Sequence


class DraftSlots:
    """Counts from the beginning of each block: in a block nothing behind a gap is of use."""

    __slots__ = ("_block_size", "_counts")

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        self._counts = np.zeros(num_blocks, dtype=np.int32)

    def num_known(self, sequence: Sequence) -> int:
        """Tokens of the sequence, from its first on, without a gap; the last one is never among them, since what
        stands in its place may be a guess that was wrong."""
        counts = self._counts[sequence.block_ids]
        is_open = counts < self._block_size
        place = int(is_open.argmax()) if is_open.any() else len(counts)
        known = place * self._block_size + (int(counts[place]) if place < len(counts) else 0)
        return min(known, sequence.num_tokens - 1)

    def wrote(self, sequence: Sequence, start: int, end: int) -> None:
        """The draft model has computed these positions, and all before them."""
        for place in range(start // self._block_size, -(-end // self._block_size)):
            count = min(self._block_size, end - place * self._block_size)
            self._counts[sequence.block_ids[place]] = count

    def follow(self, batch: Batch) -> None:
        """The served model computes a step: what it writes is new, but for the guesses, which the draft model has
        computed in the same places, all but the last of each draft."""
        for source, target in batch.copies:
            self._counts[target] = self._counts[source]
        for sequence, count, draft in batch.rows():
            start, end = sequence.num_computed_tokens, sequence.num_computed_tokens + count
            if draft:
                start = end - 1
            first = start // self._block_size
            block_ids = sequence.block_ids[first : -(-end // self._block_size)]
            kept = min(int(self._counts[block_ids[0]]), start - first * self._block_size)
            self._counts[block_ids] = 0
            self._counts[block_ids[0]] = kept

    def forget(self, block_ids: Iterable[int] | None = None) -> None:
        """Nothing is known of these blocks, or of any."""
        if block_ids is None:
            self._counts[:] = 0
        else:
            self._counts[list(block_ids)] = 0
