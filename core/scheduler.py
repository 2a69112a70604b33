"""`Scheduler` and `Batch`: who is computed in the next step, and how far."""

from __future__ import annotations

from dataclasses import dataclass

from core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """The plan of one step, all that scheduler and runner share. The runner reads sequences, it never edits them.

    For row i the step computes tokens `[num_computed_tokens, num_computed_tokens + num_scheduled_tokens[i])` of
    `sequences[i]`, whose `block_ids` already cover them. A row whose last known token is among them is sampled.
    A finished sequence may appear (policy `static`): its last token is computed again and nothing is sampled.
    """

    sequences: tuple[Sequence, ...]
    num_scheduled_tokens: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)
