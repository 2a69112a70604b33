"""Random JSON schemas from a fixed seed, as clients write them: mostly objects, some with what few engines support."""

from __future__ import annotations

import random
from typing import Any

WORDS = [
    "name",
    "age",
    "city",
    "tags",
    "id",
    "price",
    "items",
    "is_open",
    "email",
    "notes",
    "kind",
    "unit",
]
PATTERNS = ["^[a-z]{2,8}$", "^[A-Z]{3}-[0-9]{2,4}$", "^(red|green|blue)$", "^#[0-9a-f]{6}$"]
FORMATS = ["date", "date-time", "email", "uuid", "ipv4", "time"]


def random_schema(rng: random.Random) -> dict[str, Any]:
    """An object schema; one in thirty has a keyword that is seldom supported."""
    schema = _object(rng, depth=0)
    if rng.random() < 0.15:
        schema["$defs"] = {"part": _object(rng, depth=2)}
        schema["properties"]["part"] = {"$ref": "#/$defs/part"}
        schema["required"] = [*schema.get("required", []), "part"]
    if rng.random() < 0.03:
        name, value = rng.choice(
            [("not", {"required": ["x"]}), ("if", {}), ("propertyNames", {"maxLength": 5})]
        )
        schema[name] = value
    return schema


def _object(rng: random.Random, depth: int) -> dict[str, Any]:
    names = rng.sample(WORDS, rng.randint(1, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: _any(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
    }
    if rng.random() < 0.8:
        schema["additionalProperties"] = False
    return schema


def _any(rng: random.Random, depth: int) -> dict[str, Any]:
    makers = [_string, _string, _number, _number, _constant, _constant]
    if depth < 3:
        makers += [_object, _array, _array, _union]
    return rng.choice(makers)(rng, depth)


def _string(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    kind = rng.random()
    if kind < 0.4:
        schema["maxLength"] = rng.choice([5, 20, 60])
        schema["minLength"] = rng.choice([0, 1, 3])
    elif kind < 0.55:
        schema["pattern"] = rng.choice(PATTERNS)
    elif kind < 0.7:
        schema["format"] = rng.choice(FORMATS)
    return schema


def _number(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": rng.choice(["integer", "integer", "number"])}
    if rng.random() < 0.7:
        schema["minimum"] = rng.choice([0, 1, -50])
        schema["maximum"] = rng.choice([9, 120, 10_000])
    if schema["type"] == "integer" and rng.random() < 0.1:
        schema["multipleOf"] = rng.choice([2, 5])
    return schema


def _constant(rng: random.Random, depth: int) -> dict[str, Any]:
    return rng.choice(
        [
            {"type": "boolean"},
            {"enum": ["low", "medium", "high"]},
            {"enum": [1, "two", None, True]},
            {"const": "fixed"},
            {"type": ["integer", "null"]},
        ]
    )


def _array(rng: random.Random, depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "items": _any(rng, depth + 1)}
    if rng.random() < 0.7:
        schema["maxItems"] = rng.choice([1, 3, 5])
    if rng.random() < 0.3:
        schema["minItems"] = 1
    if rng.random() < 0.05:
        schema["uniqueItems"] = True
    return schema


def _union(rng: random.Random, depth: int) -> dict[str, Any]:
    name = "anyOf" if rng.random() < 0.9 else "oneOf"
    return {name: [_constant(rng, depth), _string(rng, depth)]}
