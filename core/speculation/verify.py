"""`verify`: how much of a draft stands; `check_rows`: whether a runner sampled what it should.

A guess is right if it is the token that would have been drawn in its place. Since a draw is a function of the logits,
the seed, the choice and the position, the tokens and their log-probabilities are those of a sequence that never
guessed, bit for bit. The rule of Leviathan et al. (https://arxiv.org/abs/2211.17192), which accepts at random and draws
again, keeps only the distribution. Used by the runners and by `Engine`.
"""

from __future__ import annotations

from collections.abc import Iterable

from core.batch import Batch
from core.outputs import SampledToken


def verify(draft: tuple[int, ...], drawn: Iterable[SampledToken]) -> list[SampledToken]:
    """The tokens that one row gained: the right guesses, and the token drawn behind the last of them.

    drawn: what was drawn behind the known tokens, behind one guess, behind two, ...: up to len(draft) + 1. A failure
    behind a right guess is left out: if it is one, the next step meets it again.
    """
    taken: list[SampledToken] = []
    for guess, token in zip((*draft, None), drawn, strict=False):
        if token.failure is not None and taken:
            break
        taken.append(token)
        if token.failure is not None or token.token_id != guess:
            break
    return taken


def check_rows(batch: Batch, tokens: list[list[SampledToken]]) -> None:
    """A row of an unfinished prefill must not be sampled, and a finished prefill must be (B123)."""
    for (sequence, count, draft), gained in zip(batch.rows(), tokens, strict=True):
        num_known = count - len(draft)
        is_ready = sequence.num_tokens_to_compute == num_known and not sequence.is_finished
        assert (len(gained) > 0) == is_ready, "the runner sampled the wrong rows"
        assert len(gained) <= len(draft) + 1, "a row gained more than was guessed"
