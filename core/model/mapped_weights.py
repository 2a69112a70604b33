"""`MappedWeights`: the tensors of safetensors files as a mapping that gives back what was taken out of it.

A mapped page stays resident once it was read, so a loader that packs weights would hold the whole file beside its own
copy. Here the pages of tensors that were taken are given back to the system as the next ones are taken. They are pages
of a file, unchanged: a tensor that is still in use reads them again and stays right. Knows the format (a JSON head,
then the bytes), no models. Called by `weights.py`.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections import deque
from collections.abc import Callable, Iterator, MutableMapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from core.pace import give_way

_MAX_HEADER_BYTES = 100_000_000
# Tensors that one fused layer is made of, biases included: they are read after the last of them was taken.
_IN_USE = 8
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor in a file: `start` and `end` are bytes from the file's beginning."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_head(path: Path) -> dict[str, Entry]:
    """The tensors a file says it holds. Raises `ValueError` (or `OSError`) where it is torn or foreign."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError("its head is too long")
            head = json.loads(file.read(length))
        head.pop("__metadata__", None)
        first = 8 + length
        entries = {
            name: Entry(
                entry["dtype"],
                tuple(entry["shape"]),
                first + entry["data_offsets"][0],
                first + entry["data_offsets"][1],
            )
            for name, entry in head.items()
        }
    except (KeyError, TypeError, AttributeError, IndexError, struct.error) as error:
        raise ValueError("its head is damaged") from error
    if path.stat().st_size < max((entry.end for entry in entries.values()), default=first):
        raise ValueError("it is cut short")
    return entries


class MappedWeights(MutableMapping[str, Tensor]):
    """Names to CPU tensors. Popping one tells `on_progress` the share of all bytes taken so far."""

    def __init__(
        self, paths: list[Path], on_progress: Callable[[float], None] = lambda fraction: None
    ) -> None:
        """Raises `ValueError` or `OSError`, as `read_head`, and `ValueError` for number types torch lacks."""
        self._entries: dict[str, tuple[Entry, mmap.mmap]] = {}
        self._on_progress = on_progress
        self._taken: deque[tuple[Entry, mmap.mmap]] = deque(maxlen=_IN_USE)
        self._taken_bytes = 0
        for path in paths:
            head = read_head(path)
            for name, entry in head.items():
                _check(name, entry)
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self._entries |= {name: (entry, mapped) for name, entry in head.items()}
        self._total_bytes = sum(entry.end - entry.start for entry, _ in self._entries.values())

    def __getitem__(self, name: str) -> Tensor:
        entry, mapped = self._entries[name]
        dtype = _DTYPES[entry.dtype]
        if entry.end == entry.start:
            return torch.empty(entry.shape, dtype=dtype)
        flat = torch.frombuffer(mapped, dtype=dtype, count=prod(entry.shape), offset=entry.start)
        return flat.view(entry.shape)

    def __delitem__(self, name: str) -> None:
        for entry, mapped in self._taken:
            _give_back(mapped, entry)
        entry, mapped = self._entries.pop(name)
        self._taken.append((entry, mapped))
        self._taken_bytes += entry.end - entry.start
        self._on_progress(self._taken_bytes / max(1, self._total_bytes))
        give_way()

    def __setitem__(self, name: str, tensor: Tensor) -> None:
        raise TypeError("the tensors of a file can be taken, not replaced")

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _check(name: str, entry: Entry) -> None:
    if entry.dtype not in _DTYPES:
        raise ValueError(f"tensor {name} is of type {entry.dtype}, which is not known here")
    if prod(entry.shape) * _DTYPES[entry.dtype].itemsize != entry.end - entry.start:
        raise ValueError(f"tensor {name} has another size than its shape")


def _give_back(mapped: mmap.mmap, entry: Entry) -> None:
    """Drops the pages of a tensor from this process; they stay in the system's cache of the file."""
    if not hasattr(mmap, "MADV_DONTNEED"):  # Windows
        return
    start = entry.start // mmap.PAGESIZE * mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, start, entry.end - start)
