"""`WaitingQueue`: sequences that wait for admission, first come first served, in O(1) per operation.

Knows nothing of blocks or budgets. Used by `Scheduler` only.
"""

from __future__ import annotations

from collections import OrderedDict

from core.sequence import Sequence


class WaitingQueue:
    """A queue whose members can leave from the middle (abort) and return to the front (preemption)."""

    def __init__(self) -> None:
        self._sequences: OrderedDict[str, Sequence] = OrderedDict()
        self._num_prompt_tokens = 0

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence_id: str) -> bool:
        return sequence_id in self._sequences

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt_tokens

    def sequences(self) -> list[Sequence]:
        """All of them, the next one first."""
        return list(self._sequences.values())

    def first(self) -> Sequence:
        return next(iter(self._sequences.values()))

    def next(self) -> Sequence:
        """Whom to admit next. Asked only while somebody waits."""
        return self.first()

    def take(self, sequence: Sequence) -> None:
        """Removes a sequence because it is admitted."""
        self.remove(sequence.sequence_id)

    def push(self, sequence: Sequence) -> None:
        assert sequence.sequence_id not in self._sequences
        self._sequences[sequence.sequence_id] = sequence
        self._num_prompt_tokens += sequence.num_prompt_tokens

    def push_front(self, sequence: Sequence) -> None:
        self.push(sequence)
        self._sequences.move_to_end(sequence.sequence_id, last=False)

    def remove(self, sequence_id: str) -> Sequence:
        sequence = self._sequences.pop(sequence_id)
        self._num_prompt_tokens -= sequence.num_prompt_tokens
        return sequence

    def remove_expired(self, now_s: float, timeout_s: float) -> list[Sequence]:
        """Takes out those queued longer ago than the timeout. A preempted sequence has had its turn: it stays."""
        expired = []
        for sequence in self._sequences.values():
            if sequence.num_preemptions:
                continue  # at the front, and never more than a batch
            if now_s - sequence.queued_s < timeout_s:
                break
            expired.append(sequence)
        for sequence in expired:
            self.remove(sequence.sequence_id)
        return expired

    def check_invariants(self) -> None:
        total = sum(sequence.num_prompt_tokens for sequence in self._sequences.values())
        assert self._num_prompt_tokens == total
