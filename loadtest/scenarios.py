"""The named request mixes of `scenarios.yaml`, or of a file of that form. Shapes only: `prompts.py` makes texts."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

BUILT_IN = Path(__file__).with_name("scenarios.yaml")


@dataclass(frozen=True, slots=True)
class Span:
    """A number of tokens between two bounds, both included."""

    low: int
    high: int

    def draw(self, rng: random.Random) -> int:
        """Uniform in the logarithm: as many lengths from 8 to 16 as from 128 to 256. Fixed lengths draw nothing."""
        if self.low == self.high:
            return self.low
        return round(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))


@dataclass(frozen=True, slots=True)
class Shape:
    """The work of a scenario, in tokens. `shared_tokens` of the prompt are the same in all requests of a run."""

    prompt_tokens: Span
    output_tokens: Span
    shared_tokens: int = 0
    copied_tokens: int = 0
    requests: int | None = None


def load_scenarios(path: Path = BUILT_IN) -> dict[str, Shape]:
    """Raises `SystemExit` with a sentence that names the mix and what is wrong with it."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise SystemExit(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise SystemExit(f"{path} must map names to request mixes.")
    return {str(name): _shape(str(name), value) for name, value in content.items()}


def _shape(name: str, value: object) -> Shape:
    known = {field.name for field in fields(Shape)}
    if not isinstance(value, Mapping) or not {"prompt_tokens", "output_tokens"} <= set(value):
        raise SystemExit(f"The mix {name} needs prompt_tokens and output_tokens.")
    if unknown := sorted(set(map(str, value)) - known):
        raise SystemExit(f"The mix {name} has unknown keys: {', '.join(unknown)}.")
    numbers: dict[str, Any] = {
        key: _span(name, key, number) for key, number in value.items() if key.endswith("t_tokens")
    }
    for key in ("shared_tokens", "copied_tokens", "requests"):
        if key in value:
            numbers[key] = _count(name, key, value[key])
    shape = Shape(**numbers)
    if max(shape.shared_tokens, shape.copied_tokens) > shape.prompt_tokens.low:
        raise SystemExit(f"The mix {name} shares or copies more tokens than a prompt has.")
    return shape


def _span(name: str, key: str, value: object) -> Span:
    bounds = value if isinstance(value, list) else [value, value]
    if len(bounds) != 2:
        raise SystemExit(f"{key} of the mix {name} must be a number or [low, high].")
    low, high = (_count(name, key, bound) for bound in bounds)
    if low > high:
        raise SystemExit(f"{key} of the mix {name} must not fall from {low} to {high}.")
    return Span(low, high)


def _count(name: str, key: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise SystemExit(f"{key} of the mix {name} must be a whole number from 1.")
    return value
