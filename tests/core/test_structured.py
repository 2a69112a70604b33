"""Grammars without a model: what compiles, what is refused, and how a sequence follows one."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import orjson
import pytest

from core.config import EngineConfig
from core.dummy_runner import ByteTokenizer, make_dummy_runner
from core.engine import Engine
from core.errors import InvalidValue, UnsupportedValue
from core.sampling_params import SamplingParams
from core.sequence import Sequence
from core.structured import follow
from core.structured.compiler import GrammarCompiler
from core.structured.follow import GrammarState, MaskWorker
from core.structured.grammar import ANY_OBJECT, Grammar

COMPILER = GrammarCompiler(ByteTokenizer())
SCHEMA = orjson.dumps(
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
).decode()


def run(grammar: Grammar, *, num_blocks: int = 64, choices: int = 1, **params: Any) -> list[str]:
    """What the dummy model answers under a grammar, for several choices side by side."""
    runner = make_dummy_runner(num_blocks=num_blocks, checks_context=True)
    engine = Engine(EngineConfig(batch_size=8, max_batched_tokens=64), runner, ByteTokenizer())
    compiled = COMPILER.compile(grammar)
    options = {"max_tokens": 300, "temperature": 1.0, **params}
    for index in range(choices):
        sequence = Sequence(str(index), list(b"prompt"), SamplingParams(**options), 7, index)
        sequence.grammar = GrammarState(compiled)
        engine.add(sequence)
    texts = [""] * choices
    while engine.has_work:
        for output in engine.step():
            texts[int(output.sequence_id)] += output.text
            assert output.error is None
    return texts


@pytest.mark.parametrize(
    ("kind", "text", "fits"),
    [
        ("json_schema", SCHEMA, lambda text: orjson.loads(text)["b"] in ("x", "y")),
        ("regex", "[a-c]{3}-[0-9]+z", lambda text: text[3] == "-" and text.endswith("z")),
        ("choice", '["yes","no","ja\\n\\"\\u00e4"]', lambda text: text in ("yes", "no", 'ja\n"ä')),
        ("lark", 'start: "{" /[a-z]{2}/ "}"', lambda text: len(text) == 4 and text[0] == "{"),
        ("lark", 'root ::= "a" [b-d]+ "!"', lambda text: text[0] == "a" and text[-1] == "!"),
    ],
)
def test_an_answer_follows_its_grammar_and_ends_with_it(kind, text, fits) -> None:
    for answer in run(Grammar(kind, text), choices=5):
        assert fits(answer), answer


def test_choices_go_their_own_ways_and_neighbours_change_nothing() -> None:
    grammar = Grammar("regex", "[a-z]{40}")
    crowd = run(grammar, choices=6)
    assert len(set(crowd)) == 6
    assert run(grammar, choices=1) == crowd[:1]
    assert run(grammar, choices=6, num_blocks=8) == crowd  # preempted


def test_the_end_comes_with_the_grammar_whatever_else_was_asked() -> None:
    for params in ({"min_tokens": 50}, {"ignore_eos": True}, {"min_tokens": 9, "ignore_eos": True}):
        (answer,) = run(Grammar("regex", "[0-9]{4}"), **params)
        assert len(answer) == 4


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("regex", "(["),
        ("lark", "start: nowhere"),
        ("lark", "start: 5"),
        ("json_schema", '{"type":"foo"}'),
        ("json_schema", '{"$ref":"#/nowhere"}'),
        ("json_schema", '{"not":{"type":"string"}}'),
        ("json_schema", "false"),
        ("regex", "a{1000000}"),
        ("regex", "a" * 300_000),
    ],
)
def test_what_cannot_be_compiled_is_refused_with_its_field_and_a_short_reason(kind, text) -> None:
    """B097"""
    with pytest.raises(InvalidValue) as caught:
        COMPILER.compile(Grammar(kind, text, "guided_regex"))
    assert caught.value.param == "guided_regex"
    assert len(caught.value.message) < 300


def test_a_grammar_is_compiled_once_and_its_field_does_not_matter() -> None:
    first = COMPILER.compile(Grammar("json_schema", ANY_OBJECT, "response_format"))
    assert COMPILER.compile(Grammar("json_schema", ANY_OBJECT, "guided_json")) is first
    assert COMPILER.find(Grammar("regex", "never compiled")) is None


def test_whitespace_has_an_end() -> None:
    state = GrammarState(COMPILER.compile(Grammar("json_schema", SCHEMA)))
    text = list(b"{" + b" " * 16)
    state.follow(text, 0)
    assert not state.mask.allowed[ord(" ")]
    assert state.mask.allowed[ord('"')]


def test_a_model_without_an_end_token_follows_no_grammar() -> None:
    with pytest.raises(UnsupportedValue):
        GrammarCompiler(ByteTokenizer(num_eos=0))


def test_control_tokens_are_never_text() -> None:
    compiler = GrammarCompiler(ByteTokenizer(num_eos=2))
    state = GrammarState(compiler.compile(Grammar("regex", ".+")))
    state.follow([], 0)
    assert np.count_nonzero(state.mask.allowed[256:]) == 0
    state.follow([ord("<")], 0)
    assert state.mask.allowed[256:].all()  # both end it


def test_a_grammar_that_takes_too_long_fails_alone(monkeypatch) -> None:
    compiled = COMPILER.compile(Grammar("regex", "[a-z]+"))
    follow_it = GrammarState.follow

    def slow(self, token_ids, num_prompt_tokens):
        if token_ids[0] == 0:
            time.sleep(0.4)
        follow_it(self, token_ids, num_prompt_tokens)

    monkeypatch.setattr(GrammarState, "follow", slow)
    sequences = [Sequence(str(i), [i], SamplingParams()) for i in (1, 0, 2, 3)]
    for sequence in sequences:
        sequence.grammar = GrammarState(compiled)
    worker = MaskWorker()
    worker.begin(sequences)
    started_s = time.monotonic()
    worker.finish()
    assert time.monotonic() - started_s < 3 * follow.PATIENCE_S
    assert [s.grammar.failure for s in sequences] == [None, follow.TOO_SLOW, None, None]
    assert [s.grammar.mask is not None for s in sequences] == [True, False, True, True]


def test_the_thread_that_follows_grammars_ends_with_its_model() -> None:
    worker = MaskWorker()
    sequence = Sequence("a", [0], SamplingParams())
    sequence.grammar = GrammarState(COMPILER.compile(Grammar("regex", "[a-z]+")))
    before = set(threading.enumerate())
    worker.begin([sequence])
    worker.finish()
    (thread,) = set(threading.enumerate()) - before
    del worker
    thread.join(10)
    assert not thread.is_alive()
