"""`StepInputs`: a batch of sequences as the flat tensors of one step.

Knows sequences and the layout, no models. Block tables are kept from step to step, because a table only grows until
it is cut. Used by the runner only.
"""

from __future__ import annotations

from collections.abc import Sequence as List
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from core.batch import Batch
from core.config import CacheConfig
from core.model.attention.layout import StepLayout
from core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepTensors:
    """What a forward takes. `ready` are the batch's rows whose logits are wanted, in the order of `logit_rows`: of
    each its last known token and all tokens of its draft."""

    token_ids: Tensor  # (num_tokens,) int64
    layout: StepLayout
    logit_rows: Tensor  # (num_ready + num_draft_tokens,) int64
    ready: list[int]


@dataclass(slots=True)
class _TableRow:
    """What a row of the block tables holds: the first `count` blocks of this sequence since its table was last cut."""

    sequence: Sequence
    num_table_cuts: int
    count: int
    last: int

    def is_of(self, sequence: Sequence) -> bool:
        return (
            self.sequence is sequence
            and self.num_table_cuts == sequence.num_table_cuts
            and self.count <= len(sequence.block_ids)
            and (not self.count or sequence.block_ids[self.count - 1] == self.last)
        )


class StepInputs:
    """Builds `StepTensors` with few allocations. Asserts that ids and blocks are in range: C would not."""

    __slots__ = ("_block_size", "_device", "_num_blocks", "_rows", "_tables", "_vocab_size")

    def __init__(self, cache_config: CacheConfig, vocab_size: int, device: torch.device) -> None:
        self._block_size, self._num_blocks = cache_config.block_size, cache_config.num_blocks
        self._vocab_size, self._device = vocab_size, device
        self._tables: NDArray[np.int32] = np.zeros((0, 0), dtype=np.int32)
        self._rows: list[_TableRow] = []

    def forget(self) -> None:
        """Drop all tables: the pool was emptied."""
        self._rows.clear()

    def build(self, batch: Batch) -> StepTensors:
        """The tensors of one step; the layout's tables are overwritten by the next one."""
        ids: list[int] = []
        positions: list[int] = []
        starts, ready = [0], []
        logit_rows: list[int] = []
        for i, (sequence, count, draft) in enumerate(batch.rows()):
            first = sequence.num_computed_tokens
            last = first + count
            if count == 1:
                ids.append(sequence.token_ids[first])
                positions.append(first)
            else:
                ids += sequence.token_ids[first:last]
                positions += range(first, last)
            ids += draft
            starts.append(len(positions))
            if last - len(draft) == len(sequence.token_ids) and not sequence.is_finished:
                ready.append(i)
                logit_rows += range(len(positions) - 1 - len(draft), len(positions))
        assert len(ids) == len(positions) > 0
        assert 0 <= min(ids) <= max(ids) < self._vocab_size, "a token id is out of range"
        return StepTensors(
            self._tensor(np.array(ids, dtype=np.int64)),
            self.lay_out(batch.sequences, positions, starts),
            self._tensor(np.array(logit_rows, dtype=np.int64)),
            ready,
        )

    def lay_out(
        self, sequences: List[Sequence], positions: list[int], starts: list[int]
    ) -> StepLayout:
        """The layout of a step. positions: (num_tokens,), rising by one in each sequence; those of sequence i are
        `starts[i]` to `starts[i + 1]`. Its tables are overwritten by the next one."""
        contexts = [positions[end - 1] + 1 for end in starts[1:]]
        tables = self._update_tables(sequences, contexts)
        places = np.array(positions, dtype=np.int64)
        owners = np.repeat(np.arange(len(contexts)), np.diff(starts))
        blocks, offsets = np.divmod(places, self._block_size)
        slots = tables[owners, blocks].astype(np.int64) * self._block_size + offsets
        return StepLayout(
            positions=self._tensor(places),
            slots=self._tensor(slots),
            row_starts=self._tensor(np.array(starts, dtype=np.int32)),
            context_lens=self._tensor(np.array(contexts, dtype=np.int32)),
            block_tables=self._tensor(tables),
            row_starts_list=starts,
            context_lens_list=contexts,
            block_size=self._block_size,
        )

    def _tensor(self, array: NDArray[np.int32] | NDArray[np.int64]) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._device.type == "cpu" else tensor.to(self._device)

    def _update_tables(self, sequences: List[Sequence], contexts: list[int]) -> NDArray[np.int32]:
        """(num_sequences, max_blocks); only what changed since the last step is written."""
        self._reserve(len(sequences), max(len(sequence.block_ids) for sequence in sequences))
        del self._rows[len(sequences) :]
        for i, (sequence, context) in enumerate(zip(sequences, contexts, strict=True)):
            block_ids = sequence.block_ids
            count = len(block_ids)
            assert count * self._block_size >= context, "a scheduled token has no block"
            known = 0
            if i < len(self._rows) and self._rows[i].is_of(sequence):
                known = self._rows[i].count
                if known == count:
                    continue
            new = block_ids[known:]
            assert 0 <= min(new) <= max(new) < self._num_blocks, "a block id is out of range"
            self._tables[i, known:count] = new
            if not known:
                self._tables[i, count:] = 0
            row = _TableRow(sequence, sequence.num_table_cuts, count, block_ids[-1])
            self._rows[i : i + 1] = [row]
        return self._tables[: len(sequences)]

    def _reserve(self, num_rows: int, num_blocks: int) -> None:
        rows, columns = self._tables.shape
        if num_rows <= rows and num_blocks <= columns:
            return
        if num_rows > rows:
            rows = max(num_rows, 2 * rows)
        if num_blocks > columns:
            columns = max(num_blocks, 2 * columns)
        self._tables = np.zeros((rows, columns), dtype=np.int32)
        self._rows.clear()
