"""A part of a tiny model drafts for the whole: what it guesses, and what it leaves in the blocks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from dummy_engine import draft_always
from tiny_decoders import CONFIGS, build, prompts

from core.config import (
    CacheConfig,
    EngineConfig,
    KVCacheConfig,
    ModelConfig,
    ModelShape,
    SpeculativeConfig,
)
from core.dummy_runner import ByteTokenizer
from core.engine import Engine
from core.errors import ConfigError
from core.model.attention import choose_kernels
from core.model.draft_loader import _check_vocabulary
from core.model.loader import load_model
from core.model.preview import plan_only
from core.model.runner import ModelRunner
from core.sampling_params import SamplingParams
from core.sequence import Sequence

DRAFT = SpeculativeConfig(method="draft", draft_model="self:1", max_tokens=5)


def make_engines(
    layers: list[int], kv_dtype: str = "auto", num_blocks: int = 300, longest: int = 5
) -> tuple[Engine, Engine]:
    """(without drafts, with drafts of these layers in every step), of the same weights."""
    _, decoder = build(CONFIGS["llama with biases"], choose_kernels(torch.device("cpu"), "c")[0])
    shape = ModelShape(3, 2, 32, 160, 4096, 2 * 3 * 2 * 32 * 4, decoder.weights_bytes, (0,))
    engines = []
    draft = SpeculativeConfig(method="draft", draft_model="self:1", max_tokens=longest)
    for speculative in (SpeculativeConfig(method="off"), draft):
        cache = CacheConfig(4, num_blocks, kv_dtype)  # type: ignore[arg-type]
        runner = ModelRunner(decoder, shape, cache)
        runner.draft_with(decoder.with_layers(layers), layers, "a part")
        engines.append(Engine(EngineConfig(), runner, ByteTokenizer(), speculative=speculative))
    draft_always(engines[1])
    return engines[0], engines[1]


PARAMS = [
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.8, seed=4, max_tokens=30, ignore_eos=True, top_p=0.9),
    SamplingParams(temperature=0, max_tokens=30, ignore_eos=True, repetition_penalty=1.2),
    SamplingParams(temperature=0, max_tokens=30, min_tokens=20),
]


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_all_layers_guess_every_token_right(kv_dtype: str) -> None:
    """Greedy, seeded and adjusted: the draft draws with the same numbers, so what it computes is what is verified."""
    plain, drafted = make_engines([0, 1, 2], kv_dtype)
    asked = prompts(7, 12, 3, 9, 5)
    assert [g.token_ids for g in drafted.generate(asked, PARAMS)] == [
        g.token_ids for g in plain.generate(asked, PARAMS)
    ]
    stats = drafted.stats()
    assert stats.total_draft_tokens > 60
    assert stats.total_accepted_tokens == stats.total_draft_tokens
    assert stats.total_steps < plain.stats().total_steps / 3


@pytest.mark.parametrize("layers", [[0], [0, 2], [1, 2]])
def test_some_layers_guess_some_tokens_right_and_change_none(layers: list[int]) -> None:
    plain, drafted = make_engines(layers)
    asked = prompts(7, 12, 3, 9, 5)
    assert drafted.generate(asked, PARAMS) == plain.generate(asked, PARAMS)
    stats = drafted.stats()
    assert 0 < stats.total_accepted_tokens < stats.total_draft_tokens


@pytest.mark.parametrize("num_blocks", [11, 12])
def test_a_draft_leaves_alone_what_another_sequence_is_about_to_copy(num_blocks: int) -> None:
    """In a full pool, the block that is copied is the next that anybody may take."""
    known = list(range(20, 31))
    answers = []
    for engine in make_engines([0, 1, 2], num_blocks=num_blocks, longest=14):
        engine.generate([known], [SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)])
        asked = [
            Sequence("running", [7, 8, 9, 10, 11], PARAMS[0]),
            Sequence("copying", [*known[:10], 3], PARAMS[0]),
        ]
        engine.add(asked[0])
        for _ in range(3):
            engine.step()
        engine.add(asked[1])
        while engine.has_work:
            engine.step()
        answers.append([sequence.token_ids for sequence in asked])
    assert answers[0] == answers[1]


def test_a_draft_model_is_loaded_counted_and_told(tiny_model: Callable[..., Path]) -> None:
    told: list[tuple[str, float | None]] = []
    loaded = load_model(
        ModelConfig(name=str(tiny_model("llama"))),
        EngineConfig(device="cpu", kernels="c"),
        KVCacheConfig(num_blocks=64),
        lambda message, fraction: told.append((message, fraction)),
        speculative=SpeculativeConfig(method="draft", draft_model="self:int8:1"),
    )
    progress = [fraction for message, fraction in told if message == "loading the draft model"]
    assert progress[-1] == 1.0
    assert loaded.runner.drafter is not None
    assert "1 of the 2 layers of the served model in int8" in loaded.runner.drafter.description
    assert 0 < loaded.plan.draft.weights_bytes < loaded.weights_bytes
    assert loaded.plan.total_bytes == (
        loaded.weights_bytes
        + loaded.plan.draft.weights_bytes
        + loaded.plan.activation_bytes
        + loaded.plan.kv_bytes
    )


def test_layers_that_are_shared_take_no_memory(tiny_model: Callable[..., Path]) -> None:
    loaded = load_model(
        ModelConfig(name=str(tiny_model("llama")), quantization="int8"),
        EngineConfig(device="cpu", kernels="c"),
        KVCacheConfig(num_blocks=64),
        lambda *_: None,
        speculative=SpeculativeConfig(method="draft", draft_model="self:int8:1"),
    )
    assert loaded.runner.drafter is not None
    assert loaded.plan.draft.weights_bytes == 0


def test_the_plan_shows_the_draft_model_and_refuses_layers_that_are_not_there(
    tiny_model: Callable[..., Path],
) -> None:
    def plan(name: str) -> str:
        speculative = SpeculativeConfig(method="draft", draft_model=name)
        settings = ModelConfig(name=str(tiny_model("llama"))), EngineConfig(), KVCacheConfig()
        return "\n".join(plan_only(*settings, speculative=speculative)[0])

    assert "MiB of the draft model" in plan("self:int4")
    assert "draft" not in plan("self:1")
    with pytest.raises(ConfigError, match=r"speculative\.draft_model asks for layer 6"):
        plan("self:7")


def test_without_the_kernels_nobody_drafts(tiny_model: Callable[..., Path]) -> None:
    loaded = load_model(
        ModelConfig(name=str(tiny_model("llama"))),
        EngineConfig(device="cpu", kernels="torch"),
        KVCacheConfig(num_blocks=64),
        lambda *_: None,
        speculative=SpeculativeConfig(method="draft", draft_model="self:int8"),
    )
    assert loaded.runner.drafter is None
    assert loaded.plan.draft.weights_bytes == 0


# --- another model, with keys and values of its own ---


def make_twins(**options: object) -> tuple[Engine, Engine]:
    """As `make_engines`, with the same weights again as another model: what it has seen, it guesses right."""
    _, decoder = build(CONFIGS["llama with biases"], choose_kernels(torch.device("cpu"), "c")[0])
    _, twin = build(CONFIGS["llama with biases"], choose_kernels(torch.device("cpu"), "c")[0])
    shape = ModelShape(3, 2, 32, 160, 4096, 2 * 3 * 2 * 32 * 4, decoder.weights_bytes, (0,))
    num_blocks = options.pop("num_blocks", 300)
    engines = []
    for speculative in (SpeculativeConfig(method="off"), DRAFT):
        runner = ModelRunner(decoder, shape, CacheConfig(4, num_blocks))  # type: ignore[arg-type]
        runner.draft_with(twin, None, "a twin")
        config = EngineConfig(**options)  # type: ignore[arg-type]
        engines.append(Engine(config, runner, ByteTokenizer(), speculative=speculative))
    draft_always(engines[1])
    return engines[0], engines[1]


def accepted(engine: Engine) -> float:
    stats = engine.stats()
    return stats.total_accepted_tokens / stats.total_draft_tokens


def test_a_twin_guesses_every_token_right_behind_prompts_in_pieces() -> None:
    plain, drafted = make_twins(max_batched_tokens=16)
    asked = prompts(70, 12, 3, 33, 5)
    assert drafted.generate(asked, PARAMS) == plain.generate(asked, PARAMS)
    assert drafted.stats().total_draft_tokens > 60
    assert accepted(drafted) == 1


def test_a_twin_sees_what_others_left_in_the_prefix_cache() -> None:
    """Also where drafts were off while it came, and where a beginning of a block was copied."""
    plain, drafted = make_twins()
    speculator = drafted.speculator
    assert speculator is not None
    drafted.speculator = None
    first = drafted.generate(prompts(41), PARAMS[0])[0].token_ids
    drafted.speculator = speculator
    behind = [*prompts(41)[0], *first]
    asked = [[*behind, 7], [*behind[:50], 9, 8], behind[:39]]
    made = [g.token_ids for g in drafted.generate(asked, PARAMS[0])]
    assert made == [g.token_ids for g in plain.generate(asked, PARAMS[0])]
    assert drafted.stats().total_prefix_hits > 100
    assert accepted(drafted) == 1


def test_a_twin_guesses_right_after_preemption() -> None:
    plain, drafted = make_twins(num_blocks=26, max_batched_tokens=24)
    asked = prompts(20, 31, 25, 18, 22)
    assert drafted.generate(asked, PARAMS) == plain.generate(asked, PARAMS)
    assert drafted.stats().total_preemptions > 0
    assert accepted(drafted) == 1


def test_a_twin_goes_on_right_behind_guesses_of_another_mind() -> None:
    """Only half of the drafts are of the twin's own choice: it computed others, which were verified and thrown away."""
    plain, drafted = make_twins()
    runner = drafted.runner
    assert isinstance(runner, ModelRunner)
    assert runner.drafter is not None
    chooser, turn = runner.drafter._chooser, [0]

    class OtherMind:
        def guess(self, *args: object) -> list[int]:
            turn[0] += 1
            found = chooser.guess(*args)  # type: ignore[arg-type]
            return [(i + 1) % 160 for i in found] if turn[0] % 3 == 0 else found

    runner.drafter._chooser = OtherMind()  # type: ignore[assignment]
    asked = prompts(20, 31)
    assert drafted.generate(asked, PARAMS[:2]) == plain.generate(asked, PARAMS[:2])
    stats = drafted.stats()
    # Two of three first guesses are right, whatever was thrown away before them.
    assert stats.total_accepted_per_position[0] >= 0.6 * stats.total_drafts


