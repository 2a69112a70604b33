"""`python -m loadtest SUBCOMMAND`: parses arguments and hands over. The only place of this package that exits."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable

from loadtest import bench, compare, ladder, mixed

SUBCOMMANDS: dict[
    str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str]
] = {
    "bench": (
        bench.add_arguments,
        bench.main,
        "closed or open loop against any OpenAI-compatible server",
    ),
    "compare": (
        compare.add_arguments,
        compare.main,
        "two servers in turn, and the ratio of medians",
    ),
    "ladder": (
        ladder.add_arguments,
        ladder.main,
        "one request at a time, static and continuous batching, side by side",
    ),
    "mixed": (mixed.add_arguments, mixed.main, "20 short prompts and 5 long ones at once"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    for name, (add_arguments, run, summary) in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        add_arguments(subparser)
        subparser.set_defaults(run=run)
    return parser


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _leave)  # so that a server started here is ended as well
    exit_code: int = args.run(args)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
