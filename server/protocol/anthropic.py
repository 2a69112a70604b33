"""`POST /v1/messages` and `/v1/messages/count_tokens`: what they accept of Anthropic's API. Knows no aiohttp.

A last turn of the assistant is continued. Nothing that a message names is ever fetched.
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
from server.protocol.anthropic_turns import read_tools, read_turns
from server.protocol.chat import ChatPrompt
from server.protocol.fields import REFUSED, UNBOUND, UnknownFields, convert, refuse_unsupported
from server.protocol.sampling_fields import (
    SamplingFields,
    check_common,
    check_model,
    openai_defaults,
    to_params,
)
from server.protocol.structured import flat_format
from server.protocol.tools import bind, without_stops

REFUSED_FIELDS: Mapping[str, tuple[object, ...]] = {
    **REFUSED,
    **UNBOUND,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "container": (),
    "mcp_servers": ([],),
}
_IGNORED = frozenset(
    {"metadata", "service_tier", "inference_geo", "cache_control", "diagnostics", "speed"}
)


class MessageFields(msgspec.Struct, frozen=True):
    """What is Anthropic's own; sampling fields that the API does not know mean what they mean everywhere."""

    stop_sequences: list[str] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None


_KNOWN = (
    sampling_fields.NAMES
    | REFUSED_FIELDS.keys()
    | set(MessageFields.__struct_fields__)
    | _IGNORED
    | {"messages", "system", "tools", "tool_choice"}
)


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A valid request, before its messages are tokens."""

    prompt: ChatPrompt
    params: SamplingParams
    streams: bool
    grammar: Grammar | None = None


def parse_message(
    body: Mapping[str, Any], model: ServedModel, unknown: UnknownFields
) -> MessageRequest:
    """Raises `NoriaError`; left to be found wrong are the template's opinion and the number of tokens."""
    fields = convert(body, SamplingFields)
    own = convert(body, MessageFields)
    _check_extras(body, own)
    check_common(fields, max_choices=1)
    if fields.model is None:
        raise InvalidValue("model is required.", param="model")
    check_model(fields.model, model)
    if fields.max_tokens is None:
        raise InvalidValue("max_tokens is required.", param="max_tokens")
    params = _params(fields, own, model, fields.max_tokens)
    prompt = _prompt(body)
    grammar = bind(prompt.tools, _grammar(own), model)
    unknown.note(body.keys() - _KNOWN)
    return MessageRequest(prompt, without_stops(params, prompt.tools), bool(fields.stream), grammar)


def parse_count(body: Mapping[str, Any], model: ServedModel) -> ChatPrompt:
    """The messages to count; what else a message may say is checked as there. Raises `NoriaError`."""
    fields = convert(body, SamplingFields)
    own = convert(body, MessageFields)
    _check_extras(body, own)
    check_common(fields, max_choices=1)
    check_model(fields.model, model)
    _params(fields, own, model, fields.max_tokens or MAX_TOKENS)
    prompt = _prompt(body)
    bind(prompt.tools, _grammar(own), model)
    return prompt


def _check_extras(body: Mapping[str, Any], own: MessageFields) -> None:
    refuse_unsupported(body, REFUSED_FIELDS)
    kind = (own.thinking or {}).get("type", "disabled")
    if kind not in ("disabled", "adaptive"):  # the second leaves it to the model
        raise UnsupportedValue("thinking of this type is not supported.", param="thinking")


def _grammar(own: MessageFields) -> Grammar | None:
    config = own.output_config or {}
    grammar = flat_format(config.get("format"), "output_config.format")
    older = flat_format(own.output_format, "output_format")
    if grammar is not None and older is not None:
        raise InvalidValue(
            "output_format and output_config.format exclude each other.", param="output_format"
        )
    return grammar or older


def _prompt(body: Mapping[str, Any]) -> ChatPrompt:
    turns, tools = read_turns(body), read_tools(body)
    continues = turns[-1]["role"] == "assistant"
    return ChatPrompt(turns, not continues, continues, {}, tools)


def _params(
    fields: SamplingFields, own: MessageFields, model: ServedModel, max_tokens: int
) -> SamplingParams:
    if own.stop_sequences is not None:
        if fields.stop is not None:
            raise InvalidValue("stop and stop_sequences exclude each other.", param="stop")
        fields = msgspec.structs.replace(fields, stop=own.stop_sequences)
    try:
        return to_params(
            fields, openai_defaults(model, max_tokens), vocab_size=model.shape.vocab_size
        )
    except InvalidValue as error:
        if error.param != "stop" or own.stop_sequences is None:
            raise
        name = "stop_sequences"
        raise InvalidValue(error.message.replace("stop", name, 1), param=name) from None
