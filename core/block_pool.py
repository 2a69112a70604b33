"""`BlockPool`: KV blocks of fixed size, their reference counts, and the order in which free ones are handed out.

The only code that changes a reference count. Knows nothing of sequences, tokens or tensors: a block is a number.
Used by `Scheduler` (allocate, take, release) and `PrefixCache` (keep). Step thread only.

A block is *used* (somebody holds it), *cached* (nobody holds it, but its contents can be found and taken again) or
*free*. The design follows vLLM's block pool: https://github.com/vllm-project/vllm.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator


class BlockPool:
    """Hands out blocks: recycled ones without contents first (the last released first, so that neighbours come back
    as neighbours), then blocks never used (lowest first, so that untouched memory stays untouched), and only then
    cached ones, the least recently released first.

    `on_reclaim(block_id)` is told before a cached block gets a new owner. Every operation is O(1) per block.
    """

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.on_reclaim: Callable[[int], None] | None = None
        self.reset()

    def reset(self) -> None:
        """Everything is free and nothing has contents. The holders must have dropped their tables."""
        self._reference_counts = [0] * self.num_blocks
        self._has_contents = bytearray(self.num_blocks)
        self._recycled: list[int] = []
        self._next_unused = 0
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._recycled) + self.num_blocks - self._next_unused

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` can hand out: free and cached ones."""
        return self.num_free + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def num_idle(self, block_ids: Iterable[int]) -> int:
        """How many of these nobody holds: taking them makes so many fewer available."""
        return sum(self._reference_counts[block_id] == 0 for block_id in block_ids)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each. Asking for more than `num_available` is our own bug."""
        assert count <= self.num_available, "allocated more blocks than are available"
        return [self._allocate_one() for _ in range(count)]

    def take(self, block_ids: Iterable[int]) -> None:
        """One more reference to blocks that are used or cached."""
        for block_id in block_ids:
            if self._reference_counts[block_id] == 0:
                assert block_id in self._cached, "took a block whose contents are gone"
                del self._cached[block_id]
            self._reference_counts[block_id] += 1

    def release(self, block_ids: list[int]) -> None:
        """Gives back one reference to each and empties the list, so that a second release does nothing.

        Tail first: of one sequence the last block is reclaimed first, and a prefix lives longest.
        """
        while block_ids:
            block_id = block_ids.pop()
            assert self._reference_counts[block_id] > 0, "released a block that nobody holds"
            self._reference_counts[block_id] -= 1
            if self._reference_counts[block_id] == 0:
                if self._has_contents[block_id]:
                    self._cached[block_id] = None
                else:
                    self._recycled.append(block_id)

    def keep(self, block_id: int) -> None:
        """The contents of this used block can be found from now on: when released, it becomes cached, not free."""
        assert self._reference_counts[block_id] > 0, "kept a block that nobody holds"
        self._has_contents[block_id] = True

    def latest(self) -> Iterator[int]:
        """Blocks with contents: the used ones, then the cached ones, the last released first."""
        for block_id, count in enumerate(self._reference_counts[: self._next_unused]):
            if count and self._has_contents[block_id]:
                yield block_id
        yield from reversed(self._cached)

    def check_invariants(self, tables: Iterable[Iterable[int]]) -> None:
        """Asserts that counts equal the number of tables that hold each block, and that the three states add up."""
        held = Counter(block_id for table in tables for block_id in table)
        for block_id, count in enumerate(self._reference_counts):
            assert count == held[block_id], (
                f"block {block_id} has count {count}, held by {held[block_id]}"
            )
        recycled = set(self._recycled)
        assert len(recycled) == len(self._recycled), "a block is free twice"
        unused = set(range(self._next_unused, self.num_blocks))
        used = {block_id for block_id, count in held.items() if count}
        states = [recycled, unused, set(self._cached), used]
        assert sum(map(len, states)) == len(set().union(*states)) == self.num_blocks
        assert self.num_free + self.num_used + self.num_cached == self.num_blocks
        assert all(self._has_contents[block_id] for block_id in self._cached)
        assert not any(self._has_contents[block_id] for block_id in recycled | unused)

    def _allocate_one(self) -> int:
        if self._recycled:
            block_id = self._recycled.pop()
        elif self._next_unused < self.num_blocks:
            block_id = self._next_unused
            self._next_unused += 1
        else:
            block_id, _ = self._cached.popitem(last=False)
            self._has_contents[block_id] = False
            if self.on_reclaim is not None:
                self.on_reclaim(block_id)
        self._reference_counts[block_id] = 1
        return block_id
