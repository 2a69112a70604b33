"""From the configuration to what `NativeBackend` serves: loads the model and says so, line by line.

The returned callables run in the step thread or in that for loading, and only there torch is imported: the process
listens before that. Called by `server/backends/__init__.py`.
"""

from __future__ import annotations

import gc
import importlib.metadata
import os
import platform
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

import msgspec

from core import __version__
from core.config import MIB, render_plan
from core.engine import Engine
from core.prefixes.snapshot import restore_at_the_start
from core.speculation.speculators import describe_drafts
from core.step_loop import Report
from server.backends.base import ServedModel
from server.backends.native import LoadedThings
from server.config import ServerConfig
from server.config_models import public_name

if TYPE_CHECKING:
    from core.model.loader import LoadedModel

# What renders chats is imported once the server answers: no start waits for it, and no first chat, unless it is sooner.
CHAT_DELAY_S = 1.0


@dataclass(frozen=True, slots=True)
class LoadingSteps:
    """What of loading one of several models happens in threads. Tests have steps of their own.

    `make_load(config, limit_bytes, aliases)` gives the `load` of a `NativeBackend`; `prepare` runs in the step thread,
    all else in the one for loading.
    """

    make_load: Callable[[ServerConfig, int, tuple[str, ...]], Callable[[Report], LoadedThings]]
    needed_bytes: Callable[[ServerConfig, int, Report], int]
    free_bytes: Callable[[ServerConfig], int]
    prepare: Callable[[ServerConfig], None]
    trim: Callable[[], None]


def loading_steps() -> LoadingSteps:
    """Those of real models."""

    def make(
        config: ServerConfig, limit_bytes: int, aliases: tuple[str, ...]
    ) -> Callable[[Report], LoadedThings]:
        return make_load(config, limit_bytes=limit_bytes, aliases=aliases, is_step_thread=False)

    return LoadingSteps(make, needed_bytes, free_bytes, prepare_step_thread, trim_heap)


def make_load(
    config: ServerConfig,
    *,
    limit_bytes: int | None = None,
    aliases: tuple[str, ...] | None = None,
    is_step_thread: bool = True,
) -> Callable[[Report], LoadedThings]:
    """The `load` of a `NativeBackend`. Raises `ModelRefused` and `ConfigError` with what to do.

    A thread that is not the one that steps computes alone: a second OpenMP team would ruin the first."""
    engine_config = config.engine
    if not is_step_thread:
        engine_config = msgspec.structs.replace(engine_config, threads=1)

    def load(report: Report) -> LoadedThings:
        start_s = time.monotonic()
        report("importing torch")
        from core.model.loader import load_model

        imported_s = time.monotonic() - start_s
        settings = (config.model, engine_config, config.kv_cache)
        loaded = load_model(*settings, report, limit_bytes, config.speculative)
        engine = Engine(
            config.engine,
            loaded.runner,
            loaded.tokenizer,
            max_model_len=loaded.plan.max_model_len,
            speculative=config.speculative,
        )
        if config.kv_cache.snapshot_file is not None:
            path = snapshot_file_of(config)
            engine.keep_snapshots(path, loaded.fingerprint, config.kv_cache.snapshot_max_mib * MIB)
            report("reading the prefix snapshot")
        restored = restore_at_the_start(engine.snapshots)
        kept = loaded.plan.kv_dtype
        chat = threading.Timer(CHAT_DELAY_S, loaded.tokenizer.prepare_chat)
        chat.daemon = True
        chat.start()
        phases = dict(loaded.start_phases)
        phases["import"] = phases.get("import", 0.0) + imported_s
        return LoadedThings(
            engine=engine,
            model=_served_model(config, loaded, engine.max_model_len, aliases),
            lines=(
                *_describe(config, loaded, time.monotonic() - start_s),
                *restored,
            ),
            info={
                "device": loaded.device,
                "dtype": loaded.dtype,
                "kv_dtype": loaded.dtype if kept == "auto" else kept,
                "weights": loaded.dtype,
            },
            startup_s=phases,
        )

    return load


def snapshot_file_of(config: ServerConfig) -> Path:
    """Each of several models has a file of its own."""
    path = Path(str(config.kv_cache.snapshot_file)).expanduser()
    if not config.models:
        return path
    name = quote(public_name(config.model), safe="")  # no two names become one
    return path.with_name(f"{path.stem}-{name}{path.suffix}")


def prepare_step_thread(config: ServerConfig) -> None:
    """What a step thread that loads nothing itself needs before its first step: torch, and the team's threads."""
    gc.disable()  # as in `core/step_loop.py`
    try:
        import core.model.loader  # noqa: F401 - now, so that no load collects what it leaves behind
        from core.model.threads import set_threads

        set_threads(config.engine.threads)
        gc.collect()
        gc.freeze()
    finally:
        gc.enable()


def free_bytes(config: ServerConfig) -> int:
    """Memory that models may take now."""
    from core.model.device import available_bytes, choose_device

    return available_bytes(choose_device(config.engine))


def needed_bytes(config: ServerConfig, limit_bytes: int, report: Report) -> int:
    """What the model will take, from what its files say about themselves."""
    from core.model.loader import prepare

    planned = prepare(
        config.model, config.engine, config.kv_cache, report, limit_bytes, config.speculative
    )
    return planned.plan.total_bytes


def trim_heap() -> None:
    from core.model.weights_memory import trim_heap as trim

    trim()


def _served_model(
    config: ServerConfig,
    loaded: LoadedModel,
    max_model_len: int,
    aliases: tuple[str, ...] | None,
) -> ServedModel:
    return ServedModel(
        name=public_name(config.model)
        if config.models
        else served_name(config.model.name, loaded.root),
        root=loaded.root,
        created=int(time.time()),
        max_model_len=max_model_len,
        shape=loaded.shape,
        plan=loaded.plan,
        tokenizer=loaded.tokenizer,
        generation_defaults=loaded.generation_defaults,
        aliases=config.server.model_aliases if aliases is None else aliases,
    )


def served_name(name: str, root: str) -> str:
    """The model's name as clients see it: as configured, but never a path."""
    is_path = name.endswith(".gguf") or os.path.exists(os.path.expanduser(name))
    return root if is_path else name


def _describe(config: ServerConfig, loaded: LoadedModel, seconds: float) -> list[str]:
    version = importlib.metadata.version
    return [
        f"versions: Noria {__version__}, Python {platform.python_version()}, torch {version('torch')}, "
        f"transformers {version('transformers')}, device {loaded.device}",
        f"model: {loaded.origin}, {loaded.architecture} on the {loaded.path} path, {loaded.dtype}, "
        f"{loaded.weights_bytes / MIB:,.0f} MiB of weights, loaded in {seconds:.1f} s",
        f"kernels: {loaded.kernels}",
        *loaded.notes,
        *render_plan(loaded.plan, loaded.shape),
        describe_drafts(config.speculative, loaded.runner),
    ]
