"""`python -m loadtest overhead`: what the server itself costs, in microseconds of processor time per streamed token.

The server runs in its own process over a runner that computes nothing and plays the tokens of a text; tokenizer,
detokenizer, scheduler, step thread, event loop and HTTP are the real ones. Its processor time is read from the system:
the main thread is the event loop, the others are the step thread (the dummy runner's own few microseconds included) and
the executor. `--real` shows what that comes to beside the real model.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from core.config import ModelConfig
from loadtest.closed_loop import run_async, run_closed_loop, with_model
from loadtest.figures import print_table, summarize
from loadtest.http_share import compare_with_script
from loadtest.points import add_output_arguments, emit, held_lock, positive_int
from loadtest.prompts import prompt_maker_for
from loadtest.scenarios import Shape, Span
from loadtest.server_process import running_server
from loadtest.target import PATHS, Target

COMMAND = (sys.executable, "-m", "loadtest.dummy_server")
FIGURES = (
    "server_us_per_token",
    "loop_us_per_token",
    "threads_us_per_token",
    "client_us_per_token",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=positive_int, default=32, help="at the same time")
    parser.add_argument("--tokens", type=positive_int, default=256, help="per stream")
    parser.add_argument("--prompt-tokens", type=positive_int, default=32)
    parser.add_argument("--step-ms", type=float, default=20.0, help="what a step takes")
    parser.add_argument("--repeat", type=positive_int, default=3)
    parser.add_argument("--endpoint", choices=sorted(PATHS), default="completions")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument(
        "--real",
        action="store_true",
        help="instead: the real model, tokens per second through HTTP over those of a script",
    )
    parser.add_argument("--concurrency", nargs="+", type=positive_int, default=[8, 32])
    parser.add_argument("--real-tokens", type=positive_int, default=128, help="per request")
    parser.add_argument("--model", default=ModelConfig().name, help="as for the server")
    add_output_arguments(parser)
    parser.add_argument("--lock", help="a lock file held while measuring")


def main(args: argparse.Namespace) -> int:
    if args.real:
        return compare_with_script(args)
    command = [*COMMAND, "--step-ms", str(args.step_ms), "--port", "{port}"]
    for setting in (f"engine.batch_size={args.streams}", *args.set):
        command += ["--set", setting]
    with tempfile.TemporaryDirectory(prefix="noria-overhead-") as folder:
        log_path = Path(folder) / "server.log"
        with running_server(command, log_path, ready_path="/health", start_timeout_s=120) as server:
            lines = run_async(_measure(args, server.url, server.pid))
    for line in lines:
        emit({"kind": "overhead", "label": args.label, **line}, args.out)
    print_table(
        f"{args.streams} streams of {args.tokens} tokens, a step every {args.step_ms:g} ms",
        ["tokens", "tokens/s", "server µs/token", "event loop", "other threads", "client"],
        [
            [str(line["output_tokens"]), f"{line['output_tokens_per_s']:.0f}"]
            + [f"{line[key]:.1f}" for key in FIGURES]
            for line in lines
        ],
    )
    return 1 if any(line["failed"] for line in lines) else 0


async def _measure(args: argparse.Namespace, url: str, pid: int) -> list[dict[str, Any]]:
    target = await with_model(Target(url=url, endpoint=args.endpoint))
    maker = await prompt_maker_for(target, None)
    shape = Shape(_exactly(args.prompt_tokens), _exactly(args.tokens))
    lines: list[dict[str, Any]] = []
    with held_lock(args.lock):
        for repetition in range(-1, args.repeat):  # the first warms up
            planned = maker.plan(shape, args.streams, f"overhead-{repetition}")
            before, client_s = thread_seconds(pid), time.process_time()
            result = await run_closed_loop(target, planned, args.streams, timeout_s=300)
            client_s = time.process_time() - client_s
            after = thread_seconds(pid)
            figures = summarize(result)
            spent = {tid: after[tid] - before.get(tid, 0.0) for tid in after}
            num_tokens = max(1, figures["output_tokens"])
            line = {
                "repetition": repetition,
                "streams": args.streams,
                "step_ms": args.step_ms,
                **figures,
                **per_token(spent, pid, num_tokens),
                "client_us_per_token": round(client_s / num_tokens * 1e6, 2),
            }
            if repetition >= 0:
                lines.append(line)
    return lines


def per_token(spent_s: dict[int, float], pid: int, num_tokens: int) -> dict[str, float]:
    """Microseconds of the process, of its main thread (the event loop), and of all others."""
    loop_s = spent_s.get(pid, 0.0)
    parts = (sum(spent_s.values()), loop_s, sum(spent_s.values()) - loop_s)
    return {
        name: round(seconds / num_tokens * 1e6, 2)
        for name, seconds in zip(FIGURES, parts, strict=False)
    }


def thread_seconds(pid: int) -> dict[int, float]:
    """Processor seconds of each thread of a process, by thread id; to the nanosecond where the kernel tells."""
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.is_dir():
        raise SystemExit("overhead reads the time of threads from /proc, which this system lacks.")
    return {int(task.name): _seconds_of(task) for task in tasks.iterdir()}


def _seconds_of(task: Path) -> float:
    try:
        return int((task / "schedstat").read_text().split()[0]) / 1e9
    except (OSError, IndexError, ValueError):
        fields: Sequence[str] = (task / "stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _exactly(num_tokens: int) -> Span:
    return Span(num_tokens, num_tokens)
