"""`LongestPrefixQueue`: of those that wait, the next is the one with the most cached blocks (`engine.order`).

The order is SGLang's "longest prefix match" (https://arxiv.org/abs/2312.07104), kept up to date by what the prefix
cache learns and forgets instead of by comparing all that wait in every step. Knows digests of blocks and sequences,
no budgets. Used by `Scheduler` only.
"""

from __future__ import annotations

import heapq
from collections import deque

from core.prefixes.cache import PrefixCache
from core.sequence import Sequence
from core.waiting_queue import WaitingQueue

# A sequence is passed over by at most so many later ones for each seat of the batch.
PASSED_OVER_PER_SEAT = 8
# Digests are made and filed a few at a time, so that a crowd which arrives at once does not hold up a step.
BLOCKS_FILED_AT_ONCE = 512


class LongestPrefixQueue(WaitingQueue):
    """First come first served, but for those whose prefix is cached: the longest first, the oldest of equals.

    Filing a sequence takes O(1) per block of its prompt, once; a block that becomes known or is forgotten takes
    O(log depth), however many wait for it; finding the next takes O(blocks of its prefix). Preempted sequences have
    had their turn: they stay in front. The oldest has been passed over most often of all that wait, so bounding its
    count by `max_passed_over` bounds everybody's.
    """

    def __init__(self, cache: PrefixCache, max_passed_over: int) -> None:
        super().__init__()
        self._cache = cache
        self._max_passed_over = max_passed_over
        self._num_arrivals = 0
        self._arrivals: dict[str, int] = {}  # of those never admitted, in order
        self._overtakers: list[int] = []  # a heap: arrivals admitted while an older one waited
        self._unfiled: deque[Sequence] = deque()  # some of them may have left
        self._filed: dict[str, list[bytes]] = {}  # the digests under which a sequence is found
        # Who waits for a block: one sequence, or several in order of arrival.
        self._wanted: dict[bytes, Sequence | dict[str, Sequence]] = {}
        self._known: dict[int, dict[bytes, None]] = {}  # by depth: the blocks wanted and cached
        self._depths: list[int] = []  # a heap of the negative keys of `_known`
        cache.on_change = self._note

    def push(self, sequence: Sequence) -> None:
        super().push(sequence)
        if sequence.num_preemptions:
            return
        self._arrivals[sequence.sequence_id] = self._num_arrivals
        self._num_arrivals += 1
        if sequence.pool is None:  # an embedding needs every token computed
            self._unfiled.append(sequence)

    def next(self) -> Sequence:
        first = self.first()
        if first.num_preemptions or self._num_passed_over(first) >= self._max_passed_over:
            return first
        self._file_some()
        return self._longest() or first

    def take(self, sequence: Sequence) -> None:
        arrival = self._arrivals.get(sequence.sequence_id)
        if arrival is not None and sequence is not self.first():
            heapq.heappush(self._overtakers, arrival)
        super().take(sequence)

    def remove(self, sequence_id: str) -> Sequence:
        sequence = super().remove(sequence_id)
        self._arrivals.pop(sequence_id, None)
        for depth, digest in enumerate(self._filed.pop(sequence_id, ())):
            self._drop(digest, depth, sequence_id)
        return sequence

    def check_invariants(self) -> None:
        super().check_invariants()
        assert (
            self._filed.keys() <= self._arrivals.keys() <= {s.sequence_id for s in self.sequences()}
        )
        filed = {digest for digests in self._filed.values() for digest in digests}
        assert filed == self._wanted.keys()
        known = {digest for bucket in self._known.values() for digest in bucket}
        assert known <= filed
        assert sorted(self._known) == sorted(-depth for depth in self._depths)

    def _num_passed_over(self, first: Sequence) -> int:
        """How many later arrivals were admitted while the oldest waited."""
        arrival = self._arrivals[first.sequence_id]
        while self._overtakers and self._overtakers[0] < arrival:
            heapq.heappop(self._overtakers)
        return len(self._overtakers)

    def _file_some(self) -> None:
        room = BLOCKS_FILED_AT_ONCE
        while self._unfiled and room > 0:
            sequence = self._unfiled.popleft()
            if sequence.sequence_id not in self._arrivals:
                continue  # aborted, or admitted before its turn here came
            self._filed[sequence.sequence_id] = digests = self._cache.digests(sequence)
            room -= max(1, len(digests))
            for depth, digest in enumerate(digests):
                self._file(digest, depth, sequence)

    def _file(self, digest: bytes, depth: int, sequence: Sequence) -> None:
        held = self._wanted.get(digest)
        if held is None:
            self._wanted[digest] = sequence
            if self._cache.knows(digest):
                self._show(digest, depth)
        elif isinstance(held, Sequence):
            self._wanted[digest] = {held.sequence_id: held, sequence.sequence_id: sequence}
        else:
            held[sequence.sequence_id] = sequence

    def _drop(self, digest: bytes, depth: int, sequence_id: str) -> None:
        held = self._wanted[digest]
        if isinstance(held, dict):
            del held[sequence_id]
            if held:
                return
        del self._wanted[digest]
        self._hide(digest, depth)

    def _note(self, digest: bytes, depth: int, is_known: bool) -> None:
        """The prefix cache has learned or forgotten a block."""
        if digest in self._wanted:
            if is_known:
                self._show(digest, depth)
            else:
                self._hide(digest, depth)

    def _show(self, digest: bytes, depth: int) -> None:
        if depth not in self._known:
            self._known[depth] = {}
            heapq.heappush(self._depths, -depth)
        self._known[depth][digest] = None

    def _hide(self, digest: bytes, depth: int) -> None:
        if depth in self._known:
            self._known[depth].pop(digest, None)

    def _longest(self) -> Sequence | None:
        """The oldest of those that wait for the deepest cached block."""
        while self._depths:
            depth = -self._depths[0]
            if not self._known[depth]:
                del self._known[depth]
                heapq.heappop(self._depths)
                continue
            digest = next(iter(self._known[depth]))
            held = self._wanted[digest]
            sequence = held if isinstance(held, Sequence) else next(iter(held.values()))
            if all(map(self._cache.knows, self._filed[sequence.sequence_id][:depth])):
                return sequence
            self._hide(digest, depth)  # a block before it is gone, so nobody can use it
        return None
