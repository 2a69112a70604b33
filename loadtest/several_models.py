"""`python -m loadtest models`: three models under a memory budget for two.

First requests at random to all: none may be lost, none may differ from what the same request says alone, and the loads
are counted. Then one model is pinned and answers alone, and while the two others push each other out of memory:
what their loading does to its time to first token. Last two models answer each alone and both at once: how they share.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from loadtest.closed_loop import (
    PlannedRequest,
    open_session,
    run_async,
    run_closed_loop,
    stream_request,
)
from loadtest.figures import percentile, print_table
from loadtest.points import add_output_arguments, add_run_arguments, emit, positive_int
from loadtest.server_process import DEFAULT_COMMAND, running_server
from loadtest.target import Target

ADMIN_KEY = "loadtest"
NAMES = ("none", "int8", "int4")  # of the models: the default one with weights in so many bits
KV_BLOCKS = 512
# The weights of the default model take 257, 129 and 85 MiB, the keys and values of each 180, its activations 17.
BUDGET_MIB = 850
PROMPTS = (
    "The river", "My dog likes", "Once upon a time", "The capital of France is", "To bake bread", "In winter",
)  # fmt: skip
OUTPUT_TOKENS = 16
SHARED_TOKENS = 64
SHARED_S = 6.0


@dataclass(frozen=True, slots=True)
class Admin:
    """What an operator asks of the server."""

    session: aiohttp.ClientSession
    url: str

    async def report(self) -> dict[str, Any]:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        async with self.session.get(f"{self.url}/admin/models", headers=headers) as response:
            response.raise_for_status()
            report: dict[str, Any] = await response.json()
            return report

    async def load(self, model: str, **more: Any) -> None:
        headers = {"authorization": f"Bearer {ADMIN_KEY}"}
        body = {"model": model, **more}
        path = f"{self.url}/admin/models/load"
        async with self.session.post(path, headers=headers, json=body) as response:
            response.raise_for_status()


def server_command(model: str | None = None) -> tuple[str, ...]:
    """A server with three models and memory for two."""
    name = "smollm2-135m-instruct" if model is None else model
    entries = ", ".join(
        f"{{name: {name}, served_name: {bits}, quantization: {bits}, dtype: bfloat16}}"
        for bits in NAMES
    )
    settings = (
        f"models=[{entries}]",
        f"models_memory_mib={BUDGET_MIB}",
        f"kv_cache.num_blocks={KV_BLOCKS}",
        f"server.admin_key={ADMIN_KEY}",
    )
    return (
        *DEFAULT_COMMAND,
        "--port",
        "{port}",
        *(word for each in settings for word in ("--set", each)),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=positive_int, default=300, help="at random to all")
    parser.add_argument("--clients", type=positive_int, default=12, help="of those")
    parser.add_argument("--rounds", type=positive_int, default=3, help="quiet and busy, in turn")
    parser.add_argument("--warm-requests", type=positive_int, default=120, help="of each phase")
    parser.add_argument("--warm-clients", type=positive_int, default=4)
    add_run_arguments(parser)
    add_output_arguments(parser)


def main(args: argparse.Namespace) -> int:
    folder = Path(tempfile.mkdtemp(prefix="loadtest-models-"))
    log = folder / "server.log"
    with running_server(server_command(), log, ready_path="/health", start_timeout_s=60) as server:
        target = Target(server.url)
        crowd = run_async(send_at_random(target, args))
        warm = run_async(watch_the_warm(target, args))
        shared = run_async(share_the_time(target, args))
    for figures in (crowd, warm, shared):
        emit({"label": args.label, **figures}, args.out)
        shown = {key: value for key, value in figures.items() if key != "kind"}
        title = {
            "models": "three models, memory for two",
            "warm": "a warm model, others loading",
            "shared": "two models, each alone and both at once",
        }
        print_table(
            title[figures["kind"]],
            [key.replace("_", " ") for key in shown],
            [[str(value) for value in shown.values()]],
        )
    return 0 if not crowd["lost"] and not crowd["wrong"] else 1


async def send_at_random(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Counts requests that failed, and texts that are not those of the same request alone."""
    rng = random.Random(f"models-{args.seed}")
    async with open_session() as session:
        admin = Admin(session, target.url)
        alone: dict[tuple[str, str], str] = {}
        for model in NAMES:
            for prompt in PROMPTS:
                record = await _ask(session, target, model, prompt, args.timeout)
                if not record.is_ok:
                    raise SystemExit(f"{model} does not answer alone: {record.error}")
                alone[model, prompt] = "".join(record.texts)
        before = await _loads(admin)
        todo = [(rng.choice(NAMES), rng.choice(PROMPTS)) for _ in range(args.requests)]
        queue, wrong, lost = iter(todo), 0, 0
        waits_ms: list[float] = []

        async def client() -> None:
            nonlocal wrong, lost
            for model, prompt in queue:
                record = await _ask(session, target, model, prompt, args.timeout)
                lost += not record.is_ok
                wrong += record.is_ok and "".join(record.texts) != alone[model, prompt]
                if record.is_ok:
                    waits_ms.append(1000 * (record.text_times_s[0] - record.sent_s))

        await asyncio.gather(*(client() for _ in range(args.clients)))
        after = await _loads(admin)
        report = await admin.report()
    asked = Counter(model for model, _ in todo)
    return {
        "kind": "models",
        "requests": len(todo),
        "lost": lost,
        "wrong": wrong,
        "asked": dict(asked),
        "loads": {name: after[name] - before[name] for name in NAMES},
        "seconds_to_load": {each["id"]: each["seconds_to_load"] for each in report["data"]},
        "used_mib": report["used_mib"],
        "ttft_p50_ms": round(percentile(waits_ms, 50) or 0.0, 1),
    }


