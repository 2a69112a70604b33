"""The tools of a chat request: what clients send, what the template is given, and the grammar that enforces a call.

Knows no aiohttp. `auto` leaves it to the model, whose template must know tools. A required or named call is enforced by
a grammar over plain JSON, so that it works with any model; where the template knows no tools, a system message tells of
them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from core.errors import InvalidValue, UnsupportedValue
from core.sampling_params import SamplingParams
from core.structured.grammar import WHITESPACE, Grammar
from server.backends.base import ServedModel

MAX_TOOLS = 128
MAX_CALLS = 8  # in one enforced answer
Choice = Literal["auto", "required", "none", "named"]
_CHOICES: dict[str, Choice] = {"auto": "auto", "required": "required", "none": "none"}
_NAME = re.compile(r"[A-Za-z0-9_-]{1,128}")
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
_MAY_NAME_OTHERS = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "minProperties"}
    | {"allOf", "anyOf", "oneOf", "$ref"}
)
_INSTRUCTION = (
    "You can call these functions:\n{tools}\n\n"
    'Answer with a function call and nothing else: a JSON object such as {{"name": "the function", "arguments": '
    "{{...}}}} whose arguments follow the function's parameters."
)


@dataclass(frozen=True, slots=True)
class Tools:
    """`specs` as the client sent them, for the template. `named` is the function that must be called."""

    specs: list[dict[str, Any]]
    choice: Choice
    named: str | None
    is_parallel: bool

    @property
    def names(self) -> frozenset[str]:
        return frozenset(spec["function"]["name"] for spec in self.specs)

    @property
    def is_enforced(self) -> bool:
        return self.choice != "auto"

    def grammar(self) -> Grammar | None:
        """One call, or several on lines of their own; None where the model decides."""
        if not self.is_enforced:
            return None
        calls = []
        for spec in self.specs:
            function = spec["function"]
            if self.named in (None, function["name"]):
                calls.append(_call_schema(function["name"], function.get("parameters") or None))
        several = self.choice == "required" and self.is_parallel
        rest = rf' ("\n" call){{0,{MAX_CALLS - 1}}}' if several else ""
        rules = [f"start: call{rest}", "call: " + " | ".join(f"c{i}" for i in range(len(calls)))]
        rules += [f"c{i}: %json {json.dumps(schema)}" for i, schema in enumerate(calls)]
        return Grammar("lark", "\n".join(rules), "tools")


def parse_tools(body: Mapping[str, Any]) -> Tools | None:
    """None where nothing may be called. Raises `InvalidValue` and `UnsupportedValue` with the field's path."""
    is_parallel = check_parallel(body)
    specs = tool_list(body)
    for index, tool in enumerate(specs):
        _check(tool, f"tools[{index}]")
    return choose(specs, *_choice(body.get("tool_choice")), is_parallel=is_parallel)


def check_parallel(body: Mapping[str, Any]) -> bool:
    parallel = body.get("parallel_tool_calls")
    if parallel is not None and not isinstance(parallel, bool):
        raise InvalidValue("parallel_tool_calls must be a boolean.", param="parallel_tool_calls")
    return parallel is not False


def choose(
    specs: list[dict[str, Any]], choice: Choice, named: str | None, *, is_parallel: bool
) -> Tools | None:
    """`Tools` of checked specs, in the form that templates take. Raises `InvalidValue`."""
    if not specs:
        if choice in ("required", "named"):
            raise InvalidValue("tool_choice needs tools.", param="tool_choice")
        return None
    if choice == "none":
        return None
    if named is not None and all(spec["function"]["name"] != named for spec in specs):
        raise InvalidValue(
            "tool_choice names a function that is not in tools.", param="tool_choice"
        )
    return Tools(specs, choice, named, is_parallel)


def bind(tools: Tools | None, grammar: Grammar | None, model: ServedModel) -> Grammar | None:
    """The grammar that the answer follows, be it of the tools or the request's own. Raises `UnsupportedValue`."""
    if tools is None:
        return grammar
    if grammar is not None:
        raise UnsupportedValue(
            f"{grammar.param} and tools exclude each other; set tool_choice to none.",
            param=grammar.param,
        )
    if not tools.is_enforced and model.tokenizer.tool_format is None:
        raise UnsupportedValue(
            "The chat template of this model knows no tools. A required or named tool_choice works with any model.",
            param="tools",
        )
    return tools.grammar()


def without_stops(params: SamplingParams, tools: Tools | None) -> SamplingParams:
    """Stops are for what a model says: an enforced call that one of them cuts in two would be of no use to anybody."""
    if tools is None or not tools.is_enforced:
        return params
    return replace(params, stop=(), stop_token_ids=())


