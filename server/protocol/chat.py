"""`POST /v1/chat/completions`: what it accepts. Knows no aiohttp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from core.errors import InvalidValue, UnsupportedValue
from core.interfaces import TextTokenizer
from core.sampling_params import MAX_TOKENS, SamplingParams
from core.structured.grammar import Grammar
from server.backends.base import ServedModel
from server.protocol import openai_fields, sampling_fields
from server.protocol.fields import REFUSED, UnknownFields, convert, refuse_unsupported
from server.protocol.messages import check_messages
from server.protocol.openai_fields import OpenAIFields, StreamOptions
from server.protocol.prompts import check_amount, refuse_hopeless
from server.protocol.sampling_fields import (
    MAX_CHOICES,
    SamplingFields,
    check_common,
    check_model,
    openai_defaults,
    to_params,
)
from server.protocol.structured import parse_grammar
from server.protocol.tools import (
    Tools,
    bind,
    parse_tools,
    with_calls_as_text,
    with_instruction,
    without_stops,
)

MAX_TEMPLATE_FIELDS = 32
_OF_THE_CALL = frozenset(
    {
        "chat_template",
        "tokenize",
        "messages",
        "conversation",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)
REFUSED_FIELDS: Mapping[str, tuple[object, ...]] = {
    **REFUSED,
    "functions": ([],),
    "function_call": (),
    "modalities": (["text"],),
    "audio": (),
    "chat_template": (),
    "add_special_tokens": (False,),
    "web_search_options": (),
}


class TemplateFields(msgspec.Struct, frozen=True):
    """What the template is given beside messages and tools."""

    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatFields(TemplateFields, frozen=True):
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


_KNOWN = (
    sampling_fields.NAMES
    | openai_fields.NAMES
    | REFUSED_FIELDS.keys()
    | set(ChatFields.__struct_fields__)
    | {"messages", "tools", "tool_choice"}
)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What the template is given."""

    messages: list[dict[str, Any]]
    adds_generation_prompt: bool
    continues_final_message: bool
    template_kwargs: dict[str, Any]
    tools: Tools | None = None

    def tokenize_within(self, model: ServedModel, name: str) -> list[int]:
        """The same, but what is certain not to fit is refused before it costs anything, as field `name`."""
        refuse_hopeless(self.messages, model, name)
        return self.tokenize(model.tokenizer)

    def tokenize(self, tokenizer: TextTokenizer) -> list[int]:
        """Slow; belongs in an executor. Raises `InvalidValue` where the template refuses."""
        messages, tools = self.messages, self.tools
        if tokenizer.tool_format is None:
            messages = with_calls_as_text(messages)
            messages = messages if tools is None else with_instruction(messages, tools)
            tools = None
        return tokenizer.encode_chat(
            messages,
            tools=None if tools is None else tools.specs,
            add_generation_prompt=self.adds_generation_prompt,
            continue_final_message=self.continues_final_message,
            template_kwargs=self.template_kwargs or None,
        )


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A valid request, before its messages are tokens."""

    prompt: ChatPrompt
    params: SamplingParams
    num_choices: int
    streams: bool
    stream_options: StreamOptions
    grammar: Grammar | None = None

    @property
    def tools(self) -> Tools | None:
        return self.prompt.tools


def parse_chat(
    body: Mapping[str, Any], model: ServedModel, unknown: UnknownFields, *, max_waiting: int
) -> ChatRequest:
    """Raises `NoriaError`; left to be found wrong are the template's opinion and the number of tokens."""
    fields = convert(body, SamplingFields)
    extra = convert(body, OpenAIFields)
    own = convert(body, ChatFields)
    refuse_unsupported(body, REFUSED_FIELDS)
    tools = parse_tools(body)
    grammar = bind(tools, parse_grammar(body), model)
    num_choices = check_common(fields, max_choices=MAX_CHOICES)
    check_model(fields.model, model)
    params = without_stops(_params(fields, own, model), tools)
    prompt = replace(parse_chat_prompt(body), tools=tools)
    check_amount(1, num_choices, max_waiting)
    unknown.note(body.keys() - _KNOWN)
    return ChatRequest(
        prompt,
        params,
        num_choices,
        bool(fields.stream),
        extra.stream_options or StreamOptions(),
        grammar,
    )


def check_chat_fields(body: Mapping[str, Any]) -> ChatPrompt:
    """All that the template is given but the messages. Raises `NoriaError`."""
    own = convert(body, TemplateFields)
    continues = bool(own.continue_final_message)
    if continues and own.add_generation_prompt:
        raise InvalidValue(
            "continue_final_message and add_generation_prompt exclude each other.",
            param="continue_final_message",
        )
    adds = not continues if own.add_generation_prompt is None else own.add_generation_prompt
    return ChatPrompt([], adds, continues, _template_kwargs(own.chat_template_kwargs or {}))


def parse_chat_prompt(body: Mapping[str, Any]) -> ChatPrompt:
    """The part of a body that the template sees; `/tokenize` takes it too."""
    prompt = check_chat_fields(body)
    messages = check_messages(body.get("messages"))
    if prompt.continues_final_message and messages[-1]["role"] != "assistant":
        raise InvalidValue(
            "continue_final_message needs a last message of the assistant.",
            param="continue_final_message",
        )
    return replace(prompt, messages=messages)


def _params(fields: SamplingFields, own: ChatFields, model: ServedModel) -> SamplingParams:
    if own.top_logprobs is not None and not own.logprobs:
        raise InvalidValue("top_logprobs needs logprobs: true.", param="top_logprobs")
    try:
        return to_params(
            fields,
            openai_defaults(model, MAX_TOKENS),  # the room left
            vocab_size=model.shape.vocab_size,
            logprobs=own.top_logprobs or 0 if own.logprobs else None,
            max_completion_tokens=own.max_completion_tokens,
        )
    except InvalidValue as error:
        if error.param != "logprobs":
            raise
        name = "top_logprobs"
        raise InvalidValue(error.message.replace("logprobs", name, 1), param=name) from None


def _template_kwargs(values: dict[str, Any]) -> dict[str, Any]:
    path = "chat_template_kwargs"
    if len(values) > MAX_TEMPLATE_FIELDS:
        raise InvalidValue(
            f"{path} has {len(values)} entries; at most {MAX_TEMPLATE_FIELDS} are allowed.",
            param=path,
        )
    for name, value in values.items():
        if name in _OF_THE_CALL:
            raise UnsupportedValue(f"{path} cannot set a name of the template call.", param=path)
        if isinstance(value, (dict, list)):
            raise InvalidValue(f"{path} takes only scalars.", param=path)
    return values
