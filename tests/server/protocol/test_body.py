"""Bytes to an object, strictly."""

from __future__ import annotations

import contextlib
import json
import tracemalloc

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.errors import InvalidValue, UnsupportedMediaType
from server.protocol.body import MAX_DEPTH, check_content_type, parse_object


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"text"',
        b"null",
        b"{'prompt': 'a'}",
        b'{"a": 1} {"b": 2}',
        b'{"prompt": "cut',
        b'{"a": 1 // no\n}',
        b'{"a": "\xe9"}',
        b'\xef\xbb\xbf{"a": 1}',
        b'{"a": "\x00"}',
    ],
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    """B074"""
    with pytest.raises(InvalidValue) as caught:
        parse_object(body)
    assert "orjson" not in caught.value.message


@pytest.mark.parametrize("number", ["NaN", "nan", "Infinity", "-Infinity", "1e400", "-1e5000"])
@pytest.mark.parametrize(
    "shape", ['{"temperature": %s}', '{"logit_bias": {"5": %s}}', '{"x": [%s]}']
)
def test_numbers_that_are_none_are_refused(number: str, shape: str) -> None:
    """B042"""
    with pytest.raises(InvalidValue):
        parse_object((shape % number).encode())


@pytest.mark.parametrize(
    "body",
    [
        rb'{"stop": ["a", "\udfff"]}',
        rb'{"metadata": {"k": "\ud83d"}}',
        rb'{"prompts": ["a", "\udbff"]}',
        rb'{"\ud83d": 1}',
        b'{"a": "\xed\xa0\xbd"}',
    ],
)
def test_lone_surrogates_are_refused_anywhere(body: bytes) -> None:
    """B078"""
    with pytest.raises(InvalidValue):
        parse_object(body)


def test_a_surrogate_pair_is_a_character() -> None:
    assert parse_object(rb'{"a": "\ud83d\ude00"}') == {"a": "\U0001f600"}


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    """An object of the given depth, itself counted."""
    return f'{{"a": {opening * (depth - 1)}1{closing * (depth - 1)}}}'.encode()


def test_the_depth_is_bounded_exactly() -> None:
    """B077"""
    assert parse_object(nested(MAX_DEPTH))
    assert parse_object(nested(MAX_DEPTH, '{"b":', "}"))
    for depth in (MAX_DEPTH + 1, 500, 3000, 1_000_000):
        for body in (nested(depth), nested(depth, '{"b":', "}"), nested(depth, "[{"[:1], "]")):
            with pytest.raises(InvalidValue, match="more than"):
                parse_object(body)


def test_brackets_inside_strings_do_not_count() -> None:
    text = '[[{{"' * 100 + "\\" * 7
    assert parse_object(orjson.dumps({"a": [text] * 40, "b": "\\"})) == {
        "a": [text] * 40,
        "b": "\\",
    }


def test_many_shallow_brackets_are_fine() -> None:
    body = orjson.dumps({"messages": [{"role": "user", "content": ["a"]}] * 4096})
    assert len(parse_object(body)["messages"]) == 4096
    ids = orjson.dumps({"prompt": [list(range(1000))] * 1024})
    assert len(parse_object(ids)["prompt"]) == 1024
    text = orjson.dumps({"prompt": 'say "a", "b", {}; ' * 200_000})
    assert parse_object(text)


@pytest.mark.parametrize("part", [b"{}", b"[]", b"1", b'"a"', b'{"role":"user"}', b"[[]]"])
def test_a_body_of_very_many_parts_is_refused_before_it_costs_anything(part: bytes) -> None:
    """B079, B128: parsed, the first would take seconds under the interpreter's lock and a gigabyte."""
    body = b'{"x":[' + b",".join([part] * (31 * 2**20 // (len(part) + 1))) + b"]}"
    tracemalloc.start()
    with pytest.raises(InvalidValue, match="more than"):
        parse_object(body)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 4 * len(body)


NESTED = st.recursive(
    st.none() | st.booleans() | st.text() | st.integers(-9, 9),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=200,
)


@given(NESTED)
def test_every_shallow_object_is_read_as_it_is(value: object) -> None:
    body = json.dumps({"value": value}).encode()
    assert parse_object(body) == {"value": value}


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_but_our_errors(body: bytes) -> None:
    with contextlib.suppress(InvalidValue):
        parse_object(body)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "application/json",
        "Application/JSON; charset=UTF-8",
        'application/json; charset="utf-8"',
    ],
)
def test_json_content_types_are_accepted(value: str | None) -> None:
    check_content_type(value)


@pytest.mark.parametrize(
    "value", ["", "text/plain", "application/json; charset=latin-1", "multipart/form-data", "json"]
)
def test_other_content_types_are_refused(value: str) -> None:
    with pytest.raises(UnsupportedMediaType):
        check_content_type(value)
