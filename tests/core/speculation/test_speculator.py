"""Drafts change no token, whatever they guess: over the dummy runner, whose answers are known without any engine."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from dummy_engine import (
    continuation,
    draft_always,
    drafting_engine,
    end_of,
    greedy,
    guess_with,
    make_sequence,
    partly_right,
    run_to_end,
    solo_text,
    text_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from core.batch import Batch
from core.config import EngineConfig, SpeculativeConfig
from core.dummy_runner import ByteTokenizer, make_dummy_runner
from core.engine import Engine
from core.outputs import FinishReason, SampledToken
from core.sequence import Sequence
from core.speculation.prompt_lookup import LONGEST_MATCH, PromptLookup
from core.speculation.speculator import Candidate, Speculator
from core.speculation.step_costs import StepCosts
from core.speculation.verify import verify
from core.structured.compiler import GrammarCompiler
from core.structured.follow import GrammarState
from core.structured.grammar import Grammar

# --- what is accepted ---


def test_a_draft_stands_as_far_as_it_equals_what_is_drawn() -> None:
    drawn = [SampledToken(i) for i in (5, 6, 7, 8)]
    assert [t.token_id for t in verify((5, 6, 7), drawn)] == [5, 6, 7, 8]
    assert [t.token_id for t in verify((5, 9, 7), drawn)] == [5, 6]
    assert [t.token_id for t in verify((4, 6, 7), drawn)] == [5]
    assert [t.token_id for t in verify((), drawn[:1])] == [5]


def test_a_failure_behind_a_guess_is_left_to_the_next_step() -> None:
    failed = SampledToken(-1, failure="non_finite")
    assert verify((5,), [SampledToken(5), failed]) == [SampledToken(5)]
    assert verify((5,), [failed, SampledToken(5)]) == [failed]


# --- what is guessed ---


@given(st.text("abc", min_size=1, max_size=80), st.integers(1, 12))
@settings(max_examples=200, deadline=None)
def test_a_guess_goes_on_where_the_same_tokens_stood_before(text: str, count: int) -> None:
    ids = list(text.encode())
    lookup = PromptLookup()
    for end in range(1, len(ids) + 1):
        known = ids[:end]
        lookup.index(known, 5)
        match = lookup.find(known)
        if not match:
            continue
        assert match <= LONGEST_MATCH
        draft = lookup.draft(known, count)
        assert len(draft) == count
        # Somewhere the last tokens stood before, and the draft is what came behind them.
        joined = [*known, *draft]
        assert any(
            known[place - match : place] == known[-match:]
            and joined[place : place + count] == list(draft)
            for place in range(match, end)
        )
        lookup.advance(1)


def test_the_index_takes_in_a_long_prompt_piece_by_piece() -> None:
    ids = [1, 2, 3, 4, 5] * 100
    lookup = PromptLookup()
    pieces = []
    while lookup.find(ids) == 0:
        pieces.append(lookup.index(ids, 64))
        assert pieces[-1] <= 64
    assert sum(pieces) == len(ids)
    assert lookup.draft(ids, 7) == (1, 2, 3, 4, 5, 1, 2)


def test_a_copy_with_one_token_changed_is_found_again() -> None:
    source = list(range(100, 140))
    ids = [*source, 1, *source[:10], 7, *source[11:13]]
    lookup = PromptLookup()
    lookup.index(ids, 1000)
    for end in range(51, len(ids) + 1):
        lookup.find(ids[:end])
        lookup.advance(1)
    lookup = PromptLookup()
    known = ids[:51]
    lookup.index(known, 1000)
    assert lookup.find(known) == 10
    known += [7, source[11]]  # not as guessed, and then as before
    lookup.advance(2)
    lookup.index(known, 1000)
    assert lookup.find(known) == 1
    assert lookup.draft(known, 3) == tuple(source[12:15])


# --- what it costs ---


def test_a_row_that_costs_nothing_is_wanted_and_a_dear_one_is_not() -> None:
    for extra_s, is_wanted in ((1e-4, True), (5e-3, False)):
        costs = StepCosts(1)
        assert not costs.may_draft()
        for _ in range(5):
            costs.observe(0, 10e-3)
        for _ in range(20):
            costs.observe(4, 10e-3 + 4 * extra_s)
        assert (costs.price_of_row(1.0, 0) < 0.3) == is_wanted


def test_drafting_pauses_to_learn_what_a_step_costs_without() -> None:
    costs = StepCosts(1)
    costs.observe(0, 10e-3)
    num_drafted = 0
    while costs.may_draft():
        costs.observe(3, 11e-3)
        num_drafted += 1
    assert 10 < num_drafted < 100
    costs.observe(0, 10e-3)
    assert costs.may_draft()


def test_drafts_grow_where_guesses_are_right_and_end_where_they_are_wrong() -> None:
    """The same words come again and again, with what comes behind them foreseeable or not."""

    def draft_length(next_word: Callable[[int], int]) -> float:
        engine, runner = drafting_engine(max_context=4096, num_blocks=512)
        runner.on_run = lambda step, batch: engine._clock.spend(2e-3 * batch.num_tokens)
        runner.script = [i for word in range(200) for i in (97, 98, next_word(word))]
        sequence = make_sequence("s", "abcab", max_tokens=599)
        engine.add(sequence)
        run_to_end(engine)
        return sequence.num_draft_tokens / engine.stats().total_steps

    noise = random.Random(1)
    assert draft_length(lambda word: 99) > 5
    assert draft_length(lambda word: 100 + noise.randrange(100)) < 2


def test_an_idle_batch_is_drafted_for_and_a_dear_one_is_not() -> None:
    """By measured cost: beside many sequences a row costs as much as an average token."""
    engine, _ = drafting_engine()
    speculator = engine.speculator
    assert isinstance(speculator, Speculator)
    for num_decodes, row_s, expected in ((1, 0.2e-3, 8), (32, 0.4e-3, 0)):
        costs = StepCosts(num_decodes)
        for _ in range(5):
            costs.observe(0, 8e-3 + num_decodes * 0.2e-3)
        for _ in range(20):
            costs.observe(8, 8e-3 + num_decodes * 0.2e-3 + 8 * row_s)
        candidate = Candidate(0, make_sequence("s", "ab"), None, 0.75, 8)
        speculator._decide([candidate], costs, num_decodes)
        assert (candidate.count > 2) == (expected > 2)


# --- that no token changes ---


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_guesses_leave_text_and_ends_as_they_are(data: st.DataObject) -> None:
    engine, _ = drafting_engine(
        max_tokens=data.draw(st.integers(1, 9)),
        num_blocks=data.draw(st.integers(12, 40)),
        block_size=data.draw(st.sampled_from([1, 4, 16])),
        batch_size=data.draw(st.integers(1, 5)),
        max_batched_tokens=data.draw(st.integers(1, 40)),
        policy=data.draw(st.sampled_from(["continuous", "static", "single"])),
        prefix_caching=data.draw(st.booleans()),
    )
    guess_with(engine, partly_right(random.Random(data.draw(st.integers(0, 999)))))
    prompts = data.draw(st.lists(st.text("ab", min_size=1, max_size=9), min_size=1, max_size=6))
    sequences = [
        make_sequence(f"s{i}", prompt, max_tokens=data.draw(st.integers(1, 30)))
        for i, prompt in enumerate(prompts)
        if len(prompt) < engine.max_model_len
    ]
    for sequence in sequences:
        engine.add(sequence)
    outputs = run_to_end(engine)
    for sequence in sequences:
        prompt = bytes(sequence.token_ids[: sequence.num_prompt_tokens])
        room = engine.max_model_len - len(prompt)
        length = min(sequence.params.max_tokens, room)
        assert text_of(outputs, sequence.sequence_id) == solo_text(prompt, length)
        assert end_of(outputs, sequence.sequence_id).num_output_tokens == length


def test_right_guesses_save_steps_and_every_token_has_an_output_of_its_own() -> None:
    engine, runner = drafting_engine()
    guess_with(engine, continuation)
    engine.add(make_sequence("s", "hello", max_tokens=60))
    outputs = run_to_end(engine)
    assert text_of(outputs, "s") == solo_text(b"hello", 60)
    assert [output.num_output_tokens for output in outputs] == list(range(1, 61))
    assert runner.num_steps < 15
    timings = end_of(outputs, "s").timings
    assert timings.num_accepted_tokens == 60 - runner.num_steps
    assert timings.num_draft_tokens >= timings.num_accepted_tokens


def test_a_stop_inside_a_draft_ends_the_text_there() -> None:
    text = solo_text(b"hello", 60)
    engine, _ = drafting_engine()
    guess_with(engine, continuation)
    engine.add(make_sequence("string", "hello", max_tokens=60, stop=(text[17:20],)))
    engine.add(make_sequence("token", "hello", max_tokens=60, stop_token_ids=(ord(text[13]),)))
    outputs = run_to_end(engine)
    end = end_of(outputs, "string")
    assert text_of(outputs, "string") == text[: text.index(text[17:20])]
    assert (end.finish_reason, end.stop_reason) == (FinishReason.STOP, text[17:20])
    end = end_of(outputs, "token")
    assert text_of(outputs, "token") == text[: text.index(text[13])]
    assert (end.finish_reason, end.stop_reason) == (FinishReason.STOP, ord(text[13]))


def test_min_tokens_counts_the_guesses_before_a_place() -> None:
    script = [97, 98, 256, 99, 256, 100, 256]

    def answer(is_drafted: bool) -> list[int]:
        engine, runner = drafting_engine()
        runner.script = script
        sequence = make_sequence("s", "hello", max_tokens=20, min_tokens=5)
        if is_drafted:
            guess_with(engine, lambda s, count: script[s.num_output_tokens :][:count])
        engine.add(sequence)
        run_to_end(engine)
        return sequence.token_ids

    assert answer(is_drafted=True) == answer(is_drafted=False)


def test_blocks_of_rejected_tokens_are_free_after_the_step() -> None:
    engine, _ = drafting_engine(max_tokens=8, block_size=4, num_blocks=30)
    guess_with(engine, lambda sequence, count: [0] * count)  # never right
    sequence = make_sequence("s", "hello", max_tokens=40)
    engine.add(sequence)
    while engine.has_work:
        engine.step()
        engine.check_invariants()
        needed = -(-sequence.num_tokens // 4)
        assert engine.stats().num_blocks_used <= needed
    assert sequence.num_draft_tokens > 100
    assert sequence.num_accepted_tokens == 0


def test_only_known_tokens_are_published_and_accepted_ones_are_found_again() -> None:
    engine, _ = drafting_engine(max_tokens=8, block_size=4, num_blocks=60)
    guess_with(engine, partly_right(random.Random(4)))
    first = make_sequence("first", "hello", max_tokens=30)
    engine.add(first)
    run_to_end(engine)
    second = Sequence("second", [*first.token_ids, 33], greedy(4))
    engine.add(second)
    run_to_end(engine)
    assert second.num_cached_tokens == len(first.token_ids) - 1


def test_a_full_pool_shortens_drafts_and_preempts_nobody_for_them() -> None:
    engine, _ = drafting_engine(max_tokens=8, block_size=4, num_blocks=12, prefix_caching=False)
    plain, _ = drafting_engine(block_size=4, num_blocks=12, prefix_caching=False)
    guess_with(engine, lambda sequence, count: [0] * count)
    guess_with(plain, lambda sequence, count: [])
    for each in (engine, plain):
        for name in ("a", "b", "c"):
            each.add(make_sequence(name, "hello" + name, max_tokens=24))
        run_to_end(each)
    assert engine.stats().total_preemptions == plain.stats().total_preemptions
    assert engine.stats().total_steps == plain.stats().total_steps


def test_a_grammar_holds_behind_every_guess() -> None:
    compiler = GrammarCompiler(ByteTokenizer())
    compiled = compiler.compile(Grammar("json_schema", '{"type": "object"}'))

    def answer(guess: Callable[[Sequence, int], list[int]] | None) -> Sequence:
        engine, _ = drafting_engine(max_context=512)
        if guess is not None:
            guess_with(engine, guess)
        sequence = make_sequence("s", "give me json", max_tokens=120)
        sequence.grammar = GrammarState(compiled)
        engine.add(sequence)
        run_to_end(engine)
        return sequence

    expected = answer(None)

    def oracle(sequence: Sequence, count: int) -> list[int]:
        ids = expected.token_ids[sequence.num_tokens :][:count]
        if sequence.num_tokens % 3 == 0 and ids:
            ids[-1] = ord("}")
        return ids

    for guess in (oracle, lambda sequence, count: list(b'{"a": 1, "b": {}}')[:count]):
        drafted = answer(guess)
        assert drafted.token_ids == expected.token_ids
    assert answer(oracle).num_accepted_tokens > 20


def test_guessing_that_raises_costs_nothing_but_the_draft() -> None:
    engine, _ = drafting_engine()

    def fail(candidate: Candidate) -> tuple[int, ...]:
        engine._scheduler.reserve(candidate.sequence, 8)
        raise RuntimeError("told to fail")

    guess_with(engine, continuation)
    engine.speculator._draft = fail
    engine.add(make_sequence("s", "hello", max_tokens=30))
    assert text_of(run_to_end(engine), "s") == solo_text(b"hello", 30)


def test_a_step_that_fails_with_drafts_ends_its_sequences_and_frees_their_blocks() -> None:
    engine, runner = drafting_engine()
    guess_with(engine, continuation)
    runner.failing_steps = {4}
    engine.add(make_sequence("s", "hello", max_tokens=90))
    outputs = run_to_end(engine)
    assert end_of(outputs, "s").finish_reason is FinishReason.ERROR
    assert engine.stats().num_blocks_used == 0


def test_a_runner_whose_bits_depend_on_the_batch_gets_no_drafts() -> None:
    runner = make_dummy_runner(has_fixed_bits=False)
    engine = Engine(EngineConfig(), runner, ByteTokenizer(), speculative=SpeculativeConfig())
    engine.add(make_sequence("s", "aaaaaaaaaa", max_tokens=30))
    run_to_end(engine)
    assert engine.stats().total_drafts == 0


@pytest.mark.parametrize("method", ["off", "lookup"])
def test_the_totals_tell_what_was_drafted(method: str) -> None:
    runner = make_dummy_runner(script=[97] * 64)
    engine = Engine(
        EngineConfig(), runner, ByteTokenizer(), speculative=SpeculativeConfig(method=method)
    )
    if method == "lookup":
        draft_always(engine)  # whether it pays is a matter of time, which a busy machine takes
    engine.add(make_sequence("s", "aaaa", max_tokens=40))
    run_to_end(engine)
    stats = engine.stats()
    if method == "off":
        assert stats.total_drafts == stats.total_draft_tokens == stats.total_accepted_tokens == 0
        return
    assert stats.total_draft_tokens >= stats.total_accepted_tokens > 10
    assert sum(stats.total_accepted_per_position) == stats.total_accepted_tokens


def test_a_batch_without_drafts_yields_empty_ones() -> None:
    sequence = make_sequence("s", "ab")
    assert list(Batch((sequence,), (2,)).rows()) == [(sequence, 2, ())]
