"""`ReasoningSplitter`: takes what a model thinks (`<think>...</think>`) out of the text of its answer, as it comes.

Only the beginning of an answer is looked at. Blanks around the thoughts belong to neither part. Knows no models:
whoever makes one says whether the chat template has already opened the thoughts.
"""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


class ReasoningSplitter:
    """`push` and `finish` give (thoughts, answer), either of which may be empty."""

    def __init__(self, *, is_open: bool) -> None:
        self._state = "thoughts" if is_open else "start"
        self._buffer = ""
        self._has_thoughts = False

    @property
    def is_open(self) -> bool:
        return self._state == "thoughts"

    def push(self, text: str) -> tuple[str, str]:
        if self._state == "answer":
            return "", text
        self._buffer += text
        if self._state == "start":
            begun = self._buffer.lstrip()
            if OPEN.startswith(begun) and begun != OPEN:
                return "", ""  # too little to tell
            if not begun.startswith(OPEN):
                return "", self._give_answer(self._buffer)
            self._buffer, self._state = begun.removeprefix(OPEN), "thoughts"
        thoughts = ""
        if self._state == "thoughts":
            thoughts = self._thoughts()
        if self._state == "gap" and (answer := self._buffer.lstrip()):
            return thoughts, self._give_answer(answer)
        return thoughts, ""

    def finish(self) -> tuple[str, str]:
        rest, self._buffer = self._buffer, ""
        if self._state == "thoughts":
            return rest.rstrip(), ""
        return "", "" if self._state == "gap" else rest

    def _thoughts(self) -> str:
        text = self._buffer if self._has_thoughts else self._buffer.lstrip()
        before, found, behind = text.partition(CLOSE)
        if found:
            self._buffer, self._state = behind, "gap"
            return before.rstrip()
        safe = text.rstrip()
        for length in range(min(len(CLOSE) - 1, len(safe)), 0, -1):
            if CLOSE.startswith(safe[-length:]):
                safe = safe[:-length].rstrip()
                break
        self._has_thoughts = self._has_thoughts or bool(safe)
        self._buffer = text[len(safe) :]
        return safe

    def _give_answer(self, text: str) -> str:
        self._buffer, self._state = "", "answer"
        return text
