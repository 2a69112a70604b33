"""Routes below `/admin/prefixes`: what they accept and answer. Knows no aiohttp."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from core.errors import InvalidValue
from core.prefixes.pinned import PinnedPrefix
from core.prefixes.snapshot import SnapshotReport
from core.sampling_params import SamplingParams
from server.backends.base import ServedModel
from server.protocol.answers import Exact
from server.protocol.chat import ChatPrompt, parse_chat_prompt
from server.protocol.fields import UnknownFields, convert, refuse_unsupported
from server.protocol.prompts import Prompt, check_ids, check_text, tokenize
from server.protocol.sampling_fields import MAX_LABEL_LENGTH, check_model

PARAMS = SamplingParams(max_tokens=1, temperature=0)
REFUSED_FIELDS: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),  # they would stand in the prefix, written by a template that may not know them
    "cache_salt": (),
}


class PrefixFields(msgspec.Struct, frozen=True):
    model: str | None = None
    pin: bool | None = None
    label: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class SnapshotFields(msgspec.Struct, frozen=True):
    model: str | None = None


_KNOWN = REFUSED_FIELDS.keys() | set(PrefixFields.__struct_fields__) | {"prompt", "messages"}


@dataclass(frozen=True, slots=True)
class PrefixRequest:
    """A prefix to compute, before it is tokens."""

    prompt: Prompt | ChatPrompt
    is_pinned: bool
    label: str

    def tokenize(self, model: ServedModel) -> list[int]:
        """Slow; belongs in an executor. Raises `NoriaError`."""
        if isinstance(self.prompt, ChatPrompt):
            return self.prompt.tokenize_within(model, "messages")
        return tokenize(model, [self.prompt], ["prompt"])[0]


def parse_prefix(
    body: Mapping[str, Any], model: ServedModel, unknown: UnknownFields
) -> PrefixRequest:
    """Exactly one of `prompt` and `messages`. Messages get no generation prompt unless asked for: what comes behind
    them is meant to differ. Raises `NoriaError`."""
    fields = convert(body, PrefixFields)
    refuse_unsupported(body, REFUSED_FIELDS)
    check_model(fields.model, model)
    label = fields.label or ""
    if len(label) > MAX_LABEL_LENGTH:
        raise InvalidValue(f"label has more than {MAX_LABEL_LENGTH} characters.", param="label")
    given = body.get("prompt")
    if (given is None) == (body.get("messages") is None):
        raise InvalidValue("Exactly one of prompt and messages is needed.", param="prompt")
    prompt: Prompt | ChatPrompt
    if given is None:
        adds = bool(fields.add_generation_prompt)
        prompt = parse_chat_prompt({**body, "add_generation_prompt": adds})
    elif isinstance(given, list):
        prompt = check_ids(given, "prompt", model.shape.vocab_size)
    else:
        prompt = check_text(given, "prompt")
    unknown.note(body.keys() - _KNOWN)
    return PrefixRequest(prompt, fields.pin is not False, label)


def parse_snapshot(body: Mapping[str, Any]) -> SnapshotFields:
    """An operator's mistake is refused rather than ignored. Raises `InvalidValue`."""
    for name in body.keys() - {"model"}:
        raise InvalidValue(f"{name[:64]} is not a field of this route.", param=name[:64])
    return convert(body, SnapshotFields)


class Prefix(Exact):
    """`cached_tokens` were known before. Without a pin there is no id."""

    id: str | None
    object: Literal["prefix"]
    label: str
    prompt_tokens: int
    cached_tokens: int
    pinned_tokens: int


class Pin(Exact):
    id: str
    object: Literal["prefix"]
    label: str
    pinned_tokens: int


class PinList(Exact):
    """Tokens that several prefixes share count once in `pinned_tokens`."""

    object: Literal["list"]
    data: list[Pin]
    pinned_tokens: int
    max_pinned_tokens: int


class DeletedPin(Exact):
    id: str
    object: Literal["prefix.deleted"]
    deleted: Literal[True]


class Snapshot(Exact):
    object: Literal["prefix.snapshot"]
    tokens: int
    blocks: int
    bytes: int
    seconds: float


def snapshot_object(report: SnapshotReport) -> Snapshot:
    return Snapshot(
        "prefix.snapshot",
        report.num_tokens,
        report.num_blocks,
        report.size_bytes,
        round(report.seconds, 3),
    )


def prefix_object(
    pin: PinnedPrefix | None, label: str, num_prompt_tokens: int, num_cached_tokens: int
) -> Prefix:
    return Prefix(
        id=None if pin is None else pin.prefix_id,
        object="prefix",
        label=label,
        prompt_tokens=num_prompt_tokens,
        cached_tokens=num_cached_tokens,
        pinned_tokens=0 if pin is None else pin.num_tokens,
    )


def pin_list(pins: Iterable[PinnedPrefix], num_tokens: int, max_tokens: int) -> PinList:
    shown = [Pin(pin.prefix_id, "prefix", pin.label, pin.num_tokens) for pin in pins]
    return PinList("list", shown, num_tokens, max_tokens)
