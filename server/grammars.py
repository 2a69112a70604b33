"""`Grammars`: compiles what answers must look like, away from the event loop, the step thread and other people's text.

A thread of its own: a grammar that takes long keeps nobody waiting but others with a new grammar, and those only until
`TIMEOUT_S`, when the thread is left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor

from core.errors import InvalidValue, NoriaError
from core.interfaces import TextTokenizer
from core.structured.compiler import CompiledGrammar, GrammarCompiler
from core.structured.grammar import Grammar
from server.backends.base import Backend

TIMEOUT_S = 10.0
IDLE_S = 1.0
MAX_COMPILERS = 4  # each knows a vocabulary; with several models those used last are kept


class Grammars:
    """One per application; used on the event loop."""

    def __init__(self) -> None:
        self._executor = _executor()
        self._compilers: OrderedDict[TextTokenizer, asyncio.Future[GrammarCompiler]] = OrderedDict()

    async def prepare(self, backend: Backend) -> None:
        """Reads the vocabulary when the model is loaded and nobody asks for anything: the library holds the interpreter
        lock for a few tenths of a second, which no stream should notice. A grammar that comes earlier does not wait."""
        with contextlib.suppress(NoriaError):
            await backend.loaded()
            tokenizer = backend.served_model().tokenizer
            while tokenizer not in self._compilers:
                await asyncio.sleep(IDLE_S)
                stats = backend.stats()
                if not stats.num_running + stats.num_waiting:
                    await self._make_compiler(tokenizer)

    async def _make_compiler(self, tokenizer: TextTokenizer) -> GrammarCompiler:
        """The one compiler of a tokenizer, however many ask for it at once."""
        making = self._compilers.get(tokenizer)
        if making is None:
            loop = asyncio.get_running_loop()
            making = loop.run_in_executor(self._executor, GrammarCompiler, tokenizer)
            self._compilers[tokenizer] = making
            if len(self._compilers) > MAX_COMPILERS:
                self._compilers.popitem(last=False)
        self._compilers.move_to_end(tokenizer)
        return await asyncio.shield(making)

    async def compile(
        self, grammar: Grammar | None, tokenizer: TextTokenizer
    ) -> CompiledGrammar | None:
        """None for None. Raises `InvalidValue` with the path of the field that asked for the grammar."""
        if grammar is None:
            return None
        compiler = await self._make_compiler(tokenizer)
        if (found := compiler.find(grammar)) is not None:
            return found
        executor = self._executor
        try:
            async with asyncio.timeout(TIMEOUT_S):
                loop = asyncio.get_running_loop()
                return await loop.run_in_executor(executor, compiler.compile, grammar)
        except TimeoutError:
            if self._executor is executor:
                executor.shutdown(wait=False)  # those in its queue have times of their own
                self._executor = _executor()
            raise InvalidValue(
                f"{grammar.param} could not be compiled within {TIMEOUT_S:g} s.",
                param=grammar.param,
            ) from None

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


def _executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="noria-compile")
