"""From settings to a runner: find the files, read what they say, plan memory, load weights, make the KV cache.

The one place that picks the fast decoder or the general path. Runs in the step thread, which owns every tensor from the
first on. Called by `server/__main__.py` (through the step loop) and by scripts.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import torch

from core.config import (
    NO_DRAFT,
    NO_SPECULATION,
    CacheConfig,
    EngineConfig,
    KVCacheConfig,
    MemoryPlan,
    ModelConfig,
    ModelShape,
    SpeculativeConfig,
    plan_memory,
)
from core.errors import ConfigError, ModelRefused
from core.interfaces import Runner
from core.model.attention import choose_kernels
from core.model.attention.layout import AttentionKernels, CausalModel
from core.model.default_model import Report
from core.model.description import ModelDescription, describe
from core.model.device import available_bytes, choose_device, choose_dtype
from core.model.draft_loader import NOBODY, DraftPlan, LoadedDraft, load_draft, plan_draft
from core.model.fingerprint import fingerprint
from core.model.quantization import Quantization
from core.model.source import ModelFiles, resolve
from core.model.threads import set_threads
from core.model.tokenizer import Tokenizer
from core.model.tokenizer_files import keep_tokenizer
from core.model.weights import measure_weights, open_weights
from core.model.weights_memory import trim_heap
from core.model.weights_size import held_bytes, planned_bytes

if TYPE_CHECKING:
    from core.model.runner import ModelRunner

_POSITION_TABLE = re.compile(r"(^|\.)(wpe|embed_positions|position_embeddings?)$")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `path` is `fast` or `general`; `notes` are sentences for the start log;
    `start_phases` are seconds per phase: files, tokenizer, weights, kv_cache, warm_up; probe on the general path."""

    runner: Runner
    tokenizer: Tokenizer
    shape: ModelShape
    plan: MemoryPlan
    root: str
    origin: str
    architecture: str
    path: Literal["fast", "general"]
    dtype: str
    device: str
    kernels: str
    weights_bytes: int
    generation_defaults: dict[str, Any]
    start_phases: dict[str, float]
    notes: tuple[str, ...] = ()
    fingerprint: str = (
        ""  # of what keys and values depend on; made only for `kv_cache.snapshot_file`
    )


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What `--plan` shows: everything that can be known without loading a weight."""

    files: ModelFiles
    description: ModelDescription
    shape: ModelShape
    plan: MemoryPlan
    dtype: torch.dtype
    device: torch.device
    notes: tuple[str, ...] = ()
    draft: DraftPlan = NOBODY


@dataclass(slots=True)
class _Stopwatch:
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start_s = time.monotonic()
        yield
        self.phases[name] = self.phases.get(name, 0.0) + time.monotonic() - start_s


def prepare(
    model: ModelConfig,
    engine: EngineConfig,
    kv_cache: KVCacheConfig,
    report: Report,
    limit_bytes: int | None = None,
    speculative: SpeculativeConfig = NO_SPECULATION,
) -> PlannedModel:
    """Resolve the files and plan memory from what they say about themselves. `limit_bytes` bounds what may be taken of
    the memory that is free."""
    from core.model.compiled_forward import widens_bfloat16

    files = resolve(model, report)
    device = choose_device(engine)
    description = describe(files.folder)
    kernels, _ = choose_kernels(device, engine.kernels)
    dtype = choose_dtype(model, device, widens=widens_bfloat16(description.config, kernels))
    _check_quantization(model, description, device)
    shape = description.shape(measure_weights(files.folder), dtype, description.num_embedding_rows)
    checkpoint_bytes = shape.weights_bytes

    def weights_bytes(described: ModelDescription, size: int, quantization: Quantization) -> int:
        held = msgspec.structs.replace(model, quantization=quantization)
        return planned_bytes(described, size, dtype, held, engine)

    size = weights_bytes(description, checkpoint_bytes, model.quantization)
    shape, draft = replace(shape, weights_bytes=size), NOBODY
    if engine.kernels != "torch" and device.type == "cpu":  # without the C kernels nobody drafts
        settings = (model, kv_cache, description, dtype, weights_bytes, checkpoint_bytes)
        draft = plan_draft(speculative, *settings, report)
    available = available_bytes(device)
    if limit_bytes is not None:
        available = min(available, limit_bytes)
    plan = plan_memory(shape, engine, kv_cache, model, available, _kind(device), draft.memory)
    notes = (*description.notes, *_dtype_notes(description, dtype))
    return PlannedModel(files, description, shape, plan, dtype, device, notes, draft)


def load_model(
    model: ModelConfig,
    engine: EngineConfig,
    kv_cache: KVCacheConfig,
    report: Report,
    limit_bytes: int | None = None,
    speculative: SpeculativeConfig = NO_SPECULATION,
) -> LoadedModel:
    """Load `model.name` and build its runner. Raises `ModelRefused` or `ConfigError` with what to do."""
    set_threads(engine.threads)  # of this thread's team, which computes every step
    watch = _Stopwatch()
    with watch.phase("files"):
        planned = prepare(model, engine, kv_cache, report, limit_bytes, speculative)
    description, device, dtype = planned.description, planned.device, planned.dtype
    with watch.phase("tokenizer"):
        folder, ends = planned.files.folder, description.eos_token_ids
        tokenizer = keep_tokenizer(folder, eos_token_ids=ends, template_file=model.chat_template)
    shape = replace(
        planned.shape,
        vocab_size=min(tokenizer.vocab_size, description.num_embedding_rows),
        eos_token_ids=tokenizer.eos_token_ids,
    )
    kernels, kernels_note = choose_kernels(device, engine.kernels)
    report("loading weights", None)
    with watch.phase("weights"):
        decoder, path = _build(planned, kernels, model.quantization, report)
        files = (description.config, folder)
        parts = (decoder, files, tokenizer, kernels, model.quantization)
        drafted = load_draft(planned.draft, *parts, _paced(report, "loading the draft model"))
    if path == "general":
        with watch.phase("probe"):
            shape = _try_out(decoder, shape, kv_cache)
    shape = replace(shape, weights_bytes=held_bytes(decoder) or shape.weights_bytes)
    settings = (shape, engine, kv_cache, model, planned.plan.available_bytes, _kind(device))
    plan = plan_memory(*settings, NO_DRAFT if drafted is None else drafted.memory)
    trim_heap()
    report("reserving the KV cache", None)
    with watch.phase("kv_cache"):
        runner = _make_runner(decoder, shape, plan, drafted)
    with watch.phase("warm_up"):
        runner.warm_up()
    described = getattr(decoder, "description", kernels_note)
    return LoadedModel(
        runner=runner,
        tokenizer=tokenizer,
        shape=shape,
        plan=plan,
        root=planned.files.root,
        origin=planned.files.origin,
        architecture=description.architecture,
        path=path,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        kernels=described,
        weights_bytes=shape.weights_bytes,
        generation_defaults=description.generation_defaults if model.generation_defaults else {},
        start_phases=watch.phases,
        notes=planned.notes,
        fingerprint=fingerprint(runner, folder, described) if kv_cache.snapshot_file else "",
    )


def _make_runner(
    decoder: CausalModel, shape: ModelShape, plan: MemoryPlan, drafted: LoadedDraft | None
) -> ModelRunner:
    from core.model.runner import ModelRunner

    cache_config = CacheConfig(plan.block_size, plan.num_blocks, plan.kv_dtype)
    runner = ModelRunner(decoder, shape, cache_config)
    if drafted is not None:
        about = (drafted.description, drafted.max_context)
        runner.draft_with(drafted.decoder, drafted.layers, *about)
    return runner


def _check_quantization(
    model: ModelConfig, description: ModelDescription, device: torch.device
) -> None:
    from core.model.decoder_shape import unsupported

    if model.quantization == "none":
        return
    if device.type != "cpu":
        raise ConfigError(f"model.quantization: {model.quantization} needs engine.device: cpu.")
    if reason := unsupported(description.config):
        raise ConfigError(
            f"model.quantization: {model.quantization} is for the fast decoder, which cannot compute this model: "
            f"{reason}; set it to none."
        )


def _kind(device: torch.device) -> Literal["cpu", "cuda"]:
    return "cuda" if device.type == "cuda" else "cpu"


def _dtype_notes(description: ModelDescription, dtype: torch.dtype) -> list[str]:
    if dtype == torch.float16 and description.trained_dtype == "bfloat16":
        return [
            "warning: this model was trained in bfloat16 and runs in float16, where large values overflow; set "
            "model.dtype to bfloat16 or float32"
        ]
    return []


def _build(
    planned: PlannedModel, kernels: AttentionKernels, quantization: Quantization, report: Report
) -> tuple[CausalModel, Literal["fast", "general"]]:
    from core.model.decoder import FastDecoder
    from core.model.decoder_shape import unsupported

    config = planned.description.config
    if unsupported(config) is None:
        weights = open_weights(planned.files.folder, _paced(report, "loading weights"))
        decoder = FastDecoder(config, weights, planned.dtype, planned.device, kernels, quantization)
        return decoder, "fast"
    return load_general(planned, kernels), "general"


def _paced(report: Report, message: str, log_every_s: float = 3.0) -> Callable[[float], None]:
    """Progress by the hundredth; a long load also says where it is in the message, which goes to the log."""
    last_s, said, shown = time.monotonic(), message, -1

    def tell(fraction: float) -> None:
        nonlocal last_s, said, shown
        if int(100 * fraction) == shown:
            return
        shown, now_s = int(100 * fraction), time.monotonic()
        if now_s - last_s > log_every_s:
            last_s, said = now_s, f"{message}, {fraction:.0%}"
        report(said, fraction)

    return tell


def load_general(planned: PlannedModel, kernels: AttentionKernels) -> CausalModel:
    """The library's own model. Weights that are missing are an error: the library would invent them."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as library_logging

    from core.model.general import GeneralModel

    library_logging.disable_progress_bar()
    try:
        module, info = AutoModelForCausalLM.from_pretrained(
            str(planned.files.folder),
            config=planned.description.config,
            dtype=planned.dtype,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # unknown classes, torn files, shapes that do not fit
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
        raise ModelRefused(
            f"{planned.description.architecture} cannot be loaded: {reason}"
        ) from error
    for kind in ("missing_keys", "mismatched_keys"):
        if names := sorted(map(str, info.get(kind) or ())):
            raise ModelRefused(
                f"The weights do not fit {planned.description.architecture}: {len(names)} {kind.replace('_', ' ')}, "
                f"first {names[0]}."
            )
    return GeneralModel(module.eval().to(planned.device), kernels)


def _try_out(decoder: Any, shape: ModelShape, kv_cache: KVCacheConfig) -> ModelShape:
    """Probe a general model; returns the shape with the context its position tables really hold."""
    from core.model.probe import probe

    for name, part in decoder.module.named_modules():
        if isinstance(part, torch.nn.Embedding) and _POSITION_TABLE.search(name):
            rows = part.num_embeddings - int(getattr(part, "offset", 0))
            shape = replace(shape, max_context=min(shape.max_context, rows))
    probe(decoder, shape, kv_cache.block_size, available_bytes(decoder.device))
    return shape
