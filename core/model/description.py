"""What the files of a model say about it, without its weights: config, sizes, end ids, generation defaults.

Knows config keys of transformers, no tensors. Called by `loader.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from core.config import ModelShape
from core.errors import ModelRefused
from core.model.kv_cache import kv_bytes_per_token
from core.model.plain_config import read_plain_config
from core.model.weights import WeightsSummary

_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "n_ctx",
    "max_sequence_length",
    "seq_length",
)
_DEFAULT_CONTEXT = 2048
# Scalings whose frequencies depend on the longest sequence of a batch: neighbours would change the text. Up to this
# length they do not, so this is where the context ends.
_BATCH_DEPENDENT_SCALINGS = {"longrope", "su", "dynamic", "yarn_dynamic"}
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ModelDescription:
    """`config` is the library's or, for the fast decoder, a `PlainConfig`. `notes` are sentences for the start log."""

    config: Any
    architecture: str
    trained_dtype: str | None
    eos_token_ids: tuple[int, ...]
    max_context: int
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def num_embedding_rows(self) -> int:
        return int(self.config.vocab_size)

    def shape(self, weights: WeightsSummary, dtype: torch.dtype, vocab_size: int) -> ModelShape:
        """`vocab_size` is the tokenizer's; ids above either table are never accepted and never sampled."""
        config = self.config
        num_heads = _number(config, "num_attention_heads", "n_head")
        num_kv_heads = (
            1
            if getattr(config, "multi_query", False)
            else _number(config, "num_key_value_heads") or num_heads
        )
        hidden = _number(config, "hidden_size", "n_embd", "d_model")
        head_dim = _number(config, "head_dim") or hidden // max(1, num_heads)
        num_layers = _number(config, "num_hidden_layers", "n_layer")
        if not (num_heads and num_kv_heads and head_dim and num_layers):
            raise ModelRefused(
                f"{self.architecture} does not say how many layers and heads it has."
            )
        inner = max(_number(config, "intermediate_size", "ffn_dim", "n_inner"), 4 * hidden)
        is_tied = bool(getattr(config, "tie_word_embeddings", False))
        num_weights = weights.num_weights - (weights.head_weights if is_tied else 0)
        return ModelShape(
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            vocab_size=min(vocab_size, self.num_embedding_rows),
            max_context=self.max_context,
            kv_bytes_per_token=kv_bytes_per_token(num_layers, num_kv_heads, head_dim, dtype),
            weights_bytes=num_weights * dtype.itemsize,
            eos_token_ids=self.eos_token_ids,
            activation_bytes_per_token=dtype.itemsize * (6 * hidden + 3 * inner),
        )


def describe(folder: Path) -> ModelDescription:
    """Read config.json and generation_config.json. Raises `ModelRefused` for what is no causal LM."""
    raw = _read_json(folder / "config.json")
    _refuse_unreadable(raw)
    config: Any = read_plain_config(raw) or _library_config(folder, raw)
    text = config.get_text_config()
    generation = _read_json(folder / "generation_config.json", is_optional=True)
    context, notes = _context(text)
    architectures = raw.get("architectures") or [type(config).__name__.removesuffix("Config")]
    ends = _ids(getattr(config, "eos_token_id", None)) + _ids(getattr(text, "eos_token_id", None))
    return ModelDescription(
        config=config,
        architecture=str(architectures[0]),
        trained_dtype=raw.get("dtype") or raw.get("torch_dtype"),
        eos_token_ids=tuple(dict.fromkeys([*ends, *_ids(generation.get("eos_token_id"))])),
        max_context=context,
        generation_defaults=_sampling_defaults(generation),
        notes=tuple(notes),
    )


def _library_config(folder: Path, raw: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # unknown types, and whatever the config classes check
        raise ModelRefused(
            f"The model's config.json (type {raw.get('model_type')!r}) cannot be read: {_first_line(error)}"
        ) from error


def _refuse_unreadable(raw: dict[str, Any]) -> None:
    if raw.get("quantization_config"):
        method = (raw["quantization_config"] or {}).get("quant_method", "unknown")
        raise ModelRefused(
            f"The model's weights are quantized ({method}), which cannot be read yet. "
            "Use the original weights, or a .gguf file."
        )
    if raw.get("is_encoder_decoder"):
        raise ModelRefused(
            f"{raw.get('model_type')!r} is an encoder-decoder model; only causal language models are served."
        )


def _read_json(path: Path, *, is_optional: bool = False) -> dict[str, Any]:
    if is_optional and not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelRefused(f"{path.name} of the model cannot be read.") from error
    if not isinstance(value, dict):
        raise ModelRefused(f"{path.name} of the model is no JSON object.")
    return value


def _context(config: Any) -> tuple[int, list[str]]:
    known = [
        value
        for key in _CONTEXT_KEYS
        if isinstance(value := getattr(config, key, None), int) and value > 0
    ]
    if not known:
        return _DEFAULT_CONTEXT, [
            f"the model names no context length; {_DEFAULT_CONTEXT} is assumed"
        ]
    context, notes = known[0], []
    for scaling in _scalings(config):
        kind = scaling.get("rope_type") or scaling.get("type")
        if kind not in _BATCH_DEPENDENT_SCALINGS:
            continue
        original = scaling.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        limit = int(original or context)
        if limit < context:
            notes.append(
                f"context limited to {limit:,} of {context:,} tokens: beyond it the position scaling {kind!r} of a "
                "sequence depends on its neighbours in the batch"
            )
            context = limit
    return context, notes


def _scalings(config: Any) -> list[dict[str, Any]]:
    parameters = (
        getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    )
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _sampling_defaults(generation: dict[str, Any]) -> dict[str, Any]:
    """Sampling fields the model's authors set; greedy where they say so."""
    found = {
        key: value
        for key in _SAMPLING_KEYS
        if isinstance(value := generation.get(key), (int, float)) and not isinstance(value, bool)
    }
    return {key: int(value) if key == "top_k" else float(value) for key, value in found.items()}


def _ids(value: Any) -> list[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        return [value]
    return [int(item) for item in value] if isinstance(value, (list, tuple)) else []


def _number(config: Any, *names: str) -> int:
    """The first of these config values that is a number; 0 for none."""
    return next(
        (
            value
            for name in names
            if isinstance(value := getattr(config, name, None), int) and value
        ),
        0,
    )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
