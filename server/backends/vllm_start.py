"""From the configuration to a running vLLM: which model, which engine arguments, which environment.

The returned callable blocks for as long as vLLM loads and compiles, so it runs in a thread. vLLM and torch are imported
there, not before. Called by `server/backends` only.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import importlib.util
import math
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from core import __version__
from core.config import MemoryPlan, ModelConfig, ModelShape, plan_memory, render_plan
from core.errors import ConfigError, ModelRefused
from core.step_loop import Report
from server.backends.base import ServedModel
from server.backends.loading import served_name
from server.backends.vllm_engine import StepCounter, VllmEngine
from server.backends.vllm_install import CUDA_EXTRAS
from server.config import ServerConfig

Start = Callable[[Report], VllmEngine]
_MEMORY_ARGS = {"kv_cache_memory_bytes", "gpu_memory_utilization", "num_gpu_blocks_override"}


def make_start(config: ServerConfig, counter: StepCounter) -> Start:
    """The `start` of a `VllmBackend`; may be called again after the engine's death. Raises `ModelRefused`,
    `ConfigError`."""

    def start(report: Report) -> VllmEngine:
        start_s = time.monotonic()
        report("importing vLLM")
        _set_environment(config)
        engine_class, args_class = _import_vllm()
        imported_s = time.monotonic() - start_s
        model = _model_config(config)
        prepared = _prepare(model, config, report)
        args = _engine_args(config, prepared, args_class)
        report("starting vLLM's engine process")
        llm = _make(engine_class, args_class, args, counter)
        served = _served_model(config, model, prepared, llm)
        counter.num_blocks = served.plan.num_blocks
        seconds = time.monotonic() - start_s
        return VllmEngine(
            llm,
            served,
            lines=_describe(prepared, served, args, seconds),
            info={"device": prepared.device, "dtype": prepared.dtype, "weights": prepared.dtype},
            startup_s={"import": imported_s, "vllm": seconds - imported_s},
        )

    return start


@dataclasses.dataclass(frozen=True, slots=True)
class _Prepared:
    """What the files say; the tokenizer, templates and ids are ours for both engines."""

    folder: str
    root: str
    origin: str
    architecture: str
    tokenizer: Any
    shape: ModelShape
    max_context: int
    generation_defaults: dict[str, Any]
    dtype: str
    device: str
    available_bytes: int


def _model_config(config: ServerConfig) -> ModelConfig:
    if config.vllm.model is None:
        return config.model
    changes: dict[str, Any] = {"name": config.vllm.model, "revision": None}
    return ModelConfig(
        **{f: getattr(config.model, f) for f in ModelConfig.__struct_fields__} | changes
    )


def _set_environment(config: ServerConfig) -> None:
    """What vLLM reads from the environment only. What is set already stays."""
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",  # nothing of this server goes to anyone
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        # This process has threads (tokenizing, perhaps a step thread): a fork could inherit a held lock.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if cores := _cores_of_workers(config):
        defaults["VLLM_CPU_OMP_THREADS_BIND"] = cores
    for name, value in defaults.items():
        os.environ.setdefault(name, value)
    openmp, preloaded = Path(sys.prefix) / "lib" / "libiomp5.so", os.environ.get("LD_PRELOAD", "")
    if openmp.exists() and "omp" not in preloaded:
        # The CPU build brings Intel's OpenMP along, but its processes use it only if it is loaded before torch's.
        os.environ["LD_PRELOAD"] = f"{preloaded}:{openmp}".lstrip(":")


def _cores_of_workers(config: ServerConfig) -> str:
    """As `0,1|2,3`: `engine.threads` cores (auto: all) in equal shares. Empty leaves the choice to vLLM, which can make
    it for one worker per NUMA node only."""
    args, threads = config.vllm.engine_args, config.engine.threads
    sizes = [args.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")]
    num_workers = math.prod(size for size in sizes if isinstance(size, int))
    if not hasattr(os, "sched_getaffinity") or (threads == "auto" and num_workers == 1):
        return ""
    cores = [str(core) for core in sorted(os.sched_getaffinity(0))]
    cores = cores if threads == "auto" else cores[:threads]
    share = len(cores) // num_workers
    if share < 1:
        return ""
    return "|".join(",".join(cores[i * share : (i + 1) * share]) for i in range(num_workers))


def _import_vllm() -> tuple[Any, Any]:
    try:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM
    except Exception as error:  # also what CUDA builds of extras raise beside a CPU torch
        extras = [name for name in CUDA_EXTRAS if importlib.util.find_spec(name)]
        hint = f" If it is a CPU build, try: pip uninstall -y {' '.join(extras)}" if extras else ""
        raise ModelRefused(
            f"vLLM is installed but cannot be imported: {_last_line(error)}.{hint}"
        ) from error
    return AsyncLLM, AsyncEngineArgs


def _prepare(model: ModelConfig, config: ServerConfig, report: Report) -> _Prepared:
    from core.model.description import describe
    from core.model.device import available_bytes, choose_device, choose_dtype
    from core.model.source import resolve
    from core.model.tokenizer_files import load_tokenizer
    from core.model.weights import measure_weights

    files = resolve(model, report)
    device = choose_device(config.engine)
    dtype = choose_dtype(model, device)
    description = describe(files.folder)
    tokenizer = load_tokenizer(
        files.folder,
        eos_token_ids=description.eos_token_ids,
        template_file=model.chat_template,
    )
    shape = description.shape(measure_weights(files.folder), dtype, tokenizer.vocab_size)
    return _Prepared(
        folder=str(files.folder),
        root=files.root,
        origin=files.origin,
        architecture=description.architecture,
        tokenizer=tokenizer,
        shape=dataclasses.replace(shape, eos_token_ids=tokenizer.eos_token_ids),
        max_context=description.max_context,
        generation_defaults=description.generation_defaults if model.generation_defaults else {},
        dtype=str(dtype).removeprefix("torch."),
        device=device.type,
        available_bytes=available_bytes(device),
    )


def _engine_args(config: ServerConfig, prepared: _Prepared, args_class: Any) -> dict[str, Any]:
    """Ours from the settings that both engines share, then `vllm.engine_args`. Raises `ConfigError`."""
    engine, model, given = config.engine, _model_config(config), config.vllm.engine_args
    if engine.policy == "static":
        raise ConfigError(
            "engine.policy static exists in the native engine only; with vLLM use continuous."
        )
    if engine.order != "fcfs":
        raise ConfigError(
            f"engine.order {engine.order} exists in the native engine only; with vLLM use fcfs."
        )
    if config.kv_cache.snapshot_file is not None:
        raise ConfigError(
            "kv_cache.snapshot_file exists in the native engine only; with vLLM set it to null."
        )
    known = {field.name for field in dataclasses.fields(args_class)}
    for name in given:
        if name not in known:
            raise ConfigError(f"vllm.engine_args has {name[:60]!r}, which this vLLM does not know.")
    seats = 1 if engine.policy == "single" else engine.batch_size
    asked = model.max_model_len
    ours: dict[str, Any] = {
        "model": prepared.folder,
        "served_model_name": prepared.root,
        "dtype": prepared.dtype,
        "max_model_len": prepared.max_context if asked == "auto" else asked,
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(engine.max_batched_tokens, seats),
        "enable_prefix_caching": engine.prefix_caching,
        "disable_log_stats": True,  # its own lines; ours say the same
        "max_logprobs": 20,
    }
    if not _MEMORY_ARGS & given.keys():
        ours |= _memory_args(config, model, prepared)
    return ours | given


def _memory_args(config: ServerConfig, model: ModelConfig, prepared: _Prepared) -> dict[str, Any]:
    """As much memory for K and V as the native engine would take. On CUDA vLLM measures for itself."""
    kv_cache = config.kv_cache
    if kv_cache.dtype != "auto":
        raise ConfigError(
            f"kv_cache.dtype: {kv_cache.dtype} is the native engine's; set kv_cache_dtype in vllm.engine_args."
        )
    if kv_cache.num_blocks != "auto":
        return {"num_gpu_blocks_override": kv_cache.num_blocks}
    if prepared.device == "cuda":
        fraction = kv_cache.memory_fraction
        return {} if fraction == "auto" else {"gpu_memory_utilization": fraction}
    plan = plan_memory(
        prepared.shape, config.engine, kv_cache, model, prepared.available_bytes, "cpu"
    )
    return {"kv_cache_memory_bytes": plan.kv_bytes}


def _make(engine_class: Any, args_class: Any, args: dict[str, Any], counter: StepCounter) -> Any:
    try:
        llm = engine_class.from_engine_args(
            args_class(**args), stat_loggers=[lambda config, index=0: counter]
        )
    except (
        Exception
    ) as error:  # pydantic's, its own, and those of a process that ended while it started
        raise ModelRefused(
            f"vLLM cannot start: {_last_line(error)}. Its own log above says more."
        ) from error
    # Its Prometheus logger would count everything a second time, into a registry that nobody reads.
    manager = llm.logger_manager
    manager.stat_loggers = [
        logger for logger in manager.stat_loggers if type(logger).__name__ != "PrometheusStatLogger"
    ]
    return llm


def _served_model(
    config: ServerConfig, model: ModelConfig, prepared: _Prepared, llm: Any
) -> ServedModel:
    cache, shape = llm.vllm_config.cache_config, prepared.shape
    block_size, num_blocks = int(cache.block_size), int(cache.num_gpu_blocks)
    max_model_len = min(int(llm.model_config.max_model_len), block_size * num_blocks)
    plan = MemoryPlan(
        available_bytes=prepared.available_bytes,
        memory_fraction=0.0,
        max_memory_bytes=None,
        weights_bytes=shape.weights_bytes,
        activation_bytes=0,
        bytes_per_block=block_size * shape.kv_bytes_per_token,
        block_size=block_size,
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        decided_by="vLLM",
    )
    return ServedModel(
        name=served_name(model.name, prepared.root),
        root=prepared.root,
        created=int(time.time()),
        max_model_len=max_model_len,
        shape=shape,
        plan=plan,
        tokenizer=prepared.tokenizer,
        generation_defaults=prepared.generation_defaults,
        aliases=config.server.model_aliases,
    )


def _describe(
    prepared: _Prepared, model: ServedModel, args: dict[str, Any], seconds: float
) -> tuple[str, ...]:
    version = importlib.metadata.version
    vllm = next((name for name in ("vllm", "vllm-cpu") if _has(name)), None)
    told = {k: v for k, v in args.items() if k not in ("model", "served_model_name")}
    return (
        f"versions: Noria {__version__}, Python {platform.python_version()}, "
        f"vLLM {version(vllm) if vllm else 'unknown'}, torch {version('torch')}, "
        f"transformers {version('transformers')}, device {prepared.device}",
        f"model: {prepared.origin}, {prepared.architecture} in vLLM, {prepared.dtype}, loaded in {seconds:.1f} s",
        "engine arguments: " + ", ".join(f"{name}={value}" for name, value in told.items()),
        *render_plan(model.plan, model.shape)[1:],
    )


def _has(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200].rstrip(".")
