"""`overhead --real`: what is left behind HTTP of the tokens per second of an engine that a script drives, in turn."""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson

from loadtest.closed_loop import run_async, with_model
from loadtest.figures import print_table
from loadtest.points import LoadOptions, Point, emit, measure
from loadtest.prompts import prompt_maker_for
from loadtest.scenarios import Shape, Span
from loadtest.server_process import DEFAULT_COMMAND, running_server
from loadtest.target import Target


def compare_with_script(args: argparse.Namespace) -> int:
    """Rounds of script and server; prints a line per point of each round, and the medians."""
    settings = [word for setting in args.set for word in ("--set", setting)]
    lines: list[dict[str, Any]] = []
    for repetition in range(args.repeat):
        print(f"round {repetition + 1} of {args.repeat}", file=sys.stderr)
        scripts = script_rates(args, repetition, settings)
        lines += [
            {"repetition": repetition, **line, "script_tokens_per_s": scripts[line["concurrency"]]}
            for line in server_lines(args, repetition, settings)
        ]
    rows: list[list[str]] = []
    for line in lines:
        line["share"] = round(line["output_tokens_per_s"] / line["script_tokens_per_s"], 3)
        emit({"kind": "overhead-real", "label": args.label, **line}, args.out)
    for count in args.concurrency:
        mine = [line for line in lines if line["concurrency"] == count]
        keys = ("script_tokens_per_s", "output_tokens_per_s", "share", "client_cores")
        rows.append(
            [str(count), *(f"{statistics.median(x[key] for x in mine):.3g}" for key in keys)]
        )
    print_table(
        f"{args.repeat} rounds in turn, medians",
        ["clients", "script tokens/s", "HTTP tokens/s", "share", "client's cores"],
        rows,
    )
    return 1 if any(line["failed"] for line in lines) else 0


def script_rates(
    args: argparse.Namespace, repetition: int, settings: list[str]
) -> dict[int, float]:
    command = [sys.executable, "-m", "loadtest.script_rate", "--model", args.model]
    command += ["--seed", str(repetition), "--prompt-tokens", str(args.prompt_tokens)]
    command += ["--tokens", str(args.real_tokens), "--concurrency", *map(str, args.concurrency)]
    finished = subprocess.run([*command, *settings], stdout=subprocess.PIPE, check=True)
    rates: dict[str, float] = orjson.loads(finished.stdout.splitlines()[-1])
    return {int(count): rate for count, rate in rates.items()}


def server_lines(
    args: argparse.Namespace, repetition: int, settings: list[str]
) -> list[dict[str, Any]]:
    command = [*DEFAULT_COMMAND, "--model", args.model, "--port", "{port}", *settings]
    with (
        tempfile.TemporaryDirectory(prefix="noria-overhead-") as folder,
        running_server(
            command, Path(folder) / "server.log", ready_path="/health", start_timeout_s=300
        ) as server,
    ):
        return run_async(_measure(args, server.url, server.pid, repetition))


async def _measure(
    args: argparse.Namespace, url: str, pid: int, repetition: int
) -> list[dict[str, Any]]:
    target = await with_model(Target(url=url, endpoint=args.endpoint))
    maker = await prompt_maker_for(target, None)
    prompt, output = args.prompt_tokens, args.real_tokens
    options = LoadOptions({"S": Shape(Span(prompt, prompt), Span(output, output))}, lock=args.lock)
    lines = [
        await measure(target, maker, Point("S", count), options, repetition=repetition, pid=pid)
        for count in args.concurrency
    ]
    for line in lines:
        line["client_cores"] = round(line["client_cpu_s"] / line["wall_s"], 3)
    return lines
