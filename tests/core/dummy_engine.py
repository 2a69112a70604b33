"""Engines over the dummy runner, and what their output must be. Shared by the tests of this folder."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from core.config import EngineConfig, SpeculativeConfig
from core.dummy_runner import ByteTokenizer, DummyRunner, _chain, _printable, make_dummy_runner
from core.engine import Engine
from core.outputs import FinishReason, StepOutput
from core.sampling_params import SamplingParams
from core.sequence import Sequence
from core.speculation.speculator import Candidate
from core.speculation.step_costs import StepCosts

RUNNER_KEYS = {"num_blocks", "block_size", "max_context", "script", "eos_token_ids", "vocab_size"}


def make_engine(**options: Any) -> tuple[Engine, DummyRunner]:
    """An engine whose runner checks every context. Options of the runner and of `EngineConfig` may be mixed."""
    runner_options = {key: options.pop(key) for key in list(options) if key in RUNNER_KEYS}
    runner = make_dummy_runner(checks_context=True, **runner_options)
    tokenizer = ByteTokenizer(num_eos=len(runner.shape.eos_token_ids))
    return Engine(EngineConfig(**options), runner, tokenizer), runner


def greedy(max_tokens: int, **params: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0, **params)


def make_sequence(name: str, prompt: str, max_tokens: int = 8, **params: Any) -> Sequence:
    return Sequence(name, list(prompt.encode()), greedy(max_tokens, **params))


def solo_text(prompt: bytes, num_tokens: int) -> str:
    """What the dummy runner says to a greedy prompt, computed without any engine."""
    state = 0
    for token_id in prompt:
        state = _chain(state, token_id)
    output = bytearray()
    for _ in range(num_tokens):
        output.append(_printable(state))
        state = _chain(state, output[-1])
    return output.decode()


def run_to_end(engine: Engine, max_steps: int = 10_000) -> list[StepOutput]:
    """Steps until nothing is left, with all invariants checked after every step."""
    outputs: list[StepOutput] = []
    for _ in range(max_steps):
        if not engine.has_work:
            return outputs
        outputs += engine.step()
        engine.check_invariants()
    raise AssertionError("the engine never came to an end")


def text_of(outputs: list[StepOutput], name: str) -> str:
    return "".join(output.text for output in outputs if output.sequence_id == name)


def end_of(outputs: list[StepOutput], name: str) -> StepOutput:
    """The one final output, which must be the last."""
    mine = [output for output in outputs if output.sequence_id == name]
    finals = [output for output in mine if output.finish_reason is not None]
    assert len(finals) == 1, f"{name} has {len(finals)} final outputs"
    assert mine[-1] is finals[0]
    return finals[0]


def reason_of(outputs: list[StepOutput], name: str) -> FinishReason | None:
    return end_of(outputs, name).finish_reason


class Clock:
    """A millisecond from look to look, so that a step takes as long as the tests say."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 1e-3
        return self.now_s

    def spend(self, seconds: float) -> None:
        self.now_s += seconds


def drafting_engine(max_tokens: int = 8, **options: Any) -> tuple[Engine, DummyRunner]:
    runner_options = {key: options.pop(key) for key in list(options) if key in RUNNER_KEYS}
    runner = make_dummy_runner(checks_context=True, **runner_options)
    engine = Engine(
        EngineConfig(**options),
        runner,
        ByteTokenizer(num_eos=len(runner.shape.eos_token_ids)),
        speculative=SpeculativeConfig(max_tokens=max_tokens),
        clock=Clock(),
    )
    return engine, runner


def guess_with(engine: Engine, guess: Callable[[Sequence, int], list[int]]) -> None:
    """From now on every decode gets these guesses, whatever they may cost."""
    speculator = engine.speculator
    assert speculator is not None

    def find(decodes: list[tuple[int, Sequence]]) -> list[Candidate]:
        found = find_candidates(decodes)
        known = {candidate.row for candidate in found}
        for row, sequence in decodes:
            room = min(speculator._max_tokens, speculator._num_left(sequence) - 1)
            if row not in known and room > 0:
                found.append(Candidate(row, sequence, sequence.drafting, 0.5, room))
        return found

    def decide(candidates: list[Candidate], costs: StepCosts, num_decodes: int) -> None:
        for candidate in candidates:
            candidate.count = candidate.room

    def draft(candidate: Candidate) -> tuple[int, ...]:
        ids = tuple(guess(candidate.sequence, candidate.count))[: candidate.count]
        return ids[: speculator._scheduler.reserve(candidate.sequence, len(ids))]

    find_candidates = speculator._find_candidates
    speculator._find_candidates = find
    speculator._decide = decide
    speculator._draft = draft


def draft_always(engine: Engine) -> None:
    """From now on every decode gets a draft as long as may be, whatever it may cost. The drafter is asked as ever."""
    speculator = engine.speculator
    assert speculator is not None

    def decide(candidates: list[Candidate], costs: StepCosts, num_decodes: int) -> None:
        for candidate in candidates:
            candidate.count = candidate.room

    speculator._decide = decide


def continuation(sequence: Sequence, count: int) -> list[int]:
    """What the dummy runner will say."""
    return list(solo_text(bytes(sequence.token_ids), count).encode())


def partly_right(generator: random.Random) -> Callable[[Sequence, int], list[int]]:
    def guess(sequence: Sequence, count: int) -> list[int]:
        ids = continuation(sequence, count)
        num_right = generator.randint(0, count)
        return [*ids[:num_right], *(generator.randrange(256) for _ in ids[num_right:])]

    return guess
