"""`python -m loadtest sweep engine.batch_size=1,2,4,8,16,32`: one server per value of a setting, the same load to each.

More throughput usually costs latency. The plot shows tokens per second against time to first token and time per output
token, one dot per value.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from loadtest.bench import extra_cells, extra_columns
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
)
from loadtest.prompts import prompt_maker_for
from loadtest.server_process import DEFAULT_COMMAND, RunningServer, running_server
from loadtest.target import PATHS, Target


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """How a server is started for one measurement."""

    command: Sequence[str]
    settings: Sequence[str]
    endpoint: Any
    start_timeout_s: float
    log_dir: Path

    def command_with(self, settings: Sequence[str]) -> list[str]:
        flags = [word for text in (*self.settings, *settings) for word in ("--set", text)]
        return [*self.command, "--host", "127.0.0.1", "--port", "{port}", *flags]


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--command",
        type=shlex.split,
        default=list(DEFAULT_COMMAND),
        help="how a server is started; flags are appended (default: this Python with -m server)",
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for every server"
    )
    parser.add_argument("--endpoint", choices=sorted(PATHS), default="completions")
    parser.add_argument("--start-timeout", type=float, default=180.0)
    parser.add_argument("--log-dir", help="keep the servers' logs here (default: a temporary one)")
    add_output_arguments(parser)


def server_options_of(args: argparse.Namespace, log_dir: Path) -> ServerOptions:
    log_dir.mkdir(parents=True, exist_ok=True)
    return ServerOptions(args.command, args.set, args.endpoint, args.start_timeout, log_dir)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("setting", type=setting_of, metavar="SECTION.KEY=V1,V2,…")
    add_server_arguments(parser)
    add_load_arguments(parser)
    parser.set_defaults(concurrency=[32])
    parser.add_argument("--plot", type=Path, help="write the plot to this .png")


def setting_of(text: str) -> tuple[str, list[str]]:
    """`section.key=v1,v2`. Values are YAML, as with `--set`; a list of lists is written as YAML: `[[a, b], [c]]`."""
    key, is_given, values = text.partition("=")
    if not is_given or "." not in key or not values:
        raise argparse.ArgumentTypeError("must look like engine.batch_size=1,8,32")
    if values.startswith("["):
        parsed = yaml.safe_load(values)
        return key, [yaml.safe_dump(v, default_flow_style=True).split("\n")[0] for v in parsed]
    return key, values.split(",")


def main(args: argparse.Namespace) -> int:
    key, values = args.setting
    options = load_options_of(args)
    lines: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="noria-sweep-") as temporary:
        servers = server_options_of(args, Path(args.log_dir or temporary))
        for value in values:
            for line in measure_with(servers, [f"{key}={value}"], options):
                line = {"kind": "sweep", "label": args.label, "setting": key, "value": value} | line
                emit(line, args.out)
                lines.append(line)
    if args.plot is not None:
        _plot(key, lines, args.plot)
    extra = extra_columns(lines)
    rows = [
        [
            *(line["value"], line["scenario"], str(line["concurrency"] or line["rate"])),
            *(*figure_row(line), *extra_cells(line, extra)),
        ]
        for line in lines
    ]
    columns = [key, "scenario", "load", *FIGURE_COLUMNS, *extra.values()]
    print_table(f"sweep of {key}", columns, rows)
    return 1 if any(line["failed"] for line in lines) else 0


def measure_with(
    servers: ServerOptions, settings: Sequence[str], options: LoadOptions
) -> list[dict[str, Any]]:
    """Starts a server with further settings, measures every point of the load, ends it."""
    command = servers.command_with(settings)
    print(shlex.join(command), file=sys.stderr)
    name = "-".join(settings).replace("/", "_") or "server"
    with running_server(
        command,
        servers.log_dir / f"{name}.log",
        ready_path="/health",
        start_timeout_s=servers.start_timeout_s,
    ) as server:
        return run_async(_measure_all(servers, server, options))


async def _measure_all(
    servers: ServerOptions, server: RunningServer, options: LoadOptions
) -> list[dict[str, Any]]:
    target = await with_model(Target(server.url, servers.endpoint))
    maker = await prompt_maker_for(target, None)
    return [
        await measure(target, maker, point, options, pid=server.pid) for point in points_of(options)
    ]


def _plot(key: str, lines: Sequence[dict[str, Any]], path: Path) -> None:
    from loadtest.plots import plot_sweep

    first = lines[0]
    points = [
        (
            str(line["value"]),
            line["output_tokens_per_s"],
            line["ttft_ms"]["p50"] or 0.0,
            line["tpot_ms"]["p50"] or 0.0,
        )
        for line in lines
        if all(line[name] == first[name] for name in ("scenario", "concurrency", "rate"))
    ]
    plot_sweep(
        f"{key}: {first['scenario']} at {first['concurrency'] or first['rate']}", points, path
    )
