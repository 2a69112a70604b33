"""`PinnedPrefixes`: beginnings of prompts whose blocks are never evicted, within a bound.

A pin holds a reference to each of its blocks, as a sequence would. Knows blocks and digests; what computes a prefix in
the first place is an ordinary sequence. Used by `Scheduler` and `Engine`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from core.block_pool import BlockPool
from core.errors import PinnedFull, PrefixTooShort
from core.prefixes.cache import PrefixCache
from core.sampling_params import SamplingParams
from core.sequence import Sequence

MAX_SHARE = 0.5  # of the pool


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """`prefix_id` is a function of the tokens; `num_tokens` are those in full blocks."""

    prefix_id: str
    label: str
    num_tokens: int
    block_ids: list[int] = field(repr=False)


class PinnedPrefixes:
    """Never holds more than half of the pool, nor so much that a lone request of full context would not fit: whatever
    is pinned, every request that is accepted can be computed."""

    def __init__(
        self, pool: BlockPool, cache: PrefixCache, block_size: int, max_model_len: int
    ) -> None:
        self._pool, self._cache, self._block_size = pool, cache, block_size
        room = pool.num_blocks - -(-max_model_len // block_size)
        self.max_blocks = max(0, min(room, int(pool.num_blocks * MAX_SHARE)))
        self._pins: dict[str, PinnedPrefix] = {}

    def __iter__(self) -> Iterator[PinnedPrefix]:
        return iter(self._pins.values())

    @property
    def num_blocks(self) -> int:
        """Blocks pinned; one that several prefixes share counts once."""
        return len({block_id for pin in self for block_id in pin.block_ids})

    def check_room(self, token_ids: list[int]) -> None:
        """Raises `PinnedFull` or `PrefixTooShort` if these cannot be pinned, before anything is computed for them."""
        self._check(len(token_ids) // self._block_size, self._find(token_ids))

    def pin(self, token_ids: list[int], label: str) -> PinnedPrefix | None:
        """Pins the full blocks of a prompt; None if not all of them are cached. Pinning again changes the label only.

        Raises `PinnedFull` and `PrefixTooShort`.
        """
        found = self._find(token_ids)
        num_blocks = len(token_ids) // self._block_size
        if len(found) < num_blocks:
            return None
        self._check(num_blocks, found)
        probe = self._probe(token_ids)
        prefix_id = f"prefix-{self._cache.digests(probe)[-1].hex()[:16]}"
        pinned = self._pins.get(prefix_id)
        if pinned is None:
            self._pool.take(found)
        else:
            found = pinned.block_ids
        pin = PinnedPrefix(prefix_id, label, num_blocks * self._block_size, found)
        self._pins[prefix_id] = pin
        return pin

    def unpin(self, prefix_id: str) -> PinnedPrefix | None:
        """Its blocks are as evictable as any; None if nothing of that id is pinned."""
        pin = self._pins.pop(prefix_id, None)
        if pin is not None:
            self._pool.release(pin.block_ids)
        return pin

    def clear(self) -> int:
        """After the pool was reset. Returns how many were lost."""
        count = len(self._pins)
        self._pins.clear()
        return count

    def tables(self) -> list[list[int]]:
        return [pin.block_ids for pin in self]

    def check_invariants(self) -> None:
        assert self.num_blocks <= self.max_blocks

    def _find(self, token_ids: list[int]) -> list[int]:
        return self._cache.find(self._probe(token_ids))

    def _probe(self, token_ids: list[int]) -> Sequence:
        """A sequence that may find all full blocks: a token stands behind them."""
        return Sequence("pin", [*token_ids, 0], SamplingParams())

    def _check(self, num_blocks: int, found: list[int]) -> None:
        if not num_blocks:
            raise PrefixTooShort(
                f"A prefix is pinned in blocks of {self._block_size} tokens; this one has fewer.",
                param="prompt",
            )
        held = {block_id for pin in self for block_id in pin.block_ids}
        more = num_blocks - sum(block_id in held for block_id in found)
        if len(held) + more > self.max_blocks:
            size = self._block_size
            raise PinnedFull(
                f"{self.max_blocks * size} tokens can be pinned in this pool, {len(held) * size} are; "
                f"this prefix needs {more * size} more. Unpin others, raise kv_cache.num_blocks or "
                "lower model.max_model_len.",
                param="prompt",
            )
