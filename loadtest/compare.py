"""`python -m loadtest compare --a CMD_OR_URL --b CMD_OR_URL`: two servers in turn, A B A B, and the ratio of medians.

A machine's speed drifts over minutes; only what was measured in turn in one run may be divided. A command is started
for its turn on a free port and ended after it, so that the other one has the machine to itself; a URL is left alone.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.closed_loop import run_async, with_model
from loadtest.figures import FIGURE_COLUMNS, figure_row, print_table
from loadtest.points import (
    LoadOptions,
    add_load_arguments,
    add_output_arguments,
    emit,
    load_options_of,
    measure,
    points_of,
    positive_int,
)
from loadtest.prompts import PromptMaker, prompt_maker_for
from loadtest.server_process import running_server
from loadtest.target import PATHS, Target, base_url, json_object

EPILOG = (
    "A command holds {port} where the port belongs; without it, --host 127.0.0.1 --port PORT are appended. Example: "
    "compare --a 'python -m server' --b 'vllm serve MODEL --port {port}' --b-ready /health --scenario S P --rounds 3"
)
# What is compared: where it is in a line of figures, and whether more is better.
MEASURES: dict[str, tuple[tuple[str, ...], bool]] = {
    "tokens/s": (("output_tokens_per_s",), True),
    "requests/s": (("requests_per_s",), True),
    "goodput/s": (("goodput_per_s",), True),
    "TTFT p50 ms": (("ttft_ms", "p50"), False),
    "TTFT p99 ms": (("ttft_ms", "p99"), False),
    "TPOT p50 ms": (("tpot_ms", "p50"), False),
    "ITL p99 ms": (("itl_ms", "p99"), False),
    "E2E p50 ms": (("e2e_ms", "p50"), False),
    "start s": (("server_start_s",), False),
    "peak MiB": (("server_peak_rss_mib",), False),
}


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two. `command` is empty for a server that runs already; `target.url` is then its address."""

    name: str
    command: tuple[str, ...]
    target: Target
    ready_path: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EPILOG
    for side in ("a", "b"):
        add_side_arguments(parser, side)
    parser.add_argument("--rounds", type=positive_int, default=3, help="turns of each side")
    parser.add_argument("--endpoint", choices=sorted(PATHS), default="completions")
    parser.add_argument("--tokenizer", help="a tokenizer.json for prompts, instead of /tokenize")
    parser.add_argument("--start-timeout", type=float, default=300.0)
    parser.add_argument("--log-dir", help="keep the servers' logs here (default: a temporary one)")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="draw compare.png there")
    add_output_arguments(parser)
    add_load_arguments(parser)


def add_side_arguments(parser: argparse.ArgumentParser, side: str) -> None:
    parser.add_argument(f"--{side}", required=True, metavar="CMD_OR_URL")
    parser.add_argument(f"--{side}-name", default=side.upper(), help="in tables and JSON lines")
    parser.add_argument(f"--{side}-model", help="model name in requests")
    parser.add_argument(f"--{side}-ready", default="/health", help="200 here means ready (404 too)")
    parser.add_argument(f"--{side}-extra", type=json_object, default={}, metavar="JSON")
    parser.add_argument(f"--{side}-no-ignore-eos", dest=f"{side}_ignores_eos", action="store_false")


def side_of(args: argparse.Namespace, side: str) -> Side:
    given = vars(args)
    text: str = given[side]
    is_url = text.startswith(("http://", "https://"))
    target = Target(
        url=base_url(text) if is_url else "",
        endpoint=args.endpoint,
        model=given[f"{side}_model"],
        ignores_eos=given[f"{side}_ignores_eos"],
        extra=given[f"{side}_extra"],
    )
    command = () if is_url else tuple(shlex.split(text))
    if not is_url and not any("{port}" in word for word in command):
        command = (*command, "--host", "127.0.0.1", "--port", "{port}")
    return Side(given[f"{side}_name"], command, target, given[f"{side}_ready"])


def main(args: argparse.Namespace) -> int:
    options = load_options_of(args)
    sides = [side_of(args, "a"), side_of(args, "b")]
    if sides[0].name == sides[1].name:
        raise SystemExit("--a-name and --b-name must differ.")
    lines: list[dict[str, Any]] = []
    prompts = SharedPrompts(args.tokenizer)
    with tempfile.TemporaryDirectory(prefix="noria-compare-") as temporary:
        log_dir = Path(args.log_dir or temporary)
        log_dir.mkdir(parents=True, exist_ok=True)
        for turn in range(args.rounds):
            for side in sides:
                print(f"round {turn + 1} of {args.rounds}: {side.name}", file=sys.stderr)
                log_path = log_dir / f"{side.name}-{turn}.log"
                for line in take_turn(side, options, turn, log_path, args.start_timeout, prompts):
                    line["label"] = args.label
                    emit(line, args.out)
                    lines.append(line)
    return report(lines, sides[0].name, sides[1].name, args.out, args.plots)


class SharedPrompts:
    """One maker for both sides, so that they get the same texts: of the tokenizer named, else of the first server that
    can tell which words are one token."""

    def __init__(self, tokenizer_path: str | None) -> None:
        self._tokenizer_path = tokenizer_path
        self._maker: PromptMaker | None = None

    async def maker_for(self, target: Target) -> PromptMaker:
        if self._maker is None:
            maker = await prompt_maker_for(target, self._tokenizer_path)
            if maker.source == "words":
                print("nobody says how many tokens a word is: give --tokenizer", file=sys.stderr)
            self._maker = maker
        return self._maker