async def _ask(
    session: aiohttp.ClientSession, target: Target, model: str, prompt: str, timeout_s: float
) -> Any:
    planned = PlannedRequest(prompt, OUTPUT_TOKENS)
    return await stream_request(session, replace(target, model=model), planned, timeout_s)


async def _loads(admin: Admin) -> dict[str, int]:
    return {each["id"]: each["loads"] for each in (await admin.report())["data"]}


async def watch_the_warm(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Time to first token of a pinned model, alone and while others are loaded one after the other."""
    warm = replace(target, model=NAMES[0])
    rng = random.Random(f"warm-{args.seed}")
    quiet_ms: list[float] = []
    busy_ms: list[float] = []
    async with open_session() as session:
        admin = Admin(session, target.url)
        await admin.load(NAMES[0], pinned=True)
        before = await _loads(admin)
        for _ in range(args.rounds):
            quiet_ms += await _first_tokens(warm, args, rng)
            loading = asyncio.create_task(_keep_loading(admin))
            busy_ms += await _first_tokens(warm, args, rng)
            loading.cancel()
            await asyncio.gather(loading, return_exceptions=True)
            await admin.load(NAMES[1])  # so that nothing loads in the next quiet phase
        after = await _loads(admin)
        seconds = {each["id"]: each["seconds_to_load"] for each in (await admin.report())["data"]}
        await admin.load(NAMES[0], pinned=False)
    quiet_p99, busy_p99 = percentile(quiet_ms, 99) or 0.0, percentile(busy_ms, 99) or 0.0
    return {
        "kind": "warm",
        "requests": len(quiet_ms) + len(busy_ms),
        "loads_beside": sum(after.values()) - sum(before.values()),
        "seconds_to_load_beside": {name: seconds[name] for name in NAMES[1:]},
        "quiet_p50_ms": round(percentile(quiet_ms, 50) or 0.0, 1),
        "busy_p50_ms": round(percentile(busy_ms, 50) or 0.0, 1),
        "quiet_p99_ms": round(quiet_p99, 1),
        "busy_p99_ms": round(busy_p99, 1),
        "p99_ratio": round(busy_p99 / quiet_p99, 3),
    }


async def share_the_time(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of two models, each alone and both at once, medians of rounds. `shares` are tokens/s together
    over those alone: with equal shares of the step thread's time each is about a half."""
    pair = (NAMES[0], NAMES[2])
    alone: dict[str, list[float]] = {name: [] for name in pair}
    both: dict[str, list[float]] = {name: [] for name in pair}
    async with open_session() as session:
        admin = Admin(session, target.url)
        for name in pair:
            await admin.load(name)
        for turn in range(args.rounds):
            for name in pair:
                alone[name].append(await _rate(replace(target, model=name), args, turn))
            rates = await asyncio.gather(
                *(_rate(replace(target, model=name), args, turn) for name in pair)
            )
            for name, rate in zip(pair, rates, strict=True):
                both[name].append(rate)
    return {
        "kind": "shared",
        "alone": {name: round(median(rates), 1) for name, rates in alone.items()},
        "together": {name: round(median(rates), 1) for name, rates in both.items()},
        "shares": {
            name: round(median(b / a for a, b in zip(alone[name], both[name], strict=True)), 3)
            for name in pair
        },
    }


async def _rate(target: Target, args: argparse.Namespace, turn: int) -> float:
    """Tokens per second of a model over a few seconds, by as many clients as there are warm ones."""
    planned = [
        PlannedRequest(f"{turn} {number} {PROMPTS[number % len(PROMPTS)]}", SHARED_TOKENS)
        for number in range(10_000)
    ]
    result = await run_closed_loop(
        target, planned, args.warm_clients, timeout_s=args.timeout, time_limit_s=SHARED_S
    )
    return sum(len(record.texts) for record in result.records) / result.wall_s  # the cut ones too


async def _first_tokens(
    target: Target, args: argparse.Namespace, rng: random.Random
) -> list[float]:
    planned = [
        PlannedRequest(f"{rng.randrange(10**9)} {rng.choice(PROMPTS)}", OUTPUT_TOKENS)
        for _ in range(args.warm_requests)
    ]
    result = await run_closed_loop(target, planned, args.warm_clients, timeout_s=args.timeout)
    failed = [record for record in result.records if not record.is_ok]
    if failed:
        raise SystemExit(f"{len(failed)} requests failed, the first with: {failed[0].error}")
    return [1000 * (record.text_times_s[0] - record.sent_s) for record in result.records]


async def _keep_loading(admin: Admin) -> None:
    """The two others, in turn, of which one only has room beside the pinned one."""
    while True:
        for model in NAMES[2:0:-1]:
            await admin.load(model)
