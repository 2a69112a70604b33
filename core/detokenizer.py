"""`Detokenizer`: token ids to text deltas, never half a character, never text that could still become a stop string.

Knows nothing of sequences or of the tokenizer library: it is given a decode callable. Used by `Engine`, one
per sequence. The joined deltas are the text of prompt and output minus the text of the prompt, cut at the first stop
string.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from core.byte_detokenizer import ByteDetokenizer
from core.interfaces import TextTokenizer
from core.sampling_params import SamplingParams
from core.stop_matcher import StopMatcher

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\ufffd"
_CONTEXT = 4  # ids kept in front of new ones: a tokenizer may write an id differently at the start of a text
_MAX_WINDOW = 12
_LARGEST_WINDOW = (
    48  # a window that nothing splits cleanly is cut anyway, so that work per token stays constant
)
_LONGEST_CHARACTER = 4  # bytes of UTF-8, so also ids


def make_detokenizer(
    tokenizer: TextTokenizer, prompt_ids: Sequence[int], params: SamplingParams
) -> Detokenizer | ByteDetokenizer:
    """The cheap one where the tokenizer allows it."""
    if tokenizer.piece is not None:
        return ByteDetokenizer(tokenizer.piece, prompt_ids, params)
    return Detokenizer(tokenizer.decode, prompt_ids, params)


class Detokenizer:
    """Decodes a sliding window of ids and counts the characters of its text that were released.

    A text that ends in U+FFFD may be half a character: its end is held back until it becomes one, or has had ids enough
    to show that it never will. `stop` is the stop string that ended the text, if any.
    """

    def __init__(self, decode: Decode, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self._decode = decode
        self._min_tokens = params.min_tokens
        self._matcher = StopMatcher(params.stop, includes_stop=params.include_stop_str_in_output)
        self._num_pushed = 0
        self._num_unclear = 0  # ids since the text last ended in a whole character
        self._window, self._text = self._context(
            list(prompt_ids[-_MAX_WINDOW:]), lambda text: not text.startswith(_REPLACEMENT)
        )
        self._released = len(self._text)
        self._prompt_text: str | None = self._text  # until the first release

    @property
    def stop(self) -> str | None:
        return self._matcher.matched

    def push(self, token_id: int) -> str:
        """Takes the next output token; returns the text that became safe, often empty."""
        self._num_pushed += 1
        self._window.append(token_id)
        self._text = self._decode(self._window)
        is_clear = not self._text.endswith(_REPLACEMENT)
        self._num_unclear = 0 if is_clear else self._num_unclear + 1
        delta = self._release(len(self._text) - self._num_pending())
        # Not in the middle of a character: byte-fallback tokenizers show its whole run of bytes as U+FFFD until then.
        is_settled = is_clear or self._num_unclear >= _LONGEST_CHARACTER
        if is_settled and len(self._window) > _MAX_WINDOW:
            self._slide()
        return self._matcher.push(delta, may_stop=self._num_pushed >= self._min_tokens)

    def finish(self) -> str:
        """Everything held back, once no more tokens come. Nothing after a stop string."""
        delta = self._release(len(self._text))
        text = self._matcher.push(delta, may_stop=self._num_pushed >= self._min_tokens)
        return text + self._matcher.finish()

    def _num_pending(self) -> int:
        """Characters at the end of the window's text that may still change."""
        if not self._num_unclear:
            return 0
        num_replacements = len(self._text) - len(self._text.rstrip(_REPLACEMENT))
        if self._num_unclear < _LONGEST_CHARACTER:
            return num_replacements
        return min(num_replacements, _LONGEST_CHARACTER - 1)

    def _release(self, end: int) -> str:
        if self._prompt_text is not None:
            # A prompt may end in half a character which the output completes: then that character is output.
            self._released = _common_length(self._prompt_text, self._text)
            if end > self._released:
                self._prompt_text = None
        if end <= self._released:
            return ""
        delta = self._text[self._released : end]
        self._released = end
        return delta

    def _slide(self) -> None:
        """Drops old ids, where the text of the rest is the end of the whole text, so that no character is cut."""
        whole, num_pending = self._text, len(self._text) - self._released
        window, text = self._context(self._window, whole.endswith)
        is_clean = text != "" and whole.endswith(text) and num_pending <= len(text)
        if is_clean or len(self._window) > _LARGEST_WINDOW:
            self._window, self._text = window, text
            self._released = max(0, len(text) - num_pending)
            self._prompt_text = None

    def _context(self, ids: list[int], is_clean: Callable[[str], bool]) -> tuple[list[int], str]:
        """The last few of `ids` and their text; more of them if the fewest do not begin with a character."""
        context, text = ids, ""
        for num_ids in range(_CONTEXT, _CONTEXT + _LONGEST_CHARACTER):
            context = ids[-num_ids:]
            text = self._decode(context)
            if num_ids >= len(ids) or (text and is_clean(text)):
                break
        return context, text


def _common_length(a: str, b: str) -> int:
    if b.startswith(a):
        return len(a)
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, (x, y) in pairs if x != y), min(len(a), len(b)))
