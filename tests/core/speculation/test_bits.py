"""With drafts a request gets the same tokens and log-probabilities as without, bit for bit, on a real model.

The requests are mixed: greedy and seeded, penalties, biases, stops, minimum lengths, grammars, several choices, prompts
that begin alike and prompts that are there to be copied. They are answered without drafts first; then with prompt
lookup, with guesses that are right for a while and then wrong, in small chunks, from the prefix cache, and in a pool
so small that most are preempted.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from dummy_engine import draft_always, guess_with

from core.config import (
    NO_SPECULATION,
    CacheConfig,
    EngineConfig,
    KVCacheConfig,
    ModelConfig,
    SpeculativeConfig,
)
from core.engine import Engine
from core.generation import GenerationBuilder
from core.model.attention import choose_kernels
from core.model.description import describe
from core.model.draft_loader import DraftPlan, load_draft
from core.model.loader import LoadedModel, load_model
from core.model.runner import ModelRunner
from core.outputs import StepOutput
from core.sampling_params import SamplingParams
from core.sequence import Sequence
from core.speculation.self_draft import read_self_draft
from core.structured.compiler import GrammarCompiler
from core.structured.follow import GrammarState
from core.structured.grammar import Grammar

RECORDS = (
    '[{"id": 1, "name": "Alice Johnson", "city": "Oslo", "active": true},'
    ' {"id": 2, "name": "Bob Smith", "city": "Lima", "active": false}]'
)
PASSAGE = (
    "The river rises in the hills and runs slowly to the sea. In spring it floods the meadows, and in summer"
    " children swim in it. The town was built where the road crosses the river."
)
CODE = "def total(items):\n    total = 0\n    for item in items:\n        total += item.price\n    return total\n"
SCHEMA = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 30}, "id": {"type": "integer"}},'
    ' "required": ["name", "id"], "additionalProperties": false}'
)
GRAMMARS = (
    Grammar("json_schema", SCHEMA),
    Grammar("regex", "(the (river|town|road) ){1,9}"),
    Grammar("choice", '["The river rises in the hills", "The river runs to the sea"]'),
)
TASKS = (
    f"Write this JSON again with every city set to Rome:\n{RECORDS}",
    f"Quote the first two sentences of this text:\n{PASSAGE}",
    f"Write this code again with total named amount:\n{CODE}",
    "Say the word river ten times.",
    "Why is the sky blue?",
)


class Request:
    def __init__(self, token_ids: list[int], params: SamplingParams, choice_index: int) -> None:
        self.token_ids, self.params, self.choice_index = token_ids, params, choice_index
        self.grammar: Grammar | None = None


def make_requests(loaded: LoadedModel, count: int, seed: int) -> list[Request]:
    rng = random.Random(seed)
    requests: list[Request] = []
    while len(requests) < count:
        task = rng.choice(TASKS)
        if rng.random() < 0.3:
            task = f"{PASSAGE}\n{task}"  # many begin alike
        ids = loaded.tokenizer.encode_chat([{"role": "user", "content": task}])
        options: dict[str, object] = {"temperature": 0.0}
        if rng.random() < 0.5:
            options = {"temperature": rng.choice([0.3, 0.7, 1.0]), "seed": rng.randrange(1000)}
            options |= rng.choice([{}, {"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.05}])
        options |= rng.choice(
            [
                *({}, {}),
                {"repetition_penalty": 1.1},
                {"presence_penalty": 0.5, "frequency_penalty": 0.3},
                {"stop": ("river", "ity", '", "')},
                {"stop": ("the",), "include_stop_str_in_output": True},
                {"min_tokens": 12},
                {"logit_bias": {ids[-3]: 2.0, 10: -5.0}},
                {"stop_token_ids": (28, 29, 30, ids[-4])},
                {"ignore_eos": True},
            ]
        )
        max_tokens = rng.randint(12, 60)
        if rng.random() < 0.5:
            options["logprobs"] = rng.choice([0, 3])
        params = SamplingParams(max_tokens=max_tokens, **options)  # type: ignore[arg-type]
        grammar = rng.choice(GRAMMARS) if rng.random() < 0.15 else None
        for choice_index in range(rng.choice([1, 1, 1, 3]) if "seed" in options else 1):
            request = Request(ids, params, choice_index)
            request.grammar = grammar
            requests.append(request)
    return requests[:count]


def answer(engine: Engine, requests: list[Request], compiler: GrammarCompiler) -> list[tuple]:
    """Everything that a client can see of each answer."""
    builders: dict[str, GenerationBuilder] = {}
    for i, request in enumerate(requests):
        sequence = Sequence(
            str(i),
            list(request.token_ids),
            request.params,
            seed=request.params.seed or 0,
            choice_index=request.choice_index,
        )
        if request.grammar is not None:
            sequence.grammar = GrammarState(compiler.compile(request.grammar))
        builders[sequence.sequence_id] = GenerationBuilder(sequence)
        engine.add(sequence)
    outputs: list[StepOutput] = []
    while engine.has_work:
        outputs += engine.step()
    for output in outputs:
        builders[output.sequence_id].take(output)
    answers = []
    for builder in builders.values():
        made = builder.build()
        assert made.error is None
        logprobs = None if made.logprobs is None else tuple(made.logprobs)
        answers.append(
            (tuple(made.token_ids), made.text, made.finish_reason, made.stop_reason, logprobs)
        )
    return answers


def check(folder: Path, count: int, *, num_rounds: int) -> None:
    loaded = load_model(
        ModelConfig(name=str(folder)),
        EngineConfig(device="cpu", kernels="c"),
        KVCacheConfig(num_blocks=600),
        lambda message, fraction=None: None,
    )
    assert loaded.runner.has_fixed_bits
    compiler = GrammarCompiler(loaded.tokenizer)
    requests = make_requests(loaded, count, seed=3)

    def engine(
        chunk: int, *, num_blocks: int = 600, speculative: SpeculativeConfig = NO_SPECULATION
    ) -> Engine:
        runner = loaded.runner
        assert isinstance(runner, ModelRunner)
        runner = ModelRunner(runner.model, runner.shape, CacheConfig(16, num_blocks))
        config = EngineConfig(batch_size=16, max_batched_tokens=chunk)
        return Engine(config, runner, loaded.tokenizer, speculative=speculative)

    expected = answer(engine(256), requests, compiler)
    longest = max(len(r.token_ids) + r.params.max_tokens for r in requests)
    lookup = engine(256, speculative=SpeculativeConfig())
    crowded = engine(24, num_blocks=-(-longest // 16) + 2, speculative=SpeculativeConfig())
    guessed = engine(64, speculative=SpeculativeConfig(max_tokens=5))
    guess_with(guessed, half_right(expected))
    cramped = engine(
        16, num_blocks=-(-longest // 16) + 2, speculative=SpeculativeConfig(max_tokens=12)
    )
    guess_with(cramped, half_right(expected))
    for company in (lookup, crowded, guessed, cramped):
        for _ in range(num_rounds):  # cold, then with whatever the cache holds
            got = answer(company, requests, compiler)
            different = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
            assert not different, f"{len(different)} of {count} differ, first {different[0]}"
        assert company.stats().total_accepted_tokens > (
            count if company in (guessed, cramped) else 0
        )
    for company in (crowded, cramped):
        assert company.stats().total_preemptions > 0


def half_right(expected: list[tuple]) -> Callable[[Sequence, int], list[int]]:
    """Guesses the known answer, with one wrong token in every fifth draft or so, and on behind its end."""
    rng = random.Random(1)

    def guess(sequence: Sequence, count: int) -> list[int]:
        known = expected[int(sequence.sequence_id)][0]
        ids = list(known[sequence.num_output_tokens :][:count])
        ids += [28] * (count - len(ids))
        if rng.random() < 0.2:
            ids[rng.randrange(count)] = rng.randrange(1000)
        return ids

    return guess


def test_drafts_leave_every_bit_as_it_is(default_model_folder: Path) -> None:
    check(default_model_folder, 16, num_rounds=1)


def check_draft_model(folder: Path, draft_model: str, count: int, least_accepted: float) -> None:
    """As `check`, with a part of the model that drafts: alone, in chunks from the prefix cache, and preempted."""
    loaded = load_model(
        ModelConfig(name=str(folder)),
        EngineConfig(device="cpu", kernels="c"),
        KVCacheConfig(num_blocks=600),
        lambda message, fraction=None: None,
    )
    runner = loaded.runner
    assert isinstance(runner, ModelRunner)
    speculative = SpeculativeConfig(method="draft", draft_model=draft_model, max_tokens=4)
    kernels, _ = choose_kernels(runner.model.device, "c")
    part = DraftPlan(part=read_self_draft(draft_model))
    files = (describe(folder).config, folder)
    draft = load_draft(part, runner.model, files, loaded.tokenizer, kernels, "none")
    assert draft is not None
    compiler = GrammarCompiler(loaded.tokenizer)
    requests = make_requests(loaded, count, seed=5)

    def engine(chunk: int, num_blocks: int, speculative: SpeculativeConfig) -> Engine:
        own = ModelRunner(runner.model, runner.shape, CacheConfig(16, num_blocks))
        own.draft_with(draft.decoder, draft.layers, draft.description)
        config = EngineConfig(batch_size=16, max_batched_tokens=chunk)
        made = Engine(config, own, loaded.tokenizer, speculative=speculative)
        if speculative is not NO_SPECULATION:
            draft_always(made)
        return made

    expected = answer(engine(256, 600, NO_SPECULATION), requests, compiler)
    longest = max(len(r.token_ids) + r.params.max_tokens for r in requests)
    roomy, cramped = engine(256, 600, speculative), engine(24, -(-longest // 16) + 2, speculative)
    for company in (roomy, roomy, cramped):  # cold, from the cache, preempted
        got = answer(company, requests, compiler)
        different = [i for i, (a, b) in enumerate(zip(expected, got, strict=True)) if a != b]
        assert not different, f"{len(different)} of {count} differ, first {different[0]}"
        stats = company.stats()
        assert stats.total_accepted_tokens > least_accepted * stats.total_draft_tokens
    assert cramped.stats().total_preemptions > 0


@pytest.mark.parametrize(("draft_model", "least_accepted"), [("self:int4", 0.3), ("self:9", 0.0)])
def test_a_draft_model_leaves_every_bit_as_it_is(
    default_model_folder: Path, draft_model: str, least_accepted: float
) -> None:
    check_draft_model(default_model_folder, draft_model, 10, least_accepted)


@pytest.mark.slow
def test_a_draft_model_leaves_every_bit_of_a_thousand_mixed_requests_as_it_is(
    default_model_folder: Path,
) -> None:
    check_draft_model(default_model_folder, "self:int4", 1000, 0.3)


@pytest.mark.slow
def test_drafts_leave_every_bit_of_a_thousand_mixed_requests_as_it_is(
    default_model_folder: Path,
) -> None:
    check(default_model_folder, 1000, num_rounds=2)


@pytest.mark.slow
def test_unseeded_draws_have_the_same_distribution_with_drafts(
    tiny_model: Callable[..., Path],
) -> None:
    """Chi-squared over 20,000 draws with and without, of the third token: behind two guesses in one step."""
    loaded = load_model(
        ModelConfig(name=str(tiny_model("llama")), dtype="float32"),
        EngineConfig(device="cpu", kernels="c"),
        KVCacheConfig(num_blocks=2000),
        lambda message, fraction=None: None,
    )
    assert loaded.runner.has_fixed_bits
    params = SamplingParams(temperature=0.4, max_tokens=4, ignore_eos=True)

    def draws(speculative: SpeculativeConfig) -> tuple[Counter[int], Engine]:
        config = EngineConfig(batch_size=64)
        engine = Engine(config, loaded.runner, loaded.tokenizer, speculative=speculative)
        if speculative is not NO_SPECULATION:
            guess_with(engine, lambda sequence, count: [common[0]] * count)
        prompts = [[5, 9, 14, 3]] * 20_000
        return Counter(g.token_ids[2] for g in engine.generate(prompts, params)), engine

    common = [0]
    plain, _ = draws(NO_SPECULATION)
    common = [plain.most_common(1)[0][0]]
    drafted, engine = draws(SpeculativeConfig())
    assert engine.stats().total_accepted_tokens > 200
    statistic, degrees = chi_squared(plain, drafted)
    assert degrees > 10
    # Wilson and Hilferty: the cube root is nearly normal. 3.1 standard deviations: once in 1,000 runs.
    scale = 2 / (9 * degrees)
    assert ((statistic / degrees) ** (1 / 3) - (1 - scale)) / scale**0.5 < 3.1


def chi_squared(first: Counter[int], second: Counter[int]) -> tuple[float, int]:
    """Of two samples of the same size; tokens seen rarely are taken together."""
    pairs = [(first[i], second[i]) for i in first.keys() | second.keys()]
    often = [pair for pair in pairs if sum(pair) >= 20]
    rest = [pair for pair in pairs if sum(pair) < 20]
    if rest:
        often.append((sum(a for a, _ in rest), sum(b for _, b in rest)))
    return sum((a - b) ** 2 / (a + b) for a, b in often if a + b), len(often) - 1
