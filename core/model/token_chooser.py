"""`TokenChooser`: the next token of every row: one C call where the best is the whole answer, the sampler elsewhere.

Knows logits and sequences, no batches and no blocks. Used by the runner and by its drafter, which so draws as it does.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from core.model.kernels import Kernels
from core.model.sampler import Sampler
from core.outputs import SampledToken
from core.sequence import Sequence


class TokenChooser:
    """`compiled` None: the sampler does it all."""

    __slots__ = ("_compiled", "_sampler", "_vocab_size")

    def __init__(
        self, vocab_size: int, eos_token_ids: tuple[int, ...], compiled: Kernels | None
    ) -> None:
        self._vocab_size, self._compiled = vocab_size, compiled
        self._sampler = Sampler(vocab_size, eos_token_ids)

    def sample(
        self, logits: Tensor, sequences: list[Sequence], guesses: list[tuple[int, ...]]
    ) -> list[SampledToken]:
        """See `Sampler.sample`."""
        rest = [
            row
            for row, sequence in enumerate(sequences)
            if not self._sampler.is_plain(sequence, len(guesses[row]))
        ]
        best = self._best_tokens(logits) if len(rest) < len(sequences) else None
        if best is None:
            return self._sampler.sample(logits, sequences, guesses)
        self._fill_in(best, rest, logits, sequences, guesses)
        return best

    def guess(
        self, logits: Tensor, sequences: list[Sequence], guesses: list[tuple[int, ...]]
    ) -> list[int]:
        """As `sample`, for a draft: ids alone, -1 where there is none. What a grammar forbids is not left out: the
        masks of this step are not made yet."""
        best = self._best_tokens(logits)
        if best is None:
            return [-1] * len(sequences)
        rest = [
            row
            for row, sequence in enumerate(sequences)
            if sequence.grammar is None and not self._sampler.is_plain(sequence, len(guesses[row]))
        ]
        self._fill_in(best, rest, logits, sequences, guesses)
        return [-1 if token.failure is not None else token.token_id for token in best]

    def _fill_in(
        self,
        found: list[SampledToken],
        rows: list[int],
        logits: Tensor,
        sequences: list[Sequence],
        guesses: list[tuple[int, ...]],
    ) -> None:
        """Samples some rows in the place of what was found for them."""
        if not rows:
            return
        sampled = self._sampler.sample(
            logits[rows], [sequences[row] for row in rows], [guesses[row] for row in rows]
        )
        for row, token in zip(rows, sampled, strict=True):
            found[row] = token

    def _best_tokens(self, logits: Tensor) -> list[SampledToken] | None:
        """The argmax of every row; None where there are no kernels for it, or a row is not finite."""
        if self._compiled is None or logits.dtype != torch.float32:
            return None
        rows, stride = logits.shape
        token_ids = np.empty(rows, dtype=np.int64)
        self._compiled.greedy(
            logits.data_ptr(), rows, stride, self._vocab_size, token_ids.ctypes.data
        )
        found: list[int] = token_ids.tolist()
        if min(found) < 0:
            return None
        return [SampledToken(token_id) for token_id in found]
