"""`KVCache`: the tensors behind block ids. Knows no reference counts and no sequences; made by the runner."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from core.model.attention.layout import LayerCache


def kv_bytes_per_token(
    num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> int:
    """Bytes of K and V that one token takes over all layers."""
    return 2 * num_layers * num_kv_heads * head_dim * dtype.itemsize


@dataclass(frozen=True, slots=True)
class KVCache:
    """K and V of every layer for `num_blocks` blocks of `block_size` tokens."""

    layers: list[LayerCache]
    num_blocks: int
    block_size: int
    size_bytes: int

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        value_head_dim: int | None = None,
    ) -> KVCache:
        """Reserves the pool. On a CPU its memory stays untouched, and so costs nothing, until a block is written."""
        value_dim = head_dim if value_head_dim is None else value_head_dim
        shape = (num_blocks, num_kv_heads, block_size)
        layers = [
            LayerCache(
                torch.empty(*shape, head_dim, dtype=dtype, device=device),
                torch.empty(*shape, value_dim, dtype=dtype, device=device),
            )
            for _ in range(num_layers)
        ]
        size = sum(layer.key.nbytes + layer.value.nbytes for layer in layers)
        return cls(layers, num_blocks, block_size, size)
