"""`POST /v1/messages` and `/v1/messages/count_tokens`: what they accept of Anthropic's API. Knows no aiohttp.

Turns of the same role that follow each other become one turn, and blocks of text are paragraphs of it, as that API
does. A last turn of the assistant is continued. Nothing that a message names is ever fetched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import InvalidValue, UnsupportedValue
from core.sampling_params import SamplingParams
from server.backends.base import ServedModel
from server.protocol import sampling_fields
from server.protocol.chat import ChatPrompt
from server.protocol.fields import REFUSED, UNBOUND, UnknownFields, convert, refuse_unsupported
from server.protocol.messages import MAX_MESSAGES, text_of_part
from server.protocol.sampling_fields import (
    SamplingFields,
    check_common,
    check_model,
    openai_defaults,
    to_params,
)

BETWEEN_BLOCKS = "\n\n"
_ROLES = ("user", "assistant")
REFUSED_FIELDS: Mapping[str, tuple[object, ...]] = {
    **REFUSED,
    **UNBOUND,
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ({"type": "auto"}, {"type": "none"}),
    "container": (),
    "mcp_servers": ([],),
    "output_format": (),
}
_IGNORED = frozenset(
    {"metadata", "service_tier", "inference_geo", "cache_control", "diagnostics", "speed"}
)


class MessageFields(msgspec.Struct, frozen=True):
    """What is Anthropic's own; sampling fields that the API does not know mean what they mean everywhere."""

    stop_sequences: list[str] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None


_KNOWN = (
    sampling_fields.NAMES
    | REFUSED_FIELDS.keys()
    | set(MessageFields.__struct_fields__)
    | _IGNORED
    | {"messages", "system"}
)


@dataclass(frozen=True, slots=True)
class MessageRequest:
    """A valid request, before its messages are tokens."""

    prompt: ChatPrompt
    params: SamplingParams
    streams: bool


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
    params = _params(fields, own, model)
    prompt = _prompt(body)
    unknown.note(body.keys() - _KNOWN)
    return MessageRequest(prompt, params, bool(fields.stream))


def parse_count(body: Mapping[str, Any], model: ServedModel) -> ChatPrompt:
    """The messages to count. Raises `NoriaError`."""
    fields = convert(body, SamplingFields)
    _check_extras(body, convert(body, MessageFields))
    check_model(fields.model, model)
    return _prompt(body)


def _check_extras(body: Mapping[str, Any], own: MessageFields) -> None:
    refuse_unsupported(body, REFUSED_FIELDS)
    kind = (own.thinking or {}).get("type", "disabled")
    if kind not in ("disabled", "adaptive"):  # the second leaves it to the model
        raise UnsupportedValue("thinking of this type is not supported.", param="thinking")
    if (own.output_config or {}).get("format") is not None:
        raise UnsupportedValue(
            "output_config.format is not supported.", param="output_config.format"
        )


def _params(fields: SamplingFields, own: MessageFields, model: ServedModel) -> SamplingParams:
    if own.stop_sequences is not None:
        if fields.stop is not None:
            raise InvalidValue("stop and stop_sequences exclude each other.", param="stop")
        fields = msgspec.structs.replace(fields, stop=own.stop_sequences)
    assert fields.max_tokens is not None
    try:
        return to_params(
            fields, openai_defaults(model, fields.max_tokens), vocab_size=model.shape.vocab_size
        )
    except InvalidValue as error:
        if error.param != "stop" or own.stop_sequences is None:
            raise
        name = "stop_sequences"
        raise InvalidValue(error.message.replace("stop", name, 1), param=name) from None


def _prompt(body: Mapping[str, Any]) -> ChatPrompt:
    given = body.get("messages")
    if not isinstance(given, list):
        raise InvalidValue("messages must be a list of objects.", param="messages")
    if not 1 <= len(given) <= MAX_MESSAGES:
        raise InvalidValue(
            f"messages has {len(given)} entries; 1 to {MAX_MESSAGES} are allowed.", param="messages"
        )
    turns: list[dict[str, Any]] = []
    if body.get("system") is not None:
        turns.append({"role": "system", "content": _text(body["system"], "system")})
    for index, message in enumerate(given):
        role, text = _message(message, f"messages[{index}]")
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += BETWEEN_BLOCKS + text
        else:
            turns.append({"role": role, "content": text})
    continues = turns[-1]["role"] == "assistant"
    return ChatPrompt(turns, not continues, continues, {})


def _message(message: object, path: str) -> tuple[str, str]:
    if not isinstance(message, dict):
        raise InvalidValue(f"{path} must be an object.", param=path)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidValue(
            f"{path}.role must be user or assistant; instructions belong in system.",
            param=f"{path}.role",
        )
    return role, _text(message.get("content"), f"{path}.content")


def _text(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidValue(f"{path} must be a string or a list of text blocks.", param=path)
    return BETWEEN_BLOCKS.join(
        text_of_part(block, f"{path}[{i}]", "blocks") for i, block in enumerate(content)
    )
