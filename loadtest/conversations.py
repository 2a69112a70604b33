"""Two parts of `python -m loadtest sharing`: conversations whose turns repeat all that was said, and a restart.

`turns`: 16 conversations of 6 turns. Every prompt is the one before, the answer to it and something new, so nearly all
of it can come from the cache. `restart`: what a prompt costs when it is warm, and as the first one of an engine that
has read the snapshot of another.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

from core.config import KVCacheConfig
from core.engine import Engine
from core.prefixes.snapshot import restore_at_the_start, save_at_the_end
from core.sequence import Sequence
from loadtest.figures import print_table
from loadtest.in_process import draw_prompt, load_engine, make_sequence
from loadtest.points import emit, held_lock

CONVERSATIONS, TURNS, ANSWER_TOKENS = 16, 6, 64
MIN_SHARE, MAX_RATIO = 0.9, 0.2
NUM_BLOCKS = 4096


def turns(args: argparse.Namespace) -> bool:
    """All of a turn at once but the last one: its prompts come one after the other, and then again to an engine that
    knows none of them."""
    engine = load_engine(args.model, KVCacheConfig(num_blocks=NUM_BLOCKS), settings=args.set)
    cold = load_engine(
        args.model, KVCacheConfig(num_blocks=NUM_BLOCKS), settings=args.set, prefix_caching=False
    )
    rng = random.Random(args.seed)
    said: list[list[int]] = [[] for _ in range(CONVERSATIONS)]
    num_cached = num_possible = 0
    prompts: list[list[int]] = []
    with held_lock(args.lock):
        for turn in range(TURNS):
            new = [
                draw_prompt(engine, rng, rng.randint(40, 120) if turn else rng.randint(150, 300))
                for _ in said
            ]
            prompts = [before + more for before, more in zip(said, new, strict=True)]
            answered = _ask(engine, f"turn {turn}", prompts, together=turn < TURNS - 1)
            num_cached += sum(sequence.num_cached_tokens for sequence in answered)
            num_possible += sum(max(0, len(before) - 1) for before in said)
            said = [list(sequence.token_ids) for sequence in answered]
        warm_s = _first_token_s(answered)
        cold_s = _first_token_s(_ask(cold, "cold", prompts, together=False))
    figures = {
        "cached_tokens": num_cached,
        "possible": num_possible,
        "share": round(num_cached / num_possible, 4),
        "prompt_tokens_p50": statistics.median(map(len, prompts)),
        "ttft_warm_ms": round(1e3 * warm_s, 1),
        "ttft_cold_ms": round(1e3 * cold_s, 1),
        "ratio": round(warm_s / cold_s, 3),
    }
    emit({"kind": "turns", "label": args.label, **figures}, args.out)
    print_table(
        f"{CONVERSATIONS} conversations of {TURNS} turns",
        [
            "prompt tokens cached",
            "of the possible",
            "TTFT of the last turn (ms)",
            "cold (ms)",
            "ratio",
        ],
        [
            [
                f"{num_cached:,}",
                *(f"{figures[key]}" for key in ("share", "ttft_warm_ms", "ttft_cold_ms", "ratio")),
            ]
        ],
    )
    return num_cached >= MIN_SHARE * num_possible and warm_s <= MAX_RATIO * cold_s


def restart(args: argparse.Namespace) -> bool:
    """Prompts of 500 tokens: cold, warm, and as the first requests after a restart with a snapshot."""
    kv_cache = KVCacheConfig(num_blocks=NUM_BLOCKS)
    engine = load_engine(args.model, kv_cache, settings=args.set)
    again = load_engine(args.model, kv_cache, settings=args.set)
    rng = random.Random(args.seed)
    prompts = [draw_prompt(engine, rng, 500) for _ in range(CONVERSATIONS)]
    with held_lock(args.lock), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prefixes"
        for each in (engine, again):
            each.keep_snapshots(path, "the same process", 1 << 30)
        cold_s = _first_token_s(_ask(engine, "cold", prompts, together=False))
        warm = _ask(engine, "warm", prompts, together=False)
        warm_s = _first_token_s(warm)
        for _ in save_at_the_end(engine.snapshots):
            pass
        size_mib = path.stat().st_size / (1 << 20)
        lines = restore_at_the_start(again.snapshots)
        first = _ask(again, "restored", prompts, together=False)
        first_s = _first_token_s(first)
    figures = {
        "ttft_cold_ms": round(1e3 * cold_s, 1),
        "ttft_warm_ms": round(1e3 * warm_s, 1),
        "ttft_restored_ms": round(1e3 * first_s, 1),
        "cached_tokens_warm": sum(sequence.num_cached_tokens for sequence in warm),
        "cached_tokens_restored": sum(sequence.num_cached_tokens for sequence in first),
        "snapshot_mib": round(size_mib, 1),
        "restored": lines[0] if lines else "",
    }
    emit({"kind": "restart", "label": args.label, **figures}, args.out)
    columns = ["cold (ms)", "warm (ms)", "first after a restart (ms)", "snapshot (MiB)"]
    keys = ("ttft_cold_ms", "ttft_warm_ms", "ttft_restored_ms", "snapshot_mib")
    print_table("first tokens of prompts of 500", columns, [[f"{figures[key]}" for key in keys]])
    return figures["cached_tokens_restored"] == figures["cached_tokens_warm"]


def _ask(engine: Engine, name: str, prompts: list[list[int]], *, together: bool) -> list[Sequence]:
    """The sequences with their answers."""
    sequences = [
        make_sequence(f"{name} {place}", prompt, ANSWER_TOKENS)
        for place, prompt in enumerate(prompts)
    ]
    for crowd in [sequences] if together else [[sequence] for sequence in sequences]:
        for sequence in crowd:
            engine.add(sequence)
        while engine.has_work:
            engine.step()
    return sequences


def _first_token_s(sequences: list[Sequence]) -> float:
    """The median time to the first token."""
    return statistics.median(each.first_token_s - each.queued_s for each in sequences)