def test_another_model_is_loaded_with_memory_of_its_own(tiny_model: Callable[..., Path]) -> None:
    loaded = load_model(
        ModelConfig(name=str(tiny_model("llama"))),
        EngineConfig(device="cpu", kernels="c"),
        KVCacheConfig(num_blocks=64),
        lambda *_: None,
        speculative=SpeculativeConfig(method="draft", draft_model=str(tiny_model("qwen3"))),
    )
    assert loaded.runner.drafter is not None
    draft = loaded.plan.draft
    assert draft.weights_bytes > 0
    served_bytes = loaded.shape.kv_bytes_per_token
    assert draft.kv_bytes_per_token > 0
    assert loaded.plan.bytes_per_block == 16 * (served_bytes + draft.kv_bytes_per_token)
    engine = Engine(
        EngineConfig(),
        loaded.runner,
        loaded.tokenizer,
        speculative=SpeculativeConfig(method="draft"),
    )
    draft_always(engine)
    assert len(engine.generate(["hello"], PARAMS[0])[0].token_ids) == 30
    assert engine.stats().total_draft_tokens > 0


def test_a_draft_model_with_another_vocabulary_is_refused_by_the_plan(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    def plan(name: str) -> None:
        plan_only(
            ModelConfig(name=str(tiny_model("llama"))),
            EngineConfig(),
            KVCacheConfig(),
            speculative=SpeculativeConfig(method="draft", draft_model=name),
        )

    with pytest.raises(ConfigError, match=r"speculative\.draft_model") as raised:
        plan("/no/such/folder")
    assert "model.name" not in raised.value.message
    with pytest.raises(ConfigError, match=r"cannot draft: model type gpt2"):
        plan(str(tiny_model("gpt2")))

    other = tmp_path / "other"
    shutil.copytree(tiny_model("llama"), other)
    definition = (other / "tokenizer.json").read_text()
    vocabulary = json.loads(definition)
    ids = vocabulary["model"]["vocab"]
    first, second = sorted(ids, key=ids.__getitem__)[40:42]
    ids[first], ids[second] = ids[second], ids[first]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ConfigError, match=r"speculative\.draft_model: .* has another vocabulary"):
        plan(str(other))
    (other / "tokenizer.json").write_text(definition[:50])
    with pytest.raises(ConfigError, match=r"speculative\.draft_model: .*tokenizer\.json cannot be"):
        plan(str(other))

    class Swapped(ByteTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return super().token_bytes({65: 66, 66: 65}.get(token_id, token_id))

    with pytest.raises(ConfigError, match="token 65 is b'B' there and b'A' in the served model"):
        _check_vocabulary("theirs", Swapped(), ByteTokenizer())  # type: ignore[arg-type]
