"""Paged attention behind one signature (`layout.py`): `reference.py`, and `cpu.py` over the C kernels."""

from __future__ import annotations

import torch

from core.errors import ConfigError
from core.model.attention.cpu import cpu_kernels
from core.model.attention.layout import AttentionKernels
from core.model.attention.reference import REFERENCE
from core.model.kernels import load


def choose_kernels(device: torch.device, setting: str = "auto") -> tuple[AttentionKernels, str]:
    """The kernels for `engine.kernels` (`auto`, `c` or `torch`), and one line for the log that says why.

    Raises `ConfigError` where `c` is asked for and cannot be had.
    """
    if setting == "torch":
        return REFERENCE, "reference (engine.kernels: torch)"
    if device.type != "cpu":
        if setting == "c":
            raise ConfigError("engine.kernels: c needs engine.device: cpu.")
        return REFERENCE, f"reference (no kernels of our own for {device.type})"
    kernels = load()
    if kernels is not None:
        chosen = cpu_kernels(kernels)
        return chosen, chosen.name
    if setting == "c":
        raise ConfigError(
            "engine.kernels: c needs the compiled kernels; install a C compiler and reinstall."
        )
    return REFERENCE, "reference: no compiled kernels (install a C compiler and reinstall)"
