"""The signature that every attention implementation shares, and the tensors that describe one step to it.

A step is one flat list of tokens, no padding; the rows of one sequence are contiguous and in order of position.
K and V of a layer lie in blocks: `(num_blocks, num_kv_heads, block_size, head_dim)`, one tensor each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from core.model.kernels import Kernels


@dataclass(frozen=True, slots=True)
class StepLayout:
    """Which token belongs to which sequence, and where its keys and values lie.

    All on the model's device except the `*_list` fields. Built once per step, used by every layer.
    """

    positions: Tensor  # (num_tokens,) int64, position of each token in its own sequence
    slots: Tensor  # (num_tokens,) int64, block_id * block_size + offset: where K and V of the token are written
    row_starts: Tensor  # (num_sequences + 1,) int32, offsets of each sequence's rows
    context_lens: Tensor  # (num_sequences,) int32, keys of the sequence after this step's write
    block_tables: Tensor  # (num_sequences, max_blocks) int32, padded with 0
    row_starts_list: list[int]
    context_lens_list: list[int]
    block_size: int


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Keys and values of one layer; where they are int8, an element times its row's scale is what it stands for."""

    key: Tensor  # (num_blocks, num_kv_heads, block_size, head_dim)
    value: Tensor  # (num_blocks, num_kv_heads, block_size, head_dim)
    key_scale: Tensor | None = None  # (num_blocks, num_kv_heads, block_size) float32
    value_scale: Tensor | None = None

    @property
    def size_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def tensors(self) -> list[Tensor]:
        held = (self.key, self.value, self.key_scale, self.value_scale)
        return [tensor for tensor in held if tensor is not None]


class WriteKV(Protocol):
    """Writes this step's keys and values into their slots, before `Attend` reads them."""

    def __call__(self, key: Tensor, value: Tensor, cache: LayerCache, layout: StepLayout) -> None:
        """key, value: (num_tokens, num_kv_heads, head_dim)."""


class Attend(Protocol):
    """Causal attention of every row over the cached keys of its own sequence.

    `window`: a row at position p sees keys in (p - window, p]; None is all. `softcap` c: scores become
    c * tanh(score / c) before the softmax. `sinks`: (num_heads,) extra logits that take part in the softmax and
    have no value. Sums run in float32. Returns (num_tokens, num_heads, head_dim) in the dtype of `query`.
    """

    def __call__(
        self,
        query: Tensor,  # (num_tokens, num_heads, head_dim)
        cache: LayerCache,
        layout: StepLayout,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class AttentionKernels:
    """One implementation: `name` is for the log."""

    name: str
    write_kv: WriteKV
    attend: Attend
    compiled: Kernels | None = None  # the library behind it: what else it offers may be used too


class CausalModel(Protocol):
    """What the runner needs of a model, fast or general. Weights are inside; caches are handed in."""

    dtype: torch.dtype
    device: torch.device

    def forward(
        self, token_ids: Tensor, layout: StepLayout, caches: list[LayerCache], logit_rows: Tensor
    ) -> Tensor:
        """One forward over a flat step.

        token_ids: (num_tokens,) int64; logit_rows: (num_rows,) int64, indices into the flat step.
        Returns logits (num_rows, embedding_rows) in the model's dtype or in float32; K and V of all tokens are
        written. They may lie in memory that the next forward uses again.
        """

    def hidden_states(self) -> Tensor:
        """What the last forward gave to the output head, of all its tokens: (num_tokens, hidden), behind the final
        norm, in the model's dtype or wider. Valid until the next forward."""