def take_turn(
    side: Side,
    options: LoadOptions,
    turn: int,
    log_path: Path,
    start_timeout_s: float,
    prompts: SharedPrompts,
) -> list[dict[str, Any]]:
    """All points on one side. Both sides of a round get the same requests."""
    with _serving(side, log_path, start_timeout_s) as (target, pid, start_s):
        figures = run_async(_measure_all(target, options, turn, pid, prompts))
    started = {} if start_s is None else {"server_start_s": round(start_s, 3)}
    return [{"kind": "compare", "side": side.name, **line, **started} for line in figures]


@contextlib.contextmanager
def _serving(
    side: Side, log_path: Path, start_timeout_s: float
) -> Iterator[tuple[Target, int | None, float | None]]:
    if not side.command:
        yield side.target, None, None
        return
    with running_server(
        side.command, log_path, ready_path=side.ready_path, start_timeout_s=start_timeout_s
    ) as server:
        yield side.target.at(server.url), server.pid, server.start_s


async def _measure_all(
    target: Target, options: LoadOptions, turn: int, pid: int | None, prompts: SharedPrompts
) -> list[dict[str, Any]]:
    target = await with_model(target)
    maker = await prompts.maker_for(target)
    return [
        await measure(target, maker, point, options, repetition=turn, pid=pid)
        for point in points_of(options)
    ]


def value_at(line: dict[str, Any], path: Sequence[str]) -> float | None:
    value: Any = line
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return float(value) if isinstance(value, int | float) else None


def ratios_of(lines: Sequence[dict[str, Any]], a: str, b: str) -> list[dict[str, Any]]:
    """Per point and measure: both medians, median A / median B, and the lowest and highest ratio of one round."""
    ratios: list[dict[str, Any]] = []
    keys = dict.fromkeys((line["scenario"], line["concurrency"], line["rate"]) for line in lines)
    for key in keys:
        at_point = [
            line for line in lines if (line["scenario"], line["concurrency"], line["rate"]) == key
        ]
        for measure_name, (path, is_more_better) in MEASURES.items():
            values = {
                side: {
                    line["repetition"]: value
                    for line in at_point
                    if line["side"] == side and (value := value_at(line, path)) is not None
                }
                for side in (a, b)
            }
            if not values[a] or not values[b] or not all(values[b].values()):
                continue
            medians = {side: statistics.median(values[side].values()) for side in (a, b)}
            rounds = [values[a][turn] / values[b][turn] for turn in values[a] if turn in values[b]]
            ratios.append(
                {
                    "scenario": key[0],
                    "concurrency": key[1],
                    "rate": key[2],
                    "measure": measure_name,
                    "a": round(medians[a], 3),
                    "b": round(medians[b], 3),
                    "ratio": round(medians[a] / medians[b], 3),
                    "lowest": round(min(rounds), 3) if rounds else None,
                    "highest": round(max(rounds), 3) if rounds else None,
                    "better": a if (medians[a] > medians[b]) == is_more_better else b,
                }
            )
    return ratios


def report(
    lines: Sequence[dict[str, Any]], a: str, b: str, path: str | None, plots: Path | None = None
) -> int:
    """The tables, one JSON line of ratios, the plot if wanted, and the exit code."""
    ratios = ratios_of(lines, a, b)
    emit({"kind": "compare-ratios", "a": a, "b": b, "ratios": ratios}, path)
    rows = [
        [line["side"], str(line["repetition"]), line["scenario"], load_of(line), *figure_row(line)]
        for line in lines
    ]
    print_table("runs", ["side", "round", "scenario", "load", *FIGURE_COLUMNS], rows)
    print_table(
        f"medians, and {a} / {b}",
        ["scenario", "load", "measure", a, b, "ratio", "lowest", "highest", "better"],
        [
            [r["scenario"], load_of(r), r["measure"]]
            + [f"{r[key]:.2f}" for key in ("a", "b", "ratio", "lowest", "highest")]
            + [r["better"]]
            for r in ratios
        ],
    )
    if plots is not None:
        draw(ratios, a, b, plots)
    return 1 if any(line["failed"] for line in lines) else 0


def draw(ratios: Sequence[dict[str, Any]], a: str, b: str, folder: Path) -> None:
    from loadtest.plots import plot_ratios

    folder.mkdir(parents=True, exist_ok=True)
    panels: dict[str, dict[str, tuple[float, float, float]]] = {}
    for measure_name in ("tokens/s", "TTFT p50 ms", "ITL p99 ms"):
        bars = {
            f"{r['scenario']} {load_of(r)}": (r["ratio"], r["lowest"], r["highest"])
            for r in ratios
            if r["measure"] == measure_name and r["lowest"] is not None
        }
        if bars:
            panels[measure_name] = bars
    if panels:
        plot_ratios(panels, folder / "compare.png", title=f"{a} / {b}")


def load_of(line: dict[str, Any]) -> str:
    return str(line["concurrency"]) if line["rate"] is None else f"{line['rate']:g}/s"
