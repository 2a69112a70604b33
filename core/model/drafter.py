"""`ModelDrafter`: guesses of a smaller decoder, token by token, in the blocks of the sequences it drafts for.

A part of the served model needs no keys and values of its own: those of the tokens computed so far are the served
model's, layer by layer, and those of its guesses are written again by the step that verifies them. Leaving out layers
is from Draft & Verify (Zhang et al., https://arxiv.org/abs/2309.08168), weights in fewer bits over the same keys and
values from QSpec (Zhao et al., https://arxiv.org/abs/2410.11305). Another model has keys and values of its own, in
blocks of the same ids, and first computes what it has not seen. Made by the loader, called by `Speculator`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.batch import Batch
from core.config import CacheConfig, ModelShape
from core.model.attention.layout import LayerCache
from core.model.decoder import FastDecoder
from core.model.draft_slots import DraftSlots
from core.model.kv_cache import KVCache
from core.model.step_inputs import StepInputs
from core.model.token_chooser import TokenChooser
from core.sequence import Sequence

CATCH_UP_TOKENS = 256  # in a step, over all sequences: no other stream waits longer for it


@dataclass(slots=True)
class _Row:
    """One sequence's part of a forward: `ids` from position `start` on; a guess is wanted where they reach its end."""

    place: int
    sequence: Sequence
    start: int
    ids: list[int]

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class ModelDrafter:
    """A `core.interfaces.Drafter`. `caches`: one for each layer of `decoder`, with the blocks of the sequences; None:
    it has its own, which `kv_cache` then is."""

    def __init__(
        self,
        decoder: FastDecoder,
        caches: list[LayerCache] | None,
        shape: ModelShape,
        cache_config: CacheConfig,
        chooser: TokenChooser,
        description: str,
        max_context: int | None = None,
    ) -> None:
        """`shape` is the served model's; `max_context` what the draft model can take, if that is less."""
        self.description = description
        self._decoder, self._chooser = decoder, chooser
        self._ends = frozenset(shape.eos_token_ids)
        self._max_context = max_context or shape.max_context
        self._inputs = StepInputs(cache_config, shape.vocab_size, decoder.device)
        self.kv_cache: KVCache | None = None
        self._slots: DraftSlots | None = None
        if caches is None:
            self.kv_cache = own = KVCache.allocate(
                decoder.shape.num_layers,
                cache_config.num_blocks,
                decoder.shape.num_kv_heads,
                cache_config.block_size,
                decoder.shape.head_dim,
                torch.int8 if cache_config.dtype == "int8" else decoder.dtype,
                decoder.device,
            )
            self._slots = DraftSlots(cache_config.num_blocks, cache_config.block_size)
            caches = own.layers
        self._caches = caches

    def draft(self, rows: list[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """See `Drafter.draft`. One forward for each token of the longest draft, of all rows that go on."""
        drafts: list[list[int]] = [[] for _ in rows]
        going = self._first_rows(rows)
        while going:
            guesses = self._guess(going, drafts)
            still = []
            for row, token_id in zip(going, guesses, strict=True):
                draft, (sequence, count) = drafts[row.place], rows[row.place]
                if token_id < 0:
                    continue
                draft.append(token_id)
                is_end = token_id in self._ends and not sequence.params.ignore_eos
                if len(draft) < count and not is_end:
                    still.append(_Row(row.place, sequence, row.end, [token_id]))
            going = still
        return [tuple(draft) for draft in drafts]

    def follow(self, batch: Batch) -> None:
        """The served model computes this batch; called before it does, and after drafting."""
        if self._slots is not None and self.kv_cache is not None:
            if batch.copies:
                self.kv_cache.copy_blocks(batch.copies)
            self._slots.follow(batch)

    def forget(self, block_ids: list[int]) -> None:
        """These blocks were filled by somebody else."""
        if self._slots is not None:
            self._slots.forget(block_ids)

    def reset(self) -> None:
        """The pool was emptied."""
        self._inputs.forget()
        if self._slots is not None:
            self._slots.forget()

    def _first_rows(self, rows: list[tuple[Sequence, int]]) -> list[_Row]:
        """From what is known on to the last token, or a piece of that where much is missing."""
        first, room = [], CATCH_UP_TOKENS
        for place, (sequence, count) in enumerate(rows):
            if count <= 0 or sequence.num_tokens + count > self._max_context:
                continue
            start = sequence.num_tokens - 1
            if self._slots is not None:
                start = self._slots.num_known(sequence)
            if start < sequence.num_tokens - 1:
                end = min(sequence.num_tokens, start + room)
                room -= end - start
            else:
                end = sequence.num_tokens
            if end > start:
                first.append(_Row(place, sequence, start, sequence.token_ids[start:end]))
        return first

    def _guess(self, rows: list[_Row], drafts: list[list[int]]) -> list[int]:
        """One token more behind each draft; -1 for rows that do not reach their end."""
        ids = [token_id for row in rows for token_id in row.ids]
        positions = [position for row in rows for position in range(row.start, row.end)]
        starts = [0]
        for row in rows:
            starts.append(starts[-1] + len(row.ids))
        is_ready = [row.end >= row.sequence.num_tokens for row in rows]
        ready = [place for place, ok in enumerate(is_ready) if ok]
        layout = self._inputs.lay_out([row.sequence for row in rows], positions, starts)
        logit_rows = torch.tensor([starts[place + 1] - 1 for place in ready], dtype=torch.int64)
        logits = self._decoder.forward(torch.tensor(ids), layout, self._caches, logit_rows)
        if self._slots is not None:
            for row in rows:
                self._slots.wrote(row.sequence, row.start, row.end)
        guesses = [-1] * len(rows)
        if ready:
            sequences = [rows[place].sequence for place in ready]
            behind = [tuple(drafts[rows[place].place]) for place in ready]
            with torch.inference_mode():
                found = self._chooser.guess(logits, sequences, behind)
            for place, token_id in zip(ready, found, strict=True):
                guesses[place] = token_id
        return guesses
