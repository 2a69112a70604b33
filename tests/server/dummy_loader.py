"""The `load` of a `NativeBackend` over the dummy runner, for every test of HTTP."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from core.config import MemoryPlan
from core.dummy_runner import ByteTokenizer, DummyRunner
from core.engine import Engine
from core.prefixes.snapshot import restore_at_the_start
from core.step_loop import Report
from server.backends.base import ServedModel
from server.backends.native import LoadedThings
from server.config import ServerConfig

MODEL_NAME = "dummy"


def make_loader(
    config: ServerConfig, runner: DummyRunner, tokenizer: ByteTokenizer
) -> Callable[[Report], LoadedThings]:
    """The `load` of a `NativeBackend` that loads nothing."""

    def load(report: Report) -> LoadedThings:
        report("making a dummy", 0.5)
        engine = Engine(config.engine, runner, tokenizer)
        if config.kv_cache.snapshot_file is not None:
            engine.keep_snapshots(Path(config.kv_cache.snapshot_file), "dummy", 1 << 20)
        lines = restore_at_the_start(engine.snapshots)
        shape, cache = runner.shape, runner.cache_config
        plan = MemoryPlan(
            available_bytes=1 << 30,
            memory_fraction=0.3,
            max_memory_bytes=None,
            weights_bytes=shape.weights_bytes,
            activation_bytes=0,
            bytes_per_block=cache.block_size * shape.kv_bytes_per_token,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
            max_model_len=engine.max_model_len,
            decided_by="kv_cache.num_blocks",
        )
        model = ServedModel(
            name=MODEL_NAME,
            root=MODEL_NAME,
            created=1700000000,
            max_model_len=engine.max_model_len,
            shape=shape,
            plan=plan,
            tokenizer=tokenizer,
            aliases=config.server.model_aliases,
        )
        info = {"device": "cpu", "dtype": "none", "weights": "none"}
        return LoadedThings(engine, model, tuple(lines), info=info, startup_s={"total": 0.1})

    return load
