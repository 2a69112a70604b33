"""`python -m loadtest.script_rate`: tokens per second of an engine that a script drives, as one JSON line.

A closed loop as `bench` runs it, without HTTP: C sequences at a time, the next one added when one has ended.
`overhead --real` divides what came through HTTP by this.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from typing import Any

from core.engine import Engine
from loadtest.figures import json_line
from loadtest.in_process import draw_prompt, load_engine, make_sequence
from loadtest.points import positive_int


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.script_rate")
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", nargs="+", type=positive_int, default=[8, 32])
    parser.add_argument("--prompt-tokens", type=positive_int, default=32)
    parser.add_argument("--tokens", type=positive_int, default=128)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[])
    args = parser.parse_args(arguments)
    engine = load_engine(args.model, settings=args.set)
    rng = random.Random(args.seed)
    run(engine, rng, max(args.concurrency), max(args.concurrency), args.prompt_tokens, 16)
    rates: dict[str, Any] = {}
    for count in args.concurrency:
        rate = run(engine, rng, count, max(8, 2 * count), args.prompt_tokens, args.tokens)
        rates[str(count)] = round(rate, 2)
    print(json_line(rates), flush=True)
    return 0


def run(
    engine: Engine,
    rng: random.Random,
    concurrency: int,
    num_requests: int,
    num_prompt_tokens: int,
    num_tokens: int,
) -> float:
    """Output tokens per second of `num_requests` requests with prompts of their own, `concurrency` at a time."""
    todo = [draw_prompt(engine, rng, num_prompt_tokens) for _ in range(num_requests)]
    start_s = time.perf_counter()
    num_done = 0
    for _ in range(min(concurrency, num_requests)):
        engine.add(make_sequence(f"rate-{rng.random()}", todo.pop(), num_tokens))
    while engine.has_work:
        for output in engine.step():
            num_done += output.token_id is not None
            if output.finish_reason is not None and todo:
                engine.add(make_sequence(f"rate-{rng.random()}", todo.pop(), num_tokens))
    return num_done / (time.perf_counter() - start_s)


if __name__ == "__main__":
    sys.exit(main())
