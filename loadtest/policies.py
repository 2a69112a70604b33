"""`python -m loadtest policies`: the same requests under several schedulers, one server after the other.

Each rung is a server command. The built-in rungs are the three policies of Noria with the same batch size; the same
requests, with output lengths log-uniform between two bounds and a fixed seed, go to each. Static batching wastes the
seats of sequences that have ended before the longest of their batch; the ratio shows how much. The same route is used
for all, so that nothing but the policy differs; `ladder` compares the stages as the tutorial has them.
"""

from __future__ import annotations

import argparse
import math
import random
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.closed_loop import PlannedRequest, run_async, run_closed_loop, with_model
from loadtest.figures import FIGURE_COLUMNS, figure_row, print_table, summarize
from loadtest.points import add_output_arguments, add_run_arguments, emit, held_lock, positive_int
from loadtest.process_usage import usage_figures, usage_of
from loadtest.prompts import PromptMaker, prompt_maker_for
from loadtest.server_process import DEFAULT_COMMAND, RunningServer, running_server
from loadtest.target import Target

POLICIES = ("single", "static", "continuous")


@dataclass(frozen=True, slots=True)
class Rung:
    """One server of the ladder. `command` holds `{port}`, `ready_path` answers 200 once it can work."""

    name: str
    command: tuple[str, ...]
    ready_path: str = "/health"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--command",
        type=shlex.split,
        default=list(DEFAULT_COMMAND),
        help="how a server is started; flags are appended (default: this Python with -m server)",
    )
    parser.add_argument("--policy", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--batch-size", type=positive_int, default=32)
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for every rung"
    )
    parser.add_argument("--requests", type=positive_int, default=256)
    parser.add_argument("--concurrency", type=positive_int, default=64)
    parser.add_argument("--prompt-tokens", type=positive_int, default=32)
    parser.add_argument("--min-output", type=positive_int, default=8)
    parser.add_argument("--max-output", type=positive_int, default=256)
    add_run_arguments(parser, timeout_s=600.0)
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds for one rung")
    parser.add_argument("--start-timeout", type=float, default=180.0)
    parser.add_argument("--log-dir", help="keep the servers' logs here (default: a temporary one)")
    add_output_arguments(parser)
    parser.add_argument("--lock", help="a lock file held while a rung is measured")


def output_lengths(num_requests: int, low: int, high: int, seed: int) -> list[int]:
    """Lengths whose logarithm is uniform between two bounds, both included."""
    rng = random.Random(seed)
    bounds = math.log(low), math.log(high)
    return [round(math.exp(rng.uniform(*bounds))) for _ in range(num_requests)]


def rungs_of(args: argparse.Namespace) -> list[Rung]:
    """The built-in rungs: one per policy, everything else equal."""
    rungs: list[Rung] = []
    for policy in args.policy:
        settings = [f"engine.policy={policy}", f"engine.batch_size={args.batch_size}", *args.set]
        flags = [word for setting in settings for word in ("--set", setting)]
        command = (*args.command, "--host", "127.0.0.1", "--port", "{port}", *flags)
        rungs.append(Rung(policy, command))
    return rungs


def plan(args: argparse.Namespace, maker: PromptMaker) -> list[PlannedRequest]:
    """The same requests in the same order for every rung; prompts are unique."""
    rng = random.Random(f"policies-{args.seed}")
    lengths = output_lengths(args.requests, args.min_output, args.max_output, args.seed)
    return [PlannedRequest(maker.text(rng, args.prompt_tokens), length) for length in lengths]


def main(args: argparse.Namespace) -> int:
    if args.min_output > args.max_output:
        raise SystemExit("--min-output must not be larger than --max-output.")
    with tempfile.TemporaryDirectory(prefix="noria-policies-") as temporary:
        log_dir = Path(args.log_dir or temporary)
        log_dir.mkdir(parents=True, exist_ok=True)
        points = [_climb(rung, args, log_dir) for rung in rungs_of(args)]
    return report(points, args.out)


def _climb(rung: Rung, args: argparse.Namespace, log_dir: Path) -> dict[str, Any]:
    print(f"{rung.name}: {shlex.join(rung.command)}", file=sys.stderr)
    with (
        held_lock(args.lock),
        running_server(
            rung.command,
            log_dir / f"{rung.name}.log",
            ready_path=rung.ready_path,
            start_timeout_s=args.start_timeout,
        ) as server,
    ):
        point = run_async(_measure(rung, args, server))
    emit(point, args.out)
    return point


async def _measure(rung: Rung, args: argparse.Namespace, server: RunningServer) -> dict[str, Any]:
    target = await with_model(Target(server.url))
    maker = await prompt_maker_for(target, None)
    planned = plan(args, maker)
    warm_up = maker.plan_warm_up(min(8, args.requests), str(args.seed))
    await run_closed_loop(target, warm_up, len(warm_up), timeout_s=args.timeout)
    before, client_cpu_s = usage_of(server.pid), time.process_time()
    result = await run_closed_loop(
        target,
        planned,
        args.concurrency,
        timeout_s=args.timeout,
        time_limit_s=args.time_limit,
    )
    client_cpu_s = time.process_time() - client_cpu_s
    return {
        "kind": "policies",
        "label": args.label,
        "rung": rung.name,
        "batch_size": args.batch_size,
        "concurrency": args.concurrency,
        "seed": args.seed,
        "server_start_s": round(server.start_s, 3),
        "prompt_source": maker.source,
        **summarize(result),
        "client_cpu_s": round(client_cpu_s, 3),
        **usage_figures(before, usage_of(server.pid)),
    }


def ratios_of(points: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Tokens per second of each rung over each rung before it."""
    ratios: dict[str, float] = {}
    for index, upper in enumerate(points):
        for lower in points[:index]:
            if lower["output_tokens_per_s"]:
                ratio = upper["output_tokens_per_s"] / lower["output_tokens_per_s"]
                ratios[f"{upper['rung']}/{lower['rung']}"] = round(ratio, 2)
    return ratios


def report(points: Sequence[dict[str, Any]], path: str | None) -> int:
    """The table, one JSON line of ratios, and the exit code."""
    ratios = ratios_of(points)
    emit({"kind": "policies-ratios", "output_tokens_per_s": ratios}, path)
    rows = [[point["rung"], *figure_row(point)] for point in points]
    print_table("policies", ["rung", *FIGURE_COLUMNS], rows)
    for name, ratio in ratios.items():
        print(f"{name}: {ratio:.2f} x tokens/s", file=sys.stderr)
    return 1 if any(point["failed"] for point in points) else 0
