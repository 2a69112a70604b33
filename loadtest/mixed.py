"""`python -m loadtest mixed`: 20 prompts "Hi" and 5 long ones, all at once, 100 tokens each.

Meant to be watched: with `--set log.stats_interval_s=0.5` the server's log shows KV usage rising and falling back to 0.
Where the server has `/metrics` with vLLM's names, the same curve is sampled here.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadtest.closed_loop import (
    LoopResult,
    PlannedRequest,
    open_session,
    run_async,
    run_closed_loop,
    with_model,
)
from loadtest.figures import FIGURE_COLUMNS, figure_row, print_table, summarize
from loadtest.points import add_output_arguments, add_run_arguments, emit, positive_int
from loadtest.prompts import prompt_maker_for
from loadtest.target import Target, add_target_arguments, target_of

GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
}


@dataclass(frozen=True, slots=True)
class LoadSample:
    """The server's own gauges at one moment. `kv_usage` is a share from 0 to 1."""

    at_s: float
    running: float
    waiting: float
    kv_usage: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    parser.set_defaults(endpoint="native")
    parser.add_argument("--short", type=int, default=20, help='prompts "Hi"')
    parser.add_argument("--long", type=int, default=5, help="long prompts")
    parser.add_argument("--long-tokens", type=positive_int, default=400, help="of a long prompt")
    parser.add_argument("--max-tokens", type=positive_int, default=100)
    parser.add_argument("--sample-interval", type=float, default=0.25, help="seconds; 0: never")
    add_run_arguments(parser)
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    return run_async(_mixed(args))


async def _mixed(args: argparse.Namespace) -> int:
    target = await with_model(target_of(args))
    maker = await prompt_maker_for(target, None)
    rng = random.Random(f"mixed-{args.seed}")
    planned = [PlannedRequest("Hi", args.max_tokens) for _ in range(args.short)]
    planned += [
        PlannedRequest(maker.text(rng, args.long_tokens), args.max_tokens) for _ in range(args.long)
    ]
    if not planned:
        raise SystemExit("nothing to send: --short and --long are both 0.")
    result, samples = await _run_and_sample(target, planned, args)
    figures = {
        "kind": "mixed",
        "label": args.label,
        "endpoint": target.endpoint,
        **summarize(result),
        "samples": [
            [round(s.at_s, 2), s.running, s.waiting, round(s.kv_usage, 4)] for s in samples
        ],
    }
    emit(figures, args.out)
    print_table(f"{target.url}{target.path}", FIGURE_COLUMNS, [figure_row(figures)])
    if samples:
        rows = [
            [f"{s.at_s:.2f}", f"{s.running:.0f}", f"{s.waiting:.0f}", f"{s.kv_usage:.1%}"]
            for s in samples
        ]
        print_table("the server's gauges", ["second", "running", "waiting", "KV used"], rows)
    return 1 if figures["failed"] else 0


async def _run_and_sample(
    target: Target, planned: list[PlannedRequest], args: argparse.Namespace
) -> tuple[LoopResult, list[LoadSample]]:
    samples: list[LoadSample] = []
    sampler: asyncio.Task[None] | None = None
    if args.sample_interval > 0:
        sampler = asyncio.create_task(_sample(target, samples, args.sample_interval))
    try:
        result = await run_closed_loop(target, planned, len(planned), timeout_s=args.timeout)
        if sampler is not None:
            await asyncio.sleep(2 * args.sample_interval)  # so that the way back to idle is seen
    finally:
        if sampler is not None:
            sampler.cancel()
            await asyncio.gather(sampler, return_exceptions=True)
    return result, samples


async def _sample(target: Target, samples: list[LoadSample], interval_s: float) -> None:
    """Ends by itself where the server has no such metrics."""
    start_s = time.perf_counter()
    async with open_session() as session:
        while True:
            try:
                async with session.get(target.url + "/metrics", headers=target.headers) as response:
                    text = await response.text()
            except (aiohttp.ClientError, OSError) as error:
                print(f"/metrics cannot be read: {error}", file=sys.stderr)
                return
            gauges = read_gauges(text)
            if gauges is None:
                return
            samples.append(LoadSample(time.perf_counter() - start_s, **gauges))
            await asyncio.sleep(interval_s)


def read_gauges(text: str) -> dict[str, Any] | None:
    """The three gauges of `GAUGES` out of Prometheus text, summed over label sets; None if one is missing."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in GAUGES:
            value = float(line.rpartition(" ")[2])
            found[GAUGES[name]] = found.get(GAUGES[name], 0.0) + value
    return found if len(found) == len(GAUGES) else None
