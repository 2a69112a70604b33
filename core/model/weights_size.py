"""What a model's weights take once they are packed: foreseen from its files, and asked of a decoder that holds them.

Numbers only. Used by `loader.py`, which plans memory with them.
"""

from __future__ import annotations

from typing import Any

import torch

from core.config import EngineConfig, ModelConfig
from core.model.decoder_shape import unsupported
from core.model.description import ModelDescription


def planned_bytes(
    description: ModelDescription,
    checkpoint_bytes: int,
    dtype: torch.dtype,
    model: ModelConfig,
    engine: EngineConfig,
) -> int:
    """What the decoder will hold of a checkpoint of this size in `dtype`, with a tied head counted once."""
    config = description.config
    if unsupported(config) is not None:
        return checkpoint_bytes
    head = int(config.vocab_size * config.hidden_size)
    is_tied = bool(config.tie_word_embeddings)
    has_own_embedding = not is_tied or engine.kernels == "torch"  # else it is read out of the head
    embedding_bytes = head * dtype.itemsize if has_own_embedding else 0
    layers = checkpoint_bytes // dtype.itemsize - (1 if is_tied else 2) * head
    if model.quantization == "none":
        return (layers + head) * dtype.itemsize + embedding_bytes
    bits = 4.5 if model.quantization == "int4" and engine.kernels != "torch" else 8
    return int(layers * bits / 8) + head + embedding_bytes


def held_bytes(decoder: Any) -> int:
    """What the weights really take: a decoder that packs them says so itself."""
    if (held := getattr(decoder, "weights_bytes", None)) is not None:
        return int(held)
    module = getattr(decoder, "module", None)
    if module is None:
        return 0
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))
