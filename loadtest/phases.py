"""`python -m loadtest phases`: prefill and decode apart, through an engine in this process.

A prefill multiplies weights with many tokens at once and is limited by arithmetic; a decode step reads all weights for
one token per sequence and is limited by memory, so that several sequences cost little more than one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

from core.engine import Engine
from loadtest.figures import print_table
from loadtest.in_process import add_engine_arguments, draw_prompt, load_engine, make_sequence
from loadtest.points import emit, held_lock, positive_int

DECODE_CONTEXT = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument(
        "--prefill",
        nargs="+",
        type=positive_int,
        default=[16, 64, 256, 1024],
        help="tokens at once",
    )
    parser.add_argument(
        "--decode", nargs="+", type=positive_int, default=[1, 2, 4, 8, 16, 32], help="sequences"
    )
    parser.add_argument("--repeat", type=positive_int, default=3)
    parser.add_argument("--steps", type=positive_int, default=24, help="decode steps per size")
    parser.add_argument("--plot", type=Path, help="write the plot to this .png")


def main(args: argparse.Namespace) -> int:
    engine = load_engine(
        args.model,
        settings=args.set,
        prefix_caching=False,
        batch_size=max(args.decode),
        max_batched_tokens=max(*args.prefill, max(args.decode) * DECODE_CONTEXT),
    )
    rng = random.Random(args.seed)
    lines: list[dict[str, Any]] = []
    with held_lock(args.lock):
        prefill_s(engine, rng, 64)  # the first of anything is slower
        for size in args.prefill:
            step_s = statistics.median(prefill_s(engine, rng, size) for _ in range(args.repeat))
            lines.append(_line("prefill", size, step_s))
        lines += [
            _line("decode", size, decode_s(engine, rng, size, args.steps)) for size in args.decode
        ]
    for line in lines:
        emit({"kind": "phases", "label": args.label, **line}, args.out)
    if args.plot is not None:
        _plot(lines, args.plot)
    print_table(
        "one step",
        ["phase", "tokens", "ms", "ms/token", "tokens/s"],
        [
            [
                *(line["phase"], str(line["tokens"]), f"{line['step_ms']:.1f}"),
                *(f"{line['ms_per_token']:.2f}", f"{line['tokens_per_s']:.0f}"),
            ]
            for line in lines
        ],
    )
    return 0


def _line(phase: str, num_tokens: int, step_s: float) -> dict[str, Any]:
    return {
        "phase": phase,
        "tokens": num_tokens,
        "step_ms": round(step_s * 1000, 3),
        "ms_per_token": round(step_s * 1000 / num_tokens, 4),
        "tokens_per_s": round(num_tokens / step_s, 1),
    }


def prefill_s(engine: Engine, rng: random.Random, num_tokens: int) -> float:
    """Seconds of the one step that computes a whole prompt."""
    engine.add(make_sequence(f"prefill-{rng.random()}", draw_prompt(engine, rng, num_tokens), 1))
    start_s = time.perf_counter()
    engine.step()
    elapsed_s = time.perf_counter() - start_s
    assert not engine.has_work, "the prompt took more than one step"
    return elapsed_s


def decode_s(engine: Engine, rng: random.Random, num_sequences: int, num_steps: int) -> float:
    """The median of steps in which each of so many sequences gets one token."""
    for _ in range(num_sequences):
        prompt = draw_prompt(engine, rng, DECODE_CONTEXT)
        engine.add(make_sequence(f"decode-{rng.random()}", prompt, num_steps + 1))
    durations_s: list[float] = []
    while engine.has_work:
        start_s = time.perf_counter()
        engine.step()
        elapsed_s = time.perf_counter() - start_s
        stats = engine.stats(is_after_step=True)
        if stats.step_kind == "decode" and stats.num_sequences == num_sequences:
            durations_s.append(elapsed_s)
    return statistics.median(durations_s)


def _plot(lines: list[dict[str, Any]], path: Path) -> None:
    from loadtest.plots import plot_pairs

    series = {
        phase: [(line["tokens"], line) for line in lines if line["phase"] == phase]
        for phase in ("prefill", "decode")
    }
    panels = {
        title: {
            phase: [(tokens, line[key]) for tokens, line in points]
            for phase, points in series.items()
        }
        for title, key in (("ms per step", "step_ms"), ("tokens/s", "tokens_per_s"))
    }
    plot_pairs(panels, path, x_label="tokens in the step")
