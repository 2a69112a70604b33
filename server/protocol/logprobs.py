"""Log-probabilities in the two shapes of the API. Knows no aiohttp; called by the OpenAI renderers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.interfaces import TextTokenizer
from core.outputs import FinishReason, StepOutput, TokenLogprobs


def is_end_token(output: StepOutput) -> bool:
    """Whether the output's token ended the answer without being part of it; such tokens are counted, not listed."""
    return output.finish_reason is FinishReason.STOP and not isinstance(output.stop_reason, str)


def chat_logprobs(entries: Sequence[TokenLogprobs], tokenizer: TextTokenizer) -> dict[str, Any]:
    """`{"content": [...]}` with token, logprob, bytes and the best ones at each place."""
    content = []
    for entry in entries:
        item = _chat_item(entry.token_id, entry.logprob, tokenizer)
        item["top_logprobs"] = [_chat_item(i, value, tokenizer) for i, value in entry.top]
        content.append(item)
    return {"content": content, "refusal": None}


def _chat_item(token_id: int, logprob: float, tokenizer: TextTokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}


class CompletionLogprobs:
    """The four parallel lists of a completion. One per choice: it keeps the offset of the next token.

    Offsets count characters from the start of the answer. A token of half a character is written `bytes:\\xe2\\x82`.
    """

    __slots__ = ("_offset", "_silent", "_tokenizer")

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._silent = frozenset(tokenizer.eos_token_ids)  # without text, even where ignored
        self._offset = 0

    def render(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        tokens: list[str] = []
        offsets: list[int] = []
        tops: list[dict[str, float]] = []
        for entry in entries:
            name = self._name(entry.token_id)
            top = {self._name(token_id): value for token_id, value in entry.top}
            top.setdefault(name, entry.logprob)
            tokens.append(name)
            tops.append(top)
            offsets.append(self._offset)
            self._offset += self._num_characters(entry.token_id)
        return {
            "tokens": tokens,
            "token_logprobs": [entry.logprob for entry in entries],
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _name(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)

    def _num_characters(self, token_id: int) -> int:
        """Characters that begin in this token: bytes that do not continue one."""
        if token_id in self._silent:
            return 0
        return sum(byte & 0xC0 != 0x80 for byte in self._tokenizer.token_bytes(token_id))
