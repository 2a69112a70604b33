"""`python -m loadtest bench`: request mixes at several concurrencies or rates against any OpenAI-compatible server.

The mixes are named in `scenarios.yaml`: S = 32 prompt tokens, 128 out; L = 1,024 in, 64 out; P = 32 requests that share
a prefix of 1,024 tokens and have 32 of their own, 32 out (a new prefix for each run, so its first request is always
cold); and more. All other prompts are unique. Greedy, and `ignore_eos`, so that every server does the same work.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from loadtest.closed_loop import run_async, with_model
from loadtest.figures import FIGURE_COLUMNS, figure_row, print_table
from loadtest.points import (
    add_load_arguments,
    add_output_arguments,
    emit,
    load_options_of,
    measure,
    points_of,
    positive_int,
)
from loadtest.prompts import prompt_maker_for
from loadtest.target import add_target_arguments, target_of

EPILOG = (
    "JSON lines (one per point) go to standard output, the table and progress to standard error. The client shares the "
    "machine with a local server: its own CPU seconds are in each line. Exits with 1 if any request failed."
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    add_target_arguments(parser)
    add_load_arguments(parser)
    parser.add_argument("--repeat", type=positive_int, default=1, help="runs of each point")
    parser.add_argument("--tokenizer", help="a tokenizer.json, instead of the server's /tokenize")
    parser.add_argument("--pid", type=int, help="the server's process, to add its CPU and memory")
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    return run_async(_bench(args))


async def _bench(args: argparse.Namespace) -> int:
    options = load_options_of(args)
    target = await with_model(target_of(args))
    maker = await prompt_maker_for(target, args.tokenizer)
    lines: list[dict[str, Any]] = []
    rows: list[list[str]] = []
    for point in points_of(options):
        for repetition in range(args.repeat):
            figures = await measure(
                target, maker, point, options, repetition=repetition, pid=args.pid
            )
            line = {"kind": "bench", "label": args.label, **figures}
            emit(line, args.out)
            lines.append(line)
            rows.append([point.scenario, point.load])
    extra = extra_columns(lines)
    cells = [
        [*row, *figure_row(line), *extra_cells(line, extra)]
        for row, line in zip(rows, lines, strict=True)
    ]
    columns = ["scenario", "load", *FIGURE_COLUMNS, *extra.values()]
    print_table(f"{target.url}{target.path}", columns, cells)
    return 1 if any(line["failed"] for line in lines) else 0


EXTRA_COLUMNS = {"goodput_per_s": "goodput/s", "cost_per_million_tokens": "cost/M tokens"}


def extra_columns(lines: Sequence[dict[str, Any]]) -> dict[str, str]:
    """The columns that exist only where goals or a price were given."""
    return {key: title for key, title in EXTRA_COLUMNS.items() if any(key in x for x in lines)}


def extra_cells(line: dict[str, Any], columns: dict[str, str]) -> list[str]:
    return [f"{line[key]:.2f}" if key in line else "-" for key in columns]
