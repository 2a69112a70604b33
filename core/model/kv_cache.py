"""`KVCache`: the tensors behind block ids. Knows no reference counts and no sequences; made by the runner."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

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
        """Reserves the pool, with scales for a `dtype` of int8. On a CPU its memory stays untouched, and so costs
        nothing, until a block is written."""
        value_dim = head_dim if value_head_dim is None else value_head_dim
        shape = (num_blocks, num_kv_heads, block_size)

        def tensors(*sizes: tuple[int, ...], dtype: torch.dtype = dtype) -> list[torch.Tensor]:
            return [torch.empty(size, dtype=dtype, device=device) for size in sizes]

        layers = []
        for _ in range(num_layers):
            kept = tensors((*shape, head_dim), (*shape, value_dim))
            if dtype == torch.int8:
                kept += tensors(shape, shape, dtype=torch.float32)
            layers.append(LayerCache(*kept))
        size = sum(layer.size_bytes for layer in layers)
        return cls(layers, num_blocks, block_size, size)

    @property
    def block_bytes(self) -> int:
        return self.size_bytes // self.num_blocks

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """From the first block of each pair to the second, keys, values and scales; all are read as they were before.
        No block may be written twice."""
        assert 0 <= min(map(min, pairs)) <= max(map(max, pairs)) < self.num_blocks
        sources, targets = map(list, zip(*pairs, strict=True))
        for tensor in self._tensors():
            if tensor.device.type == "cpu":
                raw = _bytes_of(tensor)
                raw[targets] = raw[sources]
            else:
                tensor[targets] = tensor[sources]

    def read_blocks(self, block_ids: list[int]) -> memoryview:
        """A copy of the contents: layer by layer keys, values and their scales, in each tensor block by block."""
        data, start = np.empty(self.block_bytes * len(block_ids), dtype=np.uint8), 0
        for tensor in self._tensors():
            is_here = tensor.device.type == "cpu"
            part = _bytes_of(tensor)[block_ids] if is_here else _bytes_of(tensor[block_ids].cpu())
            data[start : start + part.size] = part.reshape(-1)
            start += part.size
        return data.data

    def write_blocks(self, block_ids: list[int], data: memoryview) -> None:
        """The reverse of `read_blocks` for as many blocks."""
        given, start = np.frombuffer(data, dtype=np.uint8), 0
        for tensor in self._tensors():
            part = given[start : start + tensor[0].nbytes * len(block_ids)]
            start += part.size
            if tensor.device.type == "cpu":
                _bytes_of(tensor)[block_ids] = part.reshape(len(block_ids), -1)
            else:
                new = torch.from_numpy(part).view(tensor.dtype).view(-1, *tensor.shape[1:])
                tensor[block_ids] = new.to(tensor.device)

    def _tensors(self) -> Iterator[torch.Tensor]:
        for layer in self.layers:
            yield from layer.tensors()


def _bytes_of(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """(num_blocks, bytes of a block): the same memory. Copied by NumPy, since PyTorch would wake its threads for a few
    bytes of each layer, and wait for each of them on a busy machine."""
    raw: NDArray[np.uint8] = tensor.view(torch.uint8).flatten(1).numpy()
    return raw
