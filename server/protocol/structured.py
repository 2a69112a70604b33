"""What an answer must look like: the fields that bind it to a grammar, of OpenAI and of vLLM. Knows no aiohttp.

At most one of them may be given. Nothing is compiled here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import orjson

from core.errors import InvalidValue, UnsupportedValue
from core.structured.grammar import ANY_OBJECT, Grammar, GrammarKind

MAX_CHOICES = 1024
TEXTS = frozenset({"guided_json", "guided_regex", "guided_grammar", "regex", "grammar"})
NAMES = TEXTS | {"guided_choice", "structured_outputs"}
_RESPONSE_FORMATS = ("text", "json_object", "json_schema")


def parse_grammar(body: Mapping[str, Any]) -> Grammar | None:
    """The grammar that a body asks for, if any. Raises `InvalidValue` and `UnsupportedValue` with the field's path."""
    found = [
        grammar
        for name, read in _READERS.items()
        if body.get(name) is not None and (grammar := read(body[name], name)) is not None
    ]
    if len(found) > 1:
        raise InvalidValue(
            f"{found[0].param} and {found[1].param} exclude each other.", param=found[1].param
        )
    return found[0] if found else None


def schema_text(schema: object, param: str) -> str:
    """A JSON schema as text; the order of its keys is the order of the answer's."""
    if isinstance(schema, str):
        try:
            schema = orjson.loads(schema)
        except ValueError:
            raise InvalidValue(f"{param} is not valid JSON.", param=param) from None
    if schema is True:
        schema = {}  # as JSON Schema says it
    if not isinstance(schema, dict):
        raise InvalidValue(f"{param} must be a JSON schema.", param=param)
    return orjson.dumps(schema).decode()


def _response_format(value: object, param: str) -> Grammar | None:
    kind = _kind(value, param)
    assert isinstance(value, dict)
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_schema", ANY_OBJECT, param)
    inner, path = value.get("json_schema"), f"{param}.json_schema"
    if not isinstance(inner, dict):
        raise InvalidValue(f"{path} must be an object.", param=path)
    return _named_schema(inner, path)


def flat_format(value: object, param: str) -> Grammar | None:
    """As `response_format`, but the schema stands beside the type: in `text.format` and in `output_config.format`."""
    if value is None:
        return None
    kind = _kind(value, param)
    if kind == "json_schema":
        assert isinstance(value, dict)
        return _named_schema(value, param)
    return None if kind == "text" else Grammar("json_schema", ANY_OBJECT, param)


def _kind(value: object, param: str) -> str:
    if not isinstance(value, dict):
        raise InvalidValue(f"{param} must be an object.", param=param)
    kind = value.get("type")
    if not isinstance(kind, str):
        raise InvalidValue(f"{param}.type must be a string.", param=f"{param}.type")
    if kind not in _RESPONSE_FORMATS:
        raise InvalidValue(
            f"{param}.type must be one of {', '.join(_RESPONSE_FORMATS)}.", param=f"{param}.type"
        )
    return kind


def _named_schema(inner: dict[str, Any], path: str) -> Grammar:
    for name, wanted in (("name", str), ("description", str), ("strict", bool)):
        if inner.get(name) is not None and not isinstance(inner[name], wanted):
            raise InvalidValue(f"{path}.{name} has the wrong type.", param=f"{path}.{name}")
    if inner.get("schema") is None:
        raise InvalidValue(f"{path}.schema is missing.", param=f"{path}.schema")
    return Grammar("json_schema", schema_text(inner["schema"], f"{path}.schema"), f"{path}.schema")


def _structured_outputs(value: object, param: str) -> Grammar | None:
    if not isinstance(value, dict):
        raise InvalidValue(f"{param} must be an object.", param=param)
    given = {name: item for name, item in value.items() if item not in (None, False)}
    unknown = next((name for name in given if name not in _MEMBERS), None)
    if unknown is not None:
        shown = f"{param}.{unknown[:64]}"
        raise UnsupportedValue(f"{shown} is not supported.", param=shown)
    if len(given) != 1:
        raise InvalidValue(f"{param} needs exactly one of {', '.join(_MEMBERS)}.", param=param)
    ((name, item),) = given.items()
    return _MEMBERS[name](item, f"{param}.{name}")


def _schema(value: object, param: str) -> Grammar:
    return Grammar("json_schema", schema_text(value, param), param)


def _any_object(value: object, param: str) -> Grammar:
    if value is not True:
        raise InvalidValue(f"{param} must be a boolean.", param=param)
    return Grammar("json_schema", ANY_OBJECT, param)


def _text(kind: GrammarKind) -> Callable[[object, str], Grammar]:
    def read(value: object, param: str) -> Grammar:
        if not isinstance(value, str) or not value:
            raise InvalidValue(f"{param} must be a non-empty string.", param=param)
        return Grammar(kind, value, param)

    return read


def _choice(value: object, param: str) -> Grammar | None:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise InvalidValue(f"{param} must be a list of non-empty strings.", param=param)
    if len(value) > MAX_CHOICES:
        raise InvalidValue(
            f"{param} has {len(value)} entries; at most {MAX_CHOICES} are allowed.", param=param
        )
    return Grammar("choice", orjson.dumps(value).decode(), param) if value else None


_MEMBERS: dict[str, Callable[[object, str], Grammar | None]] = {
    "json": _schema,
    "regex": _text("regex"),
    "choice": _choice,
    "grammar": _text("lark"),
    "json_object": _any_object,
}
_READERS: dict[str, Callable[[object, str], Grammar | None]] = {
    "response_format": _response_format,
    "structured_outputs": _structured_outputs,
    "guided_json": _schema,
    "guided_regex": _text("regex"),
    "guided_choice": _choice,
    "guided_grammar": _text("lark"),
    "grammar": _text("lark"),
    "regex": _text("regex"),
}
