"""`python -m loadtest step`: where the time of a decode and of a prefill step goes, beside what the machine can do.

The parts of the forward are timed inside the one C call, by one of its threads (`Scratch.seconds`), in real steps over
cold weights; the others by the engine (`StepStats.parts_s`). What is read and multiplied is counted from shapes.
Bandwidth and GFLOP/s are measured in the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import threading
import time
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.engine import Engine
from core.outputs import StepOutput
from loadtest.figures import print_table
from loadtest.in_process import add_engine_arguments, draw_prompt, load_engine, make_sequence
from loadtest.points import emit, held_lock, positive_int

if TYPE_CHECKING:
    from torch import Tensor

    from loadtest.limits import Limits

# As shown, in the order of a step. `inputs`: tensors of the step and the call itself, so all of `run` but the forward.
PARTS = (
    *("schedule", "inputs", "norms", "linear", "rope", "attention", "head"),
    *("sample", "update", "hand-over"),
)


@dataclass(frozen=True, slots=True)
class Work:
    """What one step must at least do: bytes of weights, keys and values to read, and multiplications and additions."""

    linear_bytes: int
    head_bytes: int
    kv_bytes: int
    linear_flops: int
    head_flops: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_engine_arguments(parser)
    parser.add_argument("--batch", nargs="+", type=positive_int, default=[1, 8, 32])
    parser.add_argument("--context", nargs="+", type=positive_int, default=[128, 1024])
    parser.add_argument("--prefill", nargs="*", type=positive_int, default=[1024])
    parser.add_argument("--steps", type=positive_int, default=16, help="decode steps per size")
    parser.add_argument("--repeat", type=positive_int, default=3, help="prefill steps per size")
    parser.add_argument("--plot", type=Path, help="write the plot to this .png")


def main(args: argparse.Namespace) -> int:
    largest = max(args.prefill, default=1)
    engine = load_engine(
        args.model,
        settings=args.set,
        prefix_caching=False,
        batch_size=max(args.batch),
        max_batched_tokens=max(largest, max(args.context)),
    )
    from loadtest.limits import best_of, measure_limits  # torch is imported with the model

    rng = random.Random(args.seed)
    runs: dict[tuple[str, int, int], list[dict[str, float]]] = {}
    with held_lock(args.lock), closing(Stopwatch(engine)) as stopwatch:
        limits = measure_limits()
        stopwatch.prefill(rng, 64)  # the first of anything is slower
        for num_tokens in args.prefill:
            key = ("prefill", 1, num_tokens)
            runs[key] = [stopwatch.prefill(rng, num_tokens) for _ in range(args.repeat)]
        for context in args.context:
            for batch in args.batch:
                key = ("decode", batch, context)
                runs[key] = stopwatch.decode(rng, batch, context, args.steps)
        limits = best_of(limits, measure_limits())  # a processor's clock drifts
    report(args, limits, [line_of(engine, *key, runs[key], limits) for key in runs])
    return 0


class Stopwatch:
    """Runs steps of an engine and splits their time into `PARTS`, in seconds.

    `close` ends the event loop that outputs are handed to, as the server's step thread hands them over.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        time_parts = getattr(getattr(engine.runner, "model", None), "time_parts", lambda: None)
        self._forward: Tensor | None = time_parts()
        self._handed: Future[None] | None = None
        self._loop = new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="loop")
        self._thread.start()

    def close(self) -> None:
        if self._handed is not None:
            self._handed.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def prefill(self, rng: random.Random, num_tokens: int) -> dict[str, float]:
        """The parts of the one step that computes a whole prompt."""
        engine = self._engine
        prompt = draw_prompt(engine, rng, num_tokens)
        engine.add(make_sequence(f"prefill-{rng.random()}", prompt, 1))
        parts = self.step()
        assert not engine.has_work, "the prompt took more than one step"
        return parts

    def decode(
        self, rng: random.Random, batch: int, context: int, steps: int
    ) -> list[dict[str, float]]:
        """The parts of steps in which each of `batch` sequences gets one token at about `context`."""
        engine = self._engine
        for index in range(batch):
            prompt = draw_prompt(engine, rng, max(1, context - steps // 2))
            # prompts are computed one after the other: the first of them decode meanwhile
            engine.add(make_sequence(f"decode-{rng.random()}", prompt, steps + batch - index))
        runs: list[dict[str, float]] = []
        while engine.has_work:
            parts = self.step()
            stats = engine.stats(is_after_step=True)
            if stats.step_kind == "decode" and stats.num_sequences == batch:
                runs.append(parts)
        return runs

    def step(self) -> dict[str, float]:
        if self._forward is not None:
            self._forward.zero_()
        start_s = time.perf_counter()
        outputs = self._engine.step()
        handed_s = time.perf_counter()
        self._handed = asyncio.run_coroutine_threadsafe(_receive(outputs), self._loop)
        end_s = time.perf_counter()
        parts = dict(self._engine.stats(is_after_step=True).parts_s)
        parts["inputs"] = parts.pop("run")
        parts["schedule"] += parts.pop("draft")  # nobody drafts here
        if self._forward is not None:
            from core.model.kernels import PARTS as FORWARD_PARTS

            inside = dict(zip(FORWARD_PARTS, self._forward.tolist(), strict=True))
            parts |= inside
            parts["inputs"] -= sum(inside.values())
        return {**parts, "hand-over": end_s - handed_s, "step": end_s - start_s}


def new_event_loop() -> asyncio.AbstractEventLoop:
    """As the server has it: waking uvloop costs less."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _receive(outputs: list[StepOutput]) -> None:
    del outputs


def work_of(engine: Engine, batch: int, context: int, num_rows: int) -> Work | None:
    """`num_rows` rows through the layers, `batch` through the head; None for a model that does not tell its layers."""
    layers = getattr(getattr(engine.runner, "model", None), "linear_layers", None)
    if layers is None:
        return None
    *inner, head = layers
    return Work(
        linear_bytes=sum(layer.size_bytes for layer in inner),
        head_bytes=head.size_bytes,
        kv_bytes=batch * context * engine.runner.shape.kv_bytes_per_token,
        linear_flops=sum(2 * layer.inputs * layer.outputs * num_rows for layer in inner),
        head_flops=2 * head.inputs * head.outputs * batch,
    )


def line_of(
    engine: Engine,
    phase: str,
    batch: int,
    context: int,
    runs: list[dict[str, float]],
    limits: Limits,
) -> dict[str, Any]:
    """Medians of the runs, and what they come to beside the limits."""
    parts = {part: statistics.median(run.get(part, 0.0) for run in runs) for part in runs[0]}
    line = {
        "phase": phase,
        "batch": batch,
        "context": context,
        "step_ms": round(parts["step"] * 1000, 3),
        "parts_ms": {part: round(parts[part] * 1000, 4) for part in PARTS if part in parts},
    }
    work = work_of(engine, batch, context, context if phase == "prefill" else batch)
    if work is not None and "linear" in parts:
        line |= rates(phase, work, parts, limits)
    return line


def rates(phase: str, work: Work, parts: dict[str, float], limits: Limits) -> dict[str, float]:
    """How near the step is to what the machine could do. Decode reads, prefill multiplies."""
    linear_rate = work.linear_flops / parts["linear"] / 1e9
    figures = {
        "linear_gflop_per_s": round(linear_rate, 1),
        "linear_of_bf16_peak": round(linear_rate / limits.bf16_gflop_per_s, 3),
    }
    if phase == "prefill":
        rate = (work.linear_flops + work.head_flops) / parts["step"] / 1e9
        return figures | {
            "prefill_gflop_per_s": round(rate, 1),
            "prefill_of_bf16_peak": round(rate / limits.bf16_gflop_per_s, 3),
        }
    weights_bytes = work.linear_bytes + work.head_bytes
    kv_rate = work.kv_bytes / parts["attention"] / 1e9
    return figures | {
        "step_of_weights_read": round(
            parts["step"] * limits.read_gb_per_s * 1e9 / weights_bytes, 3
        ),
        "weights_gb_per_s": round(weights_bytes / (parts["linear"] + parts["head"]) / 1e9, 1),
        "attention_gb_per_s": round(kv_rate, 1),
        "attention_of_bandwidth": round(kv_rate / limits.read_gb_per_s, 3),
    }


def report(args: argparse.Namespace, limits: Limits, lines: list[dict[str, Any]]) -> None:
    measured = {
        "read_gb_per_s": round(limits.read_gb_per_s, 1),
        "bf16_gflop_per_s": round(limits.bf16_gflop_per_s, 1),
        "int8_gflop_per_s": limits.int8_gflop_per_s and round(limits.int8_gflop_per_s, 1),
    }
    emit({"kind": "limits", "label": args.label, **measured}, args.out)
    for line in lines:
        emit({"kind": "step", "label": args.label, **line}, args.out)
    if args.plot is not None:
        from loadtest.plots import plot_parts

        plot_parts({name_of(line): line["parts_ms"] for line in lines}, args.plot)
    print_table(
        "milliseconds of a step, by part",
        ["step", "ms", *PARTS],
        [
            [name_of(line), f"{line['step_ms']:.2f}"]
            + [f"{line['parts_ms'].get(part, 0.0):.2f}" for part in PARTS]
            for line in lines
        ],
    )
    print_table(
        "limits: " + ", ".join(f"{key} {value}" for key, value in measured.items()),
        ["step", *RATIOS.values()],
        [[name_of(line), *(_shown(line, key) for key in RATIOS)] for line in lines],
    )


RATIOS = {
    "step_of_weights_read": "step / reading the weights",
    "linear_gflop_per_s": "linear GFLOP/s",
    "linear_of_bf16_peak": "of bf16 peak",
    "attention_gb_per_s": "attention GB/s",
    "attention_of_bandwidth": "of bandwidth",
    "prefill_of_bf16_peak": "prefill of bf16 peak",
}


def name_of(line: dict[str, Any]) -> str:
    if line["phase"] == "prefill":
        return f"prefill {line['context']}"
    return f"decode {line['batch']} at {line['context']}"


def _shown(line: dict[str, Any], key: str) -> str:
    if key not in line:
        return "-"
    return f"{line[key]:g}"
