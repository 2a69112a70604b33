"""`python -m loadtest grammars`: what following a grammar costs a step, and what hostile grammars do to other streams.

Without `--url` an engine in this process decodes a batch with and without a JSON schema for every row, in turn. With
it, streams run against that server while requests with grammars made to be slow arrive one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import aiohttp
import orjson

from loadtest.closed_loop import (
    PlannedRequest,
    open_session,
    run_async,
    stream_request,
    with_model,
)
from loadtest.figures import percentile, print_table
from loadtest.in_process import add_engine_arguments, draw_prompt, load_engine, make_sequence
from loadtest.points import emit, held_lock, positive_int
from loadtest.prompts import prompt_maker_for
from loadtest.sse_client import RequestRecord
from loadtest.target import Target

if TYPE_CHECKING:
    from core.engine import Engine
    from core.structured.compiler import CompiledGrammar

SCHEMA = {
    "type": "array",
    "minItems": 40,  # so that no answer ends before it is measured
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}
ATTACK_TOKENS = 60


def hostile_fields() -> list[dict[str, Any]]:
    """Deep nesting, ambiguity, exponential expressions and long repetitions."""
    nested: dict[str, Any] = {"type": "string"}
    for _ in range(20):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    slow = {"type": "array", "items": {"type": "string", "pattern": "^(.*a.{30}){5}$"}}
    return [
        {"guided_grammar": "start: s\ns: s s s | s s | /[a-z]/"},
        {"guided_regex": "(.*a.{20}){3}"},
        {"guided_regex": "((a{1,100}){1,100}){1,100}"},
        {"guided_regex": "(a|a)*b" * 50},
        {"guided_regex": "(x|x)*y"},
        {"guided_regex": "a{20000}"},
        {"guided_json": nested},
        {"guided_json": slow},
    ]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--batch", type=positive_int, default=32)
    parser.add_argument("--context", type=positive_int, default=128)
    parser.add_argument("--steps", type=positive_int, default=48, help="decode steps per round")
    parser.add_argument("--rounds", type=positive_int, default=3)
    parser.add_argument("--url", help="a server to attack instead")
    parser.add_argument("--streams", type=positive_int, default=4, help="that are watched")
    parser.add_argument("--stream-tokens", type=positive_int, default=1200, help="of each answer")


def main(args: argparse.Namespace) -> int:
    return run_async(_attack(args)) if args.url else _measure(args)


def _measure(args: argparse.Namespace) -> int:
    from core.structured.compiler import GrammarCompiler
    from core.structured.grammar import Grammar

    engine = load_engine(args.model, settings=args.set, prefix_caching=False, batch_size=args.batch)
    text = orjson.dumps(SCHEMA).decode()
    compiled = GrammarCompiler(engine.tokenizer).compile(Grammar("json_schema", text))
    rng = random.Random(args.seed)
    times: dict[str, list[float]] = {"plain": [], "bound": []}
    with held_lock(args.lock):
        _decode(engine, rng, args, compiled)  # the first of anything is slower
        for _ in range(args.rounds):
            times["plain"] += _decode(engine, rng, args, None)
            times["bound"] += _decode(engine, rng, args, compiled)
    plain_s, bound_s = (statistics.median(times[name]) for name in ("plain", "bound"))
    figures = {
        "kind": "grammars",
        "label": args.label,
        "batch": args.batch,
        "context": args.context,
        "steps": len(times["plain"]),
        "plain_ms": round(plain_s * 1000, 3),
        "bound_ms": round(bound_s * 1000, 3),
        "extra_percent": round(100 * (bound_s / plain_s - 1), 2),
    }
    emit(figures, args.out)
    names = ("batch", "context", "plain_ms", "bound_ms", "extra_percent")
    row = [f"{figures[name]:g}" for name in names]
    print_table(
        "a decode step with and without a schema", [n.replace("_", " ") for n in names], [row]
    )
    return 0


def _decode(
    engine: Engine, rng: random.Random, args: argparse.Namespace, compiled: CompiledGrammar | None
) -> list[float]:
    """Seconds of each step in which all rows of the batch got a token."""
    from core.structured.follow import GrammarState

    for index in range(args.batch):
        prompt = draw_prompt(engine, rng, args.context)
        # prompts are computed one after the other: the first of them decode meanwhile
        sequence = make_sequence(f"{rng.random()}", prompt, args.steps + args.batch - index)
        if compiled is not None:
            sequence.grammar = GrammarState(compiled)
        engine.add(sequence)
    taken: list[float] = []
    while engine.has_work:
        started_s = time.perf_counter()
        outputs = engine.step()
        elapsed_s = time.perf_counter() - started_s
        failed = next((output.error for output in outputs if output.error), None)
        if failed is not None:
            raise SystemExit(f"a row failed: {failed}")
        stats = engine.stats(is_after_step=True)
        if stats.step_kind == "decode" and stats.num_sequences == args.batch:
            taken.append(elapsed_s)
    return taken


async def _attack(args: argparse.Namespace) -> int:
    target = await with_model(Target(args.url.rstrip("/")))
    maker = await prompt_maker_for(target, None)
    rng = random.Random(f"grammars-{args.seed}")
    planned = [PlannedRequest(maker.text(rng, 32), args.stream_tokens) for _ in range(args.streams)]
    async with open_session() as session:
        watched = [
            asyncio.create_task(stream_request(session, target, request, 300.0))
            for request in planned
        ]
        await asyncio.sleep(3.0)
        begun_s = time.perf_counter()
        answers = [await _send(session, target, fields) for fields in hostile_fields()]
        ended_s = time.perf_counter()
        records = await asyncio.gather(*watched)
    failed = [record for record in records if not record.is_ok]
    if failed:
        raise SystemExit(f"{len(failed)} streams failed, the first with: {failed[0].error}")
    figures = {"kind": "hostile", "label": args.label, **compare(records, begun_s, ended_s)}
    figures["answers"] = answers
    emit(figures, args.out)
    names = (
        "quiet_p50_ms",
        "quiet_max_ms",
        "attacked_p50_ms",
        "attacked_p99_ms",
        "attacked_max_ms",
    )
    row = [f"{figures[name]:g}" for name in names]
    title = f"gaps of {args.streams} streams beside {len(answers)} hostile grammars"
    print_table(title, [name.replace("_", " ") for name in names], [row])
    return 0


async def _send(
    session: aiohttp.ClientSession, target: Target, fields: dict[str, Any]
) -> list[Any]:
    """What became of one hostile request: the field, the status and the seconds it took."""
    body = {"prompt": "a", "max_tokens": ATTACK_TOKENS, "temperature": 1, "seed": 1, **fields}
    started_s = time.perf_counter()
    async with session.post(
        f"{target.url}/v1/completions", data=orjson.dumps(body), headers=target.headers
    ) as response:
        await response.read()
        return [next(iter(fields)), response.status, round(time.perf_counter() - started_s, 3)]


def compare(records: Sequence[RequestRecord], begun_s: float, ended_s: float) -> dict[str, Any]:
    """Gaps before the attack and during it. Raises `SystemExit` where a stream ended before the attack did."""
    if any(record.text_times_s[-1] < ended_s for record in records):
        raise SystemExit("a stream ended before the attack did: raise --stream-tokens.")
    gaps = [gap for record in records for gap in pairwise(record.text_times_s)]
    quiet = [1000 * (end - begin) for begin, end in gaps if end < begun_s]
    during = [1000 * (end - begin) for begin, end in gaps if end >= begun_s and begin <= ended_s]
    if not quiet or not during:
        raise SystemExit("nothing streamed before or during the attack.")
    return {
        "quiet_p50_ms": round(percentile(quiet, 50) or 0.0, 2),
        "quiet_max_ms": round(max(quiet), 2),
        "attacked_gaps": len(during),
        "attacked_p50_ms": round(percentile(during, 50) or 0.0, 2),
        "attacked_p99_ms": round(percentile(during, 99) or 0.0, 2),
        "attacked_max_ms": round(max(during), 2),
    }
