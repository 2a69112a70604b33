"""Chat templates: messages to one text, rendered by transformers in its sandbox.

Knows templates and messages, no ids. Called by `tokenizer.py` only. Also here: how the control tokens that users
typed are told apart from those the template writes (`shield`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.errors import ConfigError, InvalidValue, ModelRefused
from core.interfaces import ToolFormat

_MAX_MESSAGE = 300
_TOOLS = re.compile(r"\{[%{][^%}]*\btools\b")  # the variable, not a word of a text


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """The template of a model. `special` are the names templates may use, such as `bos_token`."""

    source: str
    special: dict[str, str]
    with_tools: str | None = (
        None  # the source for requests with tools, where the model has a separate one
    )

    @property
    def tool_format(self) -> ToolFormat | None:
        """How a model with this template writes its calls; None where the template never mentions tools."""
        source = self.with_tools or self.source
        if not _TOOLS.search(source):
            return None
        marks: list[tuple[str, ToolFormat]] = [
            ("<tool_call>", "hermes"),
            ("[TOOL_CALLS]", "mistral"),
            ("<|python_tag|>", "llama"),
            ("ipython", "llama"),
        ]
        return next((name for mark, name in marks if mark in source), "json")

    @property
    def has_thoughts(self) -> bool:
        return "<think>" in self.source or "</think>" in self.source

    @staticmethod
    def load(
        folder: Path, settings: dict[str, Any], special: dict[str, str], override: str | None
    ) -> ChatTemplate | None:
        """The file `override`, else the model's own template, else None."""
        if override is not None:
            try:
                return ChatTemplate(
                    Path(override).expanduser().read_text(encoding="utf-8"), special
                )
            except (OSError, ValueError) as error:
                raise ConfigError(
                    "model.chat_template must be the path of a readable UTF-8 file with a Jinja template."
                ) from error
        beside = folder / "chat_template.jinja"
        if beside.is_file():
            return ChatTemplate(beside.read_text(encoding="utf-8"), special)
        found: Any = settings.get("chat_template")
        in_json = folder / "chat_template.json"
        if found is None and in_json.is_file():
            try:
                found = json.loads(in_json.read_text(encoding="utf-8")).get("chat_template")
            except (ValueError, AttributeError) as error:
                raise ModelRefused("chat_template.json of the model is no valid JSON.") from error
        if isinstance(found, list):
            named = {entry["name"]: entry["template"] for entry in found}
            default = named.get("default") or next(iter(named.values()), None)
            return ChatTemplate(default, special, named.get("tool_use")) if default else None
        return ChatTemplate(str(found), special) if found else None

    def prepare(self) -> None:
        """Imports the library's renderer, which takes a second, so that the first chat need not wait for it."""
        import transformers.utils.chat_template_utils  # noqa: F401

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        tools: list[dict[str, Any]] | None,
        template_kwargs: dict[str, Any] | None,
    ) -> str:
        """The prompt's text. Raises `InvalidValue(param="messages")` with the template's own words, bounded."""
        from jinja2 import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if continue_final_message and add_generation_prompt:
            raise InvalidValue(
                "continue_final_message and add_generation_prompt exclude each other.",
                param="continue_final_message",
            )
        source = self.with_tools if tools and self.with_tools else self.source
        try:
            rendered, _ = render_jinja_template(
                conversations=[[_normalize(message, source) for message in messages]],
                tools=tools or None,
                chat_template=source,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                **{**self.special, **(template_kwargs or {})},
            )
        except TemplateError as error:
            # `raise_exception` of a template raises exactly this class; its subclasses are faults of the rendering
            reason = f": {str(error)[:_MAX_MESSAGE]}" if type(error) is TemplateError else "."
            raise InvalidValue(
                f"The chat template refuses these messages{reason}", param="messages"
            ) from error
        except Exception as error:  # a template may run into any error of Python
            raise InvalidValue(
                "The chat template cannot render these messages.", param="messages"
            ) from error
        text = str(rendered[0])
        if any(_is_left_out(message, text) for message in messages):
            raise InvalidValue(
                "The chat template of this model has no place for a system message: put it into the first message of "
                "the user.",
                param="messages",
            )
        return text


def _is_left_out(message: dict[str, Any], rendered: str) -> bool:
    """Whether a template passed over a system message in silence. Its longest word is enough to tell: templates
    may trim and indent."""
    content = message.get("content")
    if message.get("role") not in ("system", "developer") or not isinstance(content, str):
        return False
    return max(content.split(), key=len, default="") not in rendered


def _normalize(message: dict[str, Any], source: str) -> dict[str, Any]:
    """Content becomes one string (null or absent: empty, so that no template prints None); `developer` becomes
    `system` for templates that do not know it; arguments of tool calls become objects."""
    result = dict(message)
    content = result.get("content")
    if isinstance(content, list):
        content = "".join(
            part if isinstance(part, str) else str(part.get("text") or "") for part in content
        )
    result["content"] = "" if content is None else content
    if result.get("role") == "developer" and "developer" not in source:
        result["role"] = "system"
    if result.get("tool_calls"):
        result["tool_calls"] = [_with_parsed_arguments(call) for call in result["tool_calls"]]
    elif "tool_calls" in result:
        del result["tool_calls"]
    return {key: value for key, value in result.items() if value is not None}


def _with_parsed_arguments(call: Any) -> Any:
    """OpenAI's clients send arguments as JSON text; templates expect the object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return call
    return call | {"function": function | {"arguments": arguments}}


def find_sentinel(value: Any) -> str:
    """A private-use character that occurs nowhere in `value`."""
    used: set[str] = set()
    _collect(value, used)
    return next(chr(code) for code in range(0xF0000, 0xFFFFE) if chr(code) not in used)


def _collect(value: Any, used: set[str]) -> None:
    if isinstance(value, str):
        if not value.isascii():
            used.update(value)
    elif isinstance(value, dict):
        for key, item in value.items():
            _collect(key, used)
            _collect(item, used)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, used)


def shield(value: Any, controls: list[str], sentinel: str) -> tuple[Any, bool]:
    """`value` with `sentinel` put inside every control token found in its strings, and whether there was one.

    The parts of a content list are joined first: they may form a control token together.
    """
    if isinstance(value, str):
        return _shield_text(value, controls, sentinel)
    if isinstance(value, dict):
        items = {}
        is_hostile = False
        for key, item in value.items():
            if key == "role":  # validated by whoever took the request, and read by every template
                items[key] = item
                continue
            if key == "content" and isinstance(item, list):
                item = "".join(p if isinstance(p, str) else str(p.get("text") or "") for p in item)
            clean_key, hostile_key = _shield_text(key, controls, sentinel)
            items[clean_key], hostile_item = shield(item, controls, sentinel)
            is_hostile = is_hostile or hostile_key or hostile_item
        return items, is_hostile
    if isinstance(value, (list, tuple)):
        pairs = [shield(item, controls, sentinel) for item in value]
        return [item for item, _ in pairs], any(is_hostile for _, is_hostile in pairs)
    return value, False


def _shield_text(text: str, controls: list[str], sentinel: str) -> tuple[str, bool]:
    is_hostile = False
    for control in controls:
        if control in text:
            text = text.replace(control, control[:1] + sentinel + control[1:])
            is_hostile = True
    return text, is_hostile
