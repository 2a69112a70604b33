"""`POST /v1/responses`: what it accepts. Stateless: nothing is stored, so nothing stored can be named.

Knows no aiohttp. Instructions and input items become the messages of a chat (`responses_input.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import InvalidValue, UnsupportedValue
from core.sampling_params import MAX_TOKENS, SamplingParams
from core.structured.grammar import Grammar
from server.backends.base import ServedModel
from server.protocol import sampling_fields
from server.protocol.chat import ChatPrompt
from server.protocol.fields import (
    IGNORED_BY_OPENAI,
    REFUSED,
    UNBOUND,
    UnknownFields,
    convert,
    refuse_unsupported,
)
from server.protocol.responses_input import read_input, read_tools, told_tools
from server.protocol.sampling_fields import (
    SamplingFields,
    check_common,
    check_model,
    openai_defaults,
    to_params,
)
from server.protocol.structured import flat_format
from server.protocol.tools import bind, without_stops

LOGPROBS = "message.output_text.logprobs"
_NEEDS_STORE = ("previous_response_id", "conversation", "prompt")
REFUSED_FIELDS: Mapping[str, tuple[object, ...]] = {
    **REFUSED,
    **UNBOUND,
    "logprobs": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "background": (False,),
    "truncation": ("disabled",),
    "context_management": ([],),
    "moderation": (),
}


class ResponseFields(msgspec.Struct, frozen=True):
    instructions: str | None = None
    max_output_tokens: int | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: dict[str, Any] | None = None
    metadata: dict[str, Any] | None = None
    stream_options: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


_KNOWN = (
    sampling_fields.NAMES
    | REFUSED_FIELDS.keys()
    | IGNORED_BY_OPENAI
    | set(ResponseFields.__struct_fields__)
    | set(_NEEDS_STORE)
    | {"input", "tools", "tool_choice", "parallel_tool_calls"}
    | {"max_tool_calls", "prompt_cache_retention", "prompt_cache_options"}
)


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A valid request, before its items are tokens. `echoed` are the members of the answer that repeat it."""

    prompt: ChatPrompt
    params: SamplingParams
    streams: bool
    echoed: dict[str, Any]
    grammar: Grammar | None = None


def parse_response(
    body: Mapping[str, Any], model: ServedModel, unknown: UnknownFields
) -> ResponseRequest:
    """Raises `NoriaError`; left to be found wrong are the template's opinion and the number of tokens."""
    fields = convert(body, SamplingFields)
    own = convert(body, ResponseFields)
    for name in _NEEDS_STORE:
        if body.get(name) is not None:
            raise UnsupportedValue(
                f"{name} is not supported: this server stores no responses. Send the whole conversation in input.",
                param=name,
            )
    refuse_unsupported(body, REFUSED_FIELDS)
    check_common(fields, max_choices=1)
    check_model(fields.model, model)
    params = _params(fields, own, model)
    messages = read_input(body.get("input"))
    if own.instructions is not None:
        messages.insert(0, {"role": "system", "content": own.instructions})
    tools = read_tools(body)
    text = own.text or {}
    grammar = bind(tools, flat_format(text.get("format"), "text.format"), model)
    unknown.note(body.keys() - _KNOWN)
    return ResponseRequest(
        ChatPrompt(messages, True, False, {}, tools),
        without_stops(params, tools),
        bool(fields.stream),
        {
            "instructions": own.instructions,
            "max_output_tokens": own.max_output_tokens,
            "metadata": own.metadata or {},
            "temperature": params.temperature,
            "text": {**text, "format": text.get("format") or {"type": "text"}},
            "top_p": params.top_p,
            "top_logprobs": params.logprobs or 0,
            **told_tools(body),
        },
        grammar,
    )


def _params(fields: SamplingFields, own: ResponseFields, model: ServedModel) -> SamplingParams:
    if own.max_output_tokens is not None and fields.max_tokens is not None:
        raise InvalidValue(
            "max_tokens and max_output_tokens exclude each other.", param="max_tokens"
        )
    wants_logprobs = own.top_logprobs is not None or LOGPROBS in (own.include or ())
    renamed = {"max_completion_tokens": "max_output_tokens", "logprobs": "top_logprobs"}
    try:
        return to_params(
            fields,
            openai_defaults(model, MAX_TOKENS),  # the room left
            vocab_size=model.shape.vocab_size,
            logprobs=(own.top_logprobs or 0) if wants_logprobs else None,
            max_completion_tokens=own.max_output_tokens,
        )
    except InvalidValue as error:
        if error.param not in renamed:
            raise
        name = renamed[error.param]
        raise InvalidValue(error.message.replace(error.param, name, 1), param=name) from None
