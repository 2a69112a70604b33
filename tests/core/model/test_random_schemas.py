"""Random schemas and enforced calls with the default model at temperature 1, its answers held to an independent
validator. `NORIA_SCHEMAS` is how many."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from random_schemas import random_schema

from core.config import EngineConfig, KVCacheConfig, ModelConfig
from core.engine import Engine
from core.errors import InvalidValue
from core.sampling_params import SamplingParams
from core.sequence import Sequence
from core.structured.compiler import GrammarCompiler
from core.structured.follow import GrammarState
from core.structured.grammar import Grammar

pytestmark = pytest.mark.slow
NUM_SCHEMAS = int(os.environ.get("NORIA_SCHEMAS", "500"))


@pytest.fixture(scope="module")
def engine(default_model_folder: Path) -> Engine:
    return Engine.from_config(ModelConfig(), EngineConfig(), KVCacheConfig())


def answers(
    engine: Engine, rows: dict[str, tuple[str, GrammarState]], max_tokens: int
) -> dict[str, tuple[str, str]]:
    """Text and ending of every row; the key is the sequence's id."""
    texts, ends = dict.fromkeys(rows, ""), dict[str, str]()
    for number, (key, (prompt, grammar)) in enumerate(rows.items()):
        messages = [{"role": "user", "content": prompt}]
        ids = engine.tokenizer.encode_chat(messages)
        params = SamplingParams(max_tokens=max_tokens, temperature=1.0)
        engine.add(Sequence(key, ids, params, seed=number, grammar=grammar))
    while engine.has_work:
        for output in engine.step():
            texts[output.sequence_id] += output.text
            if output.finish_reason is not None:
                error = f": {output.error.message}" if output.error else ""
                ends[output.sequence_id] = output.finish_reason.value + error
    return {key: (texts[key], ends[key]) for key in rows}


def test_random_schemas_compile_finish_and_validate(engine, capsys) -> None:
    rng = random.Random(2026)
    compiler = GrammarCompiler(engine.tokenizer)
    schemas: dict[str, dict[str, Any]] = {str(i): random_schema(rng) for i in range(NUM_SCHEMAS)}
    reasons, rows = Counter[str](), {}
    for key, schema in schemas.items():
        text = json.dumps(schema)
        try:
            compiled = compiler.compile(Grammar("json_schema", text))
        except InvalidValue as error:
            reasons[error.message] += 1
            continue
        rows[key] = (f"Write a short example of this JSON schema:\n{text}", GrammarState(compiled))
    num_valid = 0
    for key, (text, end) in answers(engine, rows, max_tokens=500).items():
        if end != "stop":
            reasons[end] += 1
            continue
        jsonschema.validate(json.loads(text), schemas[key])
        num_valid += 1
    with capsys.disabled():
        print(f"\n{num_valid} of {NUM_SCHEMAS} schemas compiled, finished and validated")
        for reason, number in reasons.most_common():
            print(f"  {number}: {reason}")
    assert num_valid >= 0.8 * NUM_SCHEMAS
