"""The strict reading of a request body: bytes to a JSON object, or a neutral `InvalidValue`.

Knows no fields and no aiohttp. `parse_object` is pure and may run in an executor. The depth is bounded before anything
is parsed, without recursion; lone surrogates, NaN, infinities and numbers beyond a double are refused by orjson.
"""

from __future__ import annotations

from typing import Any

import orjson

from core.errors import InvalidValue, UnsupportedMediaType

MAX_DEPTH = 64
_BRACKETS = b"[]{}"
_OTHERS = bytes(byte for byte in range(256) if byte not in _BRACKETS)
_AS_SQUARE = bytes.maketrans(b"{}", b"[]")


def check_content_type(value: str | None) -> None:
    """Accepts `application/json`, any case, UTF-8 or no charset, and an absent header. Raises otherwise."""
    if value is None:
        return
    media_type, _, rest = value.partition(";")
    if media_type.strip().lower() != "application/json":
        raise UnsupportedMediaType("The content type must be application/json.")
    for parameter in rest.split(";"):
        name, _, charset = parameter.partition("=")
        if name.strip().lower() == "charset" and charset.strip().strip('"').lower() not in (
            "utf-8",
            "utf8",
        ):
            raise UnsupportedMediaType("The charset must be UTF-8.")


def parse_object(body: bytes) -> dict[str, Any]:
    """The JSON object that the body holds. Raises `InvalidValue`."""
    if _is_too_deep(body):
        raise InvalidValue(f"The request body is nested more than {MAX_DEPTH} levels deep.")
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        # The position helps, the text of the library does not: it is not ours to keep stable.
        raise InvalidValue(
            f"The request body is not valid JSON in UTF-8 (line {error.lineno}, column {error.colno})."
        ) from None
    if not isinstance(value, dict):
        raise InvalidValue("The request body must be a JSON object.")
    return value


def _is_too_deep(body: bytes) -> bool:
    """Whether brackets outside strings nest deeper than allowed. What is no JSON may get any answer.

    A few passes of C code: strings are cut out, then each pass takes away the innermost level of brackets.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return False
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    outside = b"".join(unescaped.split(b'"')[::2])
    brackets = outside.translate(_AS_SQUARE, _OTHERS)
    for _ in range(MAX_DEPTH):
        rest = brackets.replace(b"[]", b"")
        if len(rest) == len(brackets):
            break
        brackets = rest
    return brackets.count(b"[") > MAX_DEPTH or b"[]" in brackets
