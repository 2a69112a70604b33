"""`Sampler`: logits of one step to token ids and log-probabilities, one pass for the whole batch.

Knows sequences and their parameters, not blocks, batches or requests; the runner is the only caller. All maths runs in
float32 or wider. A row's result is a function of its own logits, parameters, seed, choice and position, never of the
batch. Stages that no row asked for are skipped.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from core.model.draw import LANE, Filters, Scratch, best_token, best_tokens, draw, uniform
from core.model.penalties import RowAdjuster, has_penalties
from core.outputs import SampledToken, TokenLogprobs
from core.sampling_params import SamplingParams
from core.sequence import Sequence

if TYPE_CHECKING:
    from core.structured.follow import Mask

_log = logging.getLogger(__name__)

TINY_TEMPERATURE = 1e-3
"""Below it a row is greedy: the best token has all the mass that float32 can tell apart."""

LOWEST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON has not."""

NON_FINITE = "non_finite"
SAMPLING = "sampling"
GRAMMAR = "grammar"


class Sampler:
    """Chooses the next token of every row.

    Ids at or above `vocab_size` are never chosen, however wide the logits are.
    """

    def __init__(self, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = eos_token_ids
        self._adjusters: dict[str, RowAdjuster] = {}
        self._scratch = Scratch()

    def is_plain_greedy(
        self, sequences: list[Sequence], guesses: list[tuple[int, ...]] | None = None
    ) -> bool:
        """Whether the argmax over `vocab_size` logits is the whole answer for all rows. A caller that takes it
        itself has to report rows whose best logit is not finite."""
        if guesses is None:
            return all(map(self.is_plain, sequences))
        return all(map(self.is_plain, sequences, map(len, guesses)))

    def is_plain(self, sequence: Sequence, num_guesses: int = 0) -> bool:
        """Whether the best token is the whole answer for this row."""
        return (
            sequence.params.logprobs is None
            and _is_greedy(sequence.params)
            and not self._is_adjusted(sequence, num_guesses)
        )

    def sample(
        self,
        logits: Tensor,
        sequences: list[Sequence],
        guesses: list[tuple[int, ...]] | None = None,
    ) -> list[SampledToken]:
        """logits: (rows, embedding_rows), any float type, one row per sequence; they are left as they are.
        guesses: per row the tokens of a draft that it stands behind, as if they were the end of its output.

        Never raises for a row: a row with NaN or infinity, or one whose sampling fails, is reported in its entry.
        """
        assert logits.shape[0] == len(sequences)
        assert logits.shape[1] >= self.vocab_size
        guesses = guesses or [()] * len(sequences)
        try:
            return self._sample(logits, sequences, guesses)
        except Exception:
            if len(sequences) == 1:
                _log.exception("sampling failed for sequence %s", sequences[0].sequence_id)
                return [SampledToken(-1, failure=SAMPLING)]
            return [
                self.sample(logits[row : row + 1], [sequence], [guesses[row]])[0]
                for row, sequence in enumerate(sequences)
            ]

    def _sample(
        self, logits: Tensor, sequences: list[Sequence], guesses: list[tuple[int, ...]]
    ) -> list[SampledToken]:
        if not sequences:
            return []
        raw = self._widen(logits)  # (rows, width)
        best, token_ids = best_token(raw)
        is_finite = torch.isfinite(
            best
        ).tolist()  # the best is NaN or infinite if any is, -inf if all are
        if self.is_plain_greedy(sequences, guesses):
            return [
                SampledToken(token_id) if ok else SampledToken(-1, failure=NON_FINITE)
                for token_id, ok in zip(token_ids.tolist(), is_finite, strict=True)
            ]
        failures = [None if ok else NON_FINITE for ok in is_finite]
        if not all(is_finite):
            is_usable = torch.isfinite(best)
            raw, best = torch.where(is_usable[:, None], raw, 0.0), torch.where(is_usable, best, 0.0)
        scores, best, token_ids = self._adjust(raw, best, token_ids, sequences, guesses, failures)
        self._draw_rows(scores, best, token_ids, sequences, guesses)
        return self._collect(raw, token_ids.tolist(), sequences, failures)

    def _widen(self, logits: Tensor) -> Tensor:
        """float32, padded with -inf to whole lanes: (rows, width). May share memory with `logits`."""
        logits = logits[:, : self.vocab_size]
        width = -(-self.vocab_size // LANE) * LANE
        if logits.dtype == torch.float32 and width == self.vocab_size and logits.is_contiguous():
            return logits
        wide = self._scratch.take("raw", logits.shape[0], width, logits.device)
        wide[:, : self.vocab_size] = logits
        wide[:, self.vocab_size :] = -torch.inf
        return wide

    def _is_adjusted(self, sequence: Sequence, num_guesses: int) -> bool:
        params = sequence.params
        if has_penalties(params) or params.logit_bias or sequence.grammar is not None:
            return True
        return self._may_not_end(sequence, num_guesses)

    def _may_not_end(self, sequence: Sequence, num_guesses: int) -> bool:
        params = sequence.params
        if params.min_tokens <= sequence.num_output_tokens + num_guesses:
            return False
        return bool(params.stop_token_ids) or not (params.ignore_eos or not self.eos_token_ids)

    def _adjust(
        self,
        raw: Tensor,
        best: Tensor,
        token_ids: Tensor,
        sequences: list[Sequence],
        guesses: list[tuple[int, ...]],
        failures: list[str | None],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Penalties, bias and masks on a copy; the best token is looked for again where anything changed."""
        rows = [
            row
            for row, sequence in enumerate(sequences)
            if self._is_adjusted(sequence, len(guesses[row]))
        ]
        bound = [row for row in rows if self._is_only_bound(sequences[row], len(guesses[row]))]
        ids = token_ids.tolist() if bound else []
        for row in bound:
            grammar = sequences[row].grammar
            mask = grammar.mask_behind(len(guesses[row])) if grammar else None
            if mask is None or not mask.allows(ids[row]):
                failures[row] = failures[row] or self._choose_allowed(
                    row, mask, raw, best, token_ids
                )
        rows = [row for row in rows if row not in bound]
        if not rows:
            return raw, best, token_ids
        scores = self._scratch.take("scores", len(raw), raw.shape[1], raw.device).copy_(raw)
        for row in rows:
            failures[row] = failures[row] or self._adjust_row(
                scores[row], sequences[row], guesses[row]
            )
        chosen, chosen_ids = best, token_ids
        best, token_ids = best_token(scores)
        if bound:
            best[bound], token_ids[bound] = chosen[bound], chosen_ids[bound]
        is_left = torch.isfinite(best)
        left = is_left.tolist()
        if all(left):
            return scores, best, token_ids
        for row, ok in enumerate(left):
            if not ok and failures[row] is None:
                failures[row] = (
                    SAMPLING if sequences[row].grammar is None else GRAMMAR
                )  # all masked
        return (
            torch.where(is_left[:, None], scores, 0.0),
            torch.where(is_left, best, 0.0),
            token_ids,
        )

    def _is_only_bound(self, sequence: Sequence, num_guesses: int) -> bool:
        """Whether it takes the best token that its grammar allows, and nothing else changes its logits."""
        params = sequence.params
        return (
            sequence.grammar is not None
            and _is_greedy(params)
            and not has_penalties(params)
            and not params.logit_bias
            and not self._may_not_end(sequence, num_guesses)
        )

    def _choose_allowed(
        self, row: int, mask: Mask | None, raw: Tensor, best: Tensor, token_ids: Tensor
    ) -> str | None:
        """Sets the best of the allowed tokens, the lowest id among equals. Else the cause of its failure."""
        if mask is None:
            return GRAMMAR
        logits = raw[row, : self.vocab_size].cpu().numpy()
        at = mask.best_of(logits)
        best[row], token_ids[row] = float(logits[at]), at
        return None if mask.allows(at) and np.isfinite(logits[at]) else GRAMMAR

    def _adjust_row(self, row: Tensor, sequence: Sequence, draft: tuple[int, ...]) -> str | None:
        """The cause of its failure, if it fails."""
        if sequence.grammar is not None and sequence.grammar.mask_behind(len(draft)) is None:
            return GRAMMAR
        try:
            self._adjuster(sequence).adjust(row, draft)
        except Exception:
            _log.exception("sampling failed for sequence %s", sequence.sequence_id)
            return SAMPLING
        return None

    def _adjuster(self, sequence: Sequence) -> RowAdjuster:
        adjuster = self._adjusters.get(sequence.sequence_id)
        if adjuster is None or adjuster.sequence is not sequence:
            gone = [key for key, kept in self._adjusters.items() if kept.sequence.is_finished]
            for key in gone:
                del self._adjusters[key]
            adjuster = RowAdjuster(sequence, self.vocab_size, self.eos_token_ids)
            self._adjusters[sequence.sequence_id] = adjuster
        return adjuster

    def _draw_rows(
        self,
        scores: Tensor,
        best: Tensor,
        token_ids: Tensor,
        sequences: list[Sequence],
        guesses: list[tuple[int, ...]],
    ) -> None:
        """Replaces the best token by a draw in the rows that are not greedy."""
        rows = [row for row, sequence in enumerate(sequences) if not _is_greedy(sequence.params)]
        if not rows:
            return
        chosen = [sequences[row] for row in rows]
        temperature = torch.tensor(
            [sequence.params.temperature for sequence in chosen],
            dtype=torch.float32,
            device=scores.device,
        )
        if len(rows) < len(sequences):
            scores, best = scores[rows], best[rows]
        scaled = self._scratch.take("scaled", len(rows), scores.shape[1], scores.device)
        torch.sub(scores, best[:, None], out=scaled).div_(temperature[:, None])
        drawn = draw(
            scaled,
            [Filters(s.params.top_k, s.params.top_p, s.params.min_p) for s in chosen],
            [
                uniform(s.seed, s.choice_index, s.num_tokens + len(guesses[row]))
                for row, s in zip(rows, chosen, strict=True)
            ],
            self._scratch,
        )
        token_ids[rows] = drawn

    def _collect(
        self,
        raw: Tensor,
        token_ids: list[int],
        sequences: list[Sequence],
        failures: list[str | None],
    ) -> list[SampledToken]:
        wanted = [sequence.params.logprobs for sequence in sequences]
        logprobs = _logprobs(raw, token_ids, wanted, self._scratch)
        return [
            SampledToken(-1, failure=failure)
            if failure is not None
            else SampledToken(token_id, logprobs.get(row))
            for row, (token_id, failure) in enumerate(zip(token_ids, failures, strict=True))
        ]


def _is_greedy(params: SamplingParams) -> bool:
    """Whether only the best token can be chosen; such rows bypass temperature and filters altogether."""
    return params.temperature < TINY_TEMPERATURE or params.top_k == 1 or params.top_p == 0


def _logprobs(
    raw: Tensor, token_ids: list[int], wanted: list[int | None], scratch: Scratch
) -> dict[int, TokenLogprobs]:
    """Log-softmax of the raw logits, for the rows that asked. raw: (rows, width)."""
    found: dict[int, TokenLogprobs] = {}
    for k in {k for k in wanted if k is not None}:
        rows = [row for row, asked in enumerate(wanted) if asked == k]
        table = scratch.take("probabilities", len(rows), raw.shape[1], raw.device)
        torch.log_softmax(raw[rows] if len(rows) < len(wanted) else raw, dim=-1, out=table)
        ids = torch.tensor([token_ids[row] for row in rows], device=raw.device)
        chosen = table.gather(1, ids[:, None])[:, 0].clamp_min(LOWEST_LOGPROB).tolist()
        tops: list[tuple[tuple[int, float], ...]] = [()] * len(rows)
        if k:
            values, best_ids = best_tokens(table, k)
            values = values.clamp_min(LOWEST_LOGPROB)
            pairs = zip(best_ids.tolist(), values.tolist(), strict=True)
            tops = [tuple(zip(row_ids, row_values, strict=True)) for row_ids, row_values in pairs]
        for row, logprob, top in zip(rows, chosen, tops, strict=True):
            found[row] = TokenLogprobs(token_ids[row], logprob, top)
    return found
