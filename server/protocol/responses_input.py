"""The items and tools of `/v1/responses` in the plain form that templates read. Knows no aiohttp.

Calls that follow each other, and the message before them, are one turn of the assistant. Thoughts of earlier turns
are left out, as templates do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core.errors import InvalidValue, UnsupportedValue
from server.protocol.messages import MAX_MESSAGES
from server.protocol.tools import (
    Tools,
    check_choice,
    check_function,
    check_parallel,
    check_type,
    choose,
    tool_list,
)

_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_TEXT_PARTS = ("input_text", "output_text", "text")


def read_input(given: object) -> list[dict[str, Any]]:
    """The input as the messages of a chat. Raises `NoriaError` with the field's path."""
    if isinstance(given, str):
        if not given:
            raise InvalidValue("input must not be empty.", param="input")
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise InvalidValue("input must be a string or a list of items.", param="input")
    if not 1 <= len(given) <= MAX_MESSAGES:
        raise InvalidValue(
            f"input has {len(given)} items; 1 to {MAX_MESSAGES} are allowed.", param="input"
        )
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        _read_item(item, f"input[{index}]", messages)
    if not messages:
        raise InvalidValue("input has no message.", param="input")
    return messages


def _read_item(item: object, path: str, messages: list[dict[str, Any]]) -> None:
    """Appends what the item says, or adds a call to the last message."""
    if not isinstance(item, dict):
        raise InvalidValue(f"{path} must be an object.", param=path)
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise InvalidValue(f"{path}.type must be a string.", param=f"{path}.type")
    if kind == "message":
        messages.append(_message(item, path))
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(_call(item, path))
    elif kind == "function_call_output":
        messages.append(
            {
                "role": "tool",
                "tool_call_id": _string(item, "call_id", path),
                "content": _content(item.get("output"), f"{path}.output"),
            }
        )
    elif kind != "reasoning":
        raise UnsupportedValue(
            f"{path}: only messages, function calls, their outputs and reasoning are supported.",
            param=path,
        )


def _message(item: dict[str, Any], path: str) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        names = ", ".join(_ROLES)
        raise InvalidValue(f"{path}.role must be one of {names}.", param=f"{path}.role")
    return {"role": _ROLES[role], "content": _content(item.get("content"), f"{path}.content")}


def _call(item: dict[str, Any], path: str) -> dict[str, Any]:
    call_id, name = _string(item, "call_id", path), _string(item, "name", path)
    function = {"name": name, "arguments": _string(item, "arguments", path)}
    return {"id": call_id, "type": "function", "function": function}


def _string(item: dict[str, Any], name: str, path: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidValue(f"{path}.{name} must be a string.", param=f"{path}.{name}")
    return value


def _content(content: object, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidValue(f"{path} must be a string or a list of text parts.", param=path)
    return "".join([_part(part, f"{path}[{index}]") for index, part in enumerate(content)])


def _part(part: object, path: str) -> str:
    if not isinstance(part, dict):
        raise InvalidValue(f"{path} must be an object.", param=path)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise InvalidValue(f"{path}.type must be a string.", param=f"{path}.type")
    if kind not in _TEXT_PARTS:
        raise UnsupportedValue(f"{path}: only parts of text are supported.", param=path)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidValue(f"{path}.text must be a string.", param=f"{path}.text")
    return text


def read_tools(body: Mapping[str, Any]) -> Tools | None:
    """None where nothing may be called. Raises `InvalidValue` and `UnsupportedValue` with the field's path."""
    is_parallel, specs = check_parallel(body), []
    for index, tool in enumerate(tool_list(body)):
        path = f"tools[{index}]"
        check_type(tool, path)
        check_function(tool, path)
        names = ("name", "description", "parameters", "strict")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        specs.append({"type": "function", "function": function})
    choice, named = body.get("tool_choice"), None
    word = check_choice(choice)
    if word is None:
        assert isinstance(choice, dict)
        named = choice.get("name")
        if not isinstance(named, str):
            raise InvalidValue("tool_choice.name must be a string.", param="tool_choice.name")
    return choose(specs, word or "named", named, is_parallel=is_parallel)


def told_tools(body: Mapping[str, Any]) -> dict[str, Any]:
    """What the answer repeats of checked tools."""
    names = ("type", "name", "description", "parameters", "strict")
    return {
        "tools": [{name: tool.get(name) for name in names} for tool in body.get("tools") or []],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": body.get("parallel_tool_calls") is not False,
    }
