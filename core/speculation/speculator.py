"""`Speculator`: which sequences get a draft in a step, how long it is, and what became of it.

A guess is worth its row if its chance to be right is above what a row costs, measured in tokens that the same time
would give without it. Chances come from what became of guesses like it, costs from the times of steps. So drafts grow
where text is copied, and end by themselves where a batch is large. Nothing here can change a token: `verify` decides
about them, and without a draft the same ones come. Knows no tensors and no text. Used by `Engine`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from typing import Any

from core.batch import Batch
from core.config import ModelShape
from core.outputs import SampledToken
from core.scheduler import Scheduler
from core.sequence import Sequence
from core.speculation.prompt_lookup import PromptLookup
from core.speculation.step_costs import StepCosts
from core.step_report import StepReport

_log = logging.getLogger("noria.engine")

_PRIOR = (
    0.2,
    0.3,
    0.4,
    0.5,
    0.7,
    0.9,
)  # chances of a guess to be right, by kind, before anything is known
_PRIOR_WEIGHT = 4.0
_MEMORY = 0.9  # of a sequence, per draft
_LONG_MEMORY = 0.98  # of all sequences
_INDEXED_PER_STEP = 2048  # tokens, over all sequences: about 1 ms
_RARELY = 32  # one in so many hopeless guesses is tried, to learn whether they still are


def _kind_of(match: int) -> int:
    """Guesses are told apart by the number of tokens that match before them: 1, 2, 3, 4-7, 8-15, 16 or more."""
    return match - 1 if match < 4 else min(match.bit_length(), 5)


@dataclass(slots=True)
class Chance:
    """How often guesses of one kind were right, the latest counting most."""

    num_right: float
    num_tried: float

    def add(self, num_right: int, num_tried: int, memory: float) -> None:
        self.num_right = self.num_right * memory + num_right
        self.num_tried = self.num_tried * memory + num_tried


@dataclass(slots=True)
class Drafting:
    """What is remembered of one sequence."""

    lookup: PromptLookup = field(default_factory=PromptLookup)
    chances: list[Chance] = field(default_factory=lambda: [Chance(0.0, 0.0) for _ in _PRIOR])
    kind: int = 0  # of its draft in this step


@dataclass(slots=True)
class SpeculationTotals:
    """Counted since the start."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_position: list[int] = field(default_factory=list)

    def as_stats(self) -> dict[str, Any]:
        """The fields of `StepStats`."""
        return {
            "total_drafts": self.num_drafts,
            "total_draft_tokens": self.num_draft_tokens,
            "total_accepted_tokens": self.num_accepted_tokens,
            "total_accepted_per_position": tuple(self.num_accepted_per_position),
        }


@dataclass(slots=True)
class Candidate:
    """A row that may get a draft of up to `room` tokens; `count` is what it gets."""

    row: int
    sequence: Sequence
    drafting: Drafting
    chance: float
    room: int
    count: int = 0


