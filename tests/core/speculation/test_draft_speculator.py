"""Drafts by a draft model, over the dummy runner: when there are any, how long, and that they change no token."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from dummy_engine import (
    Clock,
    continuation,
    draft_always,
    make_sequence,
    partly_right,
    run_to_end,
    solo_text,
    text_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import EngineConfig, SpeculativeConfig
from core.dummy_runner import ByteTokenizer, DummyRunner, make_dummy_runner
from core.engine import Engine
from core.errors import ConfigError
from core.sequence import Sequence
from core.speculation.self_draft import read_self_draft
from core.speculation.speculators import describe_drafts

STEP_S, ROW_S = 10e-3, 0.1e-3


class FakeDrafter:
    """Guesses by a function, and takes `forward_s` for each token of the longest draft."""

    description = "a function"

    def __init__(self, guess: Callable[[Sequence, int], list[int]], forward_s: float = 0.0) -> None:
        self.guess, self.forward_s = guess, forward_s
        self.clock: Clock | None = None
        self.depths: list[int] = []

    def draft(self, rows: list[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        for sequence, count in rows:
            assert sequence.num_computed_tokens == sequence.num_tokens - 1
            assert len(sequence.block_ids) * 16 >= sequence.num_tokens + count
        self.depths.append(max(count for _, count in rows))
        if self.clock is not None:
            self.clock.spend(self.forward_s * self.depths[-1])
        return [tuple(self.guess(sequence, count)) for sequence, count in rows]

    def reset(self) -> None:
        pass


def make(
    drafter: FakeDrafter, max_tokens: int = 8, **options: object
) -> tuple[Engine, DummyRunner]:
    """An engine whose steps take `STEP_S`, and `ROW_S` for each row."""
    runner = make_dummy_runner(
        checks_context=True, drafter=drafter, max_context=4096, num_blocks=600
    )
    clock = drafter.clock = Clock()
    runner.on_run = lambda step, batch: clock.spend(STEP_S + ROW_S * batch.num_tokens)
    speculative = SpeculativeConfig(method="draft", draft_model="self:1", max_tokens=max_tokens)
    config = EngineConfig(**options)  # type: ignore[arg-type]
    return Engine(config, runner, ByteTokenizer(), speculative=speculative, clock=clock), runner


def wrong(sequence: Sequence, count: int) -> list[int]:
    return [0] * count


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_draft_model_leaves_text_as_it_is(data: st.DataObject) -> None:
    guess = partly_right(random.Random(data.draw(st.integers(0, 999))))
    shorter = random.Random(1)
    drafter = FakeDrafter(lambda s, count: guess(s, count)[: shorter.randint(0, count)])
    engine, _ = make(
        drafter,
        max_tokens=data.draw(st.integers(1, 9)),
        batch_size=data.draw(st.integers(1, 5)),
        max_batched_tokens=data.draw(st.integers(1, 40)),
    )
    draft_always(engine)
    prompts = data.draw(st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=6))
    for i, prompt in enumerate(prompts):
        engine.add(make_sequence(f"s{i}", prompt, max_tokens=20))
    outputs = run_to_end(engine)
    for i, prompt in enumerate(prompts):
        assert text_of(outputs, f"s{i}") == solo_text(prompt.encode(), 20)


def test_right_guesses_of_a_cheap_draft_model_fill_whole_drafts() -> None:
    drafter = FakeDrafter(continuation, forward_s=STEP_S / 10)
    engine, runner = make(drafter)
    engine.add(make_sequence("s", "hello", max_tokens=300))
    assert text_of(run_to_end(engine), "s") == solo_text(b"hello", 300)
    assert runner.num_steps < 80
    assert drafter.depths[len(drafter.depths) // 2] == 8


@pytest.mark.parametrize(("guess", "forward_s"), [(wrong, STEP_S / 10), (continuation, 2 * STEP_S)])
def test_drafting_ends_where_it_costs_more_than_it_gives(
    guess: Callable[[Sequence, int], list[int]], forward_s: float
) -> None:
    drafter = FakeDrafter(guess, forward_s)
    engine, runner = make(drafter)
    engine.add(make_sequence("s", "hello", max_tokens=600))
    run_to_end(engine)
    assert len(drafter.depths) < runner.num_steps / 20
    assert drafter.depths[-1] == 1  # now and then it is tried nevertheless


def test_a_draft_ends_where_its_next_token_is_worth_less_than_its_forward() -> None:
    """Half of the guesses are right and a forward takes a fifth of a step: a first token pays, an eighth does not."""
    coin = random.Random(3)

    def guess(sequence: Sequence, count: int) -> list[int]:
        return [i if coin.random() < 0.5 else 0 for i in continuation(sequence, count)]

    drafter = FakeDrafter(guess, forward_s=STEP_S / 5)
    engine, _ = make(drafter)
    engine.add(make_sequence("s", "hello", max_tokens=900))
    run_to_end(engine)
    late = drafter.depths[len(drafter.depths) // 2 :]
    assert 1 <= sum(late) / len(late) <= 3


def test_one_hopeless_sequence_does_not_stop_the_others() -> None:
    def guess(sequence: Sequence, count: int) -> list[int]:
        return (
            wrong(sequence, count)
            if sequence.sequence_id == "bad"
            else continuation(sequence, count)
        )

    engine, _ = make(FakeDrafter(guess, forward_s=STEP_S / 10))
    bad = make_sequence("bad", "hello", max_tokens=200)
    good = make_sequence("good", "world", max_tokens=200)
    engine.add(bad)
    engine.add(good)
    run_to_end(engine)
    assert good.num_accepted_tokens > 120
    assert bad.num_draft_tokens < 0.8 * good.num_draft_tokens


def test_a_step_tells_how_long_it_drafted() -> None:
    engine, _ = make(FakeDrafter(continuation, forward_s=STEP_S / 10))
    draft_always(engine)
    engine.add(make_sequence("s", "hello", max_tokens=30))
    engine.step()
    engine.step()
    engine.step()
    stats = engine.stats(is_after_step=True)
    assert stats.parts_s["draft"] > 8 * STEP_S / 10


def test_a_draft_model_that_fails_costs_nothing_but_the_draft() -> None:
    def fail(sequence: Sequence, count: int) -> list[int]:
        raise RuntimeError("told to fail")

    engine, _ = make(FakeDrafter(fail))
    engine.add(make_sequence("s", "hello", max_tokens=30))
    assert text_of(run_to_end(engine), "s") == solo_text(b"hello", 30)


def test_the_start_log_says_who_drafts_and_why_nobody_does() -> None:
    drafts = SpeculativeConfig(method="draft", draft_model="self:1")
    runner = make_dummy_runner(drafter=FakeDrafter(continuation))
    assert (
        describe_drafts(drafts, runner) == "drafts: up to 8 tokens by a function, where that pays"
    )
    assert "no draft model" in describe_drafts(drafts, make_dummy_runner())
    loose = make_dummy_runner(has_fixed_bits=False)
    assert "depend on its batch" in describe_drafts(SpeculativeConfig(), loose)
    assert "prompt and output" in describe_drafts(SpeculativeConfig(), runner)
    assert "method: off" in describe_drafts(SpeculativeConfig(method="off"), runner)


@pytest.mark.parametrize(
    ("name", "layers", "quantization"),
    [
        ("self:3", [0, 1, 2], "none"),
        ("self:0-1,4,6-7", [0, 1, 4, 6, 7], "none"),
        ("self:int4", list(range(8)), "int4"),
        ("self:int8:2", [0, 1], "int8"),
        ("self:int4:0,7", [0, 7], "int4"),
    ],
)
def test_a_self_draft_names_layers_and_bits(
    name: str, layers: list[int], quantization: str
) -> None:
    draft = read_self_draft(name)
    assert draft is not None
    assert (draft.layers_of(8), draft.quantization) == (layers, quantization)


@pytest.mark.parametrize(
    "name", ["self", "self:", "self:0", "self:int5", "self:4-2", "self:1,1", "self:2:int4", "other"]
)
def test_what_is_no_self_draft_is_not_read(name: str) -> None:
    assert read_self_draft(name) is None


def test_more_layers_than_the_model_has_are_refused() -> None:
    draft = read_self_draft("self:9")
    assert draft is not None
    with pytest.raises(ConfigError, match="layer 8, counted from 0; this model has 8"):
        draft.layers_of(8)
