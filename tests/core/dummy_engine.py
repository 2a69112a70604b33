"""Engines over the dummy runner, and what their output must be. Shared by the tests of this folder."""

from __future__ import annotations

from typing import Any

from core.config import EngineConfig
from core.dummy_runner import ByteTokenizer, DummyRunner, _chain, _printable, make_dummy_runner
from core.engine import Engine
from core.outputs import FinishReason, StepOutput
from core.sampling_params import SamplingParams
from core.sequence import Sequence

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
