"""`python -m loadtest quality`: what weights in fewer bits cost, on a fixed text (`quality.txt`, public-domain books).

Every engine reads the same windows of the text in one forward each. Perplexity is exp of the mean negative
log-likelihood of each next token. The divergence is that of Kullback and Leibler from the first engine's next-token
distribution to the others', in nats, as a mean over all places; `same_best` is the share of places where both put the
same token first.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.config import MIB, KVCacheConfig
from core.engine import Engine
from core.model.attention.layout import StepLayout
from core.model.runner import ModelRunner
from loadtest.figures import print_table
from loadtest.in_process import add_engine_arguments, load_engine
from loadtest.points import emit, held_lock, positive_int

TEXT = Path(__file__).parent / "quality.txt"
BLOCK = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument(
        "--quantizations",
        nargs="+",
        default=["none", "int8", "int4"],
        help="the first is the measure",
    )
    parser.add_argument("--text", type=Path, default=TEXT, help="another text")
    parser.add_argument("--window", type=positive_int, default=256, help="tokens seen at once")


def main(args: argparse.Namespace) -> int:
    cache = KVCacheConfig(block_size=BLOCK, num_blocks=-(-args.window // BLOCK) + 4)
    engines = [
        load_engine(args.model, cache, settings=[*args.set, f"model.quantization={name}"])
        for name in args.quantizations
    ]
    ids = engines[0].tokenizer.encode(args.text.read_text(encoding="utf-8"))
    with held_lock(args.lock):
        figures = compare(engines, ids, args.window)
    lines = [
        {"kind": "quality", "label": args.label, "quantization": name, **line}
        for name, line in zip(args.quantizations, figures, strict=True)
    ]
    for line in lines:
        emit(line, args.out)
    print_table(
        f"{lines[0]['tokens']} tokens of {args.text.name}",
        ["quantization", "weights, MiB", "KV tokens gained", "perplexity", "KL, nats", "same best"],
        [
            [
                *(x["quantization"], f"{x['weights_mib']:.0f}", f"{x['kv_tokens_gained']:,}"),
                *(f"{x['perplexity']:.3f}", f"{x['divergence']:.4f}", f"{x['same_best']:.1%}"),
            ]
            for x in lines
        ],
    )
    return 0


def compare(engines: list[Engine], ids: list[int], window: int) -> list[dict[str, Any]]:
    """One line of figures for each engine; the first is the measure of all."""
    losses, divergences, same = ([0.0] * len(engines) for _ in range(3))
    count = 0
    for start in range(0, len(ids) - 1, window - 1):
        part = ids[start : start + window]
        if len(part) < 2:
            break
        count += len(part) - 1
        target = torch.tensor(part[1:])[:, None]
        measure = torch.empty(0)
        for i, engine in enumerate(engines):
            found = log_probabilities(engine, part)[:-1]
            if i == 0:
                measure = found
            losses[i] -= float(found.gather(1, target).sum(dtype=torch.float64))
            divergences[i] += float((measure.exp() * (measure - found)).sum(dtype=torch.float64))
            same[i] += int((measure.argmax(dim=1) == found.argmax(dim=1)).sum())
    shapes = [engine.runner.shape for engine in engines]
    return [
        {
            "tokens": count,
            "weights_mib": round(shapes[i].weights_bytes / MIB, 1),
            "kv_tokens_gained": (shapes[0].weights_bytes - shapes[i].weights_bytes)
            // shapes[0].kv_bytes_per_token,
            "perplexity": round(math.exp(losses[i] / count), 4),
            "divergence": round(divergences[i] / count, 5),
            "same_best": round(same[i] / count, 4),
        }
        for i in range(len(engines))
    ]


def log_probabilities(engine: Engine, ids: list[int]) -> Tensor:
    """(len(ids), vocabulary), float32: the distribution behind each token of one forward."""
    runner = engine.runner
    assert isinstance(runner, ModelRunner)
    count = len(ids)
    places = torch.arange(count)
    layout = StepLayout(
        positions=places,
        slots=places,
        row_starts=torch.tensor([0, count], dtype=torch.int32),
        context_lens=torch.tensor([count], dtype=torch.int32),
        block_tables=torch.arange(-(-count // BLOCK), dtype=torch.int32)[None],
        row_starts_list=[0, count],
        context_lens_list=[count],
        block_size=BLOCK,
    )
    logits = runner.model.forward(torch.tensor(ids), layout, runner.kv_cache.layers, places)
    return torch.log_softmax(logits[:, : runner.shape.vocab_size].float(), dim=-1)