class Speculator:
    """`max_tokens`: of one draft. A step has at most as many draft tokens as the batch has seats, or one full draft."""

    def __init__(
        self,
        max_tokens: int,
        batch_size: int,
        scheduler: Scheduler,
        max_model_len: int,
        shape: ModelShape,
    ) -> None:
        self._max_tokens = max_tokens
        self._max_step_tokens = max(max_tokens, batch_size)
        self._scheduler = scheduler
        self._max_model_len = max_model_len
        self._ends = frozenset(shape.eos_token_ids)
        self._chances = [Chance(p * _PRIOR_WEIGHT, _PRIOR_WEIGHT) for p in _PRIOR]
        self._costs: dict[int, StepCosts] = {}
        self._num_decodes = 0  # in this step
        self._num_hopeless = 0
        self.totals = SpeculationTotals(num_accepted_per_position=[0] * max_tokens)

    def extend(self, batch: Batch) -> Batch:
        """The batch with drafts behind its decodes, and blocks for them. Never raises."""
        try:
            return self._extend(batch)
        except Exception:
            _log.exception("drafting failed; the step is computed without")
            for sequence in batch.sequences:
                if not sequence.is_finished:
                    self._scheduler.settle(sequence)
            return batch

    def observe(self, batch: Batch, gained: list[list[SampledToken]], report: StepReport) -> None:
        """What became of the drafts, and how long the step took."""
        num_draft_tokens = 0
        for (sequence, _, draft), tokens in zip(batch.rows(), gained, strict=True):
            if sequence.drafting is not None and tokens:
                sequence.drafting.lookup.advance(len(tokens))
            if draft:
                num_draft_tokens += len(draft)
                self._learn(sequence, len(draft), len(tokens) - 1)
        if report.kind == "decode" and self._num_decodes:
            self._costs_of(self._num_decodes).observe(num_draft_tokens, self._step_s(report))

    def _step_s(self, report: StepReport) -> float:
        """What `StepCosts` learns from."""
        return report.duration_s

    def seconds_of(self, num_decodes: int) -> dict[str, float]:
        """What was measured beside so many sequences: a `step` without drafts, and a `row` of a draft in it."""
        costs = self._costs_of(num_decodes)
        return {"step": costs.step_s, "row": costs.row_s}

    def _extend(self, batch: Batch) -> Batch:
        decodes = [
            (row, sequence)
            for row, (sequence, count, _) in enumerate(batch.rows())
            if count == 1 and _is_decode(sequence)
        ]
        self._num_decodes = len(decodes)
        if not decodes:
            return batch
        costs = self._costs_of(len(decodes))
        if not costs.may_draft():
            return batch
        candidates = self._find_candidates(decodes)
        self._decide(candidates, costs, len(decodes))
        drafts: list[tuple[int, ...]] = [()] * len(batch.sequences)
        counts = list(batch.num_scheduled_tokens)
        chosen = [candidate for candidate in candidates if candidate.count]
        if not chosen:
            return batch
        for candidate, draft in zip(chosen, self._make_drafts(chosen), strict=True):
            drafts[candidate.row] = draft
            counts[candidate.row] += len(draft)
        if not any(drafts):
            return batch
        return replace(batch, num_scheduled_tokens=tuple(counts), drafts=tuple(drafts))

    def _find_candidates(self, decodes: list[tuple[int, Sequence]]) -> list[Candidate]:
        budget = _INDEXED_PER_STEP
        candidates = []
        for row, sequence in decodes:
            if sequence.drafting is None:
                sequence.drafting = Drafting()
            drafting = sequence.drafting
            budget -= drafting.lookup.index(sequence.token_ids, max(0, budget))
            match = drafting.lookup.find(sequence.token_ids)
            room = min(self._max_tokens, self._num_left(sequence) - 1)
            if match and room > 0:
                drafting.kind = _kind_of(match)
                chance = self._chance(drafting)
                candidates.append(Candidate(row, sequence, drafting, chance, room))
        return candidates

    def _decide(self, candidates: list[Candidate], costs: StepCosts, num_decodes: int) -> None:
        """How long each draft is. A token more in it is worth its row while the chance that it counts is above the
        tokens that the rest of the step gives in the time of a row; that rises with the drafts, so twice is enough."""
        num_expected, num_rows = float(num_decodes), 0
        for _ in range(2):
            least = costs.price_of_row(num_expected, num_rows)
            num_expected, num_rows = float(num_decodes), 0
            room = self._max_step_tokens
            for candidate in candidates:
                chance = candidate.chance
                worth = int(math.log(least) / math.log(chance)) if least < 1 else 0
                candidate.count = min(worth, candidate.room, room)
                room -= candidate.count
                num_rows += candidate.count
                num_expected += (chance - chance ** (candidate.count + 1)) / (1 - chance)
        for candidate in candidates:
            if not candidate.count:
                self._num_hopeless += 1
                if self._num_hopeless >= _RARELY * num_decodes:
                    self._num_hopeless = 0
                    candidate.count = 1

    def _make_drafts(self, candidates: list[Candidate]) -> list[tuple[int, ...]]:
        """Their guesses, with blocks for them."""
        return [self._draft(candidate) for candidate in candidates]

    def _draft(self, candidate: Candidate) -> tuple[int, ...]:
        sequence = candidate.sequence
        draft = candidate.drafting.lookup.draft(sequence.token_ids, candidate.count)
        if not sequence.params.ignore_eos:
            for place, token_id in enumerate(draft):
                if token_id in self._ends:  # nothing comes behind it
                    draft = draft[: place + 1]
                    break
        return draft[: self._scheduler.reserve(sequence, len(draft))]

    def _learn(self, sequence: Sequence, num_tokens: int, num_accepted: int) -> None:
        assert sequence.drafting is not None
        num_tried = min(num_tokens, num_accepted + 1)
        kind = sequence.drafting.kind
        sequence.drafting.chances[kind].add(num_accepted, num_tried, _MEMORY)
        self._chances[kind].add(num_accepted, num_tried, _LONG_MEMORY)
        totals = self.totals
        totals.num_drafts += 1
        totals.num_draft_tokens += num_tokens
        totals.num_accepted_tokens += num_accepted
        for position in range(num_accepted):
            totals.num_accepted_per_position[position] += 1

    def _chance(self, drafting: Drafting) -> float:
        """That a guess of this kind is right: what the sequence shows, and what all show where it has not much."""
        known, own = self._chances[drafting.kind], drafting.chances[drafting.kind]
        prior = known.num_right / known.num_tried
        chance = (prior * _PRIOR_WEIGHT + own.num_right) / (_PRIOR_WEIGHT + own.num_tried)
        return min(max(chance, 0.01), 0.98)

    def _num_left(self, sequence: Sequence) -> int:
        """Tokens that may still come."""
        num_new = sequence.params.max_tokens - sequence.num_output_tokens
        return min(num_new, self._max_model_len - sequence.num_tokens)

    def _costs_of(self, num_decodes: int) -> StepCosts:
        """Steps of nearly as many sequences cost nearly the same."""
        key = int(8 * math.log2(num_decodes))
        if key not in self._costs:
            self._costs[key] = StepCosts(num_decodes)
        return self._costs[key]


def _is_decode(sequence: Sequence) -> bool:
    return (
        not sequence.is_finished
        and sequence.pool is None
        and sequence.num_output_tokens > 0
        and sequence.num_tokens_to_compute == 1
    )
