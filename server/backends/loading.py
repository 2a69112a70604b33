"""From the configuration to what `NativeBackend` serves: loads the model and says so, line by line.

The returned callable runs in the step thread, and only there torch is imported: the process listens before that.
Called by `server/__main__.py`.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from core import __version__
from core.config import MIB, render_plan
from core.engine import Engine
from core.prefix_snapshot import restore_at_the_start
from core.step_loop import Report
from server.backends.base import ServedModel
from server.backends.native import LoadedThings
from server.config import ServerConfig

if TYPE_CHECKING:
    from core.model.loader import LoadedModel

# What renders chats is imported once the server answers: no start waits for it, and no first chat, unless it is sooner.
CHAT_DELAY_S = 1.0


def make_load(config: ServerConfig) -> Callable[[Report], LoadedThings]:
    """The `load` of a `NativeBackend`. Raises `ModelRefused` and `ConfigError` with what to do."""

    def load(report: Report) -> LoadedThings:
        start_s = time.monotonic()
        report("importing torch")
        from core.model.loader import load_model

        imported_s = time.monotonic() - start_s
        loaded = load_model(config.model, config.engine, config.kv_cache, report)
        engine = Engine(
            config.engine,
            loaded.runner,
            loaded.tokenizer,
            max_model_len=loaded.plan.max_model_len,
        )
        if config.kv_cache.snapshot_file is not None:
            path = Path(config.kv_cache.snapshot_file).expanduser()
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
            model=_served_model(config, loaded, engine.max_model_len),
            lines=(
                *_describe(loaded, time.monotonic() - start_s),
                *render_plan(loaded.plan, loaded.shape),
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


def _served_model(config: ServerConfig, loaded: LoadedModel, max_model_len: int) -> ServedModel:
    return ServedModel(
        name=served_name(config.model.name, loaded.root),
        root=loaded.root,
        created=int(time.time()),
        max_model_len=max_model_len,
        shape=loaded.shape,
        plan=loaded.plan,
        tokenizer=loaded.tokenizer,
        generation_defaults=loaded.generation_defaults,
        aliases=config.server.model_aliases,
    )


def served_name(name: str, root: str) -> str:
    """The model's name as clients see it: as configured, but never a path."""
    is_path = name.endswith(".gguf") or os.path.exists(os.path.expanduser(name))
    return root if is_path else name


def _describe(loaded: LoadedModel, seconds: float) -> list[str]:
    version = importlib.metadata.version
    return [
        f"versions: Noria {__version__}, Python {platform.python_version()}, torch {version('torch')}, "
        f"transformers {version('transformers')}, device {loaded.device}",
        f"model: {loaded.origin}, {loaded.architecture} on the {loaded.path} path, {loaded.dtype}, "
        f"{loaded.weights_bytes / MIB:,.0f} MiB of weights, loaded in {seconds:.1f} s",
        f"kernels: {loaded.kernels}",
        *loaded.notes,
    ]
