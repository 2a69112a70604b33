"""A `.gguf` file becomes a folder: config.json, generation_config.json, model.safetensors, tokenizer.json.

Done once per file (`source.py` keeps the result), so that no start ever waits for it again: widening blocks takes
seconds, mapping the result milliseconds. Config and vocabulary are read by transformers, the weights of the fast
decoder's families by `gguf_tensors.py`. What the library's reader does not know and what would change the text is
refused here: position scalings, unknown ways to split text (a wrong one gives other ids without any error), missing
tensors and unknown ones.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from core.errors import ModelRefused
from core.model.decoder_shape import FAMILIES
from core.model.default_model import Report, sha256_of
from core.model.gguf_tensors import (
    GgufTensor,
    library_name,
    read_tensor_table,
    write_safetensors,
)

# Metadata of the architecture that changes what is computed and that transformers' reader drops: refused when set.
_UNREAD_SCALINGS = ("rope.scaling.type", "rope.scaling.factor")
_UNREAD_TENSORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_SCALING_TYPES_WITHOUT_EFFECT = ("none", "")
_END_OF_TURN_KEYS = ("eot_token_id", "eom_token_id")
_END_OF_TURN_TEXTS = (
    "<|im_end|>",
    "<|eot_id|>",
    "<end_of_turn>",
    "<|end|>",
    "<|endofturn|>",
    "[|endofturn|]",
)

# How text is split before the merges, by `tokenizer.ggml.pre`, as llama.cpp defines it. Those of
# `_KNOWN_TO_TRANSFORMERS` come right out of transformers; the rest is set here; any other value is refused.
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "gigachat")


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What the head of a file says: metadata (arrays of strings in full only where asked) and the tensors."""

    metadata: dict[str, Any]
    architecture: str
    tensors: dict[str, GgufTensor]


def read_header(path: Path, *, with_tokens: bool = False) -> GgufHeader:
    """Read metadata and the tensor table, no tensor; the vocabulary only if asked.

    Raises `ModelRefused` for what is no GGUF file.
    """
    from transformers.integrations.gguf.reader import read_gguf_metadata

    try:
        tensors = read_tensor_table(path)
        metadata, _ = read_gguf_metadata(
            str(path), ("tokenizer.ggml.tokens",) if with_tokens else ()
        )
    except EOFError as error:
        raise ModelRefused(
            f"model.name is a .gguf file that is incomplete: {error}. Fetch it again."
        ) from error
    except Exception as error:  # fails anywhere: unicode, numpy, the library's own checks
        raise ModelRefused(
            f"model.name is a .gguf file that cannot be read: {str(error)[:200]}"
        ) from error
    return GgufHeader(metadata, metadata["general.architecture"], tensors)


def convert_gguf(path: Path, folder: Path, marker: str, report: Report) -> None:
    """Write the model in `path` into `folder`; `marker` is the file that says it is whole, written last."""
    header = read_header(path, with_tokens=True)
    _refuse_unread(header)
    report("converting the model (once)", None)
    config = _config(path, header)
    tokenizer, settings = _tokenizer(path, header)
    _write_tensors(path, folder / "model.safetensors", header, config, report)
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "config.json", _plain(config))
    _write_json(folder / "generation_config.json", _generation_config(header, settings, config))
    record = {
        "sha256": sha256_of(path),
        "size_bytes": path.stat().st_size,
        "architecture": header.architecture,
    }
    _write_json(folder / marker, record)


def _plain(config: Any) -> dict[str, Any]:
    """The config without the name of the machine's folder, and with the class that computes it."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    values = {key: value for key, value in config.to_dict().items() if not key.startswith("_")}
    return values | {"architectures": [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]}


def _write_json(path: Path, value: object) -> None:
    path.write_text(
        json.dumps(value, indent=2, ensure_ascii=False, default=str) + "\n", encoding="utf-8"
    )


def _refuse_unread(header: GgufHeader) -> None:
    found = [name for name in _UNREAD_TENSORS if name in header.tensors]
    for suffix in _UNREAD_SCALINGS:
        value = header.metadata.get(f"{header.architecture}.{suffix}")
        if value not in (None, 1.0, *_SCALING_TYPES_WITHOUT_EFFECT):
            found.append(suffix)
    if found and header.architecture not in ("gpt-oss", "gpt_oss"):
        raise ModelRefused(
            f"The .gguf file scales its positions ({found[0]}), which cannot be read from this format: its text would "
            "be wrong. Use the model's safetensors (a hub id or a folder)."
        )


def _config(path: Path, header: GgufHeader) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            str(path.parent), gguf_file=path.name, local_files_only=True
        )
    except Exception as error:
        raise ModelRefused(
            f"The architecture {header.architecture!r} of the .gguf file cannot be read: {str(error)[:200]}"
        ) from error
    for key, value in config.to_dict().items():
        # single precision in the file: 9.999999747378752e-06 was 1e-05
        if isinstance(value, float):
            setattr(config, key, float(str(np.float32(value))))
    head_dim = header.metadata.get(f"{header.architecture}.attention.key_length")
    if config.model_type in FAMILIES and head_dim is not None:
        config.head_dim = int(head_dim)  # the library's reader leaves the default
    for name in ("bos", "eos"):
        setattr(config, f"{name}_token_id", header.metadata.get(f"tokenizer.ggml.{name}_token_id"))
    config.pad_token_id = header.metadata.get("tokenizer.ggml.padding_token_id")
    config.dtype = _storage_dtype(header)
    return config


def _storage_dtype(header: GgufHeader) -> torch.dtype:
    """The file's own float type; bfloat16 for quantized blocks, whose 4 to 8 bits it holds nearly exactly."""
    kinds = {
        tensor.kind for name, tensor in header.tensors.items() if not name.endswith("norm.weight")
    }
    if kinds <= {0}:
        return torch.float32
    if kinds <= {0, 1}:
        return torch.float16
    return torch.bfloat16


