"""`python -m loadtest sharing`: what shared prefixes save, in an engine in this process.

`pipelines` counts the prompt tokens that few-shot prompts, n = 8, a tree of prompts and agents really compute against
the distinct ones (every token of a prefix once, whoever shares it), as SGLang's programs do
(https://arxiv.org/abs/2312.07104). `order` serves a working set three times as large as the pool under both values of
`engine.order`, in turn. `turns` and `restart` are in `conversations.py`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from core.config import KVCacheConfig
from core.engine import Engine
from core.prefixes.order import PASSED_OVER_PER_SEAT
from core.sequence import Sequence
from loadtest.conversations import restart, turns
from loadtest.figures import print_table
from loadtest.in_process import add_engine_arguments, draw_prompt, load_engine, make_sequence
from loadtest.points import emit, held_lock, positive_int

Prompt = list[int]
Round = list[tuple[str, Prompt]]  # requests that arrive together
ORDERS = ("fcfs", "longest_prefix")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--block-size", type=positive_int, default=16, help="tokens (pipelines)")
    parser.add_argument("--groups", type=positive_int, default=24, help="prefixes (order)")
    parser.add_argument("--prefix-tokens", type=positive_int, default=512, help="of each (order)")
    parser.add_argument("--requests", type=positive_int, default=400, help="(order)")
    parser.add_argument("--clients", type=positive_int, default=128, help="(order)")
    parser.add_argument("--seats", type=positive_int, default=16, help="batch_size (order)")
    parser.add_argument("--pairs", type=positive_int, default=3, help="runs of each (order)")


def main(args: argparse.Namespace) -> int:
    is_good = [PARTS[part](args) for part in args.part]
    return 0 if all(is_good) else 1


# --- pipelines ---


def pipelines(args: argparse.Namespace) -> bool:
    size = args.block_size
    kv_cache = KVCacheConfig(block_size=size, num_blocks=65536 // size)
    engine = load_engine(args.model, kv_cache, settings=args.set)
    rng = random.Random(args.seed)
    rows, is_good = [], True
    for name, rounds in (
        ("few-shot", few_shot(engine, rng)),
        ("n = 8", branching(engine, rng)),
        ("tree", tree(engine, rng)),
        ("agents", agents(engine, rng)),
    ):
        figures = count(engine, rounds)
        emit({"kind": "sharing", "label": args.label, "pipeline": name, **figures}, args.out)
        rows.append([name, *(f"{figures[key]:,}" for key in ("prompt_tokens", "distinct"))])
        rows[-1] += [f"{figures['computed']:,}", f"{figures['over_distinct'] - 1:.1%}"]
        is_good &= figures["over_distinct"] <= 1.05
    columns = ["pipeline", "prompt tokens", "distinct", "computed", "more than distinct"]
    print_table("prompt tokens that were computed", columns, rows)
    return is_good


def few_shot(engine: Engine, rng: random.Random) -> Iterator[Round]:
    """64 questions behind the same examples, all at once."""
    shots = draw_prompt(engine, rng, 1003)
    yield [(f"q{i}", shots + draw_prompt(engine, rng, rng.randint(40, 80))) for i in range(64)]


def branching(engine: Engine, rng: random.Random) -> Iterator[Round]:
    """16 prompts with 8 choices each, all at once."""
    prompts = [draw_prompt(engine, rng, rng.randint(200, 800)) for _ in range(16)]
    yield [(f"p{i} choice {j}", prompt) for i, prompt in enumerate(prompts) for j in range(8)]


def tree(engine: Engine, rng: random.Random) -> Iterator[Round]:
    """Level by level, each of 4 thoughts continued by 4 others, three levels deep."""
    level = [draw_prompt(engine, rng, rng.randint(200, 400))]
    for _ in range(3):
        level = [
            prompt + draw_prompt(engine, rng, rng.randint(40, 120))
            for prompt in level
            for _ in range(4)
        ]
        yield [(f"{len(level)} thoughts {i}", prompt) for i, prompt in enumerate(level)]


def agents(engine: Engine, rng: random.Random) -> Iterator[Round]:
    """8 agents with the same instructions; each of 6 rounds appends what a tool said to all that came before."""
    system = draw_prompt(engine, rng, 613)
    prompts = [system + draw_prompt(engine, rng, rng.randint(30, 90)) for _ in range(8)]
    for turn in range(6):
        yield [(f"agent {i} turn {turn}", prompt) for i, prompt in enumerate(prompts)]
        prompts = [prompt + draw_prompt(engine, rng, rng.randint(60, 160)) for prompt in prompts]


def count(engine: Engine, rounds: Iterable[Round]) -> dict[str, Any]:
    """Runs the rounds; tokens of prompts, of the tree of all prompts, and computed. Answers have 8 tokens, which no
    later prompt repeats."""
    prompt_tokens = computed = 0
    prompts: list[Prompt] = []
    for requests in rounds:
        for name, prompt in requests:
            engine.add(make_sequence(name, prompt, 8))
            prompts.append(prompt)
            prompt_tokens += len(prompt)
        while engine.has_work:
            engine.step()
            computed += engine.stats(is_after_step=True).num_prefill_tokens
    distinct = num_distinct(prompts)
    return {
        "prompt_tokens": prompt_tokens,
        "distinct": distinct,
        "computed": computed,
        "over_distinct": round(computed / distinct, 4),
    }


def num_distinct(prompts: list[Prompt]) -> int:
    """Nodes of the tree of all prompts: sorted neighbours share all that anybody shares."""
    total = 0
    before: Prompt = []
    for prompt in sorted(prompts):
        shared = 0
        while shared < min(len(before), len(prompt)) and before[shared] == prompt[shared]:
            shared += 1
        total += len(prompt) - shared
        before = prompt
    return total


# --- order ---


@dataclass(slots=True)
class Served:
    """What one run of the closed loop did."""

    tokens_per_s: float
    hit_rate: float
    passed_over: int
    ttft_p99_s: float


def order(args: argparse.Namespace) -> bool:
    """Pairs of runs in turn, and the median of their ratios."""
    num_blocks = -(-args.groups * args.prefix_tokens // (3 * 16))
    engines = {
        name: load_engine(
            args.model,
            KVCacheConfig(num_blocks=num_blocks),
            settings=args.set,
            batch_size=args.seats,
            order=name,
        )
        for name in ORDERS
    }
    runs: dict[str, list[Served]] = {name: [] for name in ORDERS}
    with held_lock(args.lock):
        for pair in range(args.pairs):
            for name, engine in engines.items():
                runs[name].append(serve(engine, args, pair))
                emit(
                    {"kind": "order", "order": name, "pair": pair, **as_figures(runs[name][-1])},
                    args.out,
                )
    pairs = zip(runs["longest_prefix"], runs["fcfs"], strict=True)
    ratio = statistics.median(a.tokens_per_s / b.tokens_per_s for a, b in pairs)
    bound = PASSED_OVER_PER_SEAT * args.seats
    emit(
        {"kind": "order-ratio", "label": args.label, "ratio": round(ratio, 3), "bound": bound},
        args.out,
    )
    print_table(
        f"{args.groups} prefixes of {args.prefix_tokens} tokens, a pool for a third of them: {ratio:.2f} x",
        ["order", "tokens/s", "prompt tokens cached", "passed over at most", "TTFT p99 (s)"],
        [
            [
                name,
                f"{statistics.median(run.tokens_per_s for run in served):.0f}",
                f"{statistics.median(run.hit_rate for run in served):.0%}",
                f"{max(run.passed_over for run in served)} of {bound}" if name != "fcfs" else "0",
                f"{statistics.median(run.ttft_p99_s for run in served):.1f}",
            ]
            for name, served in runs.items()
        ],
    )
    return bool(max(run.passed_over for run in runs["longest_prefix"]) <= bound)


def as_figures(served: Served) -> dict[str, float]:
    return {
        "tokens_per_s": round(served.tokens_per_s, 1),
        "hit_rate": round(served.hit_rate, 4),
        "passed_over": served.passed_over,
        "ttft_p99_s": round(served.ttft_p99_s, 2),
    }


def serve(engine: Engine, args: argparse.Namespace, pair: int) -> Served:
    """A closed loop: each client asks for a prefix at random, with an ending of its own, and again when answered."""
    rng = random.Random(f"order-{args.seed}-{pair}")
    prefixes = [draw_prompt(engine, rng, args.prefix_tokens) for _ in range(args.groups)]
    prompts = iter(
        [rng.choice(prefixes) + draw_prompt(engine, rng, 32) for _ in range(args.requests)]
    )
    sequences: list[Sequence] = []
    before, started_s = engine.stats(), time.perf_counter()

    def ask() -> None:
        prompt = next(prompts, None)
        if prompt is not None:
            sequences.append(make_sequence(f"{pair}-{len(sequences)}", prompt, 32))
            engine.add(sequences[-1])

    for _ in range(args.clients):
        ask()
    while engine.has_work:
        for output in engine.step():
            if output.finish_reason is not None:
                ask()
    seconds, after = time.perf_counter() - started_s, engine.stats()
    waits = sorted(sequence.first_token_s - sequence.queued_s for sequence in sequences)
    queries = after.total_prefix_queries - before.total_prefix_queries
    hits = after.total_prefix_hits - before.total_prefix_hits
    return Served(
        tokens_per_s=sum(sequence.num_output_tokens for sequence in sequences) / seconds,
        hit_rate=hits / queries,
        passed_over=most_passed_over(sequences),
        ttft_p99_s=waits[int(0.99 * (len(waits) - 1))],
    )


def most_passed_over(sequences: list[Sequence]) -> int:
    """By how many that came later anybody was passed over; those admitted in one step count as admitted together."""
    return max(
        sum(later.scheduled_s < each.scheduled_s for later in sequences[index + 1 :])
        for index, each in enumerate(sequences)
    )


PARTS = {"pipelines": pipelines, "order": order, "turns": turns, "restart": restart}
