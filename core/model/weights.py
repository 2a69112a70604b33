"""Weight files of a model folder: safetensors or `pytorch_model.bin`, whole or in shards.

Knows file formats, no architectures. Called by `loader.py` (and through it by the fast decoder, which takes the
iterator). Tensors are mapped, not read: what is not touched costs no memory. Pickles are opened with
`weights_only=True`, so that a file cannot run code.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from core.errors import ModelRefused

_SAFE, _PICKLE = "model.safetensors", "pytorch_model.bin"
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True)
class WeightsSummary:
    """`num_weights` counts numbers, not bytes; `head_weights` those of a separate output head (0: none or tied)."""

    num_weights: int
    head_weights: int
    file_bytes: int


def list_weight_files(folder: Path) -> list[Path]:
    """The files that make up the model, safetensors first. Raises `ModelRefused` where some are missing."""
    for name in (_SAFE, _PICKLE):
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                names = sorted(
                    set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
                )
            except (ValueError, KeyError, AttributeError) as error:
                raise ModelRefused(f"{index.name} of the model cannot be read.") from error
            if any("/" in part or "\\" in part for part in names):
                raise ModelRefused(f"{index.name} of the model names files outside of its folder.")
            missing = [part for part in names if not (folder / part).is_file()]
            if missing:
                raise ModelRefused(
                    f"The model lacks {len(missing)} of its {len(names)} weight files, first {missing[0]}."
                )
            return [folder / part for part in names]
        if (folder / name).is_file():
            return [folder / name]
    raise ModelRefused(
        f"The model's folder has no weights: neither {_SAFE} nor {_PICKLE}, whole or in shards."
    )


def iterate_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight, each file mapped into memory while it is being read. CPU tensors."""
    for path in list_weight_files(folder):
        try:
            if path.suffix == ".safetensors":
                yield from _iterate_safetensors(path)
            else:
                yield from torch.load(
                    path, map_location="cpu", weights_only=True, mmap=True
                ).items()
        except ModelRefused:
            raise
        except Exception as error:  # a torn or foreign file fails anywhere in the libraries
            raise ModelRefused(
                f"{path.name} of the model cannot be read: {str(error)[:200]}"
            ) from error


def _iterate_safetensors(path: Path) -> Iterator[tuple[str, Tensor]]:
    from safetensors import safe_open

    with safe_open(path, framework="pt", device="cpu") as file:
        for name in file.keys():  # noqa: SIM118  (not a dict)
            yield name, file.get_tensor(name)


def measure_weights(folder: Path) -> WeightsSummary:
    """Sizes from the files' heads, nothing loaded."""
    num_weights = head_weights = file_bytes = 0
    for path in list_weight_files(folder):
        file_bytes += path.stat().st_size
        for name, count in _sizes(path):
            num_weights += count
            if name in ("lm_head.weight", "output.weight", "embed_out.weight"):
                head_weights += count
    return WeightsSummary(num_weights, head_weights, file_bytes)


def _sizes(path: Path) -> Iterator[tuple[str, int]]:
    if path.suffix != ".safetensors":
        try:
            state = torch.load(path, map_location="meta", weights_only=True, mmap=True)
        except Exception as error:
            raise ModelRefused(
                f"{path.name} of the model cannot be read: {str(error)[:200]}"
            ) from error
        yield from (
            (name, tensor.numel()) for name, tensor in state.items() if isinstance(tensor, Tensor)
        )
        return
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError("its head is too long")
            header = json.loads(file.read(length))
        end = max(
            (entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"),
            default=0,
        )
        if path.stat().st_size < 8 + length + end:
            raise ValueError("it is cut short")
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ModelRefused(
            f"{path.name} of the model cannot be read: {str(error)[:200]}"
        ) from error
    yield from (
        (name, prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__"
    )
