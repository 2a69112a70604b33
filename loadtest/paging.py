"""`python -m loadtest paging`: KV blocks in use, step by step, and what a reservation per request would have held.

Drives an engine in this process with requests of mixed lengths. A paged cache holds the tokens that exist, rounded up
to blocks; a reservation holds the whole context from a request's first step to its last.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence as Items
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.config import KVCacheConfig
from core.engine import Engine
from core.sequence import Sequence, SequenceStatus
from loadtest.figures import print_table
from loadtest.in_process import add_engine_arguments, draw_prompt, load_engine, make_sequence
from loadtest.points import emit, positive_int
from loadtest.scenarios import Span


@dataclass(frozen=True, slots=True)
class StepSample:
    """All in tokens but `num_running`. `held`: tokens in blocks of running sequences, `paged`: room in those blocks."""

    num_running: int
    held: int
    paged: int
    reserved: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--requests", type=positive_int, default=24)
    parser.add_argument("--batch-size", type=positive_int, default=8)
    parser.add_argument("--max-prompt", type=positive_int, default=256)
    parser.add_argument("--max-output", type=positive_int, default=128)
    parser.add_argument("--context", type=positive_int, default=2048, help="reserved per request")
    parser.add_argument("--block-size", type=positive_int, default=16)
    parser.add_argument("--plot", type=Path, help="write the plot to this .png")


def main(args: argparse.Namespace) -> int:
    num_blocks = args.batch_size * -(-args.context // args.block_size)
    engine = load_engine(
        args.model,
        KVCacheConfig(block_size=args.block_size, num_blocks=num_blocks),
        settings=args.set,
        batch_size=args.batch_size,
        prefix_caching=False,
    )
    samples = run(engine, make_load(engine, args), args.context)
    figures = {
        "kind": "paging",
        "label": args.label,
        **summarize(samples, num_blocks * args.block_size),
    }
    emit(figures, args.out)
    if args.plot is not None:
        _plot(samples, args)
    print_table(
        f"{args.requests} requests, {args.batch_size} at once, blocks of {args.block_size}",
        ["steps", "pool", "KV usage at the peak", "at the end", "waste paged", "waste reserved"],
        [
            [
                *(str(figures["steps"]), f"{num_blocks * args.block_size} tokens"),
                *(f"{figures[key]:.1%}" for key in ("peak_usage", "end_usage")),
                *(f"{figures[key]:.1%}" for key in ("paged_waste", "reserved_waste")),
            ]
        ],
    )
    return 0


def make_load(engine: Engine, args: argparse.Namespace) -> list[Sequence]:
    rng = random.Random(args.seed)
    prompts, outputs = Span(8, args.max_prompt), Span(8, args.max_output)
    return [
        make_sequence(str(i), draw_prompt(engine, rng, prompts.draw(rng)), outputs.draw(rng))
        for i in range(args.requests)
    ]


def run(engine: Engine, sequences: Items[Sequence], context: int) -> list[StepSample]:
    """All at once, to the end; one sample per step and one after."""
    for sequence in sequences:
        engine.add(sequence)
    samples: list[StepSample] = []
    while engine.has_work:
        engine.step()
        samples.append(_sample(engine, sequences, context))
    return samples


def _sample(engine: Engine, sequences: Items[Sequence], context: int) -> StepSample:
    running = [s for s in sequences if s.status is SequenceStatus.RUNNING]
    return StepSample(
        num_running=len(running),
        held=sum(sequence.num_computed_tokens for sequence in running),
        paged=engine.stats().num_blocks_used * engine.cache_config.block_size,
        reserved=len(running) * context,
    )


def summarize(samples: Items[StepSample], capacity_tokens: int) -> dict[str, Any]:
    """Waste is the share of room that held no token, summed over all steps."""
    held = sum(sample.held for sample in samples)
    paged = sum(sample.paged for sample in samples)
    reserved = sum(sample.reserved for sample in samples)
    return {
        "steps": len(samples),
        "peak_usage": round(max(sample.paged for sample in samples) / capacity_tokens, 4),
        "end_usage": round(samples[-1].paged / capacity_tokens, 4),
        "paged_waste": round(1 - held / paged, 4) if paged else 0.0,
        "reserved_waste": round(1 - held / reserved, 4) if reserved else 0.0,
    }


def _plot(samples: Items[StepSample], args: argparse.Namespace) -> None:
    from loadtest.plots import plot_pairs

    reserved = [(i, sample.reserved) for i, sample in enumerate(samples)]
    paged = [(i, sample.paged) for i, sample in enumerate(samples)]
    held = [(i, sample.held) for i, sample in enumerate(samples)]
    panels = {
        "against a reservation (tokens)": {"whole context each": reserved, "blocks": paged},
        "close up (tokens)": {"room in blocks": paged, "tokens held": held},
    }
    plot_pairs(panels, args.plot, x_label="step", is_log=False)