def _write_tensors(
    path: Path, target: Path, header: GgufHeader, config: Any, report: Report
) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config)
    tied = set(skeleton.all_tied_weights_keys) if config.tie_word_embeddings else set()
    expected = {
        name: tuple(value.shape)
        for name, value in skeleton.state_dict().items()
        if name not in tied
    }
    dtype = _storage_dtype(header)
    if config.model_type not in FAMILIES:
        tensors = _through_library(path, skeleton, dtype)
        _check_tensors({name: tuple(tensor.shape) for name, tensor in tensors.items()}, expected)
        kept = {name: tensors[name].contiguous() for name in expected}
        save_file(kept, target, metadata={"format": "pt"})
        return
    found = {library_name(name) or name: tensor for name, tensor in header.tensors.items()}
    _check_tensors({name: tensor.shape for name, tensor in found.items()}, expected)
    if unknown := sorted(set(found) - set(expected) - tied):
        raise ModelRefused(
            f"The .gguf file holds tensors that its architecture does not have, first {unknown[0]}: its text would be "
            "wrong. Use the model's safetensors (a hub id or a folder)."
        )

    def heads_of(name: str) -> int:
        """Only files of llama.cpp's `llama`, which Mistral's are too, have rows in another order."""
        if header.architecture != "llama":
            return 0
        if ".q_proj." in name:
            return int(config.num_attention_heads)
        return int(config.num_key_value_heads) if ".k_proj." in name else 0

    def tell(fraction: float) -> None:
        report("converting the model (once)", fraction)

    write_safetensors(path, target, {name: found[name] for name in expected}, dtype, heads_of, tell)


def _through_library(path: Path, skeleton: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging as library_logging

    library_logging.disable_progress_bar()
    try:
        loaded = load_gguf_checkpoint(
            str(path), return_tensors=True, model_to_load=skeleton, torch_dtype=dtype
        )
    except Exception as error:
        raise ModelRefused(
            f"The tensors of the .gguf file cannot be read: {str(error)[:200]}"
        ) from error
    tensors: dict[str, torch.Tensor] = loaded["tensors"]
    return tensors


def _check_tensors(found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]]) -> None:
    missing = sorted(set(expected) - set(found))
    if missing:
        raise ModelRefused(
            f"The .gguf file lacks {len(missing)} tensors of its architecture, first {missing[0]}."
        )
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelRefused(
                f"Tensor {name} of the .gguf file has a shape its architecture does not expect."
            )


def _tokenizer(path: Path, header: GgufHeader) -> tuple[str, dict[str, Any]]:
    """(tokenizer.json, tokenizer_config). A tokenizer.json beside the file wins: it is the original."""
    from tokenizers import pre_tokenizers
    from transformers.integrations.gguf.gguf_tokenizer_mapping import (
        GGUF_PRE_TOKENIZER_SPLITS,
        convert_gguf_tokenizer,
        get_gguf_tokenizer,
    )

    architecture, vocabulary, raw = get_gguf_tokenizer(str(path))
    settings = {key: value for key, value in raw.items() if value is not None}
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    beside = path.with_name("tokenizer.json")
    if beside.is_file():
        return beside.read_text(encoding="utf-8"), settings
    pre = vocabulary.get("pre_tokenizer_type", "default")
    is_byte_level = vocabulary.get("tokenizer_type") == "gpt2"
    if is_byte_level and pre not in (*_DIGITS_APART, *_GPT2, *GGUF_PRE_TOKENIZER_SPLITS):
        raise ModelRefused(
            f"The .gguf file splits text by the rule {pre!r}, which is not known here, so its ids would be wrong. "
            "Put the model's tokenizer.json beside the file."
        )
    backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
    if is_byte_level and pre in _DIGITS_APART:
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        )
    for text in _ROUND_TRIP:
        ids = backend.encode(text, add_special_tokens=False).ids
        if backend.decode(ids).strip() != text.strip():
            raise ModelRefused(
                "The vocabulary of the .gguf file does not give back the text it was given. "
                "Put the model's tokenizer.json beside the file."
            )
    return backend.to_str(), settings


_ROUND_TRIP = (
    "Hello  world",
    "    def f(x):\n\treturn 1234 + 5.67",
    "naïve café — 東京 🙂",
    "한국어 हिन्दी عربي",
)


def _generation_config(header: GgufHeader, settings: dict[str, Any], config: Any) -> dict[str, Any]:
    """All ids that end a turn: the file's end token, its end-of-turn keys, and the marker of its own template."""
    ends = [
        config.eos_token_id,
        *(header.metadata.get(f"tokenizer.ggml.{name}") for name in _END_OF_TURN_KEYS),
    ]
    template = settings.get("chat_template") or ""
    tokens = header.metadata["tokenizer.ggml.tokens"]
    ends += [
        tokens.index(text) for text in _END_OF_TURN_TEXTS if text in template and text in tokens
    ]
    unique = list(dict.fromkeys(int(token_id) for token_id in ends if token_id is not None))
    result: dict[str, Any] = {
        "bos_token_id": config.bos_token_id,
        "pad_token_id": config.pad_token_id,
    }
    if unique:
        result["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    return {key: value for key, value in result.items() if value is not None}
