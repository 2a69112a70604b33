"""The draft model of `speculative.method: draft`: what it will take, and the decoder that drafts.

A part of the served model, or another model with the same vocabulary. Called by `loader.py`, in the thread that loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from core.config import MIB, NO_DRAFT, DraftMemory, KVCacheConfig, ModelConfig, SpeculativeConfig
from core.errors import ConfigError, ModelRefused
from core.model.attention.layout import AttentionKernels, CausalModel
from core.model.decoder import FastDecoder
from core.model.decoder_shape import unsupported
from core.model.default_model import Report
from core.model.description import ModelDescription, describe
from core.model.quantization import Quantization
from core.model.source import resolve
from core.model.tokenizer import Tokenizer
from core.model.tokenizer_files import load_tokenizer
from core.model.weights import measure_weights, open_weights
from core.speculation.self_draft import SelfDraft, is_self_draft, read_self_draft


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """`layers`: those of the served model that those of the decoder are; None: it is another model, which can take
    `max_context` tokens. `memory`: what is held for it alone."""

    decoder: FastDecoder
    layers: list[int] | None
    memory: DraftMemory
    description: str
    max_context: int | None = None


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What will draft, known before a weight is loaded: nobody, a part of the served model, or another model."""

    memory: DraftMemory = NO_DRAFT
    part: SelfDraft | None = None
    name: str = ""
    folder: Path | None = None
    description: ModelDescription | None = None


NOBODY = DraftPlan()


def plan_draft(
    speculative: SpeculativeConfig,
    model: ModelConfig,
    kv_cache: KVCacheConfig,
    served: ModelDescription,
    dtype: torch.dtype,
    weights_bytes: Callable[[ModelDescription, int, Quantization], int],
    served_bytes: int,
    report: Report,
) -> DraftPlan:
    """`weights_bytes(description, size of the checkpoint, quantization)` tells what a model will take.

    Raises `ConfigError` where the served model has not the layers that are asked for, and where another model is not
    there or cannot draft for it."""
    name = speculative.draft_model
    if speculative.method != "draft" or name is None or unsupported(served.config) is not None:
        return NOBODY
    if not is_self_draft(name):
        return _plan_other(name, model, kv_cache, served, dtype, weights_bytes, report)
    part = read_self_draft(name)
    assert part is not None, "the configuration was not checked"
    config, layers = served.config, part.layers_of(served.config.num_hidden_layers)
    if part.quantization in ("none", model.quantization):
        return DraftPlan(part=part)  # it shares what is there
    head = (
        config.vocab_size * config.hidden_size
    )  # in 8 bits, and so the embedding where it is tied
    head *= 1 if config.tie_word_embeddings else 1 + dtype.itemsize
    inner = max(0, weights_bytes(served, served_bytes, part.quantization) - head)
    size = head + inner * len(layers) // config.num_hidden_layers
    return DraftPlan(DraftMemory(size), part)


def _plan_other(
    name: str,
    model: ModelConfig,
    kv_cache: KVCacheConfig,
    served: ModelDescription,
    dtype: torch.dtype,
    weights_bytes: Callable[[ModelDescription, int, Quantization], int],
    report: Report,
) -> DraftPlan:
    asked = ModelConfig(name=name, cache_dir=model.cache_dir)
    try:
        folder = resolve(asked, report).folder
        description = describe(folder)
    except (ConfigError, ModelRefused) as error:  # which speak of the served model's setting
        said = error.message.replace("model.name", "speculative.draft_model")
        raise ConfigError(said) from None
    if reason := unsupported(description.config):
        raise ConfigError(f"speculative.draft_model: {name} cannot draft: {reason}.")
    if description.num_embedding_rows < served.num_embedding_rows:
        raise ConfigError(
            f"speculative.draft_model: {name} knows {description.num_embedding_rows:,} tokens, the served model "
            f"{served.num_embedding_rows:,}; both need the same vocabulary."
        )
    shape = description.shape(measure_weights(folder), dtype, description.num_embedding_rows)
    if kv_cache.dtype == "int8" and shape.head_dim % 16:
        raise ConfigError(
            f"speculative.draft_model: kv_cache.dtype: int8 needs heads of a multiple of 16 elements; those of {name} "
            f"have {shape.head_dim}."
        )
    memory = DraftMemory(
        weights_bytes(description, shape.weights_bytes, model.quantization),
        shape.kept_bytes_per_token(kv_cache.dtype),
    )
    return DraftPlan(memory, None, name, folder, description)


