"""`CallScanner`: reads one tool call, a JSON object with a name and arguments, character by character.

Knows no formats around it and no requests. Used by `tool_parser.py`. Not a validator: what the model writes between the
brackets of the arguments is passed on as it is.
"""

from __future__ import annotations

import json

_NAMES = ("name", "function")
_ARGUMENTS = ("arguments", "parameters")
_BLANKS = " \t\r\n"


class CallScanner:
    """`push` takes what belongs to the object; `take` gives the arguments that have arrived since, as JSON text.

    With a `name` the text is the arguments alone.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.raw = ""
        self.is_done = False
        self.is_broken = False
        self.has_arguments = False
        self._key: str | None = "arguments" if name is not None else None
        self._state = "value" if name is not None else "start"
        self._token = ""  # the string or value being read
        self._depth = 0
        self._in_string = self._is_escaped = self._streams = False
        self._is_bare = name is not None
        self._ready = ""

    def push(self, text: str) -> int:
        """Returns how many characters were taken; the rest stands behind the object, or broke it."""
        for position, character in enumerate(text):
            if self.is_done or self.is_broken:
                return position
            if not self._step(character):
                self._step(character)  # a bare number ends where the next thing begins
            if self.is_broken:
                return position
            self.raw += character
        return len(text)

    def take(self) -> str:
        ready, self._ready = self._ready, ""
        return ready

    def _step(self, character: str) -> bool:
        """False: the character ended a number or word and is still to be read."""
        state = self._state
        if state == "value":
            return self._start_value(character)
        if state == "string":
            self._in_text(character)
        elif state == "nested":
            self._in_nested(character)
        elif state == "word":
            if character in ",}]" or character in _BLANKS:
                self._end_value()
                return False
            self._add(character)
        elif character not in _BLANKS:
            self._between(character)
        return True

    def _between(self, character: str) -> None:
        """Around keys: `{`, then a key, a colon, a value, and a comma or the end."""
        state = self._state
        if state == "start" and character == "{":
            self._state = "first key"
        elif state in ("first key", "key") and character == '"':
            self._token, self._key, self._state = '"', None, "string"
            self._streams = False
        elif state == "colon" and character == ":":
            self._state = "value"
        elif state == "next" and character == ",":
            self._state = "key"
        elif state in ("first key", "next") and character == "}":
            self.is_done = True
        else:
            self.is_broken = True

    def _start_value(self, character: str) -> bool:
        if character in _BLANKS:
            return True
        self._token = ""
        self._streams = self._key in _ARGUMENTS and character != '"'
        self.has_arguments = self.has_arguments or self._key in _ARGUMENTS
        if self._is_bare and character != "{":
            self.is_broken = True
        elif character == '"':
            self._state = "string"
        elif character in "{[":
            self._state, self._depth = "nested", 1
        elif character in "}],:":
            self.is_broken = True
        else:
            self._state = "word"
        self._add(character)
        return True

    def _add(self, character: str) -> None:
        if self._streams:
            self._ready += character
        else:
            self._token += character

    def _in_text(self, character: str) -> None:
        self._add(character)
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            if self._key is None:
                self._key, self._state = self._decoded(), "colon"
            else:
                self._end_value()

    def _in_nested(self, character: str) -> None:
        self._add(character)
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped = character == "\\"
            self._in_string = character != '"'
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._depth += 1
        elif character in "}]":
            self._depth -= 1
            if not self._depth:
                self._end_value()

    def _end_value(self) -> None:
        is_text = self._state == "string"
        self._state = "next"
        if self._key in _NAMES and is_text:
            self.name = self._decoded()
        elif self._key in _ARGUMENTS and is_text:
            self._ready += self._decoded()  # JSON inside a string, as some models write it
        self.is_done = self._is_bare

    def _decoded(self) -> str:
        try:
            return str(json.loads(self._token, strict=False))
        except ValueError:
            self.is_broken = True
            return ""
