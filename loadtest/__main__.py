"""`python -m loadtest SUBCOMMAND`: parses arguments and hands over. The only place of this package that exits."""

from __future__ import annotations

import argparse
import signal
import sys
from types import ModuleType

from loadtest import (
    agreement,
    attention,
    bench,
    beside,
    compare,
    grammars,
    growth,
    kv_cache,
    ladder,
    mixed,
    overhead,
    paging,
    phases,
    policies,
    quality,
    several_models,
    sharing,
    speculation,
    step,
    sweep,
    tune,
)

SUBCOMMANDS: dict[str, tuple[ModuleType, str]] = {
    "bench": (bench, "closed or open loop against any OpenAI-compatible server"),
    "compare": (compare, "two servers in turn, and the ratio of medians"),
    "ladder": (ladder, "the tutorial's four stages by their own routes, with plots"),
    "policies": (policies, "one at a time, static and continuous batching over one route"),
    "sweep": (sweep, "one server per value of a setting: throughput against latency"),
    "tune": (tune, "finds batch_size and token budget that meet a latency target"),
    "mixed": (mixed, "20 short prompts and 5 long ones at once"),
    "beside": (beside, "a long prompt beside running streams: what it does to their gaps"),
    "agreement": (agreement, "locust's percentiles against the server's own histograms"),
    "kv-cache": (kv_cache, "a token with the KV cache against computing the whole prefix again"),
    "paging": (
        paging,
        "KV blocks over the steps of a mixed load, and what reservation would waste",
    ),
    "attention": (attention, "time and memory of long prefills against eager attention"),
    "phases": (phases, "prefill and decode apart: what a token costs in each"),
    "overhead": (overhead, "processor time of the server itself, per streamed token"),
    "grammars": (grammars, "what following a grammar costs a step, and hostile ones do to others"),
    "growth": (growth, "whether cost grows as context, queue, answer and cached prefix do"),
    "quality": (quality, "perplexity and divergence of quantized weights on a fixed text"),
    "speculation": (speculation, "the same requests with and without drafts, in turn"),
    "sharing": (
        sharing,
        "prompt tokens that shared prefixes save, and engine.order under pressure",
    ),
    "models": (several_models, "three models under a memory budget for two"),
    "step": (step, "a decode and a prefill step, part by part, beside the machine's limits"),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    subparsers = parser.add_subparsers(required=True, metavar="SUBCOMMAND")
    for name, (module, summary) in SUBCOMMANDS.items():
        subparser = subparsers.add_parser(name, help=summary, description=summary)
        module.add_arguments(subparser)
        subparser.set_defaults(run=module.main)
    return parser


def _leave(number: int, frame: object) -> None:
    raise SystemExit(128 + number)


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _leave)  # so that a server started here is ended as well
    exit_code: int = args.run(args)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
