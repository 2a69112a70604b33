"""What `--plan` shows of one model: its memory sum, from its config and the heads of its files."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from core.config import (
    MIB,
    NO_SPECULATION,
    EngineConfig,
    KVCacheConfig,
    ModelConfig,
    SpeculativeConfig,
    render_plan,
)
from core.model.decoder_shape import unsupported
from core.model.default_model import Report
from core.model.draft_loader import check_draft
from core.model.loader import prepare
from core.model.tokenizer_files import keep_tokenizer
from core.model.weights import list_weight_files


def plan_only(
    model: ModelConfig,
    engine: EngineConfig,
    kv_cache: KVCacheConfig,
    report: Report = lambda message, fraction: None,
    limit_bytes: int | None = None,
    speculative: SpeculativeConfig = NO_SPECULATION,
) -> tuple[list[str], int]:
    """The lines of `--plan`, and the bytes they come to: the memory sum from config and file heads; no weight is
    loaded, but the tokenizer, as it counts in what the process holds. `limit_bytes`: as in `prepare`."""
    planned = prepare(model, engine, kv_cache, report, limit_bytes, speculative)
    ends, template = planned.description.eos_token_ids, model.chat_template
    tokenizer = keep_tokenizer(planned.files.folder, eos_token_ids=ends, template_file=template)
    check_draft(planned.draft, tokenizer)
    dtype = str(planned.dtype).removeprefix("torch.")
    lines = [
        f"model: {planned.files.origin}, {planned.description.architecture}, {dtype} on {planned.device}",
        *render_plan(planned.plan, planned.shape),
        *_loading_lines(planned.files.folder, planned.description.config),
        *planned.notes,
    ]
    return lines, planned.plan.total_bytes


def _loading_lines(folder: Path, config: Any) -> list[str]:
    """A line where the checkpoint is held beside the model; none for the fast decoder over safetensors, which gives
    back each tensor that it has packed. Imports a general model's code: it stays in the process, and counts."""
    is_general = unsupported(config) is not None
    if is_general:
        _import_code(config)
    paths = list_weight_files(folder)
    if not is_general and all(path.suffix == ".safetensors" for path in paths):
        return []
    size = sum(path.stat().st_size for path in paths)
    return [
        f"loading: for a while up to {size / MIB:,.0f} MiB more, for the checkpoint beside the model"
    ]


def _import_code(config: Any) -> None:
    from transformers import AutoModelForCausalLM

    with contextlib.suppress(Exception):  # no such model: loading says so
        AutoModelForCausalLM._model_mapping[type(config)]
