"""Tiny random decoders of the Llama family with transformers' own as the truth, and ragged steps to feed them."""

from __future__ import annotations

import random

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from core.model.attention.layout import AttentionKernels, StepLayout
from core.model.decoder import FastDecoder
from core.model.decoder_shape import unsupported

CPU = torch.device("cpu")
SIZES = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
}


def rope(kind: str, **more: object) -> dict[str, object]:
    return {"rope_type": kind, "rope_theta": 10000.0, **more}


CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama with biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True, head_dim=32),
    "llama3 rope": LlamaConfig(
        **SIZES,
        rope_parameters=rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "linear rope": LlamaConfig(**SIZES, rope_parameters=rope("linear", factor=2.0)),
    "dynamic rope": LlamaConfig(**SIZES, rope_parameters=rope("dynamic", factor=2.0)),
    "yarn rope": LlamaConfig(
        **SIZES, rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "mistral": MistralConfig(**SIZES, sliding_window=24),
    "qwen2": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=20, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "odd sizes": LlamaConfig(
        **{**SIZES, "intermediate_size": 72, "hidden_size": 60, "head_dim": 14}
    ),
}


def build(config: PreTrainedConfig, kernels: AttentionKernels, dtype=torch.float32):
    """(the library's model, the fast decoder with the same random weights)."""
    torch.manual_seed(0)
    theirs = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("bias") or "norm" in name:  # zeros and ones would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.1)
    weights = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    assert unsupported(config) is None
    return theirs, FastDecoder(config, weights, dtype, CPU, kernels)


def make_step(
    contexts: list[int], rows: list[int], block_size: int, *, seed: int = 0
) -> tuple[StepLayout, int]:
    """A ragged step whose sequences have their blocks scattered; (layout, number of blocks)."""
    counts = [-(-context // block_size) for context in contexts]
    ids = random.Random(seed).sample(range(sum(counts) + 3), sum(counts))
    tables = torch.zeros(len(contexts), max(counts), dtype=torch.int32)
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for i, (context, new) in enumerate(zip(contexts, rows, strict=True)):
        mine, ids = ids[: counts[i]], ids[counts[i] :]
        tables[i, : counts[i]] = torch.tensor(mine, dtype=torch.int32)
        span = range(context - new, context)
        positions += span
        slots += [mine[p // block_size] * block_size + p % block_size for p in span]
        starts.append(len(positions))
    layout = StepLayout(
        torch.tensor(positions),
        torch.tensor(slots),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(contexts, dtype=torch.int32),
        tables,
        starts,
        contexts,
        block_size,
    )
    return layout, sum(counts) + 3


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(0, 160, (n,), generator=generator).tolist() for n in lengths]
