"""`find_hits`: what of a sequence need not be computed, because somebody computed it before. Used by `Scheduler`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from core.prefixes.cache import PrefixCache
from core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixHits:
    """Whole blocks that the sequence can share, and behind them `num_copied` tokens with which block `source` begins.

    `is_growing`: the step that is being planned computes clearly more of what could be copied, so that it is worth
    the wait of one step.
    """

    block_ids: list[int] = field(default_factory=list)
    source: int = -1
    num_copied: int = 0
    is_growing: bool = False

    @property
    def sources(self) -> list[int]:
        """The block to copy from, if there is one."""
        return [self.source] if self.num_copied else []

    def without_copy(self) -> PrefixHits:
        return replace(self, source=-1, num_copied=0)


def find_hits(
    cache: PrefixCache,
    sequence: Sequence,
    rows: Iterable[tuple[Sequence, int]],
    num_earlier: int,
) -> PrefixHits:
    """`rows` is the plan of this step so far, of which the first `num_earlier` ran before it. Whole blocks may be among
    those that it computes: they are written before anyone reads them. What is copied must have been computed before: by
    no row that starts in this step, since what it counts as computed may be what others compute now, or a copy."""
    block_ids = cache.find(sequence)
    size = cache.block_size
    start = len(block_ids) * size
    wanted = sequence.token_ids[start : min(start + size, sequence.num_tokens - 1)]
    if not wanted:
        return PrefixHits(block_ids)
    source, num_ready = cache.find_beginning(sequence, len(block_ids), wanted)
    num_coming = num_ready
    for place, (other, count) in enumerate(rows):
        num_computed = other.num_computed_tokens - start
        if num_computed + count <= num_ready or other.token_ids[start] != wanted[0]:
            continue
        if block_ids and other.block_ids[len(block_ids) - 1] != block_ids[-1]:
            continue
        num_common = _num_common(other.token_ids[start : start + size], wanted)
        num_coming = max(num_coming, min(num_common, num_computed + count))
        if place < num_earlier and min(num_common, num_computed) > num_ready:
            source, num_ready = other.block_ids[len(block_ids)], min(num_common, num_computed)
    if num_ready < cache.min_beginning:
        source, num_ready = -1, 0
    is_growing = num_coming - num_ready >= cache.min_beginning
    return PrefixHits(block_ids, source, num_ready, is_growing)


def _num_common(a: list[int], b: list[int]) -> int:
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return place
    return min(len(a), len(b))
