"""`python -m loadtest.dummy_server [--step-ms N] [noria's flags]`: Noria with everything but the model.

The dummy runner plays the tokens of a text, so that the real tokenizer has real work; scheduler, step thread, backend
and HTTP are the server's own. `overhead.py` starts it.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from core.config import MIB, MemoryPlan
from core.dummy_runner import make_dummy_runner
from core.engine import Engine
from core.errors import NoriaError
from core.interfaces import TextTokenizer
from core.sequence import Sequence
from core.step_loop import Report
from server.__main__ import leave, make_parser, run_backend
from server.backends.base import ServedModel
from server.backends.native import LoadedThings, NativeBackend
from server.config import Override, ServerConfig, load_config
from server.logs import configure_logging
from server.metrics import Metrics

NAME = "dummy"
NUM_BLOCKS, MAX_CONTEXT = 8192, 4096
TEXT = (
    " The river rises in the hills north of the town and falls, in less than 40 miles, by some 1,200 feet. Its upper"
    " course is narrow; below the old mill (built in 1783) it widens, and the water wheel — a noria, as the Spanish"
    " call it — lifts what the gardens need. “Nobody owns the river,” my grandmother used to say: she was right 🙂."
    " def turn(wheel, water):\n    return [bucket.fill(water) for bucket in wheel]\n"
)


def main(arguments: list[str] | None = None) -> int:
    own = argparse.ArgumentParser(prog="python -m loadtest.dummy_server")
    own.add_argument("--step-ms", type=float, default=20.0, help="what a step of the model takes")
    options, rest = own.parse_known_args(arguments)
    flags = make_parser().parse_args(rest)
    overrides = [Override("--port", "server.port", flags.port or 0), *flags.set]
    try:
        config, _ = load_config(None, {}, overrides, default_path="")
    except NoriaError as error:
        print(error.message, file=sys.stderr)
        return 2
    configure_logging(config.log)
    metrics = Metrics(NAME)
    load = make_load(config, options.step_ms / 1000)
    backend = NativeBackend(config.engine, load, metrics, config.log.stats_interval_s)
    return run_backend(config, backend, metrics, time.monotonic())


def make_load(config: ServerConfig, step_time_s: float) -> Callable[[Report], LoadedThings]:
    """The `load` of a `NativeBackend`: the configured model's tokenizer, and no weights."""

    def load(report: Report) -> LoadedThings:
        report("loading the tokenizer")
        from core.model.source import resolve
        from core.model.tokenizer_files import load_tokenizer

        tokenizer = load_tokenizer(resolve(config.model, report).folder)
        token_ids = tokenizer.encode(TEXT, add_special_tokens=False)

        def next_token(sequence: Sequence) -> int:
            return token_ids[(sequence.seed + sequence.num_output_tokens) % len(token_ids)]

        runner = make_dummy_runner(
            num_blocks=NUM_BLOCKS,
            max_context=MAX_CONTEXT,
            vocab_size=tokenizer.vocab_size,
            eos_token_ids=tokenizer.eos_token_ids,
            script=next_token,
            step_time_s=step_time_s,
        )
        engine = Engine(config.engine, runner, tokenizer)
        return LoadedThings(engine, _served(engine, tokenizer))

    return load


def _served(engine: Engine, tokenizer: TextTokenizer) -> ServedModel:
    shape, cache = engine.runner.shape, engine.cache_config
    plan = MemoryPlan(
        available_bytes=1024 * MIB,
        memory_fraction=1.0,
        max_memory_bytes=None,
        weights_bytes=0,
        activation_bytes=0,
        bytes_per_block=cache.block_size * shape.kv_bytes_per_token,
        block_size=cache.block_size,
        num_blocks=cache.num_blocks,
        max_model_len=engine.max_model_len,
        decided_by="kv_cache.num_blocks",
    )
    return ServedModel(
        name=NAME,
        root=NAME,
        created=int(time.time()),
        max_model_len=engine.max_model_len,
        shape=shape,
        plan=plan,
        tokenizer=tokenizer,
    )


if __name__ == "__main__":
    leave(main())
