"""`ByteDetokenizer`: ids to text deltas where every id stands for fixed bytes, whatever its neighbours.

So it is for byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM): a token costs a look-up instead of a decode of the tokenizer
library over a window. The text is that of `Detokenizer`. Knows nothing of sequences; made by `make_detokenizer`.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence

from core.sampling_params import SamplingParams
from core.stop_matcher import StopMatcher

Piece = Callable[[int], str | bytes]

_REPLACEMENT = "\ufffd"
_MAX_UNFINISHED = 3  # bytes of a character that still lacks some
_new_decoder = codecs.getincrementaldecoder("utf-8")


class ByteDetokenizer:
    """`piece(id)` is the text of an id, or its bytes where they are no whole characters. See `Detokenizer`."""

    __slots__ = (
        "_decoder",
        "_is_open",
        "_matcher",
        "_min_tokens",
        "_num_pushed",
        "_owed",
        "_piece",
    )

    def __init__(self, piece: Piece, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._piece = piece
        self._min_tokens = params.min_tokens
        self._matcher = StopMatcher(params.stop, includes_stop=params.include_stop_str_in_output)
        self._num_pushed = 0
        self._decoder = _new_decoder("replace")
        self._decoder.decode(_last_bytes(piece, prompt_ids))
        self._is_open = bool(self._decoder.getstate()[0])  # bytes wait for the rest of a character
        self._owed = _REPLACEMENT if self._is_open else ""  # how the prompt's text ends then

    @property
    def stop(self) -> str | None:
        return self._matcher.matched

    def push(self, token_id: int) -> str:
        """Takes the next output token; returns the text that became safe, often empty."""
        self._num_pushed += 1
        text = self._piece(token_id)
        if self._is_open or type(text) is bytes:
            text = self._decode(text if isinstance(text, bytes) else text.encode())
        assert isinstance(text, str)
        return self._matcher.push(text, may_stop=self._num_pushed >= self._min_tokens)

    def finish(self) -> str:
        """Everything held back, once no more tokens come. Nothing after a stop string."""
        text = self._decode(b"", is_end=True)
        delta = self._matcher.push(text, may_stop=self._num_pushed >= self._min_tokens)
        return delta + self._matcher.finish()

    def _decode(self, data: bytes, *, is_end: bool = False) -> str:
        text = self._decoder.decode(data, is_end)
        self._is_open = bool(self._decoder.getstate()[0])
        if (
            self._owed and text
        ):  # a character that the prompt began is the output's only if the output ends it
            text, self._owed = text.removeprefix(self._owed), ""
        return text


def _last_bytes(piece: Piece, token_ids: Sequence[int]) -> bytes:
    """The end of a text, long enough to hold a character that is not finished. Ids may have no bytes at all."""
    data = b""
    for token_id in reversed(token_ids):
        part = piece(token_id)
        data = (part if isinstance(part, bytes) else part.encode()) + data
        if len(data) >= _MAX_UNFINISHED:
            break
    return data
