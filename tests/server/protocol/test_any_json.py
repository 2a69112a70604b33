"""No JSON makes a parser raise anything but our errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st
from request_parsers import MODEL

from core.errors import NoriaError
from server.protocol import anthropic, chat, completions, embeddings, native, responses
from server.protocol.body import parse_object
from server.protocol.fields import UnknownFields
from server.protocol.tokenize import parse_detokenize, parse_tokenize

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=10,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "tool", "system"]) | VALUES,
            "content": st.text(max_size=5) | VALUES,
            "tool_calls": VALUES,
            "name": VALUES,
        },
    )
    | VALUES,
    max_size=4,
)
MODULES = (chat, completions, native, anthropic, responses, embeddings)
NAMES = sorted({name for module in MODULES for name in module._KNOWN} | {"tokens"})
ITEMS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "type": st.sampled_from(
                [
                    "message",
                    "text",
                    "function",
                    "function_call",
                    "function_call_output",
                    "tool_use",
                    "tool_result",
                    "custom",
                    "reasoning",
                    "thinking",
                    "auto",
                    "tool",
                    "json_schema",
                ]
            )
            | VALUES,
            "role": st.sampled_from(["user", "assistant"]) | VALUES,
            "content": MESSAGES | VALUES,
            **dict.fromkeys(
                ("call_id", "id", "tool_use_id", "name", "arguments", "output", "input", "schema"),
                st.text(max_size=3) | VALUES,
            ),
            **dict.fromkeys(("input_schema", "parameters", "function"), VALUES),
        },
    )
    | VALUES,
    max_size=4,
)
BODIES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), VALUES, max_size=6)


@settings(max_examples=250, deadline=None)
@given(
    BODIES,
    MESSAGES | VALUES,
    ITEMS,
    st.sampled_from(["none", "input", "messages", "tools", "tool_choice", "text", "output_format"]),
    st.sampled_from(["good", "wild"]),
)
def test_no_json_raises_anything_but_our_errors(
    body: dict[str, Any], messages: object, items: Any, place: str, kind: str
) -> None:
    """B004, B142"""
    if kind == "good":
        body = {**body, "prompt": "a", "prompts": ["a"], "messages": messages}
    if place in ("tool_choice", "text", "output_format"):
        items = items[0] if isinstance(items, list) and items else items
        items = {"format": items} if place == "text" else items
    if place != "none":
        body = {**body, place: items}
    try:
        body = parse_object(orjson.dumps(body, option=orjson.OPT_PASSTHROUGH_SUBCLASS))
    except TypeError:
        return  # integers that orjson cannot write
    parsers = [
        lambda: completions.parse_completion(body, MODEL, UnknownFields(), max_waiting=100),
        lambda: chat.parse_chat(body, MODEL, UnknownFields(), max_waiting=100),
        lambda: native.parse_one(
            body, MODEL, native.STREAM_DEFAULTS, UnknownFields(), streams=True
        ),
        lambda: native.parse_list(
            body, None, native.VLLM_DEFAULTS, UnknownFields(), max_waiting=100
        ),
        lambda: parse_tokenize(body, MODEL),
        lambda: parse_detokenize(body, MODEL),
        lambda: anthropic.parse_message(body, MODEL, UnknownFields()),
        lambda: anthropic.parse_count(body, MODEL),
        lambda: responses.parse_response(body, MODEL, UnknownFields()),
        lambda: embeddings.parse_embedding(body, MODEL, UnknownFields(), max_waiting=100),
    ]
    for parse in parsers:
        error = error_of(parse)
        assert error is None or error.status in (400, 404)
        assert error is None or len(error.message) < 500
        assert error is None or not {"msgspec", "Struct"} & set(error.message.split())


def error_of(parse: Callable[[], object]) -> NoriaError | None:
    try:
        parse()
    except NoriaError as error:
        return error
    return None
