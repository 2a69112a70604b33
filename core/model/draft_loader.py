"""The draft model of `speculative.method: draft`: what it will take, and the decoder that drafts.

Called by `loader.py`, in the thread that loads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import MIB, NO_DRAFT, DraftMemory, SpeculativeConfig
from core.draft_model import SelfDraft, read_self_draft
from core.model.attention.layout import AttentionKernels, CausalModel
from core.model.decoder import FastDecoder
from core.model.decoder_shape import unsupported
from core.model.quantization import Quantization
from core.model.weights import open_weights


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """`layers`: those of the served model that those of the decoder are. `memory`: what is held for it alone."""

    decoder: FastDecoder
    layers: list[int]
    memory: DraftMemory
    description: str


def plan_draft(
    speculative: SpeculativeConfig,
    config: Any,
    quantization: Quantization,
    weights_bytes: Callable[[Quantization], int],
) -> DraftMemory:
    """What the draft model will take. `weights_bytes` tells how much the whole model takes, quantized so.

    Raises `ConfigError` where the served model has not the layers that are asked for."""
    draft = _self_draft(speculative)
    if draft is None or unsupported(config) is not None:
        return NO_DRAFT
    num_layers = config.num_hidden_layers
    layers = draft.layers_of(num_layers)
    if draft.quantization in ("none", quantization):
        return NO_DRAFT  # it shares what is there
    head = (
        config.vocab_size * config.hidden_size
    )  # in 8 bits, and so the embedding where it is tied
    head *= 1 if config.tie_word_embeddings else 3
    inner = max(0, weights_bytes(draft.quantization) - head)
    return DraftMemory(weights_bytes=head + inner * len(layers) // num_layers)


def load_draft(
    speculative: SpeculativeConfig,
    served: CausalModel,
    config: Any,
    folder: Path,
    kernels: AttentionKernels,
    quantization: Quantization,
) -> LoadedDraft | None:
    """The decoder that drafts for `served`; None where drafts are not by a model, or would not be used: without the C
    kernels."""
    draft = _self_draft(speculative)
    if draft is None or not isinstance(served, FastDecoder) or served.compiled is None:
        return None
    layers = draft.layers_of(served.shape.num_layers)
    whole, is_shared = served, draft.quantization in ("none", quantization)
    if not is_shared:
        whole = FastDecoder(
            config, open_weights(folder), served.dtype, served.device, kernels, draft.quantization
        )
    decoder = whole.with_layers(layers)
    what = "the served model"
    if len(layers) < served.shape.num_layers:
        what = f"{len(layers)} of the {served.shape.num_layers} layers of the served model"
    held = 0 if is_shared else decoder.weights_bytes
    if not is_shared:
        what += f" in {draft.quantization} ({held / MIB:,.0f} MiB)"
    return LoadedDraft(decoder, layers, DraftMemory(held), what)


def _self_draft(speculative: SpeculativeConfig) -> SelfDraft | None:
    if speculative.method != "draft" or speculative.draft_model is None:
        return None
    return read_self_draft(speculative.draft_model)
