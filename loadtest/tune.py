"""`python -m loadtest tune --ttft-ms N --tpot-ms N`: which `batch_size` and token budget meet a target, by measuring.

A setting meets the target if at least `--share` of its requests meet every goal. Seats are raised by doubling until the
target is missed: more seats mean more tokens per second and slower ones. Then the token budget of a step is varied
at the edge: a larger one ends prefills sooner (time to first token), a smaller one holds running streams up for shorter
(time per output token). The fastest setting that met the target wins. The number of servers started is bounded.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from loadtest.figures import print_table
from loadtest.points import (
    LoadOptions,
    add_load_arguments,
    emit,
    load_options_of,
    positive_float,
    positive_int,
)
from loadtest.sweep import add_server_arguments, measure_with, server_options_of

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64)
DEFAULT_BUDGET = 512


@dataclass(frozen=True, slots=True)
class Trial:
    """One measured setting. `meets` says whether enough requests were good, and none failed."""

    batch_size: int
    budget: int
    meets: bool
    line: dict[str, Any]

    @property
    def rate(self) -> float:
        return float(self.line["output_tokens_per_s"])


Try = Callable[[int, int], Trial]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    add_load_arguments(parser)
    parser.set_defaults(concurrency=None)
    parser.add_argument(
        "--share", type=positive_float, default=0.9, help="of requests that must meet the goals"
    )
    parser.add_argument("--max-runs", type=positive_int, default=10, help="servers started")
    parser.add_argument("--max-batch-size", type=positive_int, default=32)


def main(args: argparse.Namespace) -> int:
    clients = args.concurrency[0] if args.concurrency else None
    options = load_options_of(args)
    if options.goals.is_empty:
        raise SystemExit("tune needs a target: --ttft-ms, --tpot-ms or --e2e-ms.")
    with tempfile.TemporaryDirectory(prefix="noria-tune-") as temporary:
        servers = server_options_of(args, Path(args.log_dir or temporary))

        def try_setting(batch_size: int, budget: int) -> Trial:
            settings = [f"engine.batch_size={batch_size}", f"engine.max_batched_tokens={budget}"]
            load = replace(options, concurrencies=[clients or batch_size])
            lines = measure_with(servers, settings, load)
            trial = judge(batch_size, budget, lines, args.share)
            line = {"kind": "tune", "label": args.label, "batch_size": batch_size, "budget": budget}
            emit(line | trial.line, args.out)
            return trial

        sizes = [size for size in BATCH_SIZES if size <= args.max_batch_size]
        trials = search(try_setting, sizes, args.max_runs, stops_early=clients is None)
    return report(trials, options, clients, args)


def judge(batch_size: int, budget: int, lines: Sequence[dict[str, Any]], share: float) -> Trial:
    """All points of the load must meet the target; the slowest of them stands for the setting."""
    meets = all(line["failed"] == 0 and line["good_share"] >= share for line in lines)
    worst = min(lines, key=lambda line: line["good_share"])
    return Trial(batch_size, budget, meets, worst)


def search(
    try_setting: Try, sizes: Sequence[int], max_runs: int, *, stops_early: bool
) -> list[Trial]:
    """The trials, in the order in which they were made. `stops_early`: no more seats after the first miss, because each
    seat brings a client of its own; with a fixed number of clients more seats can help, so all are tried."""
    trials: list[Trial] = []
    for size in sizes:
        if len(trials) >= max_runs:
            return trials
        trials.append(try_setting(size, DEFAULT_BUDGET))
        if stops_early and not trials[-1].meets:
            break
    for size in _edge(trials):
        for budget in (128, 256, 1024, 2048):
            if len(trials) >= max_runs:
                return trials
            trials.append(try_setting(size, budget))
    return trials


def _edge(trials: Sequence[Trial]) -> list[int]:
    """Where another budget can change the answer: the first size that missed, then the best one that met."""
    met = [trial for trial in trials if trial.meets]
    missed = [trial.batch_size for trial in trials if not trial.meets]
    best = max(met, key=lambda trial: trial.rate).batch_size if met else None
    beyond = [size for size in missed if best is None or size > best][:1]
    return [*beyond, *([best] if best is not None else [])]


def best_of(trials: Sequence[Trial]) -> Trial | None:
    return max((t for t in trials if t.meets), key=lambda t: t.rate, default=None)


def report(
    trials: Sequence[Trial], options: LoadOptions, clients: int | None, args: argparse.Namespace
) -> int:
    """The table and the recommendation; 1 if no setting that was measured meets the target."""
    best = best_of(trials)
    rows = [
        [
            *(str(t.batch_size), str(t.budget), t.line["scenario"], str(t.line["concurrency"])),
            *(f"{t.rate:.1f}", _spread(t.line["ttft_ms"]), _spread(t.line["tpot_ms"])),
            *(f"{t.line['good_share']:.0%}", "yes" if t.meets else "no", "<-" if t is best else ""),
        ]
        for t in trials
    ]
    columns = ["batch_size", "token budget", "scenario", "clients", "tokens/s"]
    columns += ["TTFT ms p50/p90/p99", "TPOT ms p50/p90/p99", "good", "meets", ""]
    print_table(f"target: {_target(options, args.share)}", columns, rows)
    emit(_recommendation(best, options, args), args.out)
    if best is None:
        nearest = max(trials, key=lambda trial: trial.line["good_share"])
        print(
            f"Nothing that was measured meets the target. Nearest: batch_size {nearest.batch_size}, token budget "
            f"{nearest.budget}, with {nearest.line['good_share']:.0%} of requests good."
        )
        return 1
    held = clients or best.batch_size
    load, words = f"up to {held} clients at once", f"--concurrency {held}"
    if options.rates:
        rates = " ".join(f"{rate:g}" for rate in options.rates)
        load, words = f"arrivals at {rates} per second", f"--rate {rates}"
    goals = " ".join(f"--{name.replace('_', '-')} {value:g}" for name, value in _goals(options))
    print(
        f"Recommended for {load}: --set engine.batch_size={best.batch_size} "
        f"--set engine.max_batched_tokens={best.budget}\n"
        f"To check, against a server with these settings: python -m loadtest bench "
        f"--scenario {' '.join(options.shapes)} {words} --seed {options.seed + 1} {goals}"
    )
    return 0


def _goals(options: LoadOptions) -> list[tuple[str, float]]:
    goals = options.goals
    pairs = (("ttft_ms", goals.ttft_ms), ("tpot_ms", goals.tpot_ms), ("e2e_ms", goals.e2e_ms))
    return [(name, value) for name, value in pairs if value is not None]


def _target(options: LoadOptions, share: float) -> str:
    goals = ", ".join(f"{name.split('_')[0]} <= {value:g} ms" for name, value in _goals(options))
    return f"{goals} for {share:.0%} of requests"


def _recommendation(
    best: Trial | None, options: LoadOptions, args: argparse.Namespace
) -> dict[str, Any]:
    line = {"kind": "tune-result", "label": args.label, "target": dict(_goals(options))}
    if best is None:
        return line | {"batch_size": None, "budget": None}
    return line | {"batch_size": best.batch_size, "budget": best.budget, "tokens_per_s": best.rate}


def _spread(spread: dict[str, float | None]) -> str:
    return " / ".join("-" if value is None else f"{value:.1f}" for value in spread.values())
