"""What all request bodies share: strict conversion, fields that are refused unless neutral, names nobody knows.

Knows no aiohttp. The table of section 5 of the wire contract is spelled here and in `sampling_fields.py`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from core.errors import InvalidValue, UnsupportedValue
from server.protocol import structured

T = TypeVar("T")
_log = logging.getLogger("noria.protocol")
_ERROR = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$(?P<path>.*)`)?$", re.DOTALL)
_IN_MAP = re.compile(r"\$\.(?P<name>\w+)\[\.\.\.\]`")
_EXPECTED = re.compile(r"^Expected `(?P<expected>[^`]*)`, got `(?P<got>[^`]*)`$")
_WORDS = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
MAX_UNKNOWN_NAMES = 256
MAX_SHOWN_NAME = 64

REFUSED: Mapping[str, tuple[object, ...]] = {
    "prompt_logprobs": (False,),
    "return_token_ids": (False,),
    "use_beam_search": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "typical_p": (1.0,),
    "mirostat": (0, False),
    "dry_multiplier": (0.0,),
    "xtc_probability": (0.0,),
    "timeout": (),
    "cache_salt": (),
}
"""Refused on every route unless null or one of these neutral values."""

UNBOUND: Mapping[str, tuple[object, ...]] = {
    "response_format": ({"type": "text"},),
    **dict.fromkeys(sorted(structured.NAMES), ()),
}
"""Refused beside `REFUSED` on routes that bind no answer to a grammar."""

REFUSED_PREFIX = "guided_"
"""A family of names that grows with every engine; all of them bind the answer to a grammar."""

IGNORED_BY_OPENAI = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "reasoning_effort",
        "verbosity",
    }
)


class UnknownFields:
    """Remembers which unknown names were logged, so that each is logged once; bounded."""

    def __init__(self) -> None:
        self._names: set[str] = set()

    def note(self, names: Iterable[str]) -> None:
        for name in names:
            shown = name[:MAX_SHOWN_NAME]
            if shown not in self._names and len(self._names) < MAX_UNKNOWN_NAMES:
                self._names.add(shown)
                _log.warning("unknown request field ignored: %r", shown)


def convert(value: object, kind: type[T], prefix: str = "") -> T:
    """Strict conversion of what orjson read. Raises `InvalidValue` with the field's path behind `prefix`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise _translate(_with_key(str(error), value), prefix) from None


def _with_key(text: str, value: object) -> str:
    """The error with the key of a map of numbers, where the library only says that one of its values is wrong."""
    found = _IN_MAP.search(text)
    numbers = value.get(found["name"]) if found and isinstance(value, dict) else None
    if not found or not isinstance(numbers, dict):
        return text
    key = next((key for key, number in numbers.items() if type(number) not in (int, float)), None)
    return text if key is None else text.replace(found[0], f"$.{found['name']}.{shown(key)}`")


def shown(name: str) -> str:
    """A name of the client's, bounded and without what would confuse the reader of a message."""
    return "".join(c if c.isprintable() and c != "`" else "?" for c in name[:MAX_SHOWN_NAME])


def _translate(text: str, prefix: str) -> InvalidValue:
    match = _ERROR.match(text)
    path = (match and match["path"]) or ""
    param = (prefix + path).replace("[...]", "").lstrip(".") or None
    expected = _EXPECTED.match(match["what"]) if match else None
    where = param or "The request body"
    if expected is None:
        return InvalidValue(f"{where} has the wrong type.", param=param)
    wanted = [_WORDS.get(word.strip(), "another type") for word in expected["expected"].split("|")]
    got = _WORDS.get(expected["got"], "another type")
    return InvalidValue(f"{where} must be {' or '.join(wanted)}, not {got}.", param=param)


def refuse_unsupported(body: Mapping[str, Any], refused: Mapping[str, tuple[object, ...]]) -> None:
    """Raises `UnsupportedValue` for the first known field whose value would change the answer."""
    for name, value in body.items():
        is_guide = name.startswith(REFUSED_PREFIX) and name not in structured.NAMES
        is_known = name in refused or is_guide
        if is_known and not _is_neutral(value, refused.get(name, ())):
            shown = name[:MAX_SHOWN_NAME]
            raise UnsupportedValue(f"{shown} is not supported with this value.", param=shown)


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    if value is None:
        return True
    for accepted in neutral:
        both_numbers = {type(value), type(accepted)} <= {int, float}
        if (both_numbers or type(value) is type(accepted)) and value == accepted:
            return True
    return False
