"""`SelfDraft`: what `speculative.draft_model: self:…` means, a part of the served model that drafts for the whole.

Any other name is that of another model.

Words to numbers, no tensors. Used by the configuration, which refuses what cannot be read, and by the loader.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from core.errors import ConfigError

ACCEPTED = (
    "self:N (the first N layers of the served model), self:0-5,20-29 (these layers), self:int8 or self:int4 (its "
    "weights in fewer bits), or both, as in self:int4:20; or the name of another model, as model.name takes it"
)
_SELF = "self"
_COUNT = re.compile(r"\d{1,4}")
_RANGES = re.compile(r"\d{1,4}(-\d{1,4})?(,\d{1,4}(-\d{1,4})?)*")


@dataclass(frozen=True, slots=True)
class SelfDraft:
    """`layers` None is all of them; `quantization` none is the weights as they are served."""

    num_layers: int | None = None  # the first so many
    ranges: tuple[tuple[int, int], ...] = ()  # or those from the first to the last of each
    quantization: Literal["none", "int8", "int4"] = "none"

    def layers_of(self, num_layers: int) -> list[int]:
        """Places of the layers that draft, in a model of `num_layers`. Raises `ConfigError` if it has not so many."""
        if self.num_layers is not None:
            layers = list(range(self.num_layers))
        elif self.ranges:
            layers = [layer for first, last in self.ranges for layer in range(first, last + 1)]
        else:
            layers = list(range(num_layers))
        if layers[-1] >= num_layers:
            raise ConfigError(
                f"speculative.draft_model asks for layer {layers[-1]}, counted from 0; this model has {num_layers}."
            )
        return layers


def is_self_draft(name: str) -> bool:
    return name == _SELF or name.startswith(f"{_SELF}:")


def read_self_draft(name: str) -> SelfDraft | None:
    """None where the name cannot be read: see `ACCEPTED`."""
    head, *words = name.split(":")
    if head != _SELF or not 1 <= len(words) <= 2:
        return None
    quantization: Literal["none", "int8", "int4"] = "none"
    if words[0] in ("int8", "int4"):
        quantization = "int8" if words[0] == "int8" else "int4"
        if len(words) == 1:
            return SelfDraft(quantization=quantization)
    elif len(words) == 2:
        return None
    layers = words[-1]
    if _COUNT.fullmatch(layers):
        count = int(layers)
        return SelfDraft(num_layers=count, quantization=quantization) if count else None
    ranges = _read_ranges(layers)
    return SelfDraft(ranges=ranges, quantization=quantization) if ranges else None


def _read_ranges(text: str) -> tuple[tuple[int, int], ...]:
    """Rising, each layer once; empty where they are not."""
    if not _RANGES.fullmatch(text):
        return ()
    pairs: list[tuple[int, int]] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        pairs.append((int(first), int(last or first)))
    is_rising = all(a <= b for a, b in pairs)
    is_rising &= all(a[1] < b[0] for a, b in pairwise(pairs))
    return tuple(pairs) if is_rising else ()
