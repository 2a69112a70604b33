"""`Batch`: the plan of one step, all that scheduler and runner share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import repeat

from core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """The plan of one step. The runner reads sequences, it never edits them.

    For row i the step computes tokens `[num_computed_tokens, num_computed_tokens + num_scheduled_tokens[i])` of
    `sequences[i]`, whose `block_ids` already cover them. A row whose last known token is among them is sampled.
    The last of its tokens may be a draft: guesses for what comes next, of which the sequence knows nothing yet.
    A finished sequence may appear (policy `static`): its last token is computed again and nothing is sampled.
    """

    sequences: tuple[Sequence, ...]
    num_scheduled_tokens: tuple[int, ...]
    drafts: tuple[tuple[int, ...], ...] = ()  # per row; empty: none has any
    copies: tuple[tuple[int, int], ...] = ()  # (from, to) block: before anything is written

    def rows(self) -> Iterator[tuple[Sequence, int, tuple[int, ...]]]:
        """(sequence, number of scheduled tokens with its draft, draft)."""
        drafts = self.drafts or repeat(())
        return zip(self.sequences, self.num_scheduled_tokens, drafts, strict=False)

    @property
    def num_tokens(self) -> int:
        return sum(self.num_scheduled_tokens)
