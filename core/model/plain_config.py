"""config.json of the fast decoder's families, read without transformers, whose import takes longer than all the rest.

Only what is certain is read: every field that decides what is computed must stand in the file, with its plain meaning.
For anything else, `read_plain_config` returns None and the library reads the config, with its defaults and its errors.
Called by `description.py`; `tests/core/model/test_plain_config.py` holds both readings side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from core.model.decoder_shape import FAMILIES, unsupported

_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
# Whatever of these is set changes the computation in a way that only the library knows.
_UNREAD = ("quantization_config", "text_config", "rope_scaling", "use_sliding_window")
_ROPE_KEYS = {"rope_type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True, slots=True)
class PlainConfig:
    """The fields of a transformers config that this package reads, under the library's names."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    max_position_embeddings: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    tie_word_embeddings: bool
    rope_parameters: dict[str, Any]
    eos_token_id: int | list[int]
    sliding_window: int | None = None
    layer_types: None = field(default=None, init=False)  # one kind for all layers

    def get_text_config(self) -> PlainConfig:
        """As the library's: this model reads text only."""
        return self


def read_plain_config(raw: dict[str, Any]) -> PlainConfig | None:
    """The config in `raw`, the object in config.json; None where the library must read it."""
    family = raw.get("model_type")
    if family not in FAMILIES or any(raw.get(key) for key in _UNREAD):
        return None
    if any(kind != "full_attention" for kind in raw.get("layer_types") or ()):
        return None
    sizes = {name: raw.get(name) for name in _SIZES}
    if not all(type(value) is int and value > 0 for value in sizes.values()):
        return None
    theta, window = _rope_theta(raw), raw.get("sliding_window")
    heads, hidden = raw["num_attention_heads"], raw["hidden_size"]
    head_dim = raw.get("head_dim") or hidden // heads
    is_certain = (
        theta is not None
        and type(head_dim) is int
        # Qwen3's heads have a size of their own: absent, it is the library's default
        and (bool(raw.get("head_dim")) if family == "qwen3" else hidden % heads == 0)
        and heads % raw["num_key_value_heads"] == 0
        and type(raw.get("rms_norm_eps")) is float
        and type(raw.get("hidden_act")) is str
        and type(raw.get("tie_word_embeddings")) is bool
        and _is_token_ids(raw.get("eos_token_id"))
        and (family != "mistral" or ("sliding_window" in raw and _is_window(window)))
    )
    if not is_certain:
        return None
    config = PlainConfig(
        **{name: raw[name] for name in _SIZES},
        model_type=family,
        head_dim=head_dim,
        rms_norm_eps=raw["rms_norm_eps"],
        hidden_act=raw["hidden_act"],
        tie_word_embeddings=raw["tie_word_embeddings"],
        rope_parameters={"rope_type": "default", "rope_theta": theta},
        eos_token_id=raw["eos_token_id"],
        sliding_window=window if family == "mistral" else None,
    )
    return config if unsupported(config) is None else None


def _rope_theta(raw: dict[str, Any]) -> float | None:
    """The base of unscaled rotary positions; None where they are scaled, partial, or said in another way."""
    theta: Any = raw.get("rope_theta")
    parameters = raw.get("rope_parameters")
    if parameters is not None:
        if not isinstance(parameters, dict) or parameters.keys() - _ROPE_KEYS:
            return None
        is_plain = (
            parameters.get("rope_type") == "default"
            and parameters.get("partial_rotary_factor") in (None, 1, 1.0)
            and theta in (None, parameters.get("rope_theta"))
        )
        theta = parameters.get("rope_theta") if is_plain else None
    if raw.get("partial_rotary_factor") not in (None, 1, 1.0):
        return None
    is_number = isinstance(theta, (int, float)) and not isinstance(theta, bool)
    return float(theta) if is_number and theta > 0 else None


def _is_token_ids(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(type(item) is int and item >= 0 for item in items)


def _is_window(value: Any) -> bool:
    return value is None or (type(value) is int and value > 0)
