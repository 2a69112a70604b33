"""What `sharing` counts: distinct tokens, and who was passed over."""

from __future__ import annotations

import argparse
import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dummy_engine import make_engine
from hypothesis import given
from hypothesis import strategies as st

from core.config import KVCacheConfig
from core.engine import Engine
from core.sampling_params import SamplingParams
from core.sequence import Sequence
from loadtest import conversations
from loadtest.sharing import (
    agents,
    branching,
    count,
    few_shot,
    most_passed_over,
    num_distinct,
    tree,
)


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=8))
def test_distinct_tokens_are_the_nodes_of_the_tree_of_all_prompts(prompts: list[list[int]]) -> None:
    prefixes = {tuple(prompt[: end + 1]) for prompt in prompts for end in range(len(prompt))}
    assert num_distinct(prompts) == len(prefixes)


def test_being_passed_over_counts_later_arrivals_that_were_scheduled_in_an_earlier_step() -> None:
    sequences = [Sequence(str(i), [1], SamplingParams()) for i in range(4)]
    for sequence, scheduled_s in zip(sequences, (3.0, 1.0, 3.0, 2.0), strict=True):
        sequence.scheduled_s = scheduled_s
    assert most_passed_over(sequences) == 2


@pytest.mark.parametrize("part", [conversations.turns, conversations.restart])
def test_conversations_and_restarts_find_nearly_all_that_was_computed(
    part: Callable[[argparse.Namespace], bool], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def load_dummy(model: str, kv_cache: KVCacheConfig, settings: object, **options: Any) -> Engine:
        assert kv_cache.num_blocks != "auto"
        return make_engine(num_blocks=kv_cache.num_blocks, **options)[0]

    monkeypatch.setattr(conversations, "load_engine", load_dummy)
    out = tmp_path / "lines"
    given = {"model": "dummy", "set": [], "seed": 0, "label": "", "lock": None, "out": str(out)}
    part(argparse.Namespace(**given))
    figures = json.loads(out.read_text())
    if part is conversations.turns:
        assert figures["share"] > 0.99
    else:
        assert figures["cached_tokens_restored"] == figures["cached_tokens_warm"] == 16 * 496


def test_a_pipeline_without_a_cache_computes_every_prompt_and_with_one_nearly_only_what_differs() -> (
    None
):
    for pipeline in (few_shot, branching, tree, agents):
        figures = {}
        for prefix_caching in (False, True):
            engine, _ = make_engine(num_blocks=8192, prefix_caching=prefix_caching)
            rounds = itertools.islice(pipeline(engine, random.Random(0)), 2)
            figures[prefix_caching] = count(engine, rounds)
        assert figures[False]["computed"] == figures[False]["prompt_tokens"]
        assert figures[True]["over_distinct"] < 1.2
