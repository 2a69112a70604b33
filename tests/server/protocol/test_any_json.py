"""No JSON makes a parser raise anything but our errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st
from request_parsers import (
    MODEL,
)

from core.errors import (
    NoriaError,
)
from server.protocol import chat, completions, native
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
NAMES = sorted(chat._KNOWN | completions._KNOWN | native._KNOWN | {"tokens", "add_special_tokens"})
BODIES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), VALUES, max_size=6)


@settings(max_examples=400, deadline=None)
@given(BODIES, MESSAGES | VALUES, st.sampled_from(["good", "wild"]))
def test_no_json_raises_anything_but_our_errors(
    body: dict[str, Any], messages: object, kind: str
) -> None:
    """B004, B142"""
    if kind == "good":
        body = {**body, "prompt": "a", "prompts": ["a"], "messages": messages}
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
