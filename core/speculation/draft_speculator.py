"""`DraftSpeculator`: drafts that a `Drafter` makes, one small forward for each token of the longest.

A draft grows by a token while that raises the tokens that a step gives in its time, with what drafting and verifying
took when measured. So it ends by itself where a batch is large, where guesses are wrong, and where drafting is dear.
Knows no tensors and no text. Used by `Engine`.
"""

from __future__ import annotations

import statistics
from collections import deque

from core.batch import Batch
from core.interfaces import Drafter
from core.outputs import SampledToken
from core.sequence import Sequence
from core.speculation.speculator import Candidate, Chance, Drafting, Speculator
from core.speculation.step_costs import StepCosts
from core.step_report import StepReport

_PRIOR, _PRIOR_WEIGHT = 0.7, 4.0  # that a guess is right, before anything is known
_ASSUMED = 0.4  # of a step: a forward of the draft model, before one was measured
_REMEMBERED = 16  # forwards
_RARELY = 64  # one in so many steps drafts nevertheless, to learn whether it still does not pay


class DraftSpeculator(Speculator):
    """As `Speculator`, which decides by what it measures; `drafter` guesses."""

    def __init__(self, drafter: Drafter, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._drafter = drafter
        self._chances = [Chance(_PRIOR * _PRIOR_WEIGHT, _PRIOR_WEIGHT)]
        self._forwards_s: dict[int, deque[float]] = {}
        self._num_forwards = 0  # in this step

    def observe(self, batch: Batch, gained: list[list[SampledToken]], report: StepReport) -> None:
        """See `Speculator.observe`. Time to draft is told apart from that to verify."""
        if self._num_forwards:
            forwards_s = self._forwards_of(self._num_decodes)
            forwards_s.append(report.parts_s["draft"] / self._num_forwards)
        super().observe(batch, gained, report)

    def seconds_of(self, num_decodes: int) -> dict[str, float]:
        """See `Speculator.seconds_of`; and a `forward` of the draft model, the median of the latest."""
        forwards_s = self._forwards_of(num_decodes)
        forward_s = statistics.median(forwards_s) if forwards_s else 0.0
        return {**super().seconds_of(num_decodes), "forward": forward_s}

    def _step_s(self, report: StepReport) -> float:
        return report.duration_s - report.parts_s["draft"]

    def _extend(self, batch: Batch) -> Batch:
        self._num_forwards = 0
        return super()._extend(batch)

    def _find_candidates(self, decodes: list[tuple[int, Sequence]]) -> list[Candidate]:
        candidates = []
        for row, sequence in decodes:
            if sequence.drafting is None:
                sequence.drafting = Drafting()
            room = min(self._max_tokens, self._num_left(sequence) - 1)
            if room > 0:
                chance = self._chance(sequence.drafting)
                candidates.append(Candidate(row, sequence, sequence.drafting, chance, room))
        return candidates

    def _decide(self, candidates: list[Candidate], costs: StepCosts, num_decodes: int) -> None:
        """One depth for all, since the forward for the next token is shared; the hopeless stay behind."""
        depth, _ = self._grow(candidates, costs, num_decodes, self._max_tokens)
        if not depth and candidates:
            self._num_hopeless += 1
            if self._num_hopeless >= _RARELY:
                self._num_hopeless = 0
                for candidate in candidates[: self._max_step_tokens]:
                    candidate.count = 1

    def _grow(
        self, candidates: list[Candidate], costs: StepCosts, num_decodes: int, max_depth: int
    ) -> tuple[int, float]:
        """Sets the counts; returns the depth, and the tokens a second that are expected of it."""
        forwards_s = self._forwards_of(num_decodes)
        forward_s = statistics.median(forwards_s) if forwards_s else _ASSUMED * costs.step_s
        num_expected, total_s = float(num_decodes), costs.step_s
        rate, room = num_expected / total_s, self._max_step_tokens
        for depth in range(1, max_depth + 1):
            total_s += forward_s
            taken: list[Candidate] = []
            for candidate in candidates:
                gain = candidate.chance**depth
                is_going = candidate.count == depth - 1 and candidate.room >= depth
                if is_going and len(taken) < room and gain > rate * costs.row_s:
                    taken.append(candidate)
                    num_expected += gain
                    total_s += costs.row_s
            if num_expected / total_s <= rate:
                return depth - 1, rate
            rate, room = num_expected / total_s, room - len(taken)
            for candidate in taken:
                candidate.count = depth
        return max_depth, rate

    def _make_drafts(self, candidates: list[Candidate]) -> list[tuple[int, ...]]:
        rows = [(c.sequence, self._scheduler.reserve(c.sequence, c.count)) for c in candidates]
        drafts = self._drafter.draft(rows)
        self._num_forwards = max(map(len, drafts), default=0)
        for (sequence, _), draft in zip(rows, drafts, strict=True):
            if not draft:
                self._scheduler.settle(sequence)
        return drafts

    def _forwards_of(self, num_decodes: int) -> deque[float]:
        """Seconds of the latest forwards for about so many sequences."""
        return self._forwards_s.setdefault(num_decodes.bit_length(), deque(maxlen=_REMEMBERED))
