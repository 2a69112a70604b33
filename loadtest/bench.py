"""`python -m loadtest bench`: a closed loop at several concurrencies against any OpenAI-compatible server.

Scenarios: S = 32 prompt tokens, 128 out; L = 1,024 in, 64 out; P = 32 requests that share a prefix of 1,024 tokens and
have 32 of their own, 32 out (a new prefix for each run, so its first request is always cold). All other prompts are
unique. Greedy, and `ignore_eos`, so that every server does the same work.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from loadtest.closed_loop import run_async, run_closed_loop, with_model
from loadtest.figures import FIGURE_COLUMNS, figure_row, json_line, print_table, summarize
from loadtest.process_usage import usage_figures, usage_of
from loadtest.prompts import SHAPES, PromptMaker, Scenario, default_num_requests, prompt_maker_for
from loadtest.target import Target, add_target_arguments, target_of

EPILOG = (
    "JSON lines (one per point) go to standard output, the table and progress to standard error. The client shares the "
    "machine with a local server: its own CPU seconds are in each line. Exits with 1 if any request failed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_target_arguments(parser)
    parser.add_argument("--scenario", nargs="+", choices=sorted(SHAPES), default=["S"])
    parser.add_argument("--concurrency", nargs="+", type=positive_int, default=[1, 8, 32])
    parser.add_argument(
        "--requests", type=positive_int, help="per point (default: S, L 2 x concurrency; P 32)"
    )
    parser.add_argument("--repeat", type=positive_int, default=1, help="runs of each point")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other prompts")
    parser.add_argument(
        "--warm-up", type=int, metavar="N", help="short requests first (default: concurrency)"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one request")
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds for one point")
    parser.add_argument("--tokenizer", help="a tokenizer.json, instead of the server's /tokenize")
    parser.add_argument("--pid", type=int, help="the server's process, to add its CPU and memory")
    parser.add_argument("--label", default="", help="copied into each JSON line")
    parser.add_argument("--out", help="append the JSON lines to this file as well")
    parser.add_argument(
        "--lock",
        default=os.environ.get("PERF_LOCK"),
        help="a lock file held while a point is measured (default: $PERF_LOCK)",
    )


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def main(args: argparse.Namespace) -> int:
    return run_async(_bench(args))


async def _bench(args: argparse.Namespace) -> int:
    target = await with_model(target_of(args))
    maker = await prompt_maker_for(target, args.tokenizer)
    rows: list[list[str]] = []
    num_failed = 0
    for scenario in args.scenario:
        for concurrency in args.concurrency:
            for repetition in range(args.repeat):
                point = await _run_point(args, target, maker, scenario, concurrency, repetition)
                emit(point, args.out)
                num_failed += point["failed"]
                rows.append([scenario, str(concurrency), *figure_row(point)])
    print_table(f"{target.url}{target.path}", ["scenario", "clients", *FIGURE_COLUMNS], rows)
    return 1 if num_failed else 0


async def _run_point(
    args: argparse.Namespace,
    target: Target,
    maker: PromptMaker,
    scenario: Scenario,
    concurrency: int,
    repetition: int,
) -> dict[str, Any]:
    seed = f"{args.seed}-{concurrency}-{repetition}"
    num_requests = args.requests or default_num_requests(scenario, concurrency)
    planned = maker.plan(scenario, num_requests, seed)
    num_warm_up = concurrency if args.warm_up is None else args.warm_up
    warm_up = maker.plan_warm_up(num_warm_up, seed)
    print(f"{scenario} at {concurrency} clients: {num_requests} requests", file=sys.stderr)
    with held_lock(args.lock):
        if warm_up:
            await run_closed_loop(target, warm_up, concurrency, timeout_s=args.timeout)
        server_before = usage_of(args.pid) if args.pid else None
        client_cpu_s = time.process_time()
        result = await run_closed_loop(
            target, planned, concurrency, timeout_s=args.timeout, time_limit_s=args.time_limit
        )
        client_cpu_s = time.process_time() - client_cpu_s
        server_after = usage_of(args.pid) if args.pid else None
    return {
        "kind": "bench",
        "label": args.label,
        "scenario": scenario,
        "concurrency": concurrency,
        "repetition": repetition,
        "endpoint": target.endpoint,
        "model": target.model,
        "prompt_source": maker.source,
        **summarize(result),
        "client_cpu_s": round(client_cpu_s, 3),
        **usage_figures(server_before, server_after),
    }


def emit(figures: dict[str, Any], path: str | None) -> None:
    """One JSON line to standard output and, if wanted, to a file."""
    line = json_line(figures)
    print(line, flush=True)
    if path is not None:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(line + "\n")


@contextlib.contextmanager
def held_lock(path: str | None) -> Iterator[None]:
    """Holds a lock file so that two measurements on a machine never overlap. Without a path: nothing."""
    if not path:
        yield
        return
    import fcntl  # not on Windows; asked for only where a lock is wanted

    with Path(path).open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
