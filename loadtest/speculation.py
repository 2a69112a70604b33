"""`python -m loadtest speculation`: the same requests with and without drafts, in turn, without a server.

Both engines share one model and answer with the same tokens, which is checked, so that the ratio is one of times.
Three kinds of copying (a summary that quotes, a code edit, JSON written again) one at a time; ordinary questions one at
a time and many at once. Prefill is part of the time.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from core.config import NO_SPECULATION, EngineConfig, SpeculativeConfig
from core.engine import Engine
from core.sampling_params import SamplingParams
from core.speculation.self_draft import ACCEPTED, is_self_draft, read_self_draft
from core.speculation.speculators import describe_drafts
from loadtest.figures import print_table
from loadtest.in_process import add_engine_arguments, load_engine
from loadtest.points import emit, held_lock, positive_int

TASKS = Path(__file__).with_name("speculation.yaml")
COPYING = ("quote", "code", "json")


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over the requests of a kind."""

    seconds: float
    num_tokens: int
    num_steps: int
    token_ids: list[list[int]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--kinds", nargs="+", default=[*COPYING, "chat"], help="of requests")
    parser.add_argument("--concurrency", nargs="+", type=positive_int, default=[1])
    parser.add_argument("--max-tokens", type=positive_int, default=160)
    parser.add_argument("--temperature", type=float, default=0.0, help="seeded above 0")
    parser.add_argument("--method", choices=["lookup", "draft"], default="lookup")
    parser.add_argument("--draft-model", help="as speculative.draft_model, for --method draft")
    parser.add_argument("--draft-tokens", type=positive_int, default=8, help="as max_tokens there")
    parser.add_argument("--pairs", type=positive_int, default=5)


def main(args: argparse.Namespace) -> int:
    tasks: dict[str, list[str]] = yaml.safe_load(TASKS.read_text("utf-8"))
    if unknown := [kind for kind in args.kinds if kind not in tasks]:
        raise SystemExit(f"no kind of request {', '.join(unknown)}; there are {', '.join(tasks)}.")
    speculative = speculation_of(args)
    loaded = load_engine(args.model, settings=args.set, speculative=speculative)
    print(describe_drafts(speculative, loaded.runner), file=sys.stderr)
    plain = beside(loaded, NO_SPECULATION)
    rows = []
    with held_lock(args.lock):
        for kind in args.kinds:
            for concurrency in args.concurrency:
                drafted = beside(plain, speculative)
                line = measure(plain, drafted, tasks[kind], concurrency, args)
                emit({"kind": "speculation", "label": args.label, "work": kind, **line}, args.out)
                rows.append([kind, *map(str, line.values())])
    print_table("with drafts", ["work", *line], rows)
    return 0


def speculation_of(args: argparse.Namespace) -> SpeculativeConfig:
    """Raises `SystemExit` where the draft model is missing or cannot be read."""
    name = args.draft_model or ""
    is_wrong = is_self_draft(name) and read_self_draft(name) is None
    if args.method == "draft" and (is_wrong or not name):
        raise SystemExit(f"--method draft needs --draft-model: {ACCEPTED}.")
    return SpeculativeConfig(
        method=args.method, max_tokens=args.draft_tokens, draft_model=args.draft_model
    )


def beside(plain: Engine, speculative: SpeculativeConfig) -> Engine:
    """The same model in an engine that drafts so."""
    return Engine(
        EngineConfig(prefix_caching=False),
        plain.runner,
        plain.tokenizer,
        max_model_len=plain.max_model_len,
        speculative=speculative,
    )


def measure(
    plain: Engine,
    drafted: Engine,
    tasks: list[str],
    concurrency: int,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Figures of `args.pairs` pairs of runs; ratios are of tokens per second, with drafts over without."""
    prompts = [
        plain.tokenizer.encode_chat([{"role": "user", "content": task}])
        for task in tasks * -(-concurrency // len(tasks))
    ]
    params = [
        SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=i)
        for i in range(len(prompts))
    ]
    ratios, without, with_drafts = [], [], []
    run(plain, prompts[:1], params[:1], 1)  # the first of anything is slower
    for _ in range(args.pairs):
        first = run(plain, prompts, params, concurrency)
        second = run(drafted, prompts, params, concurrency)
        assert first.token_ids == second.token_ids, "drafts changed a token"
        ratios.append(first.seconds / second.seconds)
        without.append(first)
        with_drafts.append(second)
    stats = drafted.stats()
    accepted = stats.total_accepted_tokens / max(1, stats.total_draft_tokens)
    num_drafted = stats.total_draft_tokens // args.pairs
    return {
        "clients": concurrency,
        "temperature": args.temperature,
        "tokens": without[0].num_tokens,
        "tokens/s without": round(statistics.median(r.num_tokens / r.seconds for r in without), 1),
        "tokens/s": round(statistics.median(r.num_tokens / r.seconds for r in with_drafts), 1),
        "ratio": round(statistics.median(ratios), 3),
        "lowest": round(min(ratios), 3),
        "highest": round(max(ratios), 3),
        "steps saved": f"{1 - with_drafts[-1].num_steps / without[-1].num_steps:.0%}",
        "guesses": num_drafted,
        "accepted": f"{accepted:.0%}",
        **_costs(drafted, concurrency),
    }


def _costs(drafted: Engine, concurrency: int) -> dict[str, float]:
    """What a rejected guess costs, as measured while drafting: its row in the step and its forward of a draft model."""
    if drafted.speculator is None:
        return {}
    seconds = drafted.speculator.seconds_of(concurrency)
    return {f"{name} ms": round(1000 * each, 2) for name, each in seconds.items()}


def run(
    engine: Engine, prompts: list[list[int]], params: list[SamplingParams], concurrency: int
) -> Run:
    """All of them, `concurrency` at once."""
    steps_before, token_ids = engine.stats().total_steps, []
    start_s = time.perf_counter()
    for start in range(0, len(prompts), concurrency):
        group = slice(start, start + concurrency)
        token_ids += [g.token_ids for g in engine.generate(prompts[group], params[group])]
    elapsed_s = time.perf_counter() - start_s
    num_steps = engine.stats().total_steps - steps_before
    return Run(elapsed_s, sum(map(len, token_ids)), num_steps, token_ids)
