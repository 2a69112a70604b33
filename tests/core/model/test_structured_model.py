"""Grammars with the real default model and the real sampler: masks beside rows that have none."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from core.config import EngineConfig, KVCacheConfig, ModelConfig
from core.engine import Engine
from core.sampling_params import SamplingParams
from core.sequence import Sequence
from core.structured.compiler import GrammarCompiler
from core.structured.follow import GrammarState
from core.structured.grammar import Grammar

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
GRAMMAR = Grammar("json_schema", orjson.dumps(SCHEMA).decode())
PROMPT = "<|im_start|>user\nDescribe a person as JSON.<|im_end|>\n<|im_start|>assistant\n"
PLAIN = "The capital of France is"


@pytest.fixture(scope="module")
def engine(default_model_folder: Path) -> Engine:
    return Engine.from_config(ModelConfig(), EngineConfig(), KVCacheConfig(num_blocks=64))


@pytest.fixture(scope="module")
def compiler(engine: Engine) -> GrammarCompiler:
    return GrammarCompiler(engine.tokenizer)


def run(
    engine: Engine, rows: list[tuple[str, SamplingParams, GrammarState | None]]
) -> list[tuple[str, list[int]]]:
    """Text and ids of every row, computed in one batch."""
    texts, ids = [""] * len(rows), [list[int]() for _ in rows]
    for index, (prompt, params, grammar) in enumerate(rows):
        sequence = Sequence(str(index), engine.tokenizer.encode(prompt), params, 11, index % 4)
        sequence.grammar = grammar
        engine.add(sequence)
    while engine.has_work:
        for output in engine.step():
            assert output.error is None
            texts[int(output.sequence_id)] += output.text
            if output.token_id is not None:
                ids[int(output.sequence_id)].append(output.token_id)
    return list(zip(texts, ids, strict=True))


def test_answers_follow_their_schema_and_leave_their_neighbours_alone(engine, compiler) -> None:
    """Greedy and drawn, with enough of them that some are preempted (64 blocks), beside plain greedy rows."""
    greedy = SamplingParams(max_tokens=12, temperature=0)
    (alone,) = run(engine, [(PLAIN, greedy, None)])
    compiled = compiler.compile(GRAMMAR)
    bound = [
        SamplingParams(max_tokens=200, temperature=0),
        SamplingParams(max_tokens=200, temperature=1),
        SamplingParams(max_tokens=200, temperature=1, top_p=0.9, repetition_penalty=1.1),
        SamplingParams(max_tokens=200, temperature=1, logprobs=2, min_tokens=10),
    ]
    rows = [(PROMPT, params, GrammarState(compiled)) for params in bound]
    crowd = run(engine, [*rows, *[(PLAIN, greedy, None)] * 3])
    assert crowd[len(bound) :] == [alone] * 3
    for index, params in enumerate(bound):
        person = orjson.loads(crowd[index][0])
        assert list(person) == ["name", "age", "tags"]
        assert 0 <= person["age"] <= 120
        empty = [
            (PLAIN, SamplingParams(max_tokens=1), None)
        ] * index  # keeps its place, so its choice
        again = run(engine, [*empty, (PROMPT, params, GrammarState(compiled))])
        assert again[-1] == crowd[index]
