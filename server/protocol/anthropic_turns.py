"""The messages and tools of Anthropic's API in the plain form that templates read. Knows no aiohttp.

Turns of the same role that follow each other become one turn, and blocks of text are paragraphs of it, as that API
does. Results of tools become turns of their own, before what else the user says. Thoughts of earlier turns are left
out, as templates do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from core.errors import InvalidValue, UnsupportedValue
from server.protocol.messages import MAX_MESSAGES, text_of_part
from server.protocol.tools import Choice, Tools, check_function, choose, tool_list

BETWEEN_BLOCKS = "\n\n"
_ROLES = ("user", "assistant")
_THOUGHTS = ("thinking", "redacted_thinking")
_CHOICES: dict[str, Choice] = {
    "auto": "auto",
    "any": "required",
    "tool": "named",
    "none": "none",
}

Turn = dict[str, Any]


def read_turns(body: Mapping[str, Any]) -> list[Turn]:
    """`system` and `messages` as the messages of a chat. Raises `NoriaError` with the field's path."""
    given = body.get("messages")
    if not isinstance(given, list):
        raise InvalidValue("messages must be a list of objects.", param="messages")
    if not 1 <= len(given) <= MAX_MESSAGES:
        raise InvalidValue(
            f"messages has {len(given)} entries; 1 to {MAX_MESSAGES} are allowed.", param="messages"
        )
    turns: list[Turn] = []
    if body.get("system") is not None:
        turns.append({"role": "system", "content": _text(body["system"], "system")})
    for index, message in enumerate(given):
        for turn in _message(message, f"messages[{index}]"):
            _append(turns, turn)
    if turns[-1].get("tool_calls"):
        raise InvalidValue(
            "messages ends with a tool_use whose tool_result is missing.", param="messages"
        )
    return turns


def _append(turns: list[Turn], turn: Turn) -> None:
    """Joins it with the last one where both are of the same person, and the last one called nothing."""
    last = turns[-1] if turns else {"role": ""}
    if last["role"] != turn["role"] or turn["role"] not in _ROLES or "tool_calls" in last:
        turns.append(turn)
        return
    texts = [text for text in (last["content"], turn["content"]) if text]
    turns[-1] = {**last, **turn, "content": BETWEEN_BLOCKS.join(texts)}


def _message(message: object, path: str) -> list[Turn]:
    if not isinstance(message, dict):
        raise InvalidValue(f"{path} must be an object.", param=path)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidValue(
            f"{path}.role must be user or assistant; instructions belong in system.",
            param=f"{path}.role",
        )
    path = f"{path}.content"
    if not isinstance(content, list):
        return [{"role": role, "content": _text(content, path)}]
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    results: list[Turn] = []
    for index, block in enumerate(content):
        place = f"{path}[{index}]"
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_use" and role == "assistant":
            calls.append(_call(block, place))
        elif kind == "tool_result" and role == "user":
            results.append(_result(block, place))
        elif kind not in _THOUGHTS or role == "user":
            texts.append(text_of_part(block, place, "blocks"))
    turn: Turn = {"role": role, "content": BETWEEN_BLOCKS.join(texts)}
    if calls:
        turn["tool_calls"] = calls
    return [*results, turn] if texts or not results else results


def _call(block: dict[str, Any], path: str) -> dict[str, Any]:
    call_id, name = _string(block, "id", path), _string(block, "name", path)
    if not isinstance(block.get("input"), dict):
        raise InvalidValue(f"{path}.input must be an object.", param=f"{path}.input")
    arguments = orjson.dumps(block["input"]).decode()
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _result(block: dict[str, Any], path: str) -> Turn:
    call_id, content = _string(block, "tool_use_id", path), block.get("content")
    text = "" if content is None else _text(content, f"{path}.content")
    return {"role": "tool", "tool_call_id": call_id, "content": text}


def _string(block: dict[str, Any], name: str, path: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidValue(f"{path}.{name} must be a string.", param=f"{path}.{name}")
    return value


def _text(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidValue(f"{path} must be a string or a list of text blocks.", param=path)
    return BETWEEN_BLOCKS.join(
        text_of_part(block, f"{path}[{i}]", "blocks") for i, block in enumerate(content)
    )


def read_tools(body: Mapping[str, Any]) -> Tools | None:
    """None where nothing may be called. Raises `InvalidValue` and `UnsupportedValue` with the field's path."""
    specs = []
    for index, tool in enumerate(tool_list(body)):
        path = f"tools[{index}]"
        if tool.get("type") not in (None, "custom"):
            raise UnsupportedValue(
                f"{path}: only tools of type custom are supported.", param=f"{path}.type"
            )
        check_function(tool, path, "input_schema")
        if tool.get("input_schema") is None:
            raise InvalidValue(f"{path}.input_schema is missing.", param=f"{path}.input_schema")
        if tool["input_schema"].get("type", "object") != "object":
            where = f"{path}.input_schema.type"
            raise InvalidValue(f'{where} must be "object".', param=where)
        function = {"name": tool["name"], "parameters": tool["input_schema"]}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        specs.append({"type": "function", "function": function})
    return choose(specs, *_choice(body), is_parallel=_is_parallel(body))


def _choice(body: Mapping[str, Any]) -> tuple[Choice, str | None]:
    choice = body.get("tool_choice")
    if choice is None:
        return "auto", None
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(kind, str) or kind not in _CHOICES:
        raise InvalidValue(
            f"tool_choice must be an object with a type: {', '.join(_CHOICES)}.",
            param="tool_choice",
        )
    name = choice.get("name")
    if not isinstance(name, str) and (kind == "tool" or name is not None):
        raise InvalidValue("tool_choice.name must be a string.", param="tool_choice.name")
    return _CHOICES[kind], name if kind == "tool" else None


def _is_parallel(body: Mapping[str, Any]) -> bool:
    name = "disable_parallel_tool_use"
    value = (body.get("tool_choice") or {}).get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidValue(f"tool_choice.{name} must be a boolean.", param=f"tool_choice.{name}")
    return value is not True
