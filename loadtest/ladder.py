"""`python -m loadtest ladder`: the tutorial's four stages, each by its own route, with the same requests.

One request at a time (`/basic_generate`), static batches (`/generate`), a stream out of a continuous batch
(`/generate_stream`), and vLLM (`/generate_vllm`, where it is installed: `NORIA_VLLM_PYTHON` names the Python of its
environment, else this one is asked). All requests are sent at once. When each waited, began, spoke and ended is read
from the server's own log, as an answer that comes whole does not show it; the log line of a step costs microseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.closed_loop import (
    PlannedRequest,
    open_session,
    run_async,
    run_closed_loop,
    with_model,
)
from loadtest.figures import print_table, spread_ms
from loadtest.native_routes import WholeRequest, send
from loadtest.points import add_output_arguments, add_run_arguments, emit, held_lock, positive_int
from loadtest.policies import output_lengths
from loadtest.prompts import PromptMaker, prompt_maker_for
from loadtest.server_process import DEFAULT_COMMAND, RunningServer, running_server
from loadtest.sse_client import RequestRecord
from loadtest.target import Target
from loadtest.timeline import RequestTimes, Step, read_log, refilled_share, wasted_seat_share

VLLM_START_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Stage:
    """One rung: the route that is driven and the settings of the server behind it."""

    name: str
    route: str
    settings: tuple[str, ...]


STAGES = (
    Stage("single", "/basic_generate", ("engine.policy=single",)),
    Stage("static", "/generate", ("engine.policy=static",)),
    Stage("continuous", "/generate_stream", ("engine.policy=continuous",)),
    Stage("vllm", "/generate_vllm", ("engine.backend=vllm",)),
)
LOG_SETTINGS = ("log.format=json", "log.level=debug")


@dataclass(frozen=True, slots=True)
class Climb:
    """What one stage did."""

    stage: Stage
    figures: dict[str, Any]
    requests: list[RequestTimes]
    steps: list[Step]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stage", nargs="+", choices=names, default=names)
    parser.add_argument(
        "--command", type=shlex.split, default=list(DEFAULT_COMMAND), help="starts a server"
    )
    parser.add_argument("--batch-size", type=positive_int, default=8)
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE")
    parser.add_argument(
        "--vllm-set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for vLLM only"
    )
    parser.add_argument("--requests", type=positive_int, default=32)
    parser.add_argument("--prompt-tokens", type=positive_int, default=32)
    parser.add_argument("--min-output", type=positive_int, default=8)
    parser.add_argument("--max-output", type=positive_int, default=128)
    add_run_arguments(parser, timeout_s=600.0)
    parser.add_argument("--start-timeout", type=float, default=180.0)
    parser.add_argument("--log-dir", help="keep the servers' logs here (default: a temporary one)")
    parser.add_argument("--plots", type=Path, help="write ladder.png and timeline.png here")
    add_output_arguments(parser)
    parser.add_argument("--lock", help="a lock file held while a stage is measured")


def command_of(stage: Stage, args: argparse.Namespace) -> list[str]:
    """Same model, same seats; only policy and engine differ."""
    settings = [*stage.settings, f"engine.batch_size={args.batch_size}", *LOG_SETTINGS, *args.set]
    command = list(args.command)
    if stage.name == "vllm":
        # By itself vLLM leaves a core to its front end; the native engine uses them all.
        settings += [f"engine.threads={os.cpu_count() or 1}", *args.vllm_set]
        command = [vllm_python() or command[0], *command[1:]]
    flags = [word for setting in settings for word in ("--set", setting)]
    return [*command, "--host", "127.0.0.1", "--port", "{port}", *flags]


def vllm_python() -> str | None:
    """The Python of vLLM's environment; None means that of the server's command."""
    return os.environ.get("NORIA_VLLM_PYTHON") or None


def has_vllm(python: str) -> bool:
    code = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        return subprocess.run([python, "-c", code], timeout=60, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def stages_of(args: argparse.Namespace) -> list[Stage]:
    """Those asked for; vLLM is left out, with a line that says so, where it is not installed."""
    stages = [stage for stage in STAGES if stage.name in args.stage]
    python = vllm_python() or args.command[0]
    if any(stage.name == "vllm" for stage in stages) and not has_vllm(python):
        print(
            f"vllm: skipped, {python} has no vLLM; NORIA_VLLM_PYTHON names a Python that has.",
            file=sys.stderr,
        )
        stages = [stage for stage in stages if stage.name != "vllm"]
    return stages


def main(args: argparse.Namespace) -> int:
    if args.min_output > args.max_output:
        raise SystemExit("--min-output must not be larger than --max-output.")
    with tempfile.TemporaryDirectory(prefix="noria-ladder-") as temporary:
        log_dir = Path(args.log_dir or temporary)
        log_dir.mkdir(parents=True, exist_ok=True)
        climbs = [_climb(stage, args, log_dir) for stage in stages_of(args)]
    if args.plots is not None:
        from loadtest import plots

        args.plots.mkdir(parents=True, exist_ok=True)
        plots.plot_stages([climb.figures for climb in climbs], args.plots / "ladder.png")
        timelines = {climb.stage.name: climb.requests for climb in climbs}
        plots.plot_timeline(timelines, args.plots / "timeline.png")
    return report([climb.figures for climb in climbs], args.out)


def _climb(stage: Stage, args: argparse.Namespace, log_dir: Path) -> Climb:
    command = command_of(stage, args)
    print(f"{stage.name}: {shlex.join(command)}", file=sys.stderr)
    timeout_s = args.start_timeout if stage.name != "vllm" else VLLM_START_TIMEOUT_S
    log_path = log_dir / f"{stage.name}.log"
    with (
        held_lock(args.lock),
        running_server(
            command, log_path, ready_path="/health", start_timeout_s=timeout_s
        ) as server,
    ):
        records, wall_s = run_async(_measure(stage, args, server))
    requests, steps = read_log(log_path.read_text(errors="replace").splitlines(), f"{stage.name}-")
    figures = figures_of(stage, records, wall_s, requests, steps)
    figures |= {"label": args.label, "batch_size": args.batch_size, "seed": args.seed}
    figures["server_start_s"] = round(server.start_s, 3)
    emit(figures, args.out)
    return Climb(stage, figures, requests, steps)


async def _measure(
    stage: Stage, args: argparse.Namespace, server: RunningServer
) -> tuple[list[RequestRecord], float]:
    target = await with_model(Target(server.url))
    maker = await prompt_maker_for(target, None)
    planned = plan(args, maker)
    warm_up = maker.plan_warm_up(args.batch_size, str(args.seed))
    async with open_session() as session:
        if stage.name == "vllm":
            warming = (WholeRequest(f"warm-{i}", p) for i, p in enumerate(warm_up))
            await asyncio.gather(
                *(send(session, server.url, stage.route, r, args.timeout) for r in warming)
            )
        else:
            await run_closed_loop(target, warm_up, len(warm_up), timeout_s=args.timeout)
        start_s = time.perf_counter()
        requests = [WholeRequest(f"{stage.name}-{i:03d}", p) for i, p in enumerate(planned)]
        records = await asyncio.gather(
            *(send(session, server.url, stage.route, r, args.timeout) for r in requests)
        )
    return records, time.perf_counter() - start_s


def plan(args: argparse.Namespace, maker: PromptMaker) -> list[PlannedRequest]:
    """The same requests in the same order for every stage; prompts are unique."""
    rng = random.Random(f"ladder-{args.seed}")
    lengths = output_lengths(args.requests, args.min_output, args.max_output, args.seed)
    return [PlannedRequest(maker.text(rng, args.prompt_tokens), length) for length in lengths]


def figures_of(
    stage: Stage,
    records: Sequence[RequestRecord],
    wall_s: float,
    requests: Sequence[RequestTimes],
    steps: Sequence[Step],
) -> dict[str, Any]:
    """Rates by the client's clock; tokens and moments by the server's log. The first token is the engine's: whoever
    gets the answer whole sees nothing before its end."""
    failed = [record for record in records if not record.is_ok]
    num_tokens = sum(request.num_tokens for request in requests if request.is_ok)
    figures: dict[str, Any] = {
        "kind": "ladder",
        "stage": stage.name,
        "route": stage.route,
        "requests": len(records),
        "failed": len(failed),
        "wall_s": round(wall_s, 3),
        "output_tokens": num_tokens,
        "output_tokens_per_s": round(num_tokens / wall_s, 3),
        "requests_per_s": round((len(records) - len(failed)) / wall_s, 3),
        "first_token_ms": spread_ms(
            None if r.first_token_s is None else r.first_token_s - r.arrival_s for r in requests
        ),
        "e2e_ms": spread_ms(record.e2e_s for record in records if record.is_ok),
        "wasted_seat_share": _rounded(wasted_seat_share(steps)),
        "refilled_at_next_step": _rounded(refilled_share(steps)),
    }
    if failed:
        figures["first_error"] = failed[0].error
    return figures


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def report(lines: Sequence[dict[str, Any]], path: str | None) -> int:
    """The table, one JSON line of ratios to the first stage, and the exit code."""
    base = lines[0]["output_tokens_per_s"] if lines else 0
    ratios = {x["stage"]: round(x["output_tokens_per_s"] / base, 2) for x in lines if base}
    emit({"kind": "ladder-ratios", "output_tokens_per_s": ratios}, path)
    columns = ["stage", "route", "requests", "failed", "tokens/s", "ratio", "requests/s"]
    columns += ["first token s p50/p99", "end s p50/p99", "seats wasted", "refilled at once"]
    rows = [
        [
            *(line["stage"], line["route"], str(line["requests"]), str(line["failed"])),
            f"{line['output_tokens_per_s']:.1f}",
            f"{ratios.get(line['stage'], 0):.2f}",
            f"{line['requests_per_s']:.2f}",
            _seconds(line["first_token_ms"]),
            _seconds(line["e2e_ms"]),
            _percent(line["wasted_seat_share"]),
            _percent(line["refilled_at_next_step"]),
        ]
        for line in lines
    ]
    print_table("ladder", columns, rows)
    return 1 if not lines or any(line["failed"] for line in lines) else 0


def _seconds(spread: dict[str, float | None]) -> str:
    return " / ".join(
        "-" if (v := spread[p]) is None else f"{v / 1000:.2f}" for p in ("p50", "p99")
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"
