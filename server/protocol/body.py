"""The strict reading of a request body: bytes to a JSON object, or a neutral `InvalidValue`.

Knows no fields and no aiohttp. `parse_object` is pure and may run in an executor. Depth and number of values are
bounded before anything is parsed, without recursion; lone surrogates, NaN, infinities and numbers beyond a double are
refused by orjson.
"""

from __future__ import annotations

from typing import Any

import orjson

from core.errors import InvalidValue, UnsupportedMediaType

MAX_DEPTH = 64
# A body of the allowed size can hold ten million empty objects: gigabytes of memory, and seconds in which the parser
# holds the interpreter lock and nothing else answers. Token ids are cheap, everything else is not.
MAX_PARTS = 2**18  # strings, and objects and lists
MAX_VALUES = 2**21  # separated by commas
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
    _check_structure(body)
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


def _check_structure(body: bytes) -> None:
    """Bounds what parsing may cost. Raises `InvalidValue`. What is no JSON may get any answer.

    A few passes of C code: strings are cut out, then each pass takes away the innermost level of brackets.
    """
    num_brackets = body.count(b"[") + body.count(b"{")
    is_flat = num_brackets <= MAX_DEPTH
    if is_flat and body.count(b'"') <= 2 * MAX_PARTS and body.count(b",") <= MAX_VALUES:
        return
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if unescaped.count(b'"') > 2 * MAX_PARTS:
        raise InvalidValue(f"The request body has more than {MAX_PARTS} strings.")
    outside = b"".join(unescaped.split(b'"')[::2])
    if outside.count(b",") > MAX_VALUES:
        raise InvalidValue(f"The request body has more than {MAX_VALUES} values.")
    brackets = outside.translate(_AS_SQUARE, _OTHERS)
    if brackets.count(b"[") > MAX_PARTS:
        raise InvalidValue(f"The request body has more than {MAX_PARTS} objects and lists.")
    if _is_deeper(brackets):
        raise InvalidValue(f"The request body is nested more than {MAX_DEPTH} levels deep.")


def _is_deeper(brackets: bytes) -> bool:
    """Whether square brackets nest deeper than allowed."""
    for _ in range(MAX_DEPTH):
        rest = brackets.replace(b"[]", b"")
        if len(rest) == len(brackets):
            break
        brackets = rest
    return brackets.count(b"[") > MAX_DEPTH or b"[]" in brackets
