"""`SamplingParams`: how the next token of one sequence is chosen. The only place that knows the ranges."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from core.errors import InvalidValue

MAX_TOKENS = 2**31 - 1
MAX_SEED = 2**63 - 1
MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of one sequence. Construction checks every range and raises `InvalidValue` with `param`.

    `temperature` 0 is greedy. `top_k` 0 or -1 is off. `seed` None draws a fresh one. `logprobs` None is off;
    0 gives the chosen token only, k the k best as well. `logit_bias` maps token ids to additive biases.
    Token ids are checked against the vocabulary by whoever knows it (`server/protocol`, `Engine.add`).
    """

    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _number("temperature", self.temperature, 0, 2)
        _number("top_p", self.top_p, 0, 1)
        _whole("top_k", self.top_k, -1, MAX_TOKENS)
        _number("min_p", self.min_p, 0, 1)
        _number("presence_penalty", self.presence_penalty, -2, 2)
        _number("frequency_penalty", self.frequency_penalty, -2, 2)
        _number("repetition_penalty", self.repetition_penalty, 0, 10, open_low=True)
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_lists(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _check_lists(params: SamplingParams) -> None:
    if len(params.stop) > MAX_STOPS:
        raise InvalidValue(
            f"stop has {len(params.stop)} strings; at most {MAX_STOPS} are allowed.", param="stop"
        )
    for text in params.stop:
        if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_LENGTH:
            raise InvalidValue(
                f"every stop string must have 1 to {MAX_STOP_LENGTH} characters.", param="stop"
            )
    if len(params.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidValue(
            f"stop_token_ids has {len(params.stop_token_ids)} entries; "
            f"at most {MAX_STOP_TOKEN_IDS} are allowed.",
            param="stop_token_ids",
        )
    for token_id in params.stop_token_ids:
        _whole("stop_token_ids", token_id, 0, MAX_TOKENS)
    if len(params.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidValue(
            f"logit_bias has {len(params.logit_bias)} entries; at most {MAX_LOGIT_BIAS} are allowed.",
            param="logit_bias",
        )
    for token_id, bias in params.logit_bias.items():
        _whole("logit_bias", token_id, 0, MAX_TOKENS)
        _number(f"logit_bias.{token_id}", bias, -100, 100)


def _whole(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise InvalidValue(f"{name} must be an integer from {low} to {high}.", param=name)


def _number(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    if type(value) not in (int, float):
        raise InvalidValue(f"{name} must be a number.", param=name)
    number = float(value)  # type: ignore[arg-type]
    if not math.isfinite(number) or not low <= number <= high or (open_low and number == low):
        span = f"above {low:g} and at most {high:g}" if open_low else f"from {low:g} to {high:g}"
        raise InvalidValue(f"{name} must be a number {span}.", param=name)
