"""Tiny random models of every family, with a tiny byte-level tokenizer. No network, well under a second each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)
SPECIALS = ("<|endoftext|>", "<|start|>", "<|end|>")
NUM_TOKENS = 3 + 256 + 5

_BASE: dict[str, Any] = {
    "vocab_size": NUM_TOKENS,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_ALL_HEADS = {"num_key_value_heads": None}  # every query head has a KV head of its own
_GPT2_STYLE: dict[str, Any] = {
    **_ALL_HEADS,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
}

# The fast decoder's families, then those of the general path; windows are small, so that tests run past them.
FAST: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 24},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
}
GENERAL: dict[str, dict[str, Any]] = {
    "gpt2": _GPT2_STYLE,
    "gptj": {**_GPT2_STYLE, "rotary_dim": 4},
    "opt": {**_ALL_HEADS, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "gpt_neox": {**_ALL_HEADS},
    "phi": {},
    "phi3": {},
    "gemma2": {"head_dim": 8, "sliding_window": 24},
    "gemma3_text": {"head_dim": 8, "sliding_window": 24, "num_hidden_layers": 6},
    "starcoder2": {"sliding_window": 24, "use_sliding_window": True},
    "olmo2": {},
    "granite": {},
    "cohere": {},
    "stablelm": {},
    "smollm3": {},
    "glm4": {"head_dim": 8},
    "exaone4": {"sliding_window": 24, "sliding_window_pattern": 2},
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {
        "num_experts": 4,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "sliding_window": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "falcon": {},
    "bloom": {"n_head": 4, "n_layer": 2},
    "mamba": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "llama4_text": {"head_dim": 8, "attention_chunk_size": 24},
}
ALL = {**FAST, **GENERAL, **REFUSED}


def build(family: str, folder: Path, **changes: Any) -> Path:
    """Write a random model of `family` with its tokenizer into `folder`. The same bits every time."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **{**_BASE, **ALL[family], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config).eval()
        for parameter in model.parameters():
            if (
                parameter.dim() > 1
            ):  # the usual start is so flat that every best token is a near tie
                parameter.data.mul_(4)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Byte-level BPE over all bytes, with a handful of merges, three control tokens and a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a")]
    words = [*SPECIALS, *alphabet, *("".join(pair) for pair in merges)]
    assert len(words) == NUM_TOKENS
    vocabulary = {word: i for i, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in SPECIALS]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|endoftext|>",
        "eos_token": "<|end|>",
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def load_reference(folder: Path) -> Any:
    """The library's own model in float32, with plain attention."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


def greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """`num_tokens` greedy tokens of `transformers`' `generate`, end tokens included."""
    import torch

    with torch.inference_mode():
        output = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in output[0, len(prompt) :]]
