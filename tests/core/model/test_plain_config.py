"""config.json read directly: the same values as the library's, or none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from core.model.decoder_shape import shape_of, unsupported
from core.model.description import describe
from core.model.plain_config import PlainConfig, read_plain_config

BASE: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rope_theta": 500000.0,
    "eos_token_id": [2, 7],
}
NEW_ROPE = {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
READ: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama with a base in whole numbers": {"rope_theta": 10000},
    "llama with a head size": {"head_dim": 32},
    "llama without a head size": {"head_dim": None},
    "llama in the library's newer words": NEW_ROPE,
    "llama that names an unused window": {"sliding_window": 16},
    "mistral": {"model_type": "mistral", "sliding_window": 24, "eos_token_id": 2},
    "mistral without a window": {"model_type": "mistral", "sliding_window": None},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32768},
    "qwen2 with layer types": {"model_type": "qwen2", "layer_types": ["full_attention"] * 3},
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
}
UNREAD: dict[str, dict[str, Any]] = {
    "another family": {"model_type": "gemma2"},
    "no KV heads": {"num_key_value_heads": None},
    "no window": {"model_type": "mistral"},
    "no end": {"eos_token_id": None},
    "no tie": {"tie_word_embeddings": None},
    "sizes that are no numbers": {"hidden_size": "64"},
    "heads that do not divide": {"num_attention_heads": 5},
    "windows": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8},
    "layers of two kinds": {"model_type": "qwen2", "layer_types": ["sliding_attention"] * 3},
    "Qwen3 without a head size": {"model_type": "qwen3"},
    "scaled positions": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "scaled positions in newer words": {
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    },
    "two bases": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "partly rotated heads": {"partial_rotary_factor": 0.5},
    "no base": {"rope_theta": None},
    "an activation of its own": {"hidden_act": "gelu"},
    "quantized weights": {"quantization_config": {"quant_method": "awq"}},
}


def written(folder: Path, changes: dict[str, Any]) -> dict[str, Any]:
    raw = {key: value for key, value in (BASE | changes).items() if value is not None}
    if "sliding_window" in changes and changes["sliding_window"] is None:
        raw["sliding_window"] = None
    (folder / "config.json").write_text(json.dumps(raw))
    return raw


@pytest.mark.parametrize("name", READ)
def test_what_is_read_directly_is_what_the_library_reads(name: str, tmp_path: Path) -> None:
    plain = read_plain_config(written(tmp_path, READ[name]))
    library = AutoConfig.from_pretrained(str(tmp_path), local_files_only=True)
    assert plain is not None
    assert unsupported(plain) is unsupported(library) is None
    assert shape_of(plain) == shape_of(library)
    expected = dict(library.rope_parameters)
    assert {key: expected[key] for key in plain.rope_parameters} == plain.rope_parameters
    for field in fields(PlainConfig):
        if field.name in ("rope_parameters", "sliding_window", "layer_types", "head_dim"):
            continue  # compared above, as what the decoder makes of them
        assert getattr(plain, field.name) == getattr(library, field.name), field.name


@pytest.mark.parametrize("name", UNREAD)
def test_what_is_not_certain_is_left_to_the_library(name: str, tmp_path: Path) -> None:
    assert read_plain_config(written(tmp_path, UNREAD[name])) is None


def test_a_description_is_the_same_from_either_reading(
    default_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = describe(default_model_folder)
    assert isinstance(plain.config, PlainConfig)
    monkeypatch.setattr("core.model.description.read_plain_config", lambda raw: None)
    library = describe(default_model_folder)
    for name in ("architecture", "trained_dtype", "eos_token_ids", "max_context", "notes"):
        assert getattr(plain, name) == getattr(library, name)


def test_a_fast_model_starts_without_the_library(tiny_model: Callable[..., Path]) -> None:
    """Importing transformers would take longer than everything else together."""
    script = (
        "import sys\nfrom core.config import *\nfrom core.engine import Engine\n"
        f"engine = Engine.from_config(ModelConfig(name={str(tiny_model('llama'))!r}), None,"
        " KVCacheConfig(num_blocks=8))\n"
        "list(engine.generate(['the']))\n"
        "assert 'transformers' not in sys.modules, 'transformers was imported'\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[3])
