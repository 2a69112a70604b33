"""`Scheduler`: who is computed in the next step, and how far.

Owns `waiting` and `running`. There is no prefill phase and no decode phase: each sequence has tokens known and tokens
computed, and a step spends a token budget on closing the gap. Knows blocks and counts, never tensors, text or the model
runner. Used by `Engine` only, in the step thread. Iteration-level scheduling is from Orca
(https://www.usenix.org/conference/osdi22/presentation/yu), preemption by recompute from vLLM
(https://arxiv.org/abs/2309.06180), chunked prefill beside decodes from Sarathi-Serve (https://arxiv.org/abs/2403.02310).
"""

from __future__ import annotations

import logging

from core.batch import Batch
from core.block_pool import BlockPool
from core.config import CacheConfig, EngineConfig
from core.prefixes.cache import PrefixCache
from core.prefixes.hits import PrefixHits, find_hits
from core.prefixes.order import PASSED_OVER_PER_SEAT, LongestPrefixQueue
from core.prefixes.pinned import PinnedPrefixes
from core.sequence import Sequence, SequenceStatus
from core.step_budget import StepBudget
from core.waiting_queue import WaitingQueue

_MAX_DOUBLINGS = 30
_log = logging.getLogger("noria.engine")


class Scheduler:
    """Plans steps. `running` followed by the preempted ones in `waiting` is always in order of first admission: the
    newest is preempted first and returns to the front of the queue, so the oldest always gets on. Those that were never
    admitted wait behind them, first come first served or as `engine.order` says.

    All blocks for the known tokens of a sequence are allocated at its admission; only decoding needs more.
    """

    def __init__(
        self,
        config: EngineConfig,
        cache_config: CacheConfig,
        max_model_len: int,
        pool: BlockPool,
        prefix_cache: PrefixCache | None,
    ) -> None:
        assert max_model_len <= cache_config.num_tokens, (
            "a lone sequence must never run out of blocks"
        )
        self._policy = config.policy
        self._max_running = 1 if config.policy == "single" else config.batch_size
        self._max_batched_tokens = config.max_batched_tokens
        self.step_budget = StepBudget(config.target_step_ms / 1000)
        self._queue_timeout_s = config.queue_timeout_s
        self._block_size = cache_config.block_size
        self._max_model_len = max_model_len
        self._pool = pool
        self._prefix_cache = prefix_cache
        self.pins: PinnedPrefixes | None = None
        if prefix_cache is not None:
            self.pins = PinnedPrefixes(pool, prefix_cache, self._block_size, max_model_len)
        self.waiting = WaitingQueue()
        if config.order == "longest_prefix" and prefix_cache is not None:
            most = PASSED_OVER_PER_SEAT * self._max_running
            self.waiting = LongestPrefixQueue(prefix_cache, most)
        self.running: list[Sequence] = []  # oldest first
        self._copies: list[tuple[int, int]] = []  # of the step that is being planned
        self.total_preemptions = 0
        self.total_recomputed_tokens = 0
        self.total_prefix_queries = 0
        self.total_prefix_hits = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.push(sequence)

    def schedule(self, now_s: float) -> Batch:
        """The next step. Empty only if nothing runs and nothing waits."""
        preemptions_before = self.total_preemptions
        if self._prefix_cache is not None:
            self._prefix_cache.settle()
        rows, budget = self._plan_running()
        if self.total_preemptions == preemptions_before:
            self._admit(rows, budget, now_s)
        sequences, counts = zip(*rows, strict=True) if rows else ((), ())
        return Batch(sequences, counts, copies=tuple(self._copies))

    def release_sources(self) -> None:
        """Of the step's copies; after drafting, which writes to blocks before they are made."""
        self._pool.release([self._copies.pop()[0] for _ in self._copies[:]])

    def reserve(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks for a draft behind the known tokens; returns for how many there is room. At nobody's cost: it takes
        what a complete plan has left, and `settle` gives back what turned out not to be needed."""
        missing = self._blocks_for(sequence.num_tokens + num_tokens) - len(sequence.block_ids)
        missing = min(missing, self._pool.num_available)
        if missing > 0:
            sequence.block_ids += self._pool.allocate(missing)
        return min(num_tokens, len(sequence.block_ids) * self._block_size - sequence.num_tokens)

    def settle(self, sequence: Sequence) -> None:
        """After a step with a draft: publishes the blocks that accepted tokens filled and recycles those that only
        rejected ones needed. Their slots in other blocks are written again before anyone reads them."""
        if self._prefix_cache is not None:
            self._prefix_cache.publish(sequence, sequence.num_computed_tokens)
        needed = self._blocks_for(sequence.num_tokens)
        if len(sequence.block_ids) > needed:
            surplus = sequence.block_ids[needed:]
            del sequence.block_ids[needed:]
            sequence.num_table_cuts += 1
            self._pool.release(surplus)

    def finish(self, sequence: Sequence, *, keeps_seat: bool = False) -> None:
        """Takes a sequence out, wherever it is, and recycles its blocks. Idempotent.

        With `keeps_seat` under policy `static` it stays in the batch until the longest has ended, and its last
        computed position is computed again in every step, as a padded batch would.
        """
        if sequence.is_finished:
            return
        sequence.status = SequenceStatus.FINISHED
        if sequence.sequence_id in self.waiting:
            self.waiting.remove(sequence.sequence_id)
        elif keeps_seat and self._policy == "static":
            sequence.num_computed_tokens -= 1
        else:
            self._take_out(sequence)
        if all(seat.is_finished for seat in self.running):
            self._clear_seats()

    def remove_expired(self, now_s: float) -> list[Sequence]:
        """Takes out the sequences that have waited longer than `engine.queue_timeout_s`."""
        if not self._queue_timeout_s:
            return []
        expired = self.waiting.remove_expired(now_s, self._queue_timeout_s)
        for sequence in expired:
            sequence.status = SequenceStatus.FINISHED
        return expired

    def fail_running(self, *, is_end: bool = False) -> list[Sequence]:
        """Ends every running sequence and empties pool and prefix cache: after a failed step no block can be trusted.

        Returns those that had not finished.
        """
        failed = [sequence for sequence in self.running if not sequence.is_finished]
        for sequence in self.running:
            sequence.status = SequenceStatus.FINISHED
            sequence.block_ids.clear()
        self.running.clear()
        self._pool.reset()
        if self._prefix_cache is not None:
            self._prefix_cache.clear()
        if self.pins is not None and (num_lost := self.pins.clear()) and not is_end:
            _log.warning("a failed step lost %d pinned prefixes; pin them again", num_lost)
        return failed

    def clear(self) -> None:
        """Ends everything, the waiting ones too."""
        self.fail_running(is_end=True)
        for sequence in self.waiting.sequences():
            self.waiting.remove(sequence.sequence_id)
            sequence.status = SequenceStatus.FINISHED

    def check_invariants(self) -> None:
        tables = [sequence.block_ids for sequence in self.running]
        if self.pins is not None:
            self.pins.check_invariants()
            tables += self.pins.tables()
        self._pool.check_invariants(tables)
        self.waiting.check_invariants()
        if self._prefix_cache is not None:
            self._prefix_cache.check_invariants()
        for sequence in self.waiting.sequences():
            assert sequence.status is SequenceStatus.WAITING
            assert not sequence.block_ids
        assert len(self.running) <= self._max_running
        for sequence in self.running:
            assert sequence.num_computed_tokens <= len(sequence.block_ids) * self._block_size
            assert len(sequence.block_ids) <= self._blocks_for(sequence.num_tokens)

    def _plan_running(self) -> tuple[list[tuple[Sequence, int]], int]:
        """Rows for the running sequences, oldest first, and what they leave of the budget.

        One-token rows (decodes) are never held back; the budget is for the rest. `engine.target_step_ms` bounds it
        only beside them: a step without them holds nobody up.
        """
        if self._policy == "static":
            self._clear_seats_if_short_of_blocks()
        rows: list[tuple[Sequence, int]] = []
        # Kept seats do not count: they never end by themselves, and could starve a prefill of the same batch.
        num_single = sum(sequence.num_tokens_to_compute == 1 for sequence in self.running)
        budget = self._max_batched_tokens - num_single
        if num_single:
            budget = self.step_budget.num_prefill_tokens(budget)
        for sequence in list(self.running):
            if sequence.status is SequenceStatus.WAITING:
                break  # preempted for an older one, and so are all that follow
            if not self._grow(sequence):
                break
            if sequence.is_finished:
                rows.append((sequence, 1))
            elif sequence.num_tokens_to_compute == 1:
                self._plan_row(rows, sequence, 1)
            elif budget > 0:
                budget -= self._plan_row(rows, sequence, budget)
        return rows, budget

    def _plan_row(self, rows: list[tuple[Sequence, int]], sequence: Sequence, room: int) -> int:
        """Schedules up to `room` tokens and returns how many.

        Blocks that they fill are published before the step is computed: a layer writes the keys and values of all rows
        before any row attends, so those admitted later in this very step may share them, and prompts with the same
        beginning that arrive together compute it once. Nobody who has a row is preempted in the same step, and a step
        that fails empties the cache, so the promise is always kept.
        """
        count = 1 if room == 1 else min(sequence.num_tokens_to_compute, room)
        rows.append((sequence, count))
        num_computed = sequence.num_computed_tokens + count
        is_block_filled = num_computed // self._block_size > sequence.num_published_blocks
        if is_block_filled and self._prefix_cache is not None:
            self._prefix_cache.publish(sequence, num_computed)
        return count

    def _grow(self, sequence: Sequence) -> bool:
        """Gives the sequence blocks for all its known tokens, at the cost of the newest. False: it was the newest."""
        if sequence.is_finished:
            return True  # a kept seat gets no new blocks
        missing = self._blocks_for(sequence.num_tokens) - len(sequence.block_ids)
        if not missing:
            return True
        while missing > self._pool.num_available:
            newest = self.running[-1]
            assert newest is not self.running[0], "a lone sequence ran out of blocks"
            self._preempt(newest)
            if newest is sequence:
                return False
        sequence.block_ids += self._pool.allocate(missing)
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._take_out(sequence)
        sequence.status = SequenceStatus.WAITING
        sequence.num_preemptions += 1
        sequence.num_table_cuts += 1
        sequence.num_discarded_tokens = sequence.num_computed_tokens
        sequence.num_computed_tokens = 0
        sequence.num_published_blocks = 0
        self.waiting.push_front(sequence)
        self.total_preemptions += 1

    def _admit(self, rows: list[tuple[Sequence, int]], budget: int, now_s: float) -> None:
        """Starts waiting sequences in order while seats, budget and blocks allow. Nobody overtakes the next."""
        num_earlier, is_static = len(rows), self._policy == "static"
        if is_static and self.running:
            return
        while len(self.waiting) and len(self.running) < self._max_running:
            if budget <= 0 and not is_static:
                return
            sequence = self.waiting.next()
            hits = self._find_room(sequence, rows, num_earlier)
            if hits is None:
                return
            self.waiting.take(sequence)
            self._start(sequence, hits, now_s)
            if budget > 0:
                budget -= self._plan_row(rows, sequence, budget)

    def _find_room(
        self, sequence: Sequence, rows: list[tuple[Sequence, int]], num_earlier: int
    ) -> PrefixHits | None:
        """What is cached of it; None if the rest has no room, or if this step computes what it can copy in the next."""
        available = self._pool.num_available
        headroom = self._headroom(sequence) if self.running else 0
        if available <= headroom:
            return None
        hits = PrefixHits()
        if self._prefix_cache is not None and sequence.pool is None:  # a pool needs every token
            hits = find_hits(self._prefix_cache, sequence, rows, num_earlier)
            if hits.is_growing and self._policy != "static":
                return None
        needed = self._blocks_for(sequence.num_tokens) - len(hits.block_ids)
        needed += self._pool.num_idle(hits.block_ids)
        if needed + headroom > available:
            assert self.running, "a prompt was accepted that does not fit the empty pool"
            return None
        if needed + self._pool.num_idle(hits.sources) > available:
            return hits.without_copy()
        return hits

    def _headroom(self, candidate: Sequence) -> int:
        """Blocks to leave for growth: one for each running sequence, and twice as many with every preemption of the
        candidate, up to all that the running ones can still need. So a sequence is preempted only about
        log2(blocks of a full context) times, whatever the pool (B107)."""
        share = 1 << min(candidate.num_preemptions, _MAX_DOUBLINGS)
        return sum(
            min(share, self._blocks_left_to_grow(sequence))
            for sequence in (*self.running, candidate)
            if not sequence.is_finished
        )

    def _blocks_left_to_grow(self, sequence: Sequence) -> int:
        limit = min(sequence.num_prompt_tokens + sequence.params.max_tokens, self._max_model_len)
        # The last token is sampled but never computed, so it needs no place.
        return self._blocks_for(limit - 1) - self._blocks_for(sequence.num_tokens)

    def _start(self, sequence: Sequence, hits: PrefixHits, now_s: float) -> None:
        self._pool.take(hits.block_ids)
        self._pool.take(hits.sources)
        num_shared = len(hits.block_ids)
        new = self._pool.allocate(self._blocks_for(sequence.num_tokens) - num_shared)
        self._copies += [(source, new[0]) for source in hits.sources]
        sequence.block_ids += hits.block_ids + new
        sequence.num_computed_tokens = num_shared * self._block_size + hits.num_copied
        sequence.num_published_blocks = num_shared
        sequence.status = SequenceStatus.RUNNING
        if not sequence.first_token_s:
            sequence.scheduled_s = now_s
        self.running.append(sequence)
        if sequence.num_preemptions:
            lost = sequence.num_discarded_tokens - sequence.num_computed_tokens
            self.total_recomputed_tokens += max(0, lost)
            return
        sequence.num_cached_tokens = sequence.num_computed_tokens
        if self._prefix_cache is not None:
            self.total_prefix_queries += sequence.num_prompt_tokens
            self.total_prefix_hits += sequence.num_cached_tokens

    def _clear_seats_if_short_of_blocks(self) -> None:
        missing = sum(
            self._blocks_for(sequence.num_tokens) - len(sequence.block_ids)
            for sequence in self.running
            if not sequence.is_finished
        )
        if missing > self._pool.num_available:
            self._clear_seats()

    def _clear_seats(self) -> None:
        """Takes finished sequences (policy `static`) out of the batch."""
        for sequence in [sequence for sequence in self.running if sequence.is_finished]:
            self._take_out(sequence)

    def _take_out(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if self._prefix_cache is not None:
            self._prefix_cache.publish_end(sequence)
        self._pool.release(sequence.block_ids)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
