"""The native routes: what they accept, and the defaults that differ between them.

Knows no aiohttp.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from core.errors import InvalidValue
from core.sampling_params import SamplingParams
from core.structured.grammar import Grammar
from server.backends.base import ServedModel
from server.protocol import structured
from server.protocol.fields import REFUSED, UnknownFields, convert, refuse_unsupported
from server.protocol.prompts import MAX_PROMPTS, check_amount, check_text
from server.protocol.sampling_fields import (
    NAMES,
    Defaults,
    SamplingFields,
    check_common,
    check_model,
    to_params,
)
from server.protocol.structured import parse_grammar

GENERATE_DEFAULTS = Defaults(max_tokens=50, temperature=0.0)
STREAM_DEFAULTS = Defaults(max_tokens=50, temperature=0.7)
VLLM_DEFAULTS = Defaults(max_tokens=20, temperature=0.7, top_p=0.95)

REFUSED_FIELDS = {**REFUSED, "logprobs": (False,), "top_logprobs": (0,)}
_TEXTS = frozenset({"prompt", "model", "stop", "request_id"}) | structured.TEXTS
_KNOWN = (
    NAMES
    | REFUSED_FIELDS.keys()
    | structured.NAMES
    | {"prompt", "prompts", "priority", "response_format"}
)
_IN_QUERY = (NAMES | REFUSED_FIELDS.keys()) - {"stop_token_ids", "logit_bias"} | {"prompt"}


@dataclass(frozen=True, slots=True)
class NativeRequest:
    """A valid request, before its prompts are tokens."""

    prompts: list[str]
    params: SamplingParams
    is_list: bool
    grammar: Grammar | None = None


def parse_one(
    body: Mapping[str, Any],
    model: ServedModel,
    defaults: Defaults,
    unknown: UnknownFields,
    *,
    streams: bool,
) -> NativeRequest:
    """A body with `prompt`. Raises `NoriaError`."""
    params = _params(body, model, defaults, unknown, streams=streams)
    return NativeRequest(
        [check_text(body.get("prompt"), "prompt")], params, False, parse_grammar(body)
    )


def parse_list(
    body: Mapping[str, Any],
    model: ServedModel | None,
    defaults: Defaults,
    unknown: UnknownFields,
    *,
    max_waiting: int,
) -> NativeRequest:
    """A body with `prompts`, which may be empty. Without a model, ids and its name are not checked."""
    params = _params(body, model, defaults, unknown, streams=False)
    prompts = body.get("prompts")
    if not isinstance(prompts, list):
        raise InvalidValue("prompts must be a list of strings.", param="prompts")
    if len(prompts) > MAX_PROMPTS:
        raise InvalidValue(
            f"prompts has {len(prompts)} entries; at most {MAX_PROMPTS} are allowed.",
            param="prompts",
        )
    texts = [check_text(text, f"prompts[{index}]") for index, text in enumerate(prompts)]
    check_amount(len(texts), 1, max_waiting)
    return NativeRequest(texts, params, True, parse_grammar(body))


def _params(
    body: Mapping[str, Any],
    model: ServedModel | None,
    defaults: Defaults,
    unknown: UnknownFields,
    *,
    streams: bool,
) -> SamplingParams:
    fields = convert(body, SamplingFields)
    refuse_unsupported(body, REFUSED_FIELDS)
    check_common(fields, max_choices=1, streams=streams)
    if model is not None:
        check_model(fields.model, model)
    unknown.note(body.keys() - _KNOWN)
    vocab_size = None if model is None else model.shape.vocab_size
    return to_params(fields, defaults, vocab_size=vocab_size)


def body_of_query(query: list[tuple[str, str]]) -> dict[str, Any]:
    """Query parameters as the body they stand for: texts as they are, the rest as JSON scalars.

    `stop` may be repeated, nothing else may. What is not a sampling field is passed on as text.
    """
    body: dict[str, Any] = {}
    for name, text in query:
        if name == "stop":
            body.setdefault("stop", []).append(text)
        elif name in body:
            raise InvalidValue(f"{name} is given twice.", param=name)
        elif name in ("stop_token_ids", "logit_bias"):
            raise InvalidValue(f"{name} cannot be given in a query.", param=name)
        else:
            body[name] = _scalar(name, text) if name in _IN_QUERY - _TEXTS else text
    return body


def _scalar(name: str, text: str) -> Any:
    try:
        value = orjson.loads(text)
    except ValueError:
        raise InvalidValue(f"{name} must be a JSON number or boolean.", param=name) from None
    if isinstance(value, (dict, list)):
        raise InvalidValue(f"{name} must be a JSON number or boolean.", param=name)
    return value
