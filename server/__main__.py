"""The command `noria` (`python -m server`): arguments, configuration, logging, event loop. The only place that exits.

Exit codes: 0 after a signal, 1 when the server cannot serve, 2 for wrong arguments or settings.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from core import __version__
from core.errors import ConfigError, NoriaError
from server.api_keys import asks_for_key
from server.backends import make_backend, make_beside
from server.backends.base import Backend
from server.config import Override, ServerConfig, describe, load_config
from server.config_models import default_name
from server.logs import configure_logging, log_start
from server.metrics import Metrics
from server.serving import serve, why_insecure

# The event loop and the step thread share the interpreter lock. The loop's turns are short; with Python's default of
# 5 ms the step thread would wait up to a whole small step for each of them. Measured in turn: 3 to 5 % more tokens with
# 32 streams, no difference with 8.
SWITCH_INTERVAL_S = 0.0005
FLAGS = {"model": "model.name", "host": "server.host", "port": "server.port"}


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script."""
    started_s = time.monotonic()
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["bench"]:
        leave(_bench(words))
    options = make_parser().parse_args(words)
    code = 2
    try:
        config, sources = load_config(options.config, os.environ, _overrides(options))
        if options.print_config:
            code = _print(describe(config, sources))
        elif options.plan:
            code = _print_plan(config)
        else:
            configure_logging(config.log)
            refusal = why_insecure(config, options.insecure)
            if refusal is not None:
                raise refusal
            code = run(config, started_s)
    except ConfigError as error:
        print(f"noria: {error.message}", file=sys.stderr)
    leave(code)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="noria",
        description="Serves a language model as token streams.",
        epilog="`noria bench` measures a server that runs: see `noria bench --help`.",
    )
    parser.add_argument("--config", metavar="FILE", help="settings (default: ./config.yaml)")
    parser.add_argument("--model", help="built-in name, hub id, folder or .gguf file")
    parser.add_argument("--host", help="address to listen on (default: 127.0.0.1)")
    parser.add_argument("--port", type=int, help="port to listen on (default: 8000)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any setting; may be given several times",
    )
    parser.add_argument(
        "--insecure", action="store_true", help="serve other machines without an API key"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="show all settings and where they come from"
    )
    parser.add_argument("--plan", action="store_true", help="show the memory sum, load no weights")
    parser.add_argument("--version", action="version", version=f"noria {__version__}")
    return parser


def _overrides(options: argparse.Namespace) -> list[str | Override]:
    overrides: list[str | Override] = list(options.set)
    for flag, key in FLAGS.items():
        value = getattr(options, flag)
        if value is not None:
            overrides.append(Override(f"--{flag}", key, value))
    return overrides


def _bench(words: list[str]) -> int:
    """`noria bench …` is `python -m loadtest bench …`; a server that serves never imports it."""
    from loadtest.__main__ import main as loadtest

    return loadtest(words)


def run(config: ServerConfig, started_s: float) -> int:
    """Serves the configured model; returns the exit code."""
    metrics = Metrics(default_name(config.models, config.model), __version__)
    backend = make_backend(config, metrics)
    return run_backend(config, backend, metrics, started_s, make_beside(config, metrics))


def run_backend(
    config: ServerConfig,
    backend: Backend,
    metrics: Metrics,
    started_s: float,
    beside: Backend | None = None,
) -> int:
    """Serves any backend on a fresh event loop; returns the exit code."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)

    def on_ready(url: str) -> None:
        log_start(config, backend.start_lines(), metrics.startup_s, url)
        print(ready_line(url, config, time.monotonic() - started_s), flush=True)

    serving = serve(config, backend, metrics, started_s=started_s, on_ready=on_ready, beside=beside)
    try:
        _run_on_loop(serving)
    except ConfigError:
        raise
    except NoriaError:  # the backend has logged the sentence that says why
        return 1
    return 0


def _run_on_loop(serving: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(serving)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        new_event_loop: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module(
            "uvloop"
        ).new_event_loop
    except ImportError:  # Windows
        return None
    return new_event_loop


def ready_line(url: str, config: ServerConfig, seconds: float) -> str:
    key = ' -H "authorization: Bearer $KEY"' if asks_for_key(config.server) else ""
    body = """'{"prompt": "The capital of France is"}'"""
    return (
        f"Noria is ready at {url} after {seconds:.1f} s. Try:\n"
        f"  curl -N {url}/generate_stream{key} -H 'content-type: application/json' -d {body}"
    )


def _print_plan(config: ServerConfig) -> int:
    from server.plan import plan_lines

    try:
        lines = plan_lines(config)
    except ConfigError:
        raise
    except NoriaError as error:
        print(f"noria: {error.message}", file=sys.stderr)
        return 1
    return _print("\n".join(lines))


def _print(text: str) -> int:
    """To standard output, whose reader may take only the first lines, as `head` does; returns the exit code."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is buffered would raise again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def leave(code: int) -> None:
    """Ends the process. A thread that is stuck in a step or a download must not keep it alive (B132)."""
    logging.shutdown()
    sys.stdout.flush()
    is_held = any(
        thread is not threading.main_thread() and not thread.daemon and thread.is_alive()
        for thread in threading.enumerate()
    )
    if is_held:
        os._exit(code)
    sys.exit(code)


if __name__ == "__main__":
    main()
