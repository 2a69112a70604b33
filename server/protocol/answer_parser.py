"""`AnswerParser`: the text of one answer, token by token, to thoughts, content and tool calls. Knows no aiohttp.

Used by the renderers of all three APIs that have tools. `make_answer_parser` gives None wherever there is nothing to
take apart.
"""

from __future__ import annotations

from collections.abc import Sequence

from core.interfaces import TextTokenizer, ToolFormat
from server.protocol.reasoning import ReasoningSplitter
from server.protocol.tool_parser import MARKS, Content, Event, Reasoning, ToolParser
from server.protocol.tools import Tools


class AnswerParser:
    """The text of one choice to events. `push` takes the text of each token, and the token for marks without text.

    An enforced call has no content: what is left of one that was cut before its name is told to nobody.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        tools: Tools | None,
        *,
        is_thinking: bool,
    ) -> None:
        """`is_thinking`: the prompt ends with opened thoughts."""
        kind: ToolFormat = "json"
        if tools is not None and not tools.is_enforced and tokenizer.tool_format is not None:
            kind = tokenizer.tool_format
        self._tools: ToolParser | None = None
        if tools is not None:
            self._tools = ToolParser(kind, tools.names, is_parallel=tools.is_parallel)
        self.is_enforced = tools is not None and tools.is_enforced
        self._thoughts: ReasoningSplitter | None = None
        if tokenizer.has_thoughts and not self.is_enforced:  # a grammar leaves no room for them
            self._thoughts = ReasoningSplitter(is_open=is_thinking)
        names = {i: tokenizer.token_bytes(i) for i in tokenizer.control_token_ids}
        self._marks = {i: name.decode() for i, name in names.items() if name.decode() in MARKS}

    @property
    def is_thinking(self) -> bool:
        return self._thoughts is not None and self._thoughts.is_open

    @property
    def ends_in_call(self) -> bool:
        """The last call was begun, but not ended."""
        return self._tools is not None and self._tools.is_cut

    @property
    def has_called(self) -> bool:
        """There are calls, and all of them are whole."""
        return self._tools is not None and self._tools.num_calls > 0 and not self._tools.is_cut

    def push(self, text: str, token_id: int | None = None) -> list[Event]:
        if token_id in self._marks:
            text += self._marks[token_id]
        if self._thoughts is None:
            return self._parse(text)
        thoughts, text = self._thoughts.push(text)
        return [*([Reasoning(thoughts)] if thoughts else []), *self._parse(text)]

    def finish(self) -> list[Event]:
        events: list[Event] = []
        if self._thoughts is not None:
            thoughts, text = self._thoughts.finish()
            events = [*([Reasoning(thoughts)] if thoughts else []), *self._parse(text)]
        return events + (self._said(self._tools.finish()) if self._tools is not None else [])

    def _parse(self, text: str) -> list[Event]:
        if not text:
            return []
        return [Content(text)] if self._tools is None else self._said(self._tools.push(text))

    def _said(self, events: list[Event]) -> list[Event]:
        if not self.is_enforced:
            return events
        return [event for event in events if not isinstance(event, Content)]


def make_answer_parser(
    tokenizer: TextTokenizer, tools: Tools | None, prompt_ids: Sequence[int]
) -> AnswerParser | None:
    if tools is None and not tokenizer.has_thoughts:
        return None
    return AnswerParser(tokenizer, tools, is_thinking=ends_in_thoughts(tokenizer, prompt_ids))


def ends_in_thoughts(tokenizer: TextTokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the template has opened the thoughts that the answer goes on with."""
    tail = b"".join(tokenizer.token_bytes(i) for i in prompt_ids[-8:])
    return tail.rstrip().endswith(b"<think>")
