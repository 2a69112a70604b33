"""`ParsedChatRenderer`: chat answers whose text is taken apart into thoughts, content and tool calls.

Knows no aiohttp. `make_chat_renderer` gives the plain renderer wherever there is nothing to take apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from core.interfaces import TextTokenizer, ToolFormat
from core.outputs import FinishReason, StepOutput
from server import sse
from server.protocol.openai_fields import StreamOptions
from server.protocol.openai_renderer import ChatShape, Choice, OpenAIRenderer
from server.protocol.reasoning import ReasoningSplitter
from server.protocol.tally import Tally
from server.protocol.tool_parser import (
    MARKS,
    CallArguments,
    CallStart,
    Content,
    Event,
    Reasoning,
    ToolParser,
)
from server.protocol.tools import Tools


class AnswerParser:
    """The text of one choice to events. `push` takes the text of each token, and the token for marks without text."""

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
        is_enforced = (
            tools is not None and tools.is_enforced
        )  # a grammar leaves no room for thoughts
        self._thoughts: ReasoningSplitter | None = None
        if tokenizer.has_thoughts and not is_enforced:
            self._thoughts = ReasoningSplitter(is_open=is_thinking)
        names = {i: tokenizer.token_bytes(i) for i in tokenizer.control_token_ids}
        self._marks = {i: name.decode() for i, name in names.items() if name.decode() in MARKS}

    @property
    def num_calls(self) -> int:
        return self._tools.num_calls if self._tools is not None else 0

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
        return events + (self._tools.finish() if self._tools is not None else [])

    def _parse(self, text: str) -> list[Event]:
        if not text:
            return []
        return self._tools.push(text) if self._tools is not None else [Content(text)]


@dataclass(slots=True)
class Delta:
    """Events joined: what one chunk, or a whole message, says."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, dict[str, Any]] = field(default_factory=dict)

    @staticmethod
    def of(events: Sequence[Event]) -> Delta:
        delta = Delta()
        for event in events:
            match event:
                case Content(text):
                    delta.content += text
                case Reasoning(text):
                    delta.reasoning += text
                case CallStart(index, call_id, name):
                    delta.calls[index] = {
                        "index": index,
                        "id": call_id,
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                case CallArguments(index, text):
                    call = delta.calls.setdefault(
                        index, {"index": index, "function": {"arguments": ""}}
                    )
                    call["function"]["arguments"] += text
        return delta


class ParsedChatRenderer(OpenAIRenderer):
    """As `OpenAIRenderer`, with one parser per choice. A chunk says what a token has made certain."""

    def __init__(
        self,
        parsers: list[AnswerParser],
        tokenizer: TextTokenizer,
        model_name: str,
        tally: Tally,
        *,
        has_logprobs: bool,
        stream_options: StreamOptions,
        request_id: str = "",
    ) -> None:
        super().__init__(
            ChatShape(tokenizer),
            model_name,
            tally,
            num_sequences=len(parsers),
            has_logprobs=has_logprobs,
            stream_options=stream_options,
            request_id=request_id,
        )
        self._has_plain_chunks = False
        self._parsers = parsers
        self._events: list[list[Event]] = [[] for _ in parsers]

    def _take(self, index: int, output: StepOutput) -> None:
        super()._take(index, output)
        choice, parser = self._choices[index], self._parsers[index]
        choice.texts.clear()
        self._events[index] += parser.push(output.text, output.token_id)
        if output.finish_reason is not None:
            self._events[index] += parser.finish()
            if parser.num_calls and output.finish_reason is FinishReason.STOP:
                choice.finish_reason = "tool_calls"

    def _flush(self, choice: Choice) -> bytes:
        events, self._events[choice.index] = self._events[choice.index], []
        if not events and choice.finish_reason is None:
            return b""
        delta, members = Delta.of(events), dict[str, Any]()
        if not choice.has_sent:
            members["role"] = "assistant"
        if delta.reasoning:
            members["reasoning_content"] = delta.reasoning
        if delta.content:
            members["content"] = delta.content
        elif not choice.has_sent:
            members["content"] = None if delta.calls or delta.reasoning else ""
        if delta.calls:
            members["tool_calls"] = list(delta.calls.values())
        choice.has_sent = True
        return self._chunk(choice, b'"delta":' + sse.escape(orjson.dumps(members)))

    def _message(self, choice: Choice) -> dict[str, Any]:
        delta = Delta.of(self._events[choice.index])
        message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls:
            message["content"] = delta.content or None
            message["tool_calls"] = [
                {key: value for key, value in call.items() if key != "index"}
                for call in delta.calls.values()
            ]
        return {"message": message}


def make_chat_renderer(
    tokenizer: TextTokenizer,
    tools: Tools | None,
    prompt_ids: Sequence[int],
    model_name: str,
    tally: Tally,
    *,
    num_sequences: int,
    has_logprobs: bool,
    stream_options: StreamOptions,
    request_id: str = "",
) -> OpenAIRenderer:
    if tools is None and not tokenizer.has_thoughts:
        return OpenAIRenderer(
            ChatShape(tokenizer),
            model_name,
            tally,
            num_sequences=num_sequences,
            has_logprobs=has_logprobs,
            stream_options=stream_options,
            request_id=request_id,
        )
    is_thinking = ends_in_thoughts(tokenizer, prompt_ids)
    parsers = [
        AnswerParser(tokenizer, tools, is_thinking=is_thinking) for _ in range(num_sequences)
    ]
    return ParsedChatRenderer(
        parsers,
        tokenizer,
        model_name,
        tally,
        has_logprobs=has_logprobs,
        stream_options=stream_options,
        request_id=request_id,
    )


def ends_in_thoughts(tokenizer: TextTokenizer, prompt_ids: Sequence[int]) -> bool:
    """Whether the template has opened the thoughts that the answer goes on with."""
    tail = b"".join(tokenizer.token_bytes(i) for i in prompt_ids[-8:])
    return tail.rstrip().endswith(b"<think>")
