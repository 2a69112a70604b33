"""What the fast decoder needs to know of a model, read from its transformers config, and which configs it can take.

Knows config fields, no tensors. Used by `decoder.py` and by the loader, which asks `unsupported` first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from core.model.rope import unsupported_rope

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of a Llama-family decoder. `windows` has one entry per layer, None where all keys are seen."""

    num_layers: int
    hidden: int
    inner: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    epsilon: float
    windows: tuple[int | None, ...]
    is_tied: bool
    has_head_norms: bool  # queries and keys are normalised head by head (Qwen3)


def unsupported(config: Any) -> str | None:
    """Why the fast decoder cannot compute this model, or None where it can."""
    family = getattr(config, "model_type", None)
    if family not in FAMILIES:
        return f"model type {family} is not of the Llama family"
    if getattr(config, "quantization_config", None):
        return "its weights are quantized"
    if config.hidden_act not in ("silu", "swish"):
        return f"activation {config.hidden_act} instead of silu"
    if config.num_attention_heads % _kv_heads(config):
        return "query heads are not a multiple of KV heads"
    if _head_dim(config) % 2:
        return "head size is odd"
    kinds = set(getattr(config, "layer_types", None) or ())
    if kinds - {"full_attention", "sliding_attention"}:
        return f"layer types {', '.join(sorted(map(str, kinds)))}"
    return unsupported_rope(config)


def shape_of(config: Any) -> DecoderShape:
    """The shape of a supported config."""
    num_layers = config.num_hidden_layers
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    if config.model_type == "llama":
        window = None
    if kinds is None or config.model_type == "mistral":  # Mistral: one window for all layers
        windows = (window,) * num_layers
    else:
        windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return DecoderShape(
        num_layers=num_layers,
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=_kv_heads(config),
        head_dim=_head_dim(config),
        epsilon=config.rms_norm_eps,
        windows=windows,
        is_tied=bool(config.tie_word_embeddings),
        has_head_norms=config.model_type == "qwen3",
    )


def _kv_heads(config: Any) -> int:
    return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)


def _head_dim(config: Any) -> int:
    return int(
        getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    )
