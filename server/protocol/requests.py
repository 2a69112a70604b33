"""The schemas of request bodies: made of the structs that requests are really read with, plus what those cannot tell.

That is the ranges, the fields that are read by hand (`messages`, `prompt`), and the tables of what is refused or
ignored. Tests hold the ranges against the parsers. Knows no aiohttp; used by `openapi.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from core import sampling_params as limits
from server.protocol import anthropic, chat, completions, native, responses
from server.protocol.anthropic import MessageFields
from server.protocol.chat import ChatFields
from server.protocol.completions import CompletionFields
from server.protocol.fields import IGNORED_BY_OPENAI
from server.protocol.messages import MAX_MESSAGES
from server.protocol.openai_fields import OpenAIFields
from server.protocol.prompts import MAX_PROMPTS
from server.protocol.responses import ResponseFields
from server.protocol.sampling_fields import MAX_CHOICES, MAX_LABEL_LENGTH, Defaults, SamplingFields
from server.protocol.tokenize import DetokenizeFields, TokenizeFields

Schema = dict[str, Any]
REF_TEMPLATE = "#/components/schemas/{name}"

_TEXT: Schema = {"type": "string", "minLength": 1}
_IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_CONTENT: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}],
    "description": "A text, or a list of text parts that are joined in order.",
}
MESSAGE: Schema = {
    "type": "object",
    "description": "One message of a conversation.",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": _CONTENT,
        "name": {"type": ["string", "null"]},
        "tool_call_id": {"type": ["string", "null"]},
    },
    "required": ["role", "content"],
}
_MESSAGES: Schema = {
    "type": "array",
    "items": {"$ref": REF_TEMPLATE.format(name="ChatMessage")},
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "description": "The conversation so far.",
}
_INPUT: Schema = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": MAX_MESSAGES},
    ],
    "description": "The conversation: a text, or items of type `message` with role and content.",
}
_TURNS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["user", "assistant"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]},
        },
        "required": ["role", "content"],
    },
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "description": "The turns so far; texts and blocks of text.",
}
_SYSTEM: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": _PART}, {"type": "null"}],
    "description": "The system prompt.",
}
_PROMPT: Schema = {**_TEXT, "description": "The text to continue."}
_PROMPTS: Schema = {
    "type": "array",
    "items": _TEXT,
    "maxItems": MAX_PROMPTS,
    "description": "The texts to continue.",
}
_ANY_PROMPT: Schema = {
    "anyOf": [
        _TEXT,
        {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
        _IDS,
        {"type": "array", "items": _IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ],
    "description": "One or many prompts, as texts or as token ids.",
}


def _span(low: float, high: float) -> Schema:
    return {"minimum": low, "maximum": high}


# What a struct cannot say of its fields: (description, constraints of the value where it is not null).
FIELDS: Mapping[str, tuple[str, Schema]] = {
    "model": ("A name or alias of the served model; absent means it.", {}),
    "max_tokens": (
        "At most so many tokens; clamped to the room left in the context.",
        _span(1, limits.MAX_TOKENS),
    ),
    "max_completion_tokens": ("The newer name of `max_tokens`; wins.", _span(1, limits.MAX_TOKENS)),
    "min_tokens": (
        "End tokens and stop strings have no effect before; at most `max_tokens`.",
        _span(0, limits.MAX_TOKENS),
    ),
    "ignore_eos": ("Goes on behind end tokens.", {}),
    "temperature": ("0 always takes the likeliest token.", _span(0, 2)),
    "top_p": ("Only the likeliest tokens that together have this probability.", _span(0, 1)),
    "top_k": ("Only so many of the likeliest tokens; 0 or -1: all.", _span(-1, limits.MAX_TOKENS)),
    "min_p": ("Only tokens with this part of the best one's probability.", _span(0, 1)),
    "presence_penalty": ("Against tokens that the answer already has.", _span(-2, 2)),
    "frequency_penalty": ("The same, for each time.", _span(-2, 2)),
    "repetition_penalty": (
        "Against tokens of prompt and answer; 1 is off.",
        {"exclusiveMinimum": 0, "maximum": 10},
    ),
    "seed": (
        "The same seed, prompt and settings give the same answer; null or -1: a fresh one.",
        _span(-1, limits.MAX_SEED),
    ),
    "stop": (
        f"One or up to {limits.MAX_STOPS} strings that end the answer.",
        {"minLength": 1, "maxLength": limits.MAX_STOP_LENGTH, "maxItems": limits.MAX_STOPS},
    ),
    "stop_token_ids": ("Token ids that end the answer.", {"maxItems": limits.MAX_STOP_TOKEN_IDS}),
    "include_stop_str_in_output": ("Keeps the stop string in the text.", {}),
    "logit_bias": (
        "Token id to a number from -100 to 100 that is added to its logit.",
        {"maxProperties": limits.MAX_LOGIT_BIAS, "propertyNames": {"pattern": "^[0-9]{1,10}$"}},
    ),
    "n": ("So many answers to each prompt.", _span(1, MAX_CHOICES)),
    "stream": ("One event per token instead of one body.", {}),
    "request_id": ("A label for the log.", {"maxLength": MAX_LABEL_LENGTH}),
    "logprobs": ("Log-probabilities of the tokens.", _span(0, limits.MAX_LOGPROBS)),
    "top_logprobs": ("And so many of the best; needs `logprobs`.", _span(0, limits.MAX_LOGPROBS)),
    "stream_options": ("Whether a stream tells its usage.", {}),
    "response_format": ("Only `text` for now.", {}),
    "continue_final_message": ("Goes on with the last message, which is the assistant's.", {}),
    "add_generation_prompt": ("Whether the template opens an answer; excludes the former.", {}),
    "chat_template_kwargs": ("Scalars for the chat template.", {"maxProperties": 32}),
    "add_special_tokens": ("Whether the tokenizer's own are added; true by default.", {}),
    "prompt": ("The text.", {}),
    "instructions": ("The system prompt.", {}),
    "max_output_tokens": ("At most so many tokens.", _span(1, limits.MAX_TOKENS)),
    "include": (f"`{responses.LOGPROBS}` asks for log-probabilities.", {}),
    "text": ("The format of the answer; only `text` for now.", {}),
    "metadata": ("Told back in the answer.", {}),
    "stop_sequences": (
        "Strings that end the answer.",
        {"minLength": 1, "maxLength": limits.MAX_STOP_LENGTH, "maxItems": limits.MAX_STOPS},
    ),
    "thinking": ("Only `disabled` and `adaptive`.", {}),
    "output_config": ("Without `format`.", {}),
}


def request_schemas(struct_schemas: Mapping[str, Schema]) -> dict[str, Schema]:
    """All request bodies by name, from the schemas of the structs in `STRUCTS`."""

    def merge(kinds: Iterable[type], own: Schema, required: tuple[str, ...], **more: Any) -> Schema:
        properties: Schema = {}
        for kind in kinds:
            properties |= copy.deepcopy(struct_schemas[kind.__name__].get("properties", {}))
        return _finish(properties, own, required, **more)

    chats = (SamplingFields, OpenAIFields, ChatFields)
    ignored = {"ignored": IGNORED_BY_OPENAI | {"priority"}}
    schemas = {
        "ChatMessage": MESSAGE,
        "ChatRequest": merge(
            chats, {"messages": _MESSAGES}, ("messages",), refused=chat.REFUSED_FIELDS, **ignored
        ),
        "CompletionRequest": merge(
            (SamplingFields, OpenAIFields, CompletionFields),
            {"prompt": _ANY_PROMPT},
            ("prompt",),
            refused=completions.REFUSED_FIELDS,
            defaults={"max_tokens": completions.DEFAULT_MAX_TOKENS},
            **ignored,
        ),
        "TokenizeRequest": merge((TokenizeFields, ChatFields), {"messages": _MESSAGES}, ()),
        "DetokenizeRequest": merge(
            [DetokenizeFields],
            {"tokens": {**_IDS, "minItems": 0, "description": "The ids."}},
            ("tokens",),
        ),
    }
    schemas |= {
        "ResponseRequest": merge(
            (SamplingFields, ResponseFields),
            {"input": _INPUT},
            ("input",),
            refused=responses.REFUSED_FIELDS,
            **ignored,
        ),
        "MessagesRequest": merge(
            (SamplingFields, MessageFields),
            {"messages": _TURNS, "system": _SYSTEM},
            ("model", "max_tokens", "messages"),
            refused=anthropic.REFUSED_FIELDS,
        ),
        "CountRequest": merge(
            (SamplingFields, MessageFields),
            {"messages": _TURNS, "system": _SYSTEM},
            ("messages",),
            refused=anthropic.REFUSED_FIELDS,
        ),
    }
    return schemas | _native_schemas(merge)


def _native_schemas(merge: Callable[..., Schema]) -> dict[str, Schema]:
    schemas = {}
    ours, lists = {"prompt": _PROMPT}, {"prompts": _PROMPTS}
    for name, own, defaults in (
        ("GenerateRequest", ours, native.GENERATE_DEFAULTS),
        ("GenerateListRequest", lists, native.GENERATE_DEFAULTS),
        ("StreamRequest", ours, native.STREAM_DEFAULTS),
        ("VllmRequest", lists, native.VLLM_DEFAULTS),
    ):
        told, refused = _told(defaults), native.REFUSED_FIELDS
        schemas[name] = merge([SamplingFields], own, tuple(own), refused=refused, defaults=told)
        schemas[name]["properties"]["n"]["anyOf"] = [{"const": 1}, {"type": "null"}]
        is_stream = name == "StreamRequest"
        schemas[name]["properties"]["stream"]["anyOf"] = [{"const": is_stream}, {"type": "null"}]
    return schemas


STRUCTS = (
    SamplingFields,
    OpenAIFields,
    ChatFields,
    CompletionFields,
    TokenizeFields,
    DetokenizeFields,
    ResponseFields,
    MessageFields,
)


def _told(defaults: Defaults) -> dict[str, float]:
    names = ("max_tokens", "temperature", "top_p")
    return {name: getattr(defaults, name) for name in names}


def _finish(
    properties: Schema,
    own: Schema,
    required: tuple[str, ...],
    *,
    refused: Mapping[str, tuple[object, ...]] | None = None,
    ignored: Iterable[str] = (),
    defaults: Mapping[str, float] | None = None,
) -> Schema:
    for name, schema in properties.items():
        text, constraints = FIELDS[name]
        _constrain(schema, constraints)
        schema["description"] = text
        schema.pop("default", None)  # null, which only means: absent
        if defaults and name in defaults:
            schema["default"] = defaults[name]
    properties = {**own, **properties}
    for name, neutral in (refused or {}).items():
        if name not in properties:
            shown = " or ".join(str(msgspec.json.encode(value), "utf-8") for value in neutral)
            text = f"Not supported: refused unless absent{f', null or {shown}' if shown else ' or null'}."
            properties[name] = {"enum": [None, *neutral], "description": text}
    for name in sorted(ignored):
        properties.setdefault(name, {"description": "Accepted and ignored."})
    schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = list(required)
    return schema


def _constrain(schema: Schema, constraints: Schema) -> None:
    """Puts each constraint where its type is: a string's length at the string, also inside a list of strings."""
    kinds = {
        "minimum": ("integer", "number"),
        "exclusiveMinimum": ("integer", "number"),
        "maximum": ("integer", "number"),
        "minLength": ("string",),
        "maxLength": ("string",),
        "maxItems": ("array",),
        "maxProperties": ("object",),
        "propertyNames": ("object",),
    }
    for part in schema.get("anyOf", [schema]):
        for name, value in constraints.items():
            if part.get("type") in kinds[name]:
                part[name] = value
        if part.get("type") == "array" and part.get("items", {}).get("type") == "string":
            _constrain(part["items"], constraints)
