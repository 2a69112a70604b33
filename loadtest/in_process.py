"""An engine in this process, without HTTP, for the commands that look at single steps. Prompts are drawn token ids."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence as List
from typing import Any

import msgspec

from core.config import NO_SPECULATION, KVCacheConfig, ModelConfig, SpeculativeConfig
from core.engine import Engine
from core.errors import NoriaError
from core.sampling_params import SamplingParams
from core.sequence import Sequence
from server.config import load_config


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default=ModelConfig().name, help="as for the server")
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as for the server"
    )
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other prompts")
    parser.add_argument("--label", default="", help="copied into each JSON line")
    parser.add_argument("--out", help="append the JSON lines to this file as well")
    parser.add_argument("--lock", help="a lock file held while measuring")


def load_engine(
    model: str,
    kv_cache: KVCacheConfig | None = None,
    *,
    settings: List[str] = (),
    speculative: SpeculativeConfig = NO_SPECULATION,
    **engine: Any,
) -> Engine:
    """`settings` as the server's `--set`; what the command needs itself, `engine`, wins over them. No
    drafts by default, so that a step is what it says."""
    print(f"loading {model}", file=sys.stderr)
    try:
        config, _ = load_config(None, {}, list(settings), default_path="")
        own = {name: value for name, value in engine.items() if value is not None}
        return Engine.from_config(
            msgspec.structs.replace(config.model, name=model),
            msgspec.structs.replace(config.engine, **own),
            kv_cache or config.kv_cache,
            speculative=speculative,
        )
    except NoriaError as error:
        raise SystemExit(error.message) from None


def draw_prompt(engine: Engine, rng: random.Random, num_tokens: int) -> list[int]:
    """Ids of plain tokens. Any will do: work does not depend on which."""
    low, high = 1000, engine.runner.shape.vocab_size
    return [rng.randrange(min(low, high // 2), high) for _ in range(num_tokens)]


def exactly(num_tokens: int) -> SamplingParams:
    """Greedy, neither more nor fewer tokens."""
    return SamplingParams(
        max_tokens=num_tokens, min_tokens=num_tokens, ignore_eos=True, temperature=0
    )


def make_sequence(name: str, token_ids: list[int], num_output_tokens: int) -> Sequence:
    return Sequence(name, list(token_ids), exactly(num_output_tokens))
