"""`ParsedChatRenderer`: chat answers whose text is taken apart into thoughts, content and tool calls.

Knows no aiohttp. `make_chat_renderer` gives the plain renderer wherever there is nothing to take apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from core.interfaces import TextTokenizer
from core.outputs import FinishReason, StepOutput
from server import sse
from server.protocol.answer_parser import AnswerParser, make_answer_parser
from server.protocol.openai_fields import StreamOptions
from server.protocol.openai_renderer import ChatShape, Choice, OpenAIRenderer
from server.protocol.tally import Tally
from server.protocol.tool_parser import CallArguments, CallStart, Content, Event, Reasoning
from server.protocol.tools import Tools


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
            if parser.has_called and output.finish_reason is FinishReason.STOP:
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
            has_more = delta.calls or delta.reasoning or self._parsers[choice.index].is_enforced
            members["content"] = None if has_more else ""
        if delta.calls:
            members["tool_calls"] = list(delta.calls.values())
        choice.has_sent = True
        return self._chunk(choice, b'"delta":' + sse.escape(orjson.dumps(members)))

    def _message(self, choice: Choice) -> dict[str, Any]:
        delta = Delta.of(self._events[choice.index])
        message: dict[str, Any] = {"role": "assistant", "content": delta.content, "refusal": None}
        if delta.reasoning:
            message["reasoning_content"] = delta.reasoning
        if delta.calls or self._parsers[choice.index].is_enforced:
            message["content"] = delta.content or None
        if delta.calls:
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
    made = [make_answer_parser(tokenizer, tools, prompt_ids) for _ in range(num_sequences)]
    parsers = [parser for parser in made if parser is not None]
    if not parsers:
        return OpenAIRenderer(
            ChatShape(tokenizer),
            model_name,
            tally,
            num_sequences=num_sequences,
            has_logprobs=has_logprobs,
            stream_options=stream_options,
            request_id=request_id,
        )
    return ParsedChatRenderer(
        parsers,
        tokenizer,
        model_name,
        tally,
        has_logprobs=has_logprobs,
        stream_options=stream_options,
        request_id=request_id,
    )
