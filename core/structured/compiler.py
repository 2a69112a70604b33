"""`GrammarCompiler`: grammars to automata over one tokenizer's vocabulary, with llguidance, within fixed limits.

llguidance (https://github.com/guidance-ai/llguidance, MIT) walks the vocabulary as a trie with an Earley parser over
derivatives of regular expressions. Compiling releases the interpreter lock. Belongs in an executor, never on the event
loop or in the step thread; a compiled grammar may then be followed by any number of sequences.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from

from core.errors import InvalidValue, UnsupportedValue
from core.interfaces import TextTokenizer
from core.structured.grammar import WHITESPACE, Grammar

MAX_GRAMMAR_BYTES = 256 * 1024
MAX_CACHED = 64  # a hostile one may hold 50 MiB of states
SLOWEST_FIRST_MASK_S = 0.25
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2000,
    "max_lexer_states": 25_000,
    "max_grammar_size": 250_000,
    "verbose_errors": False,
}
_REPEAT = re.compile(r"\{\s*(\d*)\s*,?\s*(\d*)\s*\}")
MAX_REPEAT = 20_000
_MAX_REASON = 200


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """The start of every answer that follows `grammar`. Only ever copied, so sequences may share it."""

    grammar: Grammar
    matcher: LLMatcher
    vocab_size: int
    eos_token_ids: list[int]


class GrammarCompiler:
    """Compiles for one tokenizer, and keeps what was used last. Thread-safe."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        """Reads the whole vocabulary: a few tenths of a second. Raises `UnsupportedValue` for a tokenizer without an
        end token, with which no answer could end."""
        if not tokenizer.eos_token_ids:
            raise UnsupportedValue("This model has no end token, so its answers follow no grammar.")
        self._tokenizer = LLTokenizer(
            TokenizerWrapper(_Vocabulary(tokenizer)), eos_token=list(tokenizer.eos_token_ids)
        )
        self._lock = threading.Lock()
        self._kept: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        """What was compiled before, without waiting for anything."""
        with self._lock:
            if grammar in self._kept:
                self._kept.move_to_end(grammar)
            return self._kept.get(grammar)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """Raises `InvalidValue` with the field's path and the library's reason, bounded."""
        if (found := self.find(grammar)) is not None:
            return found
        if len(grammar.text) > MAX_GRAMMAR_BYTES:
            raise _refusal(
                grammar,
                f"it has {len(grammar.text)} characters; at most {MAX_GRAMMAR_BYTES} are allowed",
            )
        repeats = [int(n) for pair in _REPEAT.findall(grammar.text) for n in pair if n]
        if grammar.kind != "choice" and max(repeats, default=0) > MAX_REPEAT:
            raise _refusal(grammar, f"it repeats something more than {MAX_REPEAT} times")
        try:
            definition = _definition(grammar)
        except Exception as error:  # the library raises plain errors of many kinds
            raise _refusal(grammar, str(error)) from None
        matcher = LLMatcher(
            self._tokenizer, definition, log_level=0, limits=LLParserLimits(**_LIMITS)
        )
        if matcher.is_error():
            raise _refusal(grammar, matcher.get_error())
        self._try(grammar, matcher)
        compiled = CompiledGrammar(
            grammar, matcher, self._tokenizer.vocab_size, self._tokenizer.eos_tokens
        )
        with self._lock:
            self._kept[grammar] = compiled
            if len(self._kept) > MAX_CACHED:
                self._kept.popitem(last=False)
        return compiled

    def _try(self, grammar: Grammar, matcher: LLMatcher) -> None:
        """The first mask, made here rather than in a step; also warms the automaton that its copies share."""
        started_s = time.monotonic()
        copy = matcher.deep_copy()
        copy.compute_bitmask()
        if copy.is_error():
            raise _refusal(grammar, copy.get_error())
        if time.monotonic() - started_s > SLOWEST_FIRST_MASK_S:
            raise _refusal(grammar, "it takes too long to follow")


def _definition(grammar: Grammar) -> str:
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(
            grammar.text, defaults={"whitespace_pattern": WHITESPACE}
        )
    if grammar.kind == "lark":
        return grammar_from("grammar", grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    quoted = (json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text))
    return LLMatcher.grammar_from_lark("start: " + " | ".join(quoted))


def _refusal(grammar: Grammar, reason: str) -> InvalidValue:
    words = " ".join(reason.split())
    shown = words if len(words) <= _MAX_REASON else words[:_MAX_REASON] + "…"
    return InvalidValue(
        f"{grammar.param} cannot be compiled: {shown.rstrip('.')}.", param=grammar.param
    )


class _Vocabulary:
    """What llguidance asks of a tokenizer. Control tokens are no text: no grammar may produce them by their names."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted({*tokenizer.control_token_ids, *tokenizer.eos_token_ids})
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False)
