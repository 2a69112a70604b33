"""`python -m loadtest kv-cache`: what a token costs with the KV cache, and without, at growing lengths.

Without a cache every token is computed from the whole text before it: the engine is asked for one token, then for one
token of the prompt and that token, and so on, with prefix caching off. With it, one request asks for all tokens. Both
must choose the same tokens; if they do not, the line says so.
"""

from __future__ import annotations

import argparse
import random
import time
from pathlib import Path
from typing import Any

from core.engine import Engine
from loadtest.figures import print_table
from loadtest.in_process import add_engine_arguments, draw_prompt, exactly, load_engine
from loadtest.points import emit, held_lock, positive_int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--lengths", nargs="+", type=positive_int, default=[64, 512, 1024])
    parser.add_argument("--tokens", type=positive_int, default=16, help="generated at each length")
    parser.add_argument("--plot", type=Path, help="write the plot to this .png")


def main(args: argparse.Namespace) -> int:
    longest = max(args.lengths) + args.tokens
    engine = load_engine(
        args.model, settings=args.set, prefix_caching=False, max_batched_tokens=longest
    )
    rng = random.Random(args.seed)
    lines: list[dict[str, Any]] = []
    with held_lock(args.lock):
        measure_at(engine, draw_prompt(engine, rng, 32), 4)  # the first of anything is slower
        for length in args.lengths:
            figures = measure_at(engine, draw_prompt(engine, rng, length), args.tokens)
            line = {"kind": "kv-cache", "label": args.label, "length": length, **figures}
            emit(line, args.out)
            lines.append(line)
    if args.plot is not None:
        from loadtest.plots import plot_lines

        names = {"without a cache": "without_ms_per_token", "with": "with_ms_per_token"}
        series = {name: [(x["length"], x[key]) for x in lines] for name, key in names.items()}
        plot_lines(series, args.plot, x_label="tokens before", y_label="ms per token", is_log=True)
    print_table(
        f"{args.tokens} tokens behind a prompt",
        ["prompt tokens", "without, ms/token", "with, ms/token", "ratio", "same tokens"],
        [
            [
                *(str(x["length"]), f"{x['without_ms_per_token']:.1f}"),
                *(f"{x['with_ms_per_token']:.1f}", f"{x['ratio']:.1f}"),
                "yes" if x["is_same"] else "no",
            ]
            for x in lines
        ],
    )
    return 0


def measure_at(engine: Engine, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    """Both ways from the same prompt. The prompt's own prefill is in neither: it must be paid once in any case."""
    first = engine.generate([prompt], exactly(1))[0].token_ids
    without_ids = list(first)
    start_s = time.perf_counter()
    for _ in range(num_tokens):
        without_ids += engine.generate([prompt + without_ids], exactly(1))[0].token_ids
    without_s = time.perf_counter() - start_s
    with_ids, with_s = _with_cache(engine, prompt, num_tokens)
    return {
        "tokens": num_tokens,
        "without_ms_per_token": round(without_s / num_tokens * 1000, 3),
        "with_ms_per_token": round(with_s / num_tokens * 1000, 3),
        "ratio": round(without_s / with_s, 2),
        "is_same": with_ids == without_ids,
    }


def _with_cache(engine: Engine, prompt: list[int], num_tokens: int) -> tuple[list[int], float]:
    """The ids of `num_tokens + 1` tokens, and the seconds of all but the first."""
    before_s = time.perf_counter()
    engine.generate([prompt], exactly(1))
    middle_s = time.perf_counter()
    ids = engine.generate([prompt], exactly(num_tokens + 1))[0].token_ids
    end_s = time.perf_counter()
    return ids, (end_s - middle_s) - (middle_s - before_s)
