"""`GrammarState`, where one answer is in its grammar, and `MaskWorker`, the thread that follows all of them.

A step's masks are made while its forward runs: the runner calls `begin` before it and `finish` after it. llguidance
releases the interpreter lock while it fills a mask, so the two only share processor time. A mask that takes
longer than allowed ends its own answer with an error: no grammar can hold up its neighbours.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from core.sequence import Sequence
    from core.structured.compiler import CompiledGrammar

PATIENCE_S = 0.08  # without any progress
SLOWEST_MASK_S = 0.03  # of processor time
TOO_SLOW = "it takes too long to follow"
_log = logging.getLogger("noria.engine")


class GrammarState:
    """A function of the output tokens alone: it takes in whatever came since it last looked, so preemption, recompute
    and chunking leave it as it is. Belongs to one sequence; touched by the worker between `begin` and `finish`, and by
    the step thread otherwise."""

    __slots__ = ("_compiled", "_mask", "_matcher", "_num_consumed", "allowed", "failure", "is_end")

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0
        self._mask: NDArray[np.int32] = np.zeros((compiled.vocab_size + 31) // 32, np.int32)
        self.allowed: NDArray[np.bool_] | None = None  # (vocab_size,), for the next token
        self.is_end = False  # nothing but an end token may follow
        self.failure: str | None = None  # why it can be followed no longer

    def follow(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Takes in the new output tokens and sets `allowed`, or `failure`."""
        self.allowed = None
        if self.failure is not None:
            return
        if self._matcher is None:
            self._matcher = self._compiled.matcher.deep_copy()
        started_s = time.thread_time()
        matcher = self._matcher
        for token_id in token_ids[num_prompt_tokens + self._num_consumed :]:
            matcher.consume_token(token_id)
        self._num_consumed = len(token_ids) - num_prompt_tokens
        matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if matcher.is_error():
            self.failure = matcher.get_error()[:200]
        elif time.thread_time() - started_s > SLOWEST_MASK_S:
            self.failure = TOO_SLOW
        else:
            bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")
            allowed = bits[: self._compiled.vocab_size].view(np.bool_)
            ends = allowed[self._compiled.eos_token_ids]
            self.is_end = np.count_nonzero(allowed) == np.count_nonzero(ends)
            self.allowed = allowed


class MaskWorker:
    """One thread, started when the first grammar comes. A stuck one is left behind and replaced."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job] | None = None
        self._job: _Job | None = None

    def begin(self, sequences: list[Sequence]) -> None:
        """Starts on the next masks of those that have a grammar; nothing else is done for the others."""
        rows = [(s.grammar, s) for s in sequences if s.grammar is not None]
        self._job = self._start(rows) if rows else None

    def finish(self) -> None:
        """Waits for the masks that `begin` asked for. One that takes too long fails alone; a new thread goes on with
        those behind it."""
        while self._job is not None:
            job, num_done = self._job, self._job.num_done
            if job.is_done.wait(PATIENCE_S):
                break
            if job.num_done > num_done:
                continue
            job.is_given_up = True
            self._jobs = None  # that thread ends when its call does
            _log.error("a grammar takes too long to follow; its request ends with an error")
            job.rows[num_done][0].failure = TOO_SLOW
            rest = job.rows[num_done + 1 :]
            self._job = self._start(rest) if rest else None
        self._job = None

    def _start(self, rows: list[tuple[GrammarState, Sequence]]) -> _Job:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            arguments = (self._jobs,)
            threading.Thread(
                target=_work, args=arguments, name="noria-grammar", daemon=True
            ).start()
        job = _Job(rows)
        self._jobs.put(job)
        return job


class _Job:
    __slots__ = ("is_done", "is_given_up", "num_done", "rows")

    def __init__(self, rows: list[tuple[GrammarState, Sequence]]) -> None:
        self.rows = rows
        self.num_done = 0
        self.is_given_up = False
        self.is_done = threading.Event()


def _work(jobs: queue.SimpleQueue[_Job]) -> None:
    while True:
        job = jobs.get()
        for state, sequence in job.rows:
            try:
                state.follow(sequence.token_ids, sequence.num_prompt_tokens)
            except Exception:
                _log.exception("following a grammar failed")
                state.failure = "it could not be followed"
            if job.is_given_up:
                return
            job.num_done += 1
        job.is_done.set()
        del job, state, sequence  # a thread that waits must not keep what it did last
