"""One measured point: a request mix, sent by C clients in a closed loop or at a rate in an open one, as figures.

Shared by every subcommand that measures (`bench`, `compare`, `sweep`, `tune`), so that they all mean the same.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from loadtest.closed_loop import LoopResult, run_closed_loop
from loadtest.figures import Goals, json_line, summarize
from loadtest.open_loop import run_open_loop
from loadtest.process_usage import usage_figures, usage_of
from loadtest.prompts import PromptMaker, default_num_requests
from loadtest.scenarios import BUILT_IN, Shape, load_scenarios
from loadtest.target import Target

DEFAULT_RATE_SECONDS = 20.0  # without --requests, an open loop sends for about so long


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """What is sent at each point and how it is judged. `rates`, where given, replace `concurrencies`."""

    shapes: dict[str, Shape]
    concurrencies: Sequence[int] = (1, 8, 32)
    rates: Sequence[float] = ()
    num_requests: int | None = None
    seed: int = 0
    num_warm_up: int | None = None
    timeout_s: float = 300.0
    time_limit_s: float = 900.0
    lock: str | None = None
    goals: Goals = field(default_factory=Goals)
    price_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Point:
    """A mix at a number of clients, or at a rate in requests per second."""

    scenario: str
    concurrency: int | None
    rate: float | None = None

    @property
    def load(self) -> str:
        return f"{self.rate:g}/s" if self.rate is not None else str(self.concurrency)


def add_run_arguments(parser: argparse.ArgumentParser, timeout_s: float = 300.0) -> None:
    """What subcommands share whose load is their own."""
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other prompts")
    parser.add_argument("--timeout", type=float, default=timeout_s, help="seconds for one request")


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """Where the figures go besides the screen; `emit` takes them."""
    parser.add_argument("--label", default="", help="copied into each JSON line")
    parser.add_argument("--out", help="append the JSON lines to this file as well")


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """What is sent. `load_options_of` reads it back."""
    parser.add_argument(
        "--scenario", nargs="+", default=["S"], metavar="NAME", help="request mixes"
    )
    parser.add_argument(
        "--scenarios", type=Path, default=BUILT_IN, metavar="FILE", help="where mixes are named"
    )
    parser.add_argument("--concurrency", nargs="+", type=positive_int, default=[1, 8, 32])
    parser.add_argument(
        "--rate",
        nargs="+",
        type=positive_float,
        default=[],
        metavar="R",
        help="open loop: Poisson arrivals, R requests per second, instead of clients that wait",
    )
    parser.add_argument(
        "--requests",
        type=positive_int,
        help="per point (default: of the mix, else 2 x concurrency, else 20 s of arrivals)",
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other prompts")
    parser.add_argument(
        "--warm-up", type=int, metavar="N", help="short requests first (default: concurrency, 8)"
    )
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for one request")
    parser.add_argument("--time-limit", type=float, default=900.0, help="seconds for one point")
    parser.add_argument(
        "--lock",
        default=os.environ.get("PERF_LOCK"),
        help="a lock file held while a point is measured (default: $PERF_LOCK)",
    )
    add_goal_arguments(parser)
    parser.add_argument(
        "--price-per-hour",
        type=positive_float,
        help="of the machine: prints cost per million tokens",
    )


def add_goal_arguments(parser: argparse.ArgumentParser) -> None:
    for name, meaning in (
        ("ttft", "time to first token"),
        ("tpot", "time per output token"),
        ("e2e", "end-to-end latency"),
    ):
        parser.add_argument(
            f"--{name}-ms",
            type=positive_float,
            metavar="N",
            help=f"a request is good if its {meaning} is at most this",
        )


def positive_int(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError("must be above 0")
    return value


def load_options_of(args: argparse.Namespace) -> LoadOptions:
    known = load_scenarios(args.scenarios)
    if unknown := [name for name in args.scenario if name not in known]:
        raise SystemExit(f"no request mix {', '.join(unknown)}; there are {', '.join(known)}.")
    return LoadOptions(
        shapes={name: known[name] for name in args.scenario},
        concurrencies=args.concurrency,
        rates=args.rate,
        num_requests=args.requests,
        seed=args.seed,
        num_warm_up=args.warm_up,
        timeout_s=args.timeout,
        time_limit_s=args.time_limit,
        lock=args.lock,
        goals=Goals(args.ttft_ms, args.tpot_ms, args.e2e_ms),
        price_per_hour=args.price_per_hour,
    )


def points_of(options: LoadOptions) -> list[Point]:
    """Every mix at every number of clients, or at every rate."""
    points: list[Point] = []
    for scenario in options.shapes:
        if options.rates:
            points += [Point(scenario, None, rate) for rate in options.rates]
        else:
            points += [Point(scenario, concurrency) for concurrency in options.concurrencies]
    return points


async def measure(
    target: Target,
    maker: PromptMaker,
    point: Point,
    options: LoadOptions,
    *,
    repetition: int = 0,
    pid: int | None = None,
) -> dict[str, Any]:
    """Warms up, sends the point's requests and returns its figures; with `pid`, also what they cost the server."""
    shape = options.shapes[point.scenario]
    seed = f"{point.scenario}-{options.seed}-{point.load}-{repetition}"
    num_requests = options.num_requests or _default_requests(shape, point)
    planned = maker.plan(shape, num_requests, seed)
    num_warm_up = options.num_warm_up
    if num_warm_up is None:
        num_warm_up = point.concurrency or 8
    warm_up = maker.plan_warm_up(num_warm_up, seed)
    print(f"{point.scenario} at {point.load}: {num_requests} requests", file=sys.stderr)
    with held_lock(options.lock):
        if warm_up:
            await run_closed_loop(target, warm_up, len(warm_up), timeout_s=options.timeout_s)
        before, client_cpu_s = usage_of(pid) if pid else None, time.process_time()
        result = await _send(target, planned, point, options, seed)
        client_cpu_s = time.process_time() - client_cpu_s
        after = usage_of(pid) if pid else None
    return {
        "scenario": point.scenario,
        "concurrency": point.concurrency,
        "rate": point.rate,
        "repetition": repetition,
        "endpoint": target.endpoint,
        "model": target.model,
        "prompt_source": maker.source,
        **summarize(result, options.goals, options.price_per_hour),
        "client_cpu_s": round(client_cpu_s, 3),
        **usage_figures(before, after),
    }


def _default_requests(shape: Shape, point: Point) -> int:
    if point.rate is not None:
        return max(8, round(point.rate * DEFAULT_RATE_SECONDS))
    assert point.concurrency is not None
    return default_num_requests(shape, point.concurrency)


async def _send(
    target: Target, planned: Sequence[Any], point: Point, options: LoadOptions, seed: str
) -> LoopResult:
    limits = {"timeout_s": options.timeout_s, "time_limit_s": options.time_limit_s}
    if point.rate is not None:
        return await run_open_loop(target, planned, point.rate, seed, **limits)
    assert point.concurrency is not None
    return await run_closed_loop(target, planned, point.concurrency, **limits)


def single_point(options: LoadOptions) -> LoadOptions:
    """The same load at the last number of clients only."""
    return replace(options, concurrencies=options.concurrencies[-1:])


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
