"""`POST /v1/responses`: what it accepts. Stateless: nothing is stored, so nothing stored can be named.

Knows no aiohttp. Instructions and input items become the messages of a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import InvalidValue, UnsupportedValue
from core.sampling_params import MAX_TOKENS, SamplingParams
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
from server.protocol.messages import MAX_MESSAGES
from server.protocol.sampling_fields import (
    SamplingFields,
    check_common,
    check_model,
    openai_defaults,
    to_params,
)

LOGPROBS = "message.output_text.logprobs"
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text")
_NEEDS_STORE = ("previous_response_id", "conversation", "prompt")
REFUSED_FIELDS: Mapping[str, tuple[object, ...]] = {
    **REFUSED,
    **UNBOUND,
    "logprobs": (False,),
    "echo": (False,),
    "suffix": ("",),
    "best_of": (1,),
    "background": (False,),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
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


_KNOWN = (
    sampling_fields.NAMES
    | REFUSED_FIELDS.keys()
    | IGNORED_BY_OPENAI
    | set(ResponseFields.__struct_fields__)
    | set(_NEEDS_STORE)
    | {"input", "reasoning", "max_tool_calls", "prompt_cache_retention", "prompt_cache_options"}
)


@dataclass(frozen=True, slots=True)
class ResponseRequest:
    """A valid request, before its items are tokens. `echoed` are the members of the answer that repeat it."""

    prompt: ChatPrompt
    params: SamplingParams
    streams: bool
    echoed: dict[str, Any]


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
    _check_format(own.text)
    check_common(fields, max_choices=1)
    check_model(fields.model, model)
    params = _params(fields, own, model)
    messages = _messages(body.get("input"))
    if own.instructions is not None:
        messages.insert(0, {"role": "system", "content": own.instructions})
    unknown.note(body.keys() - _KNOWN)
    return ResponseRequest(
        ChatPrompt(messages, True, False, {}),
        params,
        bool(fields.stream),
        {
            "instructions": own.instructions,
            "max_output_tokens": own.max_output_tokens,
            "metadata": own.metadata or {},
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_logprobs": params.logprobs or 0,
        },
    )


def _params(fields: SamplingFields, own: ResponseFields, model: ServedModel) -> SamplingParams:
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


def _check_format(text: dict[str, Any] | None) -> None:
    """Plain text only, until there is a grammar engine."""
    given = (text or {}).get("format")
    if given is None:
        return
    kind = given.get("type") if isinstance(given, dict) else None
    if not isinstance(kind, str):
        raise InvalidValue("text.format.type must be a string.", param="text.format.type")
    if kind != "text":
        raise UnsupportedValue(f"text.format of type {kind} is not supported.", param="text.format")


def _messages(given: object) -> list[dict[str, Any]]:
    if isinstance(given, str):
        if not given:
            raise InvalidValue("input must not be empty.", param="input")
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidValue("input must be a string or a list of items.", param="input")
    if not 1 <= len(given) <= MAX_MESSAGES:
        raise InvalidValue(
            f"input has {len(given)} items; 1 to {MAX_MESSAGES} are allowed.", param="input"
        )
    return [_item(item, f"input[{index}]") for index, item in enumerate(given)]


def _item(item: object, path: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InvalidValue(f"{path} must be an object.", param=path)
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise InvalidValue(f"{path}.type must be a string.", param=f"{path}.type")
    if kind != "message":
        raise UnsupportedValue(f"{path}: only items of type message are supported.", param=path)
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        names = ", ".join(_ROLES)
        raise InvalidValue(f"{path}.role must be one of {names}.", param=f"{path}.role")
    content = item.get("content")
    if isinstance(content, str):
        return {"role": _ROLES[role], "content": content}
    if not isinstance(content, list):
        raise InvalidValue(
            f"{path}.content must be a string or a list of text parts.", param=f"{path}.content"
        )
    parts = [_part(part, f"{path}.content[{index}]") for index, part in enumerate(content)]
    return {"role": _ROLES[role], "content": "".join(parts)}


def _part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidValue(f"{path} must be an object.", param=path)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise InvalidValue(f"{path}.type must be a string.", param=f"{path}.type")
    if kind not in _TEXT_PARTS:
        raise UnsupportedValue(f"{path}: only parts of text are supported.", param=path)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidValue(f"{path}.text must be a string.", param=f"{path}.text")
    return text
