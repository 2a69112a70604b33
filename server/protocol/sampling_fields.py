"""The sampling fields of every route, and how they become `SamplingParams`. Ranges are known to `SamplingParams` only.

Knows no aiohttp. `None` stands for absent and for null alike.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import InvalidValue, ModelNotFound
from core.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from server.backends.base import ServedModel
from server.protocol.fields import shown

MAX_LABEL_LENGTH = 128
MAX_CHOICES = 128
_TOKEN_ID = re.compile(r"[0-9]{1,10}", re.ASCII)


class SamplingFields(msgspec.Struct, frozen=True):
    """Fields with one meaning on all routes, as a client sends them."""

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    stream: bool | None = None
    request_id: str | None = None


NAMES = frozenset(SamplingFields.__struct_fields__)


@dataclass(frozen=True, slots=True)
class Defaults:
    """What absent fields mean on one route."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


def openai_defaults(model: ServedModel, max_tokens: int) -> Defaults:
    """The model's generation config where it says something, else the API's own defaults."""
    known: Mapping[str, Any] = {
        name: value
        for name, value in model.generation_defaults.items()
        if value is not None
        and name in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    }
    return Defaults(max_tokens, **known)


def to_params(
    fields: SamplingFields,
    defaults: Defaults,
    *,
    vocab_size: int | None,
    logprobs: int | None = None,
    max_completion_tokens: int | None = None,
) -> SamplingParams:
    """`SamplingParams` with `max_tokens` as asked or by default, not yet clamped to the room.

    `max_completion_tokens` wins over `max_tokens`. Ids are checked against `vocab_size` where it is known. Raises
    `InvalidValue`.
    """
    asked = defaults.max_tokens if fields.max_tokens is None else fields.max_tokens
    if max_completion_tokens is not None:
        SamplingParams(max_tokens=asked)  # the one that loses must be valid, too
        asked = max_completion_tokens
    stop = fields.stop or () if not isinstance(fields.stop, str) else (fields.stop,)
    try:
        params = SamplingParams(
            max_tokens=asked,
            min_tokens=fields.min_tokens or 0,
            ignore_eos=bool(fields.ignore_eos),
            temperature=_or(fields.temperature, defaults.temperature),
            top_p=_or(fields.top_p, defaults.top_p),
            top_k=defaults.top_k if fields.top_k is None else fields.top_k,
            min_p=_or(fields.min_p, defaults.min_p),
            presence_penalty=_or(fields.presence_penalty, 0.0),
            frequency_penalty=_or(fields.frequency_penalty, 0.0),
            repetition_penalty=_or(fields.repetition_penalty, defaults.repetition_penalty),
            seed=None if fields.seed == -1 else fields.seed,
            stop=tuple(stop),
            stop_token_ids=tuple(fields.stop_token_ids or ()),
            include_stop_str_in_output=bool(fields.include_stop_str_in_output),
            logit_bias=_bias(fields.logit_bias or {}),
            logprobs=logprobs,
        )
    except InvalidValue as error:
        if error.param == "max_tokens" and max_completion_tokens is not None:
            name = "max_completion_tokens"
            raise InvalidValue(error.message.replace("max_tokens", name, 1), param=name) from None
        raise
    if vocab_size is not None:
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)
        _check_ids("logit_bias", params.logit_bias, vocab_size)
    return params


def check_model(name: str | None, model: ServedModel) -> None:
    """Raises `ModelNotFound` unless the name is the served model's, an alias, absent, or `"*"` is an alias."""
    if name is None or name == model.name or name in model.aliases or "*" in model.aliases:
        return
    raise ModelNotFound("The model does not exist here; see /v1/models.", param="model")


def check_common(fields: SamplingFields, *, max_choices: int, streams: bool | None = None) -> int:
    """Checks label, number of choices and, where the path decides, `stream`. Returns the number of choices."""
    label = fields.request_id
    if label is not None and len(label) > MAX_LABEL_LENGTH:
        raise InvalidValue(
            f"request_id has {len(label)} characters; at most {MAX_LABEL_LENGTH} are allowed.",
            param="request_id",
        )
    num_choices = 1 if fields.n is None else fields.n
    if not 1 <= num_choices <= max_choices:
        span = "1 on this route" if max_choices == 1 else f"an integer from 1 to {max_choices}"
        raise InvalidValue(f"n must be {span}.", param="n")
    if streams is not None and fields.stream is not None and fields.stream != streams:
        raise InvalidValue(
            f"stream must be {str(streams).lower()} or absent on this route.", param="stream"
        )
    return num_choices


def _or(value: float | None, default: float) -> float:
    return default if value is None else value


def _bias(raw: Mapping[str, float]) -> dict[int, float]:
    if len(raw) > MAX_LOGIT_BIAS:
        raise InvalidValue(
            f"logit_bias has {len(raw)} entries; at most {MAX_LOGIT_BIAS} are allowed.",
            param="logit_bias",
        )
    for name in raw:
        if not _TOKEN_ID.fullmatch(name):
            raise InvalidValue(
                f"logit_bias needs token ids in decimal digits, not {shown(name)}.",
                param="logit_bias",
            )
    return {int(name): value for name, value in raw.items()}


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    wrong = next((token_id for token_id in ids if token_id >= vocab_size), None)
    if wrong is not None:
        raise InvalidValue(
            f"{name} must hold token ids below {vocab_size}, not {wrong}.", param=name
        )
