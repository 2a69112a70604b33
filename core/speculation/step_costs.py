"""`StepCosts`: what a row of a draft costs beside a number of decoding sequences, learned from the times of steps.

Knows durations and counts only. Used by `Speculator`.
"""

from __future__ import annotations

import statistics
from collections import deque

_REMEMBERED = 5  # steps without drafts: a median of so many is not moved by one that was disturbed
_REMEMBERED_DRAFTS = 16  # steps with drafts
_NEVER_ABOVE = 4.0  # a step so many times the usual one was disturbed by something else
_REFRESH = 48  # after so many steps with drafts one goes without, so that what a step costs does not grow old
_HOPELESS = 0.95  # a guess is never as sure as that
_LOWEST = 0.01  # of a step: no row is free


class StepCosts:
    """Steps with and without drafts, of about `num_decodes` sequences. Times in seconds."""

    def __init__(self, num_decodes: int) -> None:
        self._plain_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._drafted: deque[tuple[int, float]] = deque(maxlen=_REMEMBERED_DRAFTS)
        # Before any was seen: a row of a small step is nearly free, one of a large step costs half of an average row.
        self._assumed = min(0.1, 0.5 / num_decodes)
        self._usual_s = 0.0
        self._num_since_plain = 0
        self._row_s = 0.0

    def observe(self, num_draft_tokens: int, duration_s: float) -> None:
        """One step without prefill."""
        if num_draft_tokens:
            self._num_since_plain += 1
            self._drafted.append((num_draft_tokens, duration_s))
        else:
            self._num_since_plain = 0
            self._plain_s.append(duration_s)
            self._usual_s = statistics.median(self._plain_s)
        usual_s = self._usual_s
        if self._drafted:
            most_s = _NEVER_ABOVE * usual_s
            more_s = sum(min(seconds, most_s) - usual_s for _, seconds in self._drafted)
            self._row_s = more_s / sum(count for count, _ in self._drafted)
        else:
            self._row_s = self._assumed * usual_s
        self._row_s = max(self._row_s, _LOWEST * usual_s)

    @property
    def step_s(self) -> float:
        """Of a step without drafts."""
        return self._usual_s

    @property
    def row_s(self) -> float:
        """What a row more takes."""
        return self._row_s

    def may_draft(self) -> bool:
        """Whether it is known what a step costs without."""
        return bool(self._plain_s) and self._num_since_plain < _REFRESH

    def price_of_row(self, num_expected: float, num_rows: int) -> float:
        """Tokens that a step which is to give `num_expected`, with so many rows for drafts, gives in the time of one
        row more."""
        return num_expected * self._row_s / (self._usual_s + num_rows * self._row_s)
