"""`python -m loadtest beside`: a long prompt arrives while streams run. What it does to them, and how long it takes.

Undisturbed gaps are those that end before the prompt is sent; disturbed ones lie between that and its first token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from loadtest.closed_loop import (
    PlannedRequest,
    open_session,
    run_async,
    stream_request,
    with_model,
)
from loadtest.figures import percentile, print_table
from loadtest.points import add_output_arguments, add_run_arguments, emit, positive_int
from loadtest.prompts import prompt_maker_for
from loadtest.sse_client import RequestRecord
from loadtest.target import Target, add_target_arguments, target_of

FIGURES = (
    "ttft_ms",
    "disturbed_gaps",
    "undisturbed_p50_ms",
    "disturbed_p50_ms",
    "disturbed_p99_ms",
    "disturbed_max_ms",
    "p99_over_p50",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_target_arguments(parser)
    parser.add_argument("--streams", type=positive_int, default=8)
    parser.add_argument("--stream-tokens", type=positive_int, default=400, help="of each answer")
    parser.add_argument("--prompt-tokens", type=positive_int, default=4000, help="the long one's")
    parser.add_argument("--after", type=float, default=2.0, help="seconds until it is sent")
    add_run_arguments(parser)
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    return run_async(_beside(args))


async def _beside(args: argparse.Namespace) -> int:
    target = await with_model(target_of(args))
    maker = await prompt_maker_for(target, None)
    rng = random.Random(f"beside-{args.seed}")
    planned = [PlannedRequest(maker.text(rng, 32), args.stream_tokens) for _ in range(args.streams)]
    long = PlannedRequest(maker.text(rng, args.prompt_tokens), 1)
    records = await _run(target, planned, long, args.after, args.timeout)
    failed = [record for record in records if not record.is_ok]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first with: {failed[0].error}")
    figures = {"kind": "beside", "label": args.label, **compare_gaps(records[:-1], records[-1])}
    emit(figures, args.out)
    print_table(
        f"{args.streams} streams and a prompt of {args.prompt_tokens} tokens",
        [key.replace("_", " ") for key in FIGURES],
        [[f"{figures[key]:g}" for key in FIGURES]],
    )
    return 0


async def _run(
    target: Target,
    planned: Sequence[PlannedRequest],
    long: PlannedRequest,
    after_s: float,
    timeout_s: float,
) -> list[RequestRecord]:
    """The records of the streams, and at the end that of the long prompt."""
    async with open_session() as session:
        streams = [
            asyncio.create_task(stream_request(session, target, request, timeout_s))
            for request in planned
        ]
        await asyncio.sleep(after_s)
        last = await stream_request(session, target, long, timeout_s)
        return [*await asyncio.gather(*streams), last]


def compare_gaps(streams: Sequence[RequestRecord], long: RequestRecord) -> dict[str, Any]:
    """Raises `SystemExit` where a stream ended before the long prompt's first token, or none had begun before."""
    first_text_s = long.text_times_s[0]
    if any(record.text_times_s[-1] < first_text_s for record in streams):
        raise SystemExit("a stream ended before the long prompt did: raise --stream-tokens.")
    gaps = [gap for record in streams for gap in pairwise(record.text_times_s)]
    before = [end - begin for begin, end in gaps if end < long.sent_s]
    if not before:
        raise SystemExit("nothing streamed before the long prompt was sent: raise --after.")
    during = [end - begin for begin, end in gaps if long.sent_s <= end <= first_text_s]
    if not during:
        raise SystemExit("nothing streamed until the long prompt's first token.")
    undisturbed_ms, disturbed_ms, worst_ms = (
        1000 * (percentile(values, percent) or 0.0)
        for values, percent in ((before, 50), (during, 50), (during, 99))
    )
    return {
        "ttft_ms": round((first_text_s - long.sent_s) * 1000, 1),
        "disturbed_gaps": len(during),
        "undisturbed_p50_ms": round(undisturbed_ms, 2),
        "disturbed_p50_ms": round(disturbed_ms, 2),
        "disturbed_p99_ms": round(worst_ms, 2),
        "disturbed_max_ms": round(max(during) * 1000, 2),
        "p99_over_p50": round(worst_ms / undisturbed_ms, 3),
    }
