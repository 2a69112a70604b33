"""`ModelDrafter`: guesses of a smaller decoder, token by token, in the blocks of the sequences it drafts for.

A part of the served model needs no keys and values of its own: those of the tokens computed so far are the served
model's, layer by layer, and those of its guesses are written again by the step that verifies them. Leaving out layers
is from Draft & Verify (Zhang et al., https://arxiv.org/abs/2309.08168), weights in fewer bits over the same keys and
values from QSpec (Zhao et al., https://arxiv.org/abs/2410.11305). Made by the loader, called by `Speculator`.
"""

from __future__ import annotations

import torch

from core.config import CacheConfig, ModelShape
from core.model.attention.layout import LayerCache
from core.model.decoder import FastDecoder
from core.model.step_inputs import StepInputs
from core.model.token_chooser import TokenChooser
from core.sequence import Sequence


class ModelDrafter:
    """A `core.interfaces.Drafter`. `caches`: one for each layer of `decoder`, with the blocks of the sequences."""

    def __init__(
        self,
        decoder: FastDecoder,
        caches: list[LayerCache],
        shape: ModelShape,
        cache_config: CacheConfig,
        chooser: TokenChooser,
        description: str,
    ) -> None:
        self.description = description
        self._decoder, self._caches, self._chooser = decoder, caches, chooser
        self._ends = frozenset(shape.eos_token_ids)
        self._inputs = StepInputs(cache_config, shape.vocab_size, decoder.device)

    def draft(self, rows: list[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """See `Drafter.draft`. One forward for each token of the longest draft, of all rows that go on."""
        drafts: list[list[int]] = [[] for _ in rows]
        going = [place for place, (_, count) in enumerate(rows) if count > 0]
        while going:
            token_ids = self._guess(
                [rows[place][0] for place in going], [drafts[place] for place in going]
            )
            still = []
            for place, token_id in zip(going, token_ids, strict=True):
                sequence, count = rows[place]
                if token_id < 0:
                    continue
                drafts[place].append(token_id)
                is_end = token_id in self._ends and not sequence.params.ignore_eos
                if len(drafts[place]) < count and not is_end:
                    still.append(place)
            going = still
        return [tuple(draft) for draft in drafts]

    def reset(self) -> None:
        """The pool was emptied."""
        self._inputs.forget()

    def _guess(self, sequences: list[Sequence], drafts: list[list[int]]) -> list[int]:
        """One token more behind each draft."""
        last = [
            draft[-1] if draft else sequence.token_ids[-1]
            for sequence, draft in zip(sequences, drafts, strict=True)
        ]
        positions = [
            sequence.num_tokens - 1 + len(draft)
            for sequence, draft in zip(sequences, drafts, strict=True)
        ]
        starts = list(range(len(sequences) + 1))
        layout = self._inputs.lay_out(sequences, positions, starts)
        logits = self._decoder.forward(
            torch.tensor(last), layout, self._caches, torch.arange(len(sequences))
        )
        with torch.inference_mode():
            return self._chooser.guess(logits, sequences, [tuple(draft) for draft in drafts])
