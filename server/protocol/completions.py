"""`POST /v1/completions`: what it accepts. Knows no aiohttp."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from core.errors import InvalidValue, UnsupportedValue
from core.interfaces import TextTokenizer
from core.sampling_params import SamplingParams
from core.structured.grammar import Grammar
from server.backends.base import ServedModel
from server.protocol import openai_fields, sampling_fields
from server.protocol.fields import REFUSED, UnknownFields, convert, refuse_unsupported
from server.protocol.openai_fields import OpenAIFields, StreamOptions
from server.protocol.prompts import Prompt, check_amount, check_prompts, names_of, tokenize
from server.protocol.sampling_fields import (
    MAX_CHOICES,
    SamplingFields,
    check_common,
    check_model,
    openai_defaults,
    to_params,
)
from server.protocol.structured import parse_grammar

DEFAULT_MAX_TOKENS = 16
REFUSED_FIELDS: Mapping[str, tuple[object, ...]] = {
    **REFUSED,
    "best_of": (1,),
    "add_special_tokens": (True,),
}
_KNOWN = (
    sampling_fields.NAMES
    | openai_fields.NAMES
    | REFUSED_FIELDS.keys()
    | {"prompt", "logprobs", "echo", "suffix"}
)


class CompletionFields(msgspec.Struct, frozen=True):
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A valid request, before its prompts are tokens. `names` are the paths of the prompts."""

    prompts: list[Prompt]
    names: list[str]
    params: SamplingParams
    num_choices: int
    streams: bool
    stream_options: StreamOptions
    grammar: Grammar | None = None
    echoes: bool = False
    suffix: str | None = None

    def tokenize(self, model: ServedModel) -> list[list[int]]:
        """Ids of every prompt; see `prompts.tokenize`. Raises `UnsupportedValue` where a suffix cannot be told."""
        ids = tokenize(model, self.prompts, self.names)
        if self.suffix is None:
            return ids
        return [model.tokenizer.encode_infill(str(text), self.suffix) for text in self.prompts]

    def prefixes(self, ids: list[list[int]], tokenizer: TextTokenizer) -> list[str]:
        """What the text of every choice begins with: its prompt, if that was asked for. Slow for long prompts of
        ids."""
        if not self.echoes:
            return []
        texts = [
            prompt if isinstance(prompt, str) else tokenizer.decode(tokens)
            for prompt, tokens in zip(self.prompts, ids, strict=True)
        ]
        return [text for text in texts for _ in range(self.num_choices)]


def parse_completion(
    body: Mapping[str, Any], model: ServedModel, unknown: UnknownFields, *, max_waiting: int
) -> CompletionRequest:
    """Raises `NoriaError`; nothing is left to be found wrong but the number of tokens."""
    fields = convert(body, SamplingFields)
    extra = convert(body, OpenAIFields)
    own = convert(body, CompletionFields)
    refuse_unsupported(body, REFUSED_FIELDS)
    if own.echo and own.logprobs is not None:
        raise UnsupportedValue("echo with logprobs is not supported.", param="echo")
    grammar = parse_grammar(body)
    num_choices = check_common(fields, max_choices=MAX_CHOICES)
    check_model(fields.model, model)
    params = to_params(
        fields,
        openai_defaults(model, DEFAULT_MAX_TOKENS),
        vocab_size=model.shape.vocab_size,
        logprobs=own.logprobs,
    )
    prompts, is_list = check_prompts(body.get("prompt"), model.shape.vocab_size)
    if own.suffix is not None and not all(isinstance(prompt, str) for prompt in prompts):
        raise InvalidValue("suffix needs prompts that are texts.", param="suffix")
    check_amount(len(prompts), num_choices, max_waiting)
    unknown.note(body.keys() - _KNOWN)
    return CompletionRequest(
        prompts,
        names_of(prompts, "prompt", is_list=is_list),
        params,
        num_choices,
        bool(fields.stream),
        extra.stream_options or StreamOptions(),
        grammar,
        bool(own.echo),
        own.suffix,
    )
