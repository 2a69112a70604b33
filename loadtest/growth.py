"""`python -m loadtest growth`: whether cost grows as the work does, through an engine in this process.

`context`: a decode step at a long context over one at a short one, beside the bytes that each must read.
`waiting`: a decode step with a thousand requests in the queue over one with none.
`output`: the last tokens of a long answer over those of a short one at the same context.
`prefix`: the time to the first token behind a cached prefix over that of a prompt that nobody has sent before.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from core.engine import Engine
from loadtest.figures import print_table
from loadtest.in_process import add_engine_arguments, draw_prompt, load_engine, make_sequence
from loadtest.points import emit, held_lock, positive_int
from loadtest.step import work_of

STEPS = 24  # of each kind, per run
Case = tuple[str, Callable[[], float], Callable[[], float], float | None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--batch", type=positive_int, default=8, help="sequences of a decode step")
    parser.add_argument("--context", nargs=2, type=positive_int, default=[256, 4096])
    parser.add_argument("--waiting", type=positive_int, default=1000, help="requests in the queue")
    parser.add_argument("--output", nargs=2, type=positive_int, default=[100, 2000], help="tokens")
    parser.add_argument("--prefix", type=positive_int, default=1024, help="tokens")
    parser.add_argument("--pairs", type=positive_int, default=5, help="runs of each, in turn")


def main(args: argparse.Namespace) -> int:
    engine = load_engine(args.model, settings=args.set, batch_size=args.batch)
    rng = random.Random(args.seed)
    with held_lock(args.lock):
        first_token_s(engine, rng, draw_prompt(engine, rng, 64))  # the first of anything is slower
        lines = [compare(args, *case) for case in cases(engine, rng, args)]
    for line in lines:
        emit({"kind": "growth", "label": args.label, **line}, args.out)
    print_table(
        f"{args.batch} sequences, medians of {args.pairs} pairs",
        ["", "ms", "against ms", "ratio", "lowest", "highest", "bytes to read, ratio"],
        [
            [line["case"], f"{line['ms']:.2f}", f"{line['base_ms']:.2f}"]
            + [f"{line[key]:.3f}" for key in ("ratio", "lowest", "highest")]
            + [f"{line['bytes_ratio']:.3f}" if line["bytes_ratio"] else ""]
            for line in lines
        ],
    )
    return 0


def cases(engine: Engine, rng: random.Random, args: argparse.Namespace) -> list[Case]:
    """What is timed, what it is compared with, and the ratio of the bytes that both must read where that is meant."""
    batch, (short, long) = args.batch, args.context
    few, many = args.output
    tail = draw_prompt(engine, rng, 32)

    def behind_a_prefix() -> float:
        prefix = draw_prompt(engine, rng, args.prefix)
        first_token_s(engine, rng, prefix + tail)
        return first_token_s(engine, rng, prefix + tail[::-1])

    return [
        (
            f"context {long} over {short}",
            lambda: decode_s(engine, rng, batch, long),
            lambda: decode_s(engine, rng, batch, short),
            bytes_ratio(engine, batch, long, short),
        ),
        (
            f"{args.waiting} waiting over none",
            lambda: decode_s(engine, rng, batch, short, num_waiting=args.waiting),
            lambda: decode_s(engine, rng, batch, short),
            None,
        ),
        (
            f"token {many} of an answer over token {few}, same context",
            lambda: decode_s(engine, rng, 1, 32 + many, num_before=many - STEPS),
            lambda: decode_s(engine, rng, 1, 32 + many, num_before=few - STEPS),
            None,
        ),
        (
            f"first token behind {args.prefix} cached tokens over none cached",
            behind_a_prefix,
            lambda: first_token_s(engine, rng, draw_prompt(engine, rng, args.prefix + len(tail))),
            None,
        ),
    ]


def compare(
    args: argparse.Namespace,
    case: str,
    measure: Callable[[], float],
    measure_base: Callable[[], float],
    ratio_of_bytes: float | None,
) -> dict[str, Any]:
    """Medians in milliseconds, and of the ratios of neighbouring runs."""
    runs = [(measure(), measure_base()) for _ in range(args.pairs)]
    ratios = [a / b for a, b in runs]
    return {
        "case": case,
        "ms": round(1000 * statistics.median(a for a, _ in runs), 3),
        "base_ms": round(1000 * statistics.median(b for _, b in runs), 3),
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "bytes_ratio": ratio_of_bytes and round(ratio_of_bytes, 3),
    }


def bytes_ratio(engine: Engine, batch: int, long: int, short: int) -> float | None:
    """Weights and KV of a step at one context over those at the other; None for a model that tells no layers."""
    works = [work_of(engine, batch, context, batch) for context in (long, short)]
    totals = [work.linear_bytes + work.head_bytes + work.kv_bytes for work in works if work]
    return totals[0] / totals[1] if len(totals) == 2 else None


def decode_s(
    engine: Engine,
    rng: random.Random,
    batch: int,
    context: int,
    *,
    num_before: int = 0,
    num_waiting: int = 0,
) -> float:
    """The median of `STEPS` decode steps of `batch` sequences about `context` tokens long, of which each has answered
    the last `num_before` itself, while `num_waiting` others wait for a seat."""
    shared = draw_prompt(engine, rng, max(1, context - num_before - STEPS))
    names = [f"{rng.random()}" for _ in range(batch)]
    for name in names:
        # beginnings of their own, so that nobody shares a block
        prompt = draw_prompt(engine, rng, 32) + shared[32:]
        engine.add(make_sequence(name, prompt, num_before + STEPS + batch * context))
    waiting = [f"waiting {index} {names[0]}" for index in range(num_waiting)]
    for name in waiting:
        engine.add(make_sequence(name, shared[:32], STEPS))
    durations_s: list[float] = []
    while len(durations_s) < num_before + STEPS:
        start_s = time.perf_counter()
        engine.step()
        elapsed_s = time.perf_counter() - start_s
        stats = engine.stats(is_after_step=True)
        if stats.step_kind == "decode" and stats.num_sequences == batch:
            durations_s.append(elapsed_s)
    for name in (*waiting, *names):
        engine.abort(name)
    assert not engine.has_work
    return statistics.median(durations_s[-STEPS:])


def first_token_s(engine: Engine, rng: random.Random, prompt: list[int]) -> float:
    """From the arrival of a request to its only token, with nobody else there."""
    start_s = time.perf_counter()
    engine.add(make_sequence(f"first {rng.random()}", prompt, 1))
    while engine.has_work:
        engine.step()
    return time.perf_counter() - start_s
