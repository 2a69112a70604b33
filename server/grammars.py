"""`Grammars`: compiles what answers must look like, away from the event loop, the step thread and other people's text.

A thread of its own: a grammar that takes long keeps nobody waiting but others with a new grammar, and those only until
`TIMEOUT_S`, when the thread is left behind.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from core.errors import InvalidValue
from core.interfaces import TextTokenizer
from core.structured.compiler import CompiledGrammar, GrammarCompiler
from core.structured.grammar import Grammar

TIMEOUT_S = 5.0


class Grammars:
    """One per application; used on the event loop."""

    def __init__(self) -> None:
        self._executor = _executor()
        self._tokenizer: TextTokenizer | None = None
        self._compiler: GrammarCompiler | None = None

    async def compile(
        self, grammar: Grammar | None, tokenizer: TextTokenizer
    ) -> CompiledGrammar | None:
        """None for None. Raises `InvalidValue` with the path of the field that asked for the grammar."""
        if grammar is None:
            return None
        if self._tokenizer is not tokenizer:
            self._tokenizer, self._compiler = tokenizer, None
        if self._compiler is not None and (found := self._compiler.find(grammar)) is not None:
            return found
        loop, executor = asyncio.get_running_loop(), self._executor
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if self._compiler is None:
                    self._compiler = await loop.run_in_executor(
                        executor, GrammarCompiler, tokenizer
                    )
                return await loop.run_in_executor(executor, self._compiler.compile, grammar)
        except TimeoutError:
            if self._executor is executor:
                executor.shutdown(wait=False, cancel_futures=True)
                self._executor = _executor()
            raise InvalidValue(
                f"{grammar.param} could not be compiled within {TIMEOUT_S:g} s.",
                param=grammar.param,
            ) from None

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="noria-compile")
