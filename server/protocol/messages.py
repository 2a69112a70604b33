"""The messages of a chat: checked one by one and brought into the plain form that templates read.

Knows no aiohttp, no templates and no tokenizer. Nothing that a message names is ever fetched.
"""

from __future__ import annotations

from typing import Any

from core.errors import InvalidValue, UnsupportedValue

MAX_MESSAGES = 4096
_ROLES = ("system", "developer", "user", "assistant", "tool")


def check_messages(messages: object) -> list[dict[str, Any]]:
    """Messages with `role`, `content` (one string) and, where given, `name`, `tool_calls` and `tool_call_id`."""
    if not isinstance(messages, list):
        raise InvalidValue("messages must be a list of objects.", param="messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidValue(
            f"messages has {len(messages)} entries; 1 to {MAX_MESSAGES} are allowed.",
            param="messages",
        )
    return [_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _message(message: object, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InvalidValue(f"{path} must be an object.", param=path)
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidValue(f"{path}.role must be one of {', '.join(_ROLES)}.", param=f"{path}.role")
    tool_calls = message.get("tool_calls")
    if tool_calls is not None:
        _check_tool_calls(tool_calls, f"{path}.tool_calls")
    may_be_empty = role == "assistant" and bool(tool_calls)
    checked: dict[str, Any] = {
        # The newer name of the same role; templates know the older one.
        "role": "system" if role == "developer" else role,
        "content": _content(message.get("content"), f"{path}.content", may_be_empty=may_be_empty),
    }
    for name in ("name", "tool_call_id"):
        value = message.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidValue(f"{path}.{name} must be a string.", param=f"{path}.{name}")
        if value is not None:
            checked[name] = value
    for name in ("audio", "function_call"):
        if message.get(name) is not None:
            raise UnsupportedValue(f"{path}.{name} is not supported.", param=f"{path}.{name}")
    if tool_calls:
        checked["tool_calls"] = tool_calls
    return checked


def _content(content: object, path: str, *, may_be_empty: bool) -> str:
    if isinstance(content, str):
        return content
    if content is None and may_be_empty:
        return ""
    if not isinstance(content, list):
        raise InvalidValue(f"{path} must be a string or a list of text parts.", param=path)
    return "".join(text_of_part(part, f"{path}[{index}]") for index, part in enumerate(content))


def text_of_part(part: object, path: str, noun: str = "parts") -> str:
    """The text of one member of a content list; `noun` is what the API calls them. Raises for any other kind."""
    if not isinstance(part, dict):
        raise InvalidValue(f"{path} must be an object.", param=path)
    kind = part.get("type")
    if not isinstance(kind, str):
        raise InvalidValue(f"{path}.type must be a string.", param=f"{path}.type")
    if kind != "text":
        raise UnsupportedValue(f"{path}: only {noun} of type text are supported.", param=path)
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidValue(f"{path}.text must be a string.", param=f"{path}.text")
    return text


def _check_tool_calls(calls: object, path: str) -> None:
    if not isinstance(calls, list):
        raise InvalidValue(f"{path} must be a list.", param=path)
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise InvalidValue(
                f"{path}[{index}] must be an object with function.name.", param=f"{path}[{index}]"
            )
        if not isinstance(function.get("arguments", ""), (str, dict)):
            raise InvalidValue(
                f"{path}[{index}].function.arguments must be a string.",
                param=f"{path}[{index}].function.arguments",
            )
