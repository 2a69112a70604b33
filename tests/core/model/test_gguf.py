"""GGUF files: the same weights, ids and settings as the folder they were made of, or a refusal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter, quants

from core.config import ModelConfig
from core.errors import ModelRefused
from core.model.description import describe
from core.model.gguf_import import _through_library
from core.model.gguf_tensors import read_tensor_table, write_safetensors
from core.model.source import resolve
from core.model.tokenizer_files import load_tokenizer
from core.model.weights import iterate_weights

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def silent(message: str, fraction: float | None) -> None:
    """A report nobody reads."""


def gguf_name(name: str) -> str:
    if name == "lm_head.weight":
        return "output.weight"
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{NAMES[part]}.{kind}"


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of the rows of Q and K: pairs side by side instead of in halves."""
    split = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return split.swapaxes(1, 2).reshape(weights.shape)


def write_gguf(
    folder: Path,
    path: Path,
    *,
    pre: str = "smollm",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    leave_out: str | None = None,
    extra: dict[str, Any] | None = None,
    extra_tensor: str | None = None,
) -> Path:
    """The model in `folder` as a file of llama.cpp's conventions."""
    config = json.loads((folder / "config.json").read_text())
    parsed = json.loads((folder / "tokenizer.json").read_text())
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    architecture = config["model_type"]
    writer = GGUFWriter(str(path), architecture)
    writer.add_name("tiny")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_rope_dimension_count(head_dim)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    vocabulary = parsed["model"]["vocab"]
    tokens = sorted(vocabulary, key=lambda token: vocabulary[token])
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in families.SPECIALS else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in parsed["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_chat_template(families.CHAT_TEMPLATE)
    for key, value in (extra or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(key, value)
    for name, tensor in iterate_weights(folder):
        if gguf_name(name) == leave_out:
            continue
        weights = tensor.float().numpy()
        if "q_proj" in name and architecture == "llama":
            weights = permute(weights, heads)
        if "k_proj" in name and architecture == "llama":
            weights = permute(weights, kv_heads)
        stored = GGMLQuantizationType.F32 if weights.ndim < 2 else kind
        writer.add_tensor(gguf_name(name), quants.quantize(weights, stored), raw_dtype=stored)
    if extra_tensor is not None:
        writer.add_tensor(extra_tensor, np.zeros(32, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def convert(path: Path, cache: Path) -> Path:
    return resolve(ModelConfig(name=str(path), cache_dir=str(cache)), silent).folder


@pytest.mark.parametrize("is_tied", [True, False])
def test_weights_come_out_as_they_went_in(
    tiny_model: Callable[..., Path], tmp_path: Path, is_tied: bool
) -> None:
    """B146: without an output head the embedding is the head. B147: rows of Q and K are put back in order."""
    source = tiny_model("llama", tie_word_embeddings=is_tied)
    folder = convert(write_gguf(source, tmp_path / "m.gguf"), tmp_path / "cache")
    expected, found = dict(iterate_weights(source)), dict(iterate_weights(folder))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert describe(folder).config.tie_word_embeddings is is_tied
    first, second = families.load_reference(source), families.load_reference(folder)
    ids = torch.arange(3, 40)[None]
    assert torch.equal(first(ids).logits, second(ids).logits)


@pytest.mark.parametrize(
    ("family", "changes"),
    [("qwen2", {}), ("qwen3", {}), ("llama", {"attention_bias": True, "mlp_bias": True})],
)
def test_biases_and_norms_of_heads_come_out_as_they_went_in(
    tiny_model: Callable[..., Path], tmp_path: Path, family: str, changes: dict[str, Any]
) -> None:
    source = tiny_model(family, **changes)
    path = write_gguf(source, tmp_path / "m.gguf")
    if changes:  # the library's reader does not know that a file may have biases
        with pytest.raises(ModelRefused, match="does not have, first"):
            convert(path, tmp_path / "cache")
        return
    folder = convert(path, tmp_path / "cache")
    expected, found = dict(iterate_weights(source)), dict(iterate_weights(folder))
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    ids = torch.arange(3, 40)[None]
    first, second = families.load_reference(source), families.load_reference(folder)
    assert torch.equal(first(ids).logits, second(ids).logits)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_weights_are_those_that_transformers_reads_from_the_same_file(
    tiny_model: Callable[..., Path], tmp_path: Path, kind: str
) -> None:
    source = tiny_model("llama")
    path = write_gguf(source, tmp_path / "m.gguf", kind=getattr(GGMLQuantizationType, kind))
    truth = _through_library(path, families.load_reference(source), torch.float32)
    found = dict(iterate_weights(convert(path, tmp_path / "cache")))
    for name, tensor in found.items():
        assert torch.equal(tensor, truth[name].to(torch.bfloat16)), name


def random_blocks(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Blocks of any bits, with scales that are numbers: there is nothing here that could make K-quants of weights."""
    block, size = GGML_QUANT_SIZES[kind]
    data = np.random.default_rng(3).integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    halves = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}
    for at in halves.get(kind.name, (0, 2) if kind.name in ("Q4_1", "Q5_1") else (0,)):
        data[..., at : at + 2] = np.array([0.01], dtype=np.float16).view(np.uint8)
    return data.reshape(rows, -1)


@pytest.mark.parametrize(
    "name", ["Q4_0", "Q4_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"]
)
def test_every_layout_is_widened_as_by_transformers(tmp_path: Path, name: str) -> None:
    """Two readings of the same bits by two libraries; rows of heads are put in order on the way."""
    from transformers.integrations.gguf.dequant import dequantize

    kind = getattr(GGMLQuantizationType, name)
    blocks = random_blocks(kind, 24, 512)
    writer = GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_token_list(["a", "b"])
    writer.add_tensor("blk.0.attn_q.weight", blocks, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    table = read_tensor_table(tmp_path / "m.gguf")
    write_safetensors(
        *(tmp_path / "m.gguf", tmp_path / "model.safetensors"),
        *({"w": table["blk.0.attn_q.weight"]}, torch.float32),
        *(lambda name: 3, lambda fraction: None),
    )
    (found,) = [tensor for _, tensor in iterate_weights(tmp_path)]
    truth = dequantize(torch.from_numpy(blocks), int(kind)).view(24, 512).numpy()
    assert np.array_equal(permute(found.numpy(), 3), truth)


def test_a_layout_that_cannot_be_read_is_refused_by_its_name(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_model("llama", hidden_size=256, intermediate_size=256)
    path = write_gguf(source, tmp_path / "m.gguf", kind=GGMLQuantizationType.TQ1_0)
    with pytest.raises(ModelRefused, match=r"stored as TQ1_0.*Q4_K"):
        convert(path, tmp_path / "cache")


def test_quantized_weights_are_equal_within_their_error(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """B147."""
    source = tiny_model("llama")
    path = write_gguf(source, tmp_path / "m.gguf", kind=GGMLQuantizationType.Q8_0)
    folder = convert(path, tmp_path / "cache")
    assert all(tensor.dtype == torch.bfloat16 for _, tensor in iterate_weights(folder))
    ids = torch.arange(3, 40)[None]
    expected = families.load_reference(source)(ids).logits
    found = families.load_reference(folder)(ids).logits
    assert (expected - found).std() < 0.05 * expected.std()


def test_half_precision_files_keep_their_type(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    for kind, dtype in (
        (GGMLQuantizationType.F16, torch.float16),
        (GGMLQuantizationType.BF16, torch.bfloat16),
    ):
        path = write_gguf(tiny_model("llama"), tmp_path / f"{kind.name}.gguf", kind=kind)
        folder = convert(path, tmp_path / "cache")
        assert {tensor.dtype for _, tensor in iterate_weights(folder)} == {dtype}


def test_settings_and_end_ids_come_out_right(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """B033: the end token and the end of turn both end an answer; single precision does not bend the settings."""
    source = tiny_model("llama")
    folder = convert(write_gguf(source, tmp_path / "m.gguf"), tmp_path / "cache")
    description = describe(folder)
    assert description.eos_token_ids == (0, 2)
    assert description.config.rms_norm_eps == describe(source).config.rms_norm_eps
    assert description.max_context == 512
    assert description.architecture == "LlamaForCausalLM"
    tokenizer = load_tokenizer(folder)
    assert tokenizer.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == (
        "user\nhi\nassistant\n"
    )


TEXTS = [
    "  two blanks",
    "in 12345 and 6.7",
    "naïve café",
    "🙂 한국어",
    "<|start|>x<|end|>",
    "the\n\tend",
]


@pytest.mark.parametrize(
    ("pre", "splits_digits"), [("smollm", True), ("gpt-2", False), ("starcoder", True)]
)
def test_ids_are_those_of_the_original_tokenizer(
    tiny_model: Callable[..., Path], tmp_path: Path, pre: str, splits_digits: bool
) -> None:
    """B148: blanks, digits, accents, emoji, specials."""
    from tokenizers import Tokenizer, pre_tokenizers

    source = tiny_model("llama")
    folder = convert(write_gguf(source, tmp_path / "m.gguf", pre=pre), tmp_path / "cache")
    original = Tokenizer.from_file(str(source / "tokenizer.json"))
    if splits_digits:
        original.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), original.pre_tokenizer]
        )
    tokenizer = load_tokenizer(folder)
    for text in TEXTS:
        assert tokenizer.encode(text) == original.encode(text, add_special_tokens=False).ids


def test_an_unknown_way_to_split_text_is_refused_unless_the_original_lies_beside(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """B148: same ids, or no start."""
    source = tiny_model("llama")
    path = write_gguf(source, tmp_path / "m.gguf", pre="brand-new")
    with pytest.raises(ModelRefused, match=r"'brand-new'.*tokenizer\.json beside"):
        convert(path, tmp_path / "cache")
    (tmp_path / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    folder = convert(path, tmp_path / "cache")
    assert load_tokenizer(folder).encode("the 12") == load_tokenizer(source).encode("the 12")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"leave_out": "blk.1.ffn_up.weight"}, "lacks 1 tensors"),
        ({"extra_tensor": "blk.1.attn_sub_norm.weight"}, "does not have, first blk.1.attn_sub"),
        ({"extra": {"llama.rope.scaling.type": "yarn"}}, "scales its positions"),
        ({"extra": {"llama.rope.scaling.factor": 8.0}}, "scales its positions"),
    ],
)
def test_what_would_give_wrong_text_is_refused(
    tiny_model: Callable[..., Path], tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf", **changes)
    with pytest.raises(ModelRefused, match=reason):
        convert(path, tmp_path / "cache")
    assert not list((tmp_path / "cache" / "gguf").iterdir())


def test_a_torn_or_foreign_file_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    whole = path.read_bytes()
    for content, reason in (
        (b"", "cannot be read"),
        (b"GGUF", "incomplete"),
        (b"no model at all, and nothing like it", "no GGUF file"),
        (whole[:300], "incomplete"),
        (whole[: len(whole) - 5000], rf"incomplete: .* it has {len(whole) - 5000}\. Fetch"),
        (whole[:-1], "incomplete"),
    ):
        path.write_bytes(content)
        with pytest.raises(ModelRefused, match=rf"model\.name is a \.gguf file.*{reason}"):
            convert(path, tmp_path / "cache")


def test_a_file_is_converted_once_and_again_when_it_changed(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "m.gguf")
    first = convert(path, tmp_path / "cache")
    written = (first / "model.safetensors").stat().st_mtime_ns
    assert convert(path, tmp_path / "cache") == first
    assert (first / "model.safetensors").stat().st_mtime_ns == written
    os.utime(path, ns=(1, 1))
    assert convert(path, tmp_path / "cache") != first


def test_a_file_is_served_under_its_name_without_its_path(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "My-Model.Q8.gguf")
    files = resolve(ModelConfig(name=str(path), cache_dir=str(tmp_path / "cache")), silent)
    assert (files.root, files.kind) == ("My-Model.Q8", "gguf")
    assert str(tmp_path) not in files.origin
    assert str(tmp_path) not in (files.folder / "config.json").read_text()