def with_instruction(messages: list[dict[str, Any]], tools: Tools) -> list[dict[str, Any]]:
    """The messages with the tools described in the system message, for templates that know no tools."""
    specs = [
        spec["function"] for spec in tools.specs if tools.named in (None, spec["function"]["name"])
    ]
    lines = "\n".join(json.dumps(function, ensure_ascii=False) for function in specs)
    text = _INSTRUCTION.format(tools=lines)
    if messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def with_calls_as_text(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The calls of earlier turns in their content, for templates that know no tools."""
    return [_with_calls_as_text(message) for message in messages]


def _with_calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if not calls:
        return message
    lines = [message["content"]] if message["content"] else []
    for call in calls:
        function = call["function"]
        arguments = function.get("arguments") or "{}"
        shown = arguments if isinstance(arguments, str) else json.dumps(arguments)
        lines.append(f'{{"name": {json.dumps(function["name"])}, "arguments": {shown}}}')
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    return {**rest, "content": "\n".join(lines)}


def _call_schema(name: str, parameters: dict[str, Any] | None) -> dict[str, Any]:
    arguments = _closed(parameters or _NO_ARGUMENTS)
    text = json.dumps(arguments)
    schema: dict[str, Any] = {
        "x-guidance": {"whitespace_pattern": WHITESPACE},
        "type": "object",
        "properties": {"name": {"const": name}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }
    for keyword in ("$defs", "definitions"):  # references are paths from the root
        if isinstance(arguments.get(keyword), dict):
            members = arguments[keyword]
            if '"allOf"' not in text:  # two closed ones together would allow nothing
                members = {name: _closed(member) for name, member in members.items()}
            schema[keyword] = members
    return schema


def _closed(schema: Any) -> Any:
    """The schema without members that it does not name, where it leaves it open whether there are any.

    Whatever this allows, the schema allows too. A small model would go on inventing arguments until its limit.
    """
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    if isinstance(schema.get("items"), dict):
        closed["items"] = _closed(schema["items"])
    if isinstance(schema.get("anyOf"), list):
        closed["anyOf"] = [_closed(member) for member in schema["anyOf"]]
    named = schema.get("properties")
    if isinstance(named, dict):
        closed["properties"] = {name: _closed(member) for name, member in named.items()}
        required = schema.get("required", [])
        names_all = isinstance(required, list) and all(name in [*named] for name in required)
        if names_all and not schema.keys() & _MAY_NAME_OTHERS:
            closed["additionalProperties"] = False
    return closed


def tool_list(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """`tools` as a list whose members are objects with a type, if any. Raises `InvalidValue`."""
    tools = body.get("tools")
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise InvalidValue("tools must be a list of objects.", param="tools")
    if len(tools) > MAX_TOOLS:
        raise InvalidValue(
            f"tools has {len(tools)} entries; at most {MAX_TOOLS} are allowed.", param="tools"
        )
    for index, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise InvalidValue(f"tools[{index}] must be an object.", param=f"tools[{index}]")
    return tools


def _check(tool: dict[str, Any], path: str) -> None:
    check_type(tool, path)
    function, path = tool.get("function"), f"{path}.function"
    if not isinstance(function, dict):
        raise InvalidValue(f"{path} must be an object.", param=path)
    check_function(function, path)


def check_type(tool: dict[str, Any], path: str) -> None:
    if not isinstance(tool.get("type"), str):
        raise InvalidValue(f"{path}.type must be a string.", param=f"{path}.type")
    if tool["type"] != "function":
        raise UnsupportedValue(f"{path}: only functions are supported.", param=f"{path}.type")


def check_function(function: dict[str, Any], path: str, schema: str = "parameters") -> None:
    """The members of a function, whose JSON schema is called `schema`. Raises `InvalidValue`."""
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidValue(
            f"{path}.name must be 1 to 128 letters, digits, hyphens or underscores.",
            param=f"{path}.name",
        )
    for key, kind, words in (
        ("description", str, "a string"),
        (schema, dict, "an object"),
        ("strict", bool, "a boolean"),
    ):
        if function.get(key) is not None and not isinstance(function[key], kind):
            raise InvalidValue(f"{path}.{key} must be {words}.", param=f"{path}.{key}")


def check_choice(choice: object) -> Choice | None:
    """A choice that is one word, or absent; None for one that is an object. Raises `InvalidValue`."""
    if choice is None:
        return "auto"
    if isinstance(choice, str):
        if choice in _CHOICES:
            return _CHOICES[choice]
        raise InvalidValue(
            "tool_choice must be auto, none, required or a function.", param="tool_choice"
        )
    if not isinstance(choice, dict):
        raise InvalidValue("tool_choice must be a string or an object.", param="tool_choice")
    if choice.get("type", "function") != "function":
        raise UnsupportedValue("tool_choice must be a function.", param="tool_choice.type")
    return None


def _choice(choice: Any) -> tuple[Choice, str | None]:
    if (word := check_choice(choice)) is not None:
        return word, None
    function = choice.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidValue(
            "tool_choice.function.name must be a string.", param="tool_choice.function.name"
        )
    return "named", function["name"]