def load_draft(
    plan: DraftPlan,
    served: CausalModel,
    files: tuple[Any, Path],
    tokenizer: Tokenizer,
    kernels: AttentionKernels,
    quantization: Quantization,
    on_progress: Callable[[float], None] = lambda fraction: None,
) -> LoadedDraft | None:
    """The decoder that drafts for `served`; None where drafts are not by a model, or would not be used: without the C
    kernels. `files`: the served model's config and folder; `tokenizer` and `quantization` are its
    too. `on_progress` is told the share of bytes read."""
    if not isinstance(served, FastDecoder) or served.compiled is None:
        return None
    if plan.part is not None:
        return _load_part(plan.part, served, files, kernels, quantization, on_progress)
    if plan.folder is None or plan.description is None:
        return None
    check_draft(plan, tokenizer)
    config, weights = plan.description.config, open_weights(plan.folder, on_progress)
    decoder = FastDecoder(config, weights, served.dtype, served.device, kernels, quantization)
    if decoder.compiled is None:
        raise ConfigError(
            f"speculative.draft_model: {plan.name} cannot draft: it has {decoder.description}."
        )
    memory = replace(plan.memory, weights_bytes=decoder.weights_bytes)
    size = f"{decoder.weights_bytes / MIB:,.0f} MiB"
    context = plan.description.max_context
    return LoadedDraft(decoder, None, memory, f"{plan.name} ({size})", context)


def _load_part(
    part: SelfDraft,
    served: FastDecoder,
    files: tuple[Any, Path],
    kernels: AttentionKernels,
    quantization: Quantization,
    on_progress: Callable[[float], None],
) -> LoadedDraft:
    layers = part.layers_of(served.shape.num_layers)
    whole, is_shared = served, part.quantization in ("none", quantization)
    if not is_shared:
        config, folder = files
        settings = (served.dtype, served.device, kernels, part.quantization)
        whole = FastDecoder(config, open_weights(folder, on_progress), *settings)
    decoder = whole.with_layers(layers)
    what = "the served model"
    if len(layers) < served.shape.num_layers:
        what = f"{len(layers)} of the {served.shape.num_layers} layers of the served model"
    held = 0 if is_shared else decoder.weights_bytes
    if not is_shared:
        what += f" in {part.quantization} ({held / MIB:,.0f} MiB)"
    return LoadedDraft(decoder, layers, DraftMemory(held), what)


def check_draft(plan: DraftPlan, served: Tokenizer) -> None:
    """Raises `ConfigError` where another model is to draft that has no tokenizer, or one for another vocabulary."""
    if plan.folder is None:
        return
    try:
        draft = load_tokenizer(plan.folder)
    except ModelRefused as error:
        raise ConfigError(f"speculative.draft_model: {plan.name}: {error.message}") from error
    _check_vocabulary(plan.name, draft, served)


def _check_vocabulary(name: str, draft: Tokenizer, served: Tokenizer) -> None:
    """Raises `ConfigError` at the first id that stands for other bytes."""
    for token_id in range(served.vocab_size):
        theirs, ours = draft.token_bytes(token_id), served.token_bytes(token_id)
        if theirs != ours:
            raise ConfigError(
                f"speculative.draft_model: {name} has another vocabulary: token {token_id} is {theirs!r} there and "
                f"{ours!r} in the served model."
            )
