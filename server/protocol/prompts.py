"""Prompts: text or ids as clients send them, and what becomes of them once they are tokens.

Knows no aiohttp. Checks run on the event loop; `tokenize` is the part that belongs in an executor.
"""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Sequence
from typing import Any

from core.errors import ContextLengthExceeded, InvalidValue
from core.sampling_params import SamplingParams
from core.structured.compiler import CompiledGrammar
from server.backends.base import GenerationRequest, ServedModel
from server.protocol.fields import convert

Prompt = str | list[int]
MAX_PROMPTS = 1024


def check_text(text: object, param: str) -> str:
    """A prompt that is a non-empty string."""
    if not isinstance(text, str):
        raise InvalidValue(f"{param} must be a string.", param=param)
    if not text:
        raise InvalidValue(f"{param} must not be empty.", param=param)
    return text


def check_prompts(
    prompt: object, vocab_size: int, name: str = "prompt"
) -> tuple[list[Prompt], bool]:
    """The four forms of a completion's prompt as a list; also whether it came as a list of prompts."""
    if isinstance(prompt, str):
        return [check_text(prompt, name)], False
    if not isinstance(prompt, list):
        raise InvalidValue(f"{name} must be a string or a list of strings or ids.", param=name)
    if not prompt:
        raise InvalidValue(f"{name} must not be empty.", param=name)
    if not isinstance(prompt[0], (str, list)):
        return [check_ids(prompt, name, vocab_size)], False
    if len(prompt) > MAX_PROMPTS:
        raise InvalidValue(
            f"{name} has {len(prompt)} entries; at most {MAX_PROMPTS} are allowed.", param=name
        )
    is_text = isinstance(prompt[0], str)
    checked: list[Prompt] = []
    for index, entry in enumerate(prompt):
        param = f"{name}[{index}]"
        checked.append(check_text(entry, param) if is_text else check_ids(entry, param, vocab_size))
    return checked, True


def check_ids(ids: object, param: str, vocab_size: int) -> list[int]:
    """A non-empty list of ids below `vocab_size`."""
    checked = convert(ids, list[int], param)
    if not checked:
        raise InvalidValue(f"{param} must not be empty.", param=param)
    if min(checked) < 0 or max(checked) >= vocab_size:
        index = next(i for i, token_id in enumerate(checked) if not 0 <= token_id < vocab_size)
        raise InvalidValue(
            f"{param}[{index}] must be a token id from 0 to {vocab_size - 1}.",
            param=f"{param}[{index}]",
        )
    return checked


def tokenize(
    model: ServedModel, prompts: Sequence[Prompt], names: Sequence[str]
) -> list[list[int]]:
    """Ids of every prompt. Slow for long texts; one that is certain not to fit is refused before it costs anything.

    `names` are the paths of the prompts for errors. Raises `ContextLengthExceeded`.
    """
    tokenizer, limit = model.tokenizer, model.max_model_len
    for prompt, name in zip(prompts, names, strict=True):
        if isinstance(prompt, str) and (lowest := tokenizer.min_num_tokens(prompt)) >= limit:
            raise ContextLengthExceeded(_too_long(f"at least {lowest}", limit), param=name)
    return [tokenizer.encode(p) if isinstance(p, str) else list(p) for p in prompts]


def refuse_hopeless(messages: Sequence[dict[str, Any]], model: ServedModel, name: str) -> None:
    """Raises `ContextLengthExceeded` for a chat that is certain not to fit, before it is rendered. Only what a user
    says counts: templates may leave out the rest."""
    said = [message.get("content") for message in messages if message.get("role") == "user"]
    parts = [
        part for content in said for part in (content if isinstance(content, list) else [content])
    ]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    lowest = sum(model.tokenizer.min_num_tokens(t.strip()) for t in texts if isinstance(t, str))
    if lowest >= model.max_model_len:
        raise ContextLengthExceeded(
            _too_long(f"at least {lowest}", model.max_model_len), param=name
        )


def resolve(
    prompts: Sequence[list[int]],
    params: SamplingParams,
    model: ServedModel,
    *,
    num_choices: int = 1,
    grammar: CompiledGrammar | None = None,
    names: Sequence[str] = (),
) -> list[GenerationRequest]:
    """One request per prompt and choice, at `prompt_index * num_choices + choice`.

    `max_tokens` becomes the smaller of what was asked and the room behind the prompt; the prompt is never cut. `names`
    are the paths of the prompts for errors. Raises `ContextLengthExceeded`, and `InvalidValue` for a prompt without
    tokens.
    """
    requests: list[GenerationRequest] = []
    for index, token_ids in enumerate(prompts):
        name = names[index] if names else "prompt"
        if not token_ids:
            raise InvalidValue(f"{name} has no tokens.", param=name)
        room = model.max_model_len - len(token_ids)
        if room < 1:
            raise ContextLengthExceeded(
                _too_long(str(len(token_ids)), model.max_model_len), param=name
            )
        clamped = params
        if params.max_tokens > room:
            clamped = dataclasses.replace(
                params, max_tokens=room, min_tokens=min(params.min_tokens, room)
            )
        seed = secrets.randbits(63) if params.seed is None else params.seed
        requests.extend(
            GenerationRequest(token_ids, clamped, seed, choice, grammar)
            for choice in range(num_choices)
        )
    return requests


def _too_long(num_tokens: str, max_model_len: int) -> str:
    """The usual sentence, exactly: coding tools shorten the chat when they see it."""
    return (
        f"This model's maximum context length is {max_model_len} tokens. However, your request has {num_tokens} "
        f"input tokens, which leaves no room for the answer. Please reduce the length of the input."
    )


def check_amount(num_prompts: int, num_choices: int, max_waiting: int) -> None:
    """Prompts times choices fit the queue, which admits all or nothing."""
    if num_prompts * num_choices > max_waiting:
        raise InvalidValue(
            f"{num_prompts} prompts with n = {num_choices} are more than the {max_waiting} places of the queue.",
            param="n",
        )


def names_of(prompts: Sequence[Any], name: str, *, is_list: bool) -> list[str]:
    """Paths for errors: `prompt`, or `prompt[0]`, `prompt[1]`, ..."""
    return [f"{name}[{index}]" for index in range(len(prompts))] if is_list else [name]
