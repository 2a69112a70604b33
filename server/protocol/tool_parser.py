"""`ToolParser`: a model's text, as it comes, to content and tool calls. One per choice, for streams and bodies alike.

Four formats, named after who writes them, found from the chat template (`core/model/chat_template.py`):

- `hermes` (Qwen, Hermes): `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of times;
- `llama` (Llama 3): an answer `{"name": ..., "parameters": {...}}`, perhaps behind `<|python_tag|>`; more behind `;`;
- `mistral`: `[TOOL_CALLS]` and a list of objects, or `name[ARGS]{...}`;
- `json`: the answer is an object, several objects, or a list of them.

Blanks between content and a call belong to neither. What turns out to be no call is content, as it was written.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from core.interfaces import ToolFormat
from server.protocol.call_scanner import CallScanner

_MARKS = {"hermes": "<tool_call>", "llama": "<|python_tag|>", "mistral": "[TOOL_CALLS]", "json": ""}
_CLOSE = "</tool_call>"
_BARE_NAME = re.compile(
    r"\s*([A-Za-z0-9_.-]{1,128})(?:\[CALL_ID\][A-Za-z0-9_-]*)?(?:\[ARGS\])?\s*(?=\{)"
)
_BARE_START = re.compile(r"\s*[A-Za-z0-9_.\-\[\]]{0,220}\s*\Z")
MARKS = frozenset({*_MARKS.values(), _CLOSE, "[ARGS]", "[CALL_ID]", "<think>", "</think>"} - {""})
"""Texts that some models write with one control token, which has no text of its own for the detokenizer."""


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """What the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    index: int
    call_id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """A piece of the arguments, JSON text; joined they are whole."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments


class ToolParser:
    """`names` are the functions that exist: an answer without any mark is a call only if it names one of them."""

    def __init__(
        self, kind: ToolFormat, names: Collection[str], *, is_parallel: bool = True
    ) -> None:
        self._mark = _MARKS[kind]
        self._kind, self._names, self._is_parallel = kind, names, is_parallel
        self._state = "text" if kind in ("hermes", "mistral") else "start"
        self._buffer = ""
        self._held = ""  # consumed, but content if no call comes of it
        self._scanner: CallScanner | None = None
        self._is_marked = self._is_list = False
        self._has_started = False  # the call being read has been told
        self._events: list[Event] = []
        self.num_calls = 0
        self.is_cut = False  # the text ended within a call

    def push(self, text: str) -> list[Event]:
        self._buffer += text
        while self._buffer and getattr(self, "_in_" + self._state)():
            pass
        return self._take()

    def finish(self) -> list[Event]:
        """The end of the text: what was held back is content."""
        if self._scanner is not None and not self._has_started:
            self._held += self._scanner.raw
        self.is_cut = self._scanner is not None and self._tells
        rest = self._held + self._buffer
        if not self.num_calls or rest.strip():
            self._say(rest)
        self._held = self._buffer = ""
        return self._take()

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _say(self, text: str) -> None:
        if text:
            self._events.append(Content(text))

    # Each state returns whether it has moved and wants to be asked again; what it cannot decide stays in the buffer.

    def _in_start(self) -> bool:
        """The first thing an answer says decides whether it is one."""
        text = self._buffer.lstrip()
        if not text or (self._mark.startswith(text) and text != self._mark and self._mark):
            return False
        if text[0] == "{" or (self._kind == "json" and text[0] == "["):
            self._is_list = text[0] == "["
            if self._is_list:
                self._held, text = self._buffer[: -len(text) + 1 or None], text[1:]
            else:
                self._held = self._buffer[: -len(text)]
            self._buffer, self._state = text, "between"
        else:
            self._state = "text"
        return True

    def _in_text(self) -> bool:
        mark, text = self._mark, self._buffer
        place = text.find(mark) if mark else -1
        if place >= 0:
            self._say(text[:place].rstrip())
            self._held = text[len(text[:place].rstrip()) : place + len(mark)]
            self._buffer, self._state = text[place + len(mark) :], "between"
            self._is_marked, self._is_list = True, False
            return True
        kept = _overlap(text, mark)
        safe = text[: len(text) - kept].rstrip()
        self._say(safe)
        self._buffer = text[len(safe) :]
        return False

    def _in_between(self) -> bool:
        """Before a call: after its mark, or where a list may go on."""
        text = self._buffer.lstrip()
        if not text:
            return False
        blanks = self._buffer[: -len(text)]
        if text[0] == "{":
            return self._start(blanks, text, CallScanner())
        if text[0] == "[" and self._is_marked and not self._is_list and self._kind == "mistral":
            self._held, self._buffer, self._is_list = self._held + blanks + "[", text[1:], True
            return True
        if self._kind == "mistral" and not self._is_list:
            if match := _BARE_NAME.match(self._buffer):
                return self._start(match[0], self._buffer[match.end() :], CallScanner(match[1]))
            if _BARE_START.match(self._buffer):
                return False
        return self._give_up()

    def _start(self, consumed: str, rest: str, scanner: CallScanner) -> bool:
        self._held += consumed
        self._scanner, self._buffer, self._state = scanner, rest, "call"
        self._has_started = False
        return True

    def _in_call(self) -> bool:
        scanner = self._scanner
        assert scanner is not None
        self._buffer = self._buffer[scanner.push(self._buffer) :]
        if not self._has_started and scanner.name is not None and not scanner.is_broken:
            is_known = self._is_marked or scanner.name in self._names
            if is_known and (scanner.has_arguments or scanner.is_done):
                self._tell(scanner.name)
        if self._has_started:
            self._tell_arguments(scanner)
        if not scanner.is_done and not scanner.is_broken:
            return False
        self._scanner = None
        if not self._has_started:
            self._held += scanner.raw
            return self._give_up()
        self._state = "after"
        return True

    def _tell(self, name: str) -> None:
        self._has_started, self._held = True, ""
        self.num_calls += 1
        if self._tells:
            call_id = "call_" + uuid.uuid4().hex[:24]
            self._events.append(CallStart(self.num_calls - 1, call_id, name))

    @property
    def _tells(self) -> bool:
        """The call being read is one that the client hears of."""
        return self._has_started and (self._is_parallel or self.num_calls == 1)

    def _tell_arguments(self, scanner: CallScanner) -> None:
        text = scanner.take()
        if scanner.is_done and not scanner.has_arguments:
            text = "{}"
        if text and self._tells:
            self._events.append(CallArguments(self.num_calls - 1, text))

    def _in_after(self) -> bool:
        """Behind a call: its closing mark, a separator, the end of a list, or something else."""
        text = self._buffer.lstrip()
        if not text:
            return False
        if self._kind == "hermes":
            if _CLOSE.startswith(text) and text != _CLOSE:
                return False
            self._buffer = text.removeprefix(_CLOSE)
            self._state = "text"
            return True
        if text[0] in ",;" or (text[0] == "{" and not self._is_bare_format()):
            self._buffer = text.lstrip(",;")
            self._state = "between"
            return True
        self._buffer = text[1:] if text[0] == "]" and self._is_list else text
        self._is_list, self._state = False, "text"
        return True

    def _is_bare_format(self) -> bool:
        return self._kind == "mistral" and not self._is_list

    def _give_up(self) -> bool:
        """No call after all."""
        self._buffer = self._held + self._buffer
        self._held = ""
        if self._is_marked and self._mark and self._buffer.lstrip().startswith(self._mark):
            skipped = self._buffer.index(self._mark) + len(self._mark)
            self._say(self._buffer[:skipped])
            self._buffer = self._buffer[skipped:]
        self._state = "text"
        return bool(self._buffer)


def _overlap(text: str, mark: str) -> int:
    """The length of the longest end of `text` that may become `mark`."""
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if mark.startswith(text[-length:]):
            return length
    return 0
