"""The schemas of request bodies: made of the structs that requests are really read with, plus what those cannot tell.

That is the ranges, the fields that are read by hand (`messages`, `prompt`), and the tables of what is refused or
ignored. Tests hold the ranges against the parsers. Knows no aiohttp; used by `openapi.py`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from server.protocol import admin, anthropic, chat, completions, embeddings, native, responses
from server.protocol import request_fields as given
from server.protocol.admin import PrefixFields, SnapshotFields
from server.protocol.anthropic import MessageFields
from server.protocol.chat import ChatFields, TemplateFields
from server.protocol.completions import CompletionFields
from server.protocol.embeddings import EmbeddingFields
from server.protocol.fields import IGNORED_BY_OPENAI
from server.protocol.model_orders import ModelLoadFields, ModelUnloadFields
from server.protocol.openai_fields import OpenAIFields
from server.protocol.request_fields import Schema
from server.protocol.responses import ResponseFields
from server.protocol.sampling_fields import Defaults, SamplingFields
from server.protocol.tokenize import DetokenizeFields, TokenizeFields


def request_schemas(struct_schemas: Mapping[str, Schema]) -> dict[str, Schema]:
    """All request bodies by name, from the schemas of the structs in `STRUCTS`."""

    def merge(kinds: Iterable[type], own: Schema, required: tuple[str, ...], **more: Any) -> Schema:
        properties: Schema = {}
        for kind in kinds:
            properties |= copy.deepcopy(struct_schemas[kind.__name__].get("properties", {}))
        return _finish(properties, own, required, **more)

    chats = (SamplingFields, OpenAIFields, ChatFields)
    grammars = {**given.GRAMMARS, "response_format": given.RESPONSE_FORMAT}
    ignored = {"ignored": IGNORED_BY_OPENAI | {"priority", "parallel_tool_calls"}}
    schemas = {
        "ChatMessage": given.MESSAGE,
        "ChatRequest": merge(
            chats,
            {"messages": given.MESSAGES, **grammars, **given.TOOLS},
            ("messages",),
            refused=chat.REFUSED_FIELDS,
            **ignored,
        ),
        "CompletionRequest": merge(
            (SamplingFields, OpenAIFields, CompletionFields),
            {"prompt": given.ANY_PROMPT} | grammars,
            ("prompt",),
            refused=completions.REFUSED_FIELDS,
            defaults={"max_tokens": completions.DEFAULT_MAX_TOKENS},
            **ignored,
        ),
        "TokenizeRequest": merge(
            (TokenizeFields, TemplateFields),
            {"messages": {**given.MESSAGES, "type": ["array", "null"]}},
            (),
        ),
        "DetokenizeRequest": merge(
            [DetokenizeFields],
            {"tokens": {**given.IDS, "minItems": 0, "description": "The ids."}},
            ("tokens",),
        ),
    }
    others = _other_schemas(merge)
    for name in ("ResponseRequest", "MessagesRequest", "CountRequest"):
        others[name]["properties"]["n"]["anyOf"] = [{"const": 1}, {"type": "null"}]
    return schemas | others | _native_schemas(merge)


def _other_schemas(merge: Callable[..., Schema]) -> dict[str, Schema]:
    return {
        "ResponseRequest": merge(
            (SamplingFields, ResponseFields),
            {"input": given.INPUT, **given.RESPONSE_TOOLS},
            ("input",),
            refused={**responses.REFUSED_FIELDS, **given.STORED},
            ignored=IGNORED_BY_OPENAI | given.OF_RESPONSES,
        ),
        "MessagesRequest": merge(
            (SamplingFields, MessageFields),
            {"messages": given.TURNS, "system": given.SYSTEM, **given.MESSAGE_TOOLS},
            ("model", "max_tokens", "messages"),
            refused=anthropic.REFUSED_FIELDS,
            ignored=given.OF_MESSAGES,
        ),
        "EmbeddingRequest": merge(
            [EmbeddingFields],
            {"input": given.ANY_PROMPT},
            ("input",),
            refused=embeddings.REFUSED_FIELDS,
            ignored=("user",),
        ),
        "PrefixRequest": merge(
            [PrefixFields],
            {"prompt": given.ONE_PROMPT, "messages": given.MESSAGES},
            (),
            refused=admin.REFUSED_FIELDS,
        ),
        "SnapshotRequest": merge([SnapshotFields], {}, ()),
        "ModelLoadRequest": merge([ModelLoadFields], {}, ("model",)),
        "ModelUnloadRequest": merge([ModelUnloadFields], {}, ("model",)),
        "CountRequest": merge(
            (SamplingFields, MessageFields),
            {"messages": given.TURNS, "system": given.SYSTEM, **given.MESSAGE_TOOLS},
            ("messages",),
            refused=anthropic.REFUSED_FIELDS,
        ),
    }


def _native_schemas(merge: Callable[..., Schema]) -> dict[str, Schema]:
    schemas = {}
    ours, lists = {"prompt": given.PROMPT}, {"prompts": given.PROMPTS}
    for name, own, defaults in (
        ("GenerateRequest", ours, native.GENERATE_DEFAULTS),
        ("GenerateListRequest", lists, native.GENERATE_DEFAULTS),
        ("StreamRequest", ours, native.STREAM_DEFAULTS),
        ("VllmRequest", lists, native.VLLM_DEFAULTS),
    ):
        told, refused = _told(defaults), native.REFUSED_FIELDS
        schemas[name] = merge(
            [SamplingFields],
            {**own, **given.GRAMMARS, "response_format": given.RESPONSE_FORMAT},
            tuple(own),
            refused=refused,
            ignored=("priority",),
            defaults=told,
        )
        schemas[name]["properties"]["n"]["anyOf"] = [{"const": 1}, {"type": "null"}]
        is_stream = name == "StreamRequest"
        schemas[name]["properties"]["stream"]["anyOf"] = [{"const": is_stream}, {"type": "null"}]
    return schemas


STRUCTS = (
    SamplingFields,
    OpenAIFields,
    ChatFields,
    TemplateFields,
    CompletionFields,
    TokenizeFields,
    DetokenizeFields,
    ResponseFields,
    MessageFields,
    EmbeddingFields,
    PrefixFields,
    SnapshotFields,
    ModelLoadFields,
    ModelUnloadFields,
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
        text, constraints = given.FIELDS[name]
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
        "pattern": ("string",),
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
