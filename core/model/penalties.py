"""What changes the logits of one row before temperature: penalties, logit bias and the mask of end tokens.

A `RowAdjuster` belongs to one sequence and is kept by the sampler while the sequence lives; it counts tokens as they
arrive, so that a step costs the number of different tokens, not the length of the history. Not for other callers.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.sampling_params import SamplingParams
from core.sequence import Sequence

_LARGEST = 1e30  # penalties stay finite in float32, whatever the factor


def has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1
        or params.presence_penalty != 0
        or params.frequency_penalty != 0
    )


def _mask(row: Tensor, allowed: NDArray[np.bool_]) -> None:
    """Everything but `allowed` to -inf. On a CPU with numpy, which opens no parallel region for one row."""
    size = len(allowed)
    row[size:] = -torch.inf
    if row.device.type == "cpu":
        np.putmask(row[:size].numpy(), ~allowed, -np.inf)
    else:
        row[:size].masked_fill_(~torch.from_numpy(allowed).to(row.device), -torch.inf)


class RowAdjuster:
    """Adjusts one row in place, in the order penalties, bias, mask.

    Repetition penalty (Keskar et al., CTRL, 2019) sees prompt and output; presence and frequency see the output only.
    """

    __slots__ = ("_banned", "_bias", "_counts", "_ids", "_num_seen", "_places", "sequence")

    def __init__(self, sequence: Sequence, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        params = sequence.params
        self.sequence = sequence
        banned = set(params.stop_token_ids) | set(() if params.ignore_eos else eos_token_ids)
        self._banned = torch.tensor(sorted(i for i in banned if i < vocab_size), dtype=torch.int64)
        bias = [(i, float(value)) for i, value in params.logit_bias.items() if i < vocab_size]
        self._bias = (
            torch.tensor([i for i, _ in bias], dtype=torch.int64),
            torch.tensor([value for _, value in bias], dtype=torch.float32),
        )
        self._places: dict[int, int] = {}  # token id to its place in the two tensors below
        self._ids = torch.zeros(64, dtype=torch.int64)
        self._counts = torch.zeros(64, dtype=torch.float32)  # occurrences in the output
        self._num_seen = 0

    def adjust(self, row: Tensor, draft: tuple[int, ...] = ()) -> None:
        """row: (width,) float32 on any device. It is the row behind these guesses, taken as part of the output."""
        params = self.sequence.params
        device = row.device
        if has_penalties(params):
            self._count_new_tokens()
            num_places = len(self._places)
            for token_id in draft:
                self._count(token_id, is_output=True)
            self._penalize(row)
            self._forget(draft, num_places)
        if params.logit_bias:
            row.index_add_(0, self._bias[0].to(device), self._bias[1].to(device))
        mask = None
        if self.sequence.grammar is not None:
            mask = self.sequence.grammar.mask_behind(len(draft))
            assert mask is not None
        is_over = mask is not None and mask.is_end  # then its end token is all that is left
        if params.min_tokens > self.sequence.num_output_tokens + len(draft) and not is_over:
            row.index_fill_(0, self._banned.to(device), -torch.inf)
        if mask is not None:
            _mask(row, mask.allowed)

    def _count_new_tokens(self) -> None:
        token_ids = self.sequence.token_ids
        num_prompt_tokens = self.sequence.num_prompt_tokens
        for position in range(self._num_seen, len(token_ids)):
            self._count(token_ids[position], is_output=position >= num_prompt_tokens)
        self._num_seen = len(token_ids)

    def _count(self, token_id: int, *, is_output: bool) -> None:
        place = self._places.setdefault(token_id, len(self._places))
        if place == len(self._ids):
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)])
            self._counts = torch.cat([self._counts, torch.zeros_like(self._counts)])
        self._ids[place] = token_id
        if is_output:
            self._counts[place] += 1

    def _forget(self, draft: tuple[int, ...], num_places: int) -> None:
        """Takes guesses out again; what they alone had brought stood behind the first `num_places`."""
        for token_id in draft:
            place = self._places[token_id]
            self._counts[place] -= 1
        for token_id in set(draft):
            if self._places[token_id] >= num_places:
                del self._places[token_id]

    def _penalize(self, row: Tensor) -> None:
        params = self.sequence.params
        ids = self._ids[: len(self._places)].to(row.device)
        counts = self._counts[: len(self._places)].to(row.device)
        values = row[ids]
        factor = params.repetition_penalty
        if factor != 1:
            values = torch.where(values > 0, values / factor, values * factor)
            values = values.clamp(-_LARGEST, _LARGEST)
        if params.frequency_penalty != 0:
            values = values - counts * params.frequency_penalty
        if params.presence_penalty != 0:
            values = values - (counts > 0).float() * params.presence_penalty
        row[ids] = values
