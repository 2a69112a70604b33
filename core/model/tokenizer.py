"""`Tokenizer`: text to ids, chats to ids, ids to text. The only importer of the tokenizer library.

Knows one model's vocabulary, its special tokens and its chat template; nothing about requests. Built by `loader.py` in
the step thread; afterwards immutable, so that the step thread may decode while executor threads encode (a
long `encode` releases the interpreter lock).
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from tokenizers import Tokenizer as Backend

from core.errors import InvalidValue, ModelRefused, UnsupportedValue
from core.model.chat_template import ChatTemplate, find_sentinel, shield

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_TURN_MARK = re.compile(r"<\|.+\|>|<\w*_of_turn>|\[/?[A-Z_]+\]|<｜.+｜>")
_INFILL = (  # before the prefix, before the suffix, before the middle
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen 2.5
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
_SHORT_TEXT = 1000  # characters; well under a millisecond


@dataclass(frozen=True, slots=True)
class ControlToken:
    """A token that has a meaning beyond its text; `strips_*`: blanks beside it in the text belong to it."""

    token_id: int
    text: str
    strips_left: bool
    strips_right: bool


class Tokenizer:
    """Implements `core.interfaces.TextTokenizer` over one `tokenizer.json`."""

    def __init__(
        self,
        definition: str,
        *,
        settings: dict[str, Any] | None = None,
        eos_token_ids: tuple[int, ...] = (),
        chat_template: ChatTemplate | None = None,
    ) -> None:
        """`definition` is the text of a tokenizer.json, `settings` what tokenizer_config.json says beside it."""
        settings = settings or {}
        self._backend = _load_backend(definition)
        parsed = json.loads(definition)
        self._template = chat_template
        self._control = _control_tokens(parsed, chat_template)
        self.control_token_ids = frozenset(token.token_id for token in self._control)
        self._definition = definition
        self._added = {entry["id"]: entry["content"] for entry in parsed.get("added_tokens", [])}
        self._is_byte_level = '"ByteLevel"' in json.dumps(
            [parsed.get("pre_tokenizer"), parsed.get("decoder")]
        )
        self._has_metaspace = not self._is_byte_level and "▁" in json.dumps(
            [parsed.get("pre_tokenizer"), parsed.get("decoder"), parsed.get("normalizer")],
            ensure_ascii=False,
        )
        is_joined = self._is_byte_level and (parsed.get("decoder") or {}).get("type") == "ByteLevel"
        self.piece: Callable[[int], str | bytes] | None = self._piece if is_joined else None
        self._pieces: dict[int, str | bytes] = {}
        self._keeps_text = parsed.get("normalizer") is None and self._is_byte_level
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        # in the byte-level alphabet a character is a byte; for other vocabularies this is not used
        self.max_token_bytes = max(
            (
                len(token.encode()) if i in self._added else len(token)
                for token, i in vocabulary.items()
            ),
            default=1,
        )
        eos = vocabulary.get(token_text(settings.get("eos_token")))
        self.eos_token_ids = eos_token_ids or (() if eos is None else (eos,))
        self.has_chat_template = chat_template is not None
        self.tool_format = chat_template.tool_format if chat_template is not None else None
        self.has_thoughts = chat_template is not None and chat_template.has_thoughts
        self._prefix, self._suffix = self._own_specials(settings, vocabulary)

    @cached_property
    def _literal(self) -> Backend:
        """A second tokenizer that reads every control token as plain text; made when first needed."""
        return _literal_backend(self._definition, self._control)

    @property
    def has_bos(self) -> bool:
        """Whether a plain prompt gets a token put before it."""
        return bool(self._prefix)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids, control tokens typed in it included. The tokenizer's own specials are added once: where the
        text already begins (ends) with them, they are not doubled."""
        ids = _ids_of(self._backend, text)
        if not add_special_tokens:
            return ids
        prefix, suffix = self._prefix, self._suffix
        if prefix and ids[: len(prefix)] == prefix:
            prefix = []
        if suffix and ids[-len(suffix) :] == suffix:
            suffix = []
        return prefix + ids + suffix

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Messages to ids: exactly the ids of the rendered template, except that control tokens written by users
        are encoded as the plain text they are. Raises `InvalidValue`."""
        if self._template is None:
            raise InvalidValue(
                "This model has no chat template: use /v1/completions, or set model.chat_template.",
                param="messages",
            )
        controls = [token.text for token in self._control]
        given = (messages, tools, template_kwargs)
        sentinel = find_sentinel(given)
        shielded, is_hostile = shield(given, controls, sentinel)
        text = self._template.render(
            shielded[0],
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=shielded[1],
            template_kwargs=shielded[2],
        )
        if not is_hostile:
            return _ids_of(self._backend, text)
        return self._encode_shielded(text, sentinel)

    def prepare_chat(self) -> None:
        """Does early, in whatever thread calls, what the first `encode_chat` would otherwise wait for."""
        if self._template is not None:
            self._template.prepare()

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """The prompt that asks for the text between two others, in the order prefix, suffix, middle (Bavarian et al.,
        Efficient Training of Language Models to Fill in the Middle). Raises `UnsupportedValue` where the vocabulary
        has no tokens for it."""
        ids = {text: token_id for token_id, text in self._added.items()}
        for marks in _INFILL:
            if ids.keys() >= set(marks):
                begin, hole, end = (ids[mark] for mark in marks)
                before, behind = (_ids_of(self._backend, text) for text in (prefix, suffix))
                return [*self._prefix, begin, *before, hole, *behind, end]
        raise UnsupportedValue("suffix needs a model with infill tokens.", param="suffix")

    def decode(self, token_ids: list[int]) -> str:
        """Ids to text without special tokens. Ids that have no text, whatever their value, are left out."""
        size = self.vocab_size
        return str(
            self._backend.decode([i for i in token_ids if 0 <= i < size], skip_special_tokens=True)
        )

    def _piece(self, token_id: int) -> str | bytes:
        """What an id adds to a decoded text, where that does not depend on its neighbours; see `TextTokenizer`."""
        piece = self._pieces.get(token_id)
        if piece is None:
            if (
                token_id in self._added
            ):  # the library's own word: it reads their text as byte-level where it can
                piece = self.decode([token_id])
            else:
                piece = self.token_bytes(token_id)
                with contextlib.suppress(UnicodeDecodeError):
                    piece = piece.decode()
            self._pieces[token_id] = piece
        return piece

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; control tokens by name; empty for ids without text."""
        if not 0 <= token_id < 2**31:
            return b""
        if token_id in self._added:
            return str(self._added[token_id]).encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            table = _byte_of_char()
            return b"".join(bytes([table[c]]) if c in table else c.encode() for c in token)
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return str(token.replace("▁", " ") if self._has_metaspace else token).encode()

    def min_num_tokens(self, text: str) -> int:
        """A lower bound on the number of ids of `text`, without encoding it: what is certain not to fit can be
        refused at once. 0 where the vocabulary allows no such bound (text is normalized, or may become unknown)."""
        if not self._keeps_text:
            return 0
        return -(-len(text.encode("utf-8", "surrogatepass")) // self.max_token_bytes)

    def _own_specials(
        self, settings: dict[str, Any], vocabulary: dict[str, int]
    ) -> tuple[list[int], list[int]]:
        """What is put before and after a plain prompt: the post-processor of tokenizer.json, corrected by what
        tokenizer_config.json says outright."""
        body = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a", add_special_tokens=True).ids
        at = next((i for i in range(len(whole)) if whole[i : i + len(body)] == body), 0)
        prefix, suffix = list(whole[:at]), list(whole[at + len(body) :])
        bos, eos = (
            vocabulary.get(token_text(settings.get(name))) for name in ("bos_token", "eos_token")
        )
        if settings.get("add_bos_token") is False and prefix == [bos]:
            prefix = []
        if settings.get("add_bos_token") is True and bos is not None and not prefix:
            prefix = [bos]
        if settings.get("add_eos_token") is not True and suffix == [eos]:
            suffix = []  # a prompt that ends with the end of text has nothing to be continued
        return prefix, suffix

    def _encode_shielded(self, text: str, sentinel: str) -> list[int]:
        """Encode a rendered chat in which the control tokens of users are broken up by `sentinel`: what still reads
        as one comes from the template. Everything between is plain text."""
        if not self._control:
            return _ids_of(self._literal, text.replace(sentinel, ""))
        tokens = {token.text: token for token in self._control}
        longest_first = sorted(tokens, key=len, reverse=True)
        ids: list[int] = []
        pieces = re.split("(" + "|".join(map(re.escape, longest_first)) + ")", text)
        for i, piece in enumerate(pieces):
            if i % 2:
                ids.append(tokens[piece].token_id)
                continue
            if i and tokens[pieces[i - 1]].strips_right:
                piece = piece.lstrip()
            if i + 1 < len(pieces) and tokens[pieces[i + 1]].strips_left:
                piece = piece.rstrip()
            ids += _ids_of(self._literal, piece.replace(sentinel, ""))
        return ids


def _ids_of(backend: Backend, text: str) -> list[int]:
    """Of the library's calls only the batched ones release the interpreter lock; short texts are not worth it."""
    if len(text) <= _SHORT_TEXT:
        return list(backend.encode(text, add_special_tokens=False).ids)
    return list(backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)


def _load_backend(definition: str) -> Backend:
    try:
        backend = Backend.from_str(definition)
    except Exception as error:  # the library raises plain Exception
        raise ModelRefused(f"tokenizer.json cannot be read: {str(error)[:200]}") from error
    backend.no_truncation()
    backend.no_padding()
    return backend


def _control_tokens(parsed: dict[str, Any], template: ChatTemplate | None) -> list[ControlToken]:
    """All special tokens, and those added ones that mark turns in the template. Tags such as `<think>` stay what the
    library makes of them: templates look for them in the messages."""
    source = template.source if template is not None else ""
    return [
        ControlToken(
            entry["id"], entry["content"], bool(entry.get("lstrip")), bool(entry.get("rstrip"))
        )
        for entry in parsed.get("added_tokens", [])
        if entry["content"].strip()
        and (
            entry.get("special")
            or (_TURN_MARK.fullmatch(entry["content"]) and entry["content"] in source)
        )
    ]


def _literal_backend(definition: str, control: list[ControlToken]) -> Backend:
    ids = {token.token_id for token in control}
    parsed = json.loads(definition)
    for entry in parsed.get("added_tokens", []):
        entry["special"] = bool(entry.get("special")) or entry["id"] in ids
    backend = _load_backend(json.dumps(parsed, ensure_ascii=False))
    backend.encode_special_tokens = True
    return backend


def token_text(token: Any) -> str:
    """Settings files give a token as its text or as an object around it."""
    return str(token["content"]) if isinstance(token, dict) else str(token)


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The inverse of the byte-level alphabet of GPT-2: printable bytes stand for themselves, the rest for U+0100 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {
        chr(0x100 + i): byte for i, byte in enumerate(rest)
    }
