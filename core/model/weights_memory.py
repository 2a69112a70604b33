"""`LargePages`: memory for weights, which every step reads from end to end, in pages of 2 MiB where there are any;
and `trim_heap`, which gives back what packing them left behind.

With pages of 4 KiB a step at batch 1 waits for thousands of page walks, above all in a virtual machine, where each is
two-dimensional. Linux gives large pages to who asks (`transparent_hugepage/enabled`: madvise, the usual setting), in
regions of many MiB; single tensors from the heap are too small and lie anywhere. Knows no weights.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import sys

import torch
from torch import Tensor

CHUNK_BYTES = 64 << 20
_ALIGNMENT = 64  # a cache line


class LargePages:
    """Hands out tensors side by side in chunks, and never takes one back: a chunk is freed with the last tensor in it.
    So each model has its own. What is not written costs nothing. Where there are no large pages: `torch.empty`."""

    __slots__ = ("_chunk", "_used_bytes")

    def __init__(self) -> None:
        self._chunk = torch.empty(0, dtype=torch.uint8)
        self._used_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Uninitialised, contiguous, on the CPU, aligned to a cache line."""
        size = math.prod(shape) * dtype.itemsize
        if not hasattr(mmap, "MADV_HUGEPAGE") or not size:
            return torch.empty(shape, dtype=dtype)
        if self._used_bytes + size > self._chunk.nbytes:
            trim_heap()  # packing leaves behind as much as it fills
            self._chunk, self._used_bytes = _map(max(size, CHUNK_BYTES)), 0
        start = self._used_bytes
        self._used_bytes += -(-size // _ALIGNMENT) * _ALIGNMENT
        return self._chunk[start : start + size].view(dtype).view(shape)


def _map(size_bytes: int) -> Tensor:
    """Private memory of its own, in large pages if the system will."""
    region = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without them
        region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)


def trim_heap() -> None:
    """Gives what packing freed back to the system, where the C library is glibc: it would keep it for ever."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
