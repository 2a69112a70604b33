"""`POST /tokenize` and `POST /detokenize`: what they accept and answer. Knows no aiohttp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from core.errors import InvalidValue
from core.interfaces import TextTokenizer
from server.backends.base import ServedModel
from server.protocol.chat import ChatPrompt, check_chat_fields, parse_chat_prompt
from server.protocol.fields import convert
from server.protocol.prompts import check_ids
from server.protocol.sampling_fields import check_model


class TokenizeFields(msgspec.Struct, frozen=True):
    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None


class DetokenizeFields(msgspec.Struct, frozen=True):
    model: str | None = None


class TextPrompt(msgspec.Struct, frozen=True):
    """A text to tokenize."""

    text: str
    adds_special_tokens: bool

    def tokenize(self, tokenizer: TextTokenizer) -> list[int]:
        """Slow for long texts; belongs in an executor."""
        return tokenizer.encode(self.text, add_special_tokens=self.adds_special_tokens)


def parse_tokenize(body: Mapping[str, Any], model: ServedModel) -> TextPrompt | ChatPrompt:
    """Exactly one of `prompt` and `messages`. Raises `NoriaError`."""
    fields = convert(body, TokenizeFields)
    check_model(fields.model, model)
    if (fields.prompt is None) == (body.get("messages") is None):
        raise InvalidValue("Exactly one of prompt and messages is needed.", param="prompt")
    if fields.prompt is None:
        return parse_chat_prompt(body)
    check_chat_fields(body)  # of no use here, but no excuse for nonsense
    return TextPrompt(fields.prompt, fields.add_special_tokens is not False)


def parse_detokenize(body: Mapping[str, Any], model: ServedModel) -> list[int]:
    """Ids below the vocabulary; an empty list is allowed. Raises `NoriaError`."""
    fields = convert(body, DetokenizeFields)
    check_model(fields.model, model)
    tokens = body.get("tokens")
    return [] if tokens == [] else check_ids(tokens, "tokens", model.shape.vocab_size)


def tokens_answer(token_ids: list[int], model: ServedModel) -> dict[str, Any]:
    return {"tokens": token_ids, "count": len(token_ids), "max_model_len": model.max_model_len}
