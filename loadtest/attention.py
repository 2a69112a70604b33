"""`python -m loadtest attention`: time and peak memory of long prefills, here and with the library's eager attention.

Eager attention writes a score for each pair of tokens: its memory grows with the square of the length. Paged attention
here walks blocks and keeps a running softmax (as FlashAttention does, https://arxiv.org/abs/2205.14135): its memory
grows with the length alone, by the keys and values.
Each figure comes from a process of its own: peak memory is a property of a process.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from loadtest.figures import print_table
from loadtest.in_process import add_engine_arguments, draw_prompt, load_engine, make_sequence
from loadtest.points import emit, held_lock, positive_int
from loadtest.process_usage import usage_of

WAYS = ("eager", "noria")
WARM_UP_TOKENS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--lengths", nargs="+", type=positive_int, default=[1024, 2048, 4096])
    parser.add_argument("--plot", type=Path, help="write the plot to this .png")
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)  # one way in this process


def main(args: argparse.Namespace) -> int:
    if args.one:
        return _run_one(args)
    lines: list[dict[str, Any]] = []
    with held_lock(args.lock):
        for length in args.lengths:
            for way in WAYS:
                line = {"kind": "attention", "label": args.label, **_in_child(way, length, args)}
                emit(line, args.out)
                lines.append(line)
    if args.plot is not None:
        _plot(lines, args.plot)
    by_way = {(line["way"], line["length"]): line for line in lines}
    rows = [_row(by_way["eager", n], by_way["noria", n]) for n in args.lengths]
    columns = ["prompt tokens", "eager s", "noria s", "ratio", "eager MiB", "noria MiB", "ratio"]
    print_table("one prefill: seconds, and memory beyond the loaded model", columns, rows)
    return 0


def _row(eager: dict[str, Any], noria: dict[str, Any]) -> list[str]:
    return [
        str(eager["length"]),
        *(f"{line['seconds']:.2f}" for line in (eager, noria)),
        f"{eager['seconds'] / noria['seconds']:.1f}",
        *(f"{line['peak_mib']:.0f}" for line in (eager, noria)),
        f"{eager['peak_mib'] / max(1.0, noria['peak_mib']):.1f}",
    ]


def _in_child(way: str, length: int, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "loadtest", "attention", "--one", way]
    command += ["--lengths", str(length), "--model", args.model, "--seed", str(args.seed)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=False)
    if finished.returncode != 0:
        raise SystemExit(f"{way} at {length} tokens failed with {finished.returncode}.")
    figures: dict[str, Any] = orjson.loads(finished.stdout.splitlines()[-1])
    return figures


def _run_one(args: argparse.Namespace) -> int:
    length = args.lengths[0]
    prefill = (_noria if args.one == "noria" else _eager)(args, length)
    prefill(WARM_UP_TOKENS)
    with contextlib.suppress(OSError):  # Linux: forget the peak of loading
        Path("/proc/self/clear_refs").write_text("5")
    before_bytes = _resident_bytes()
    start_s = time.perf_counter()
    prefill(length)
    seconds = time.perf_counter() - start_s
    peak_bytes = max(_peak_bytes(), before_bytes)
    figures = {
        "way": args.one,
        "length": length,
        "seconds": round(seconds, 4),
        "peak_mib": round((peak_bytes - before_bytes) / 2**20, 1),
    }
    emit(figures, None)
    return 0


def _noria(args: argparse.Namespace, length: int) -> Callable[[int], None]:
    """Chunks of the default token budget, as a server computes them. Includes its keys and values, like the other."""
    engine = load_engine(args.model, settings=args.set, prefix_caching=False)
    rng = random.Random(args.seed)

    def prefill(num_tokens: int) -> None:
        engine.add(make_sequence(str(num_tokens), draw_prompt(engine, rng, num_tokens), 1))
        while engine.has_work:
            engine.step()

    return prefill


def _eager(args: argparse.Namespace, length: int) -> Callable[[int], None]:
    """The library's own model and cache, in the same number format, logits of the last token only."""
    import torch
    from transformers import AutoModelForCausalLM

    from core.config import EngineConfig, ModelConfig
    from core.model.device import choose_device, choose_dtype
    from core.model.source import resolve

    config = ModelConfig(name=args.model)
    folder = resolve(config, lambda message, fraction: None).folder
    dtype = choose_dtype(config, choose_device(EngineConfig()))
    model = AutoModelForCausalLM.from_pretrained(
        str(folder), dtype=dtype, attn_implementation="eager", local_files_only=True
    ).eval()
    generator = torch.Generator().manual_seed(args.seed)

    def prefill(num_tokens: int) -> None:
        ids = torch.randint(1000, model.config.vocab_size, (1, num_tokens), generator=generator)
        with torch.inference_mode():
            model(ids, use_cache=True, logits_to_keep=1)

    return prefill


def _resident_bytes() -> int:
    usage = usage_of(os.getpid())
    return usage.rss_bytes if usage else 0


def _peak_bytes() -> int:
    usage = usage_of(os.getpid())
    return (usage.peak_rss_bytes or usage.rss_bytes) if usage else 0


def _plot(lines: list[dict[str, Any]], path: Path) -> None:
    from loadtest.plots import plot_pairs

    panels = {
        title: {
            way: [(line["length"], line[key]) for line in lines if line["way"] == way]
            for way in WAYS
        }
        for title, key in (("seconds", "seconds"), ("peak MiB beyond the model", "peak_mib"))
    }
    plot_pairs(panels, path, x_label="prompt tokens")
