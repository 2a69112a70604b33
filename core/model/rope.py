"""Rotary positions: the library's frequencies as tables of cosines and sines.

Knows a transformers config, no weights. Used by the fast decoder.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# "dynamic" scales only beyond the model's own context, which no sequence reaches; "longrope" switches its frequencies
# with the length of the text, so that cached keys would no longer fit.
SUPPORTED = ("default", "linear", "dynamic", "yarn", "llama3")
FIRST_LENGTH = 2048


def unsupported_rope(config: Any) -> str | None:
    """Why these rotary parameters cannot be tabulated, or None."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or "rope_type" not in parameters:
        return "its rotary parameters are not of one type for all layers"
    if parameters["rope_type"] not in SUPPORTED:
        return f"rope type {parameters['rope_type']} is not tabulated"
    if parameters.get("partial_rotary_factor") not in (None, 1, 1.0):
        return "only a part of each head is rotated"
    return None


def _frequencies(config: Any, head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies (head_dim / 2,) and the factor on cosines and sines (yarn)."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return 1.0 / (config.rope_parameters["rope_theta"] ** exponents), 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies.float(), float(factor)


class RopeTables:
    """cos and sin, (positions, head_dim / 2) float32, as long as the longest sequence so far needs."""

    __slots__ = ("_device", "_factor", "_frequencies", "cos", "sin")

    def __init__(self, config: Any, head_dim: int, device: torch.device) -> None:
        self._frequencies, self._factor = _frequencies(config, head_dim)
        assert self._frequencies.shape == (head_dim // 2,)
        self._device = device
        self.cos = self.sin = torch.empty(0, head_dim // 2)
        self.cover(FIRST_LENGTH)

    def cover(self, num_positions: int) -> bool:
        """Makes the tables reach `num_positions`; whether they had to be made anew. What was there keeps its bits."""
        length = self.cos.shape[0]
        if num_positions <= length:
            return False
        length = max(num_positions, 2 * length)
        angles = torch.outer(torch.arange(length, dtype=torch.float32), self._frequencies)
        self.cos = (angles.cos() * self._factor).contiguous().to(self._device)
        self.sin = (angles.sin() * self._factor).contiguous().to(self._device)
        return True
