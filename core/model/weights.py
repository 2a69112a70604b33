"""Weight files of a model folder: safetensors or `pytorch_model.bin`, whole or in shards.

Knows file formats, no architectures. Called by `loader.py` (and through it by the fast decoder, which takes the
mapping). Tensors are mapped, not read: what is not touched costs no memory. Pickles are opened with
`weights_only=True`, so that a file cannot run code.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from core.errors import ModelRefused
from core.model.mapped_weights import MappedWeights, read_head

_SAFE, _PICKLE = "model.safetensors", "pytorch_model.bin"


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


def open_weights(
    folder: Path, on_progress: Callable[[float], None] = lambda fraction: None
) -> MutableMapping[str, Tensor]:
    """Name to tensor of every weight, CPU tensors, mapped. Whoever pops them never holds the files beside the result.

    `on_progress` is told the share of bytes popped (not for pickles, which torch maps as a whole).
    """
    paths = list_weight_files(folder)
    if all(path.suffix == ".safetensors" for path in paths):
        with _readable(", ".join(path.name for path in paths[:2])):
            return MappedWeights(paths, on_progress)
    return dict(_iterate_pickles(paths))


def iterate_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every weight, mapped. CPU tensors."""
    yield from open_weights(folder).items()


def _iterate_pickles(paths: list[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in paths:
        with _readable(path.name):
            yield from torch.load(path, map_location="cpu", weights_only=True, mmap=True).items()


@contextmanager
def _readable(name: str) -> Iterator[None]:
    """A torn or foreign file fails anywhere in the libraries; said here in one sentence."""
    try:
        yield
    except ModelRefused:
        raise
    except Exception as error:
        raise ModelRefused(f"{name} of the model cannot be read: {str(error)[:200]}") from error


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
    with _readable(path.name):
        if path.suffix == ".safetensors":
            yield from ((name, prod(entry.shape)) for name, entry in read_head(path).items())
            return
        state = torch.load(path, map_location="meta", weights_only=True, mmap=True)
        yield from (
            (name, tensor.numel()) for name, tensor in state.items() if isinstance(tensor, Tensor)
        )
