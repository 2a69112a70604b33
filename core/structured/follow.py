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
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from llguidance import LLMatcher

    from core.sequence import Sequence
    from core.structured.compiler import CompiledGrammar

PATIENCE_S = 0.08  # without any progress
SLOWEST_MASK_S = 0.03  # of processor time
LOOK_AHEAD_S = 0.004  # of processor time, for the masks behind guesses
TOO_SLOW = "it takes too long to follow"
_log = logging.getLogger("noria.engine")


_OF_BYTE = np.where(  # what eight bits of a mask add to as many logits: (256, 8)
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0.0, -np.inf
).astype(np.float32)


class Mask:
    """What may stand in one place. Bits are unpacked for who asks: mostly the best token of all is allowed."""

    __slots__ = ("_allowed", "_bits", "_vocab_size", "is_end")

    def __init__(self, words: NDArray[np.int32], vocab_size: int, is_end: bool) -> None:
        """words: (vocab_size / 32, rounded up); token i is bit i % 32 of word i // 32."""
        self._bits = words.view(np.uint8).copy()
        self._vocab_size = vocab_size
        self._allowed: NDArray[np.bool_] | None = None
        self.is_end = is_end  # nothing but an end token

    def allows(self, token_id: int) -> bool:
        return bool(self._bits[token_id >> 3] >> (token_id & 7) & 1)

    def best_of(self, logits: NDArray[np.float32]) -> int:
        """The allowed token with the greatest logit, the lowest of equals; any where none is allowed. (vocab_size,)"""
        scores = np.take(_OF_BYTE, self._bits, axis=0).reshape(-1)[: len(logits)]
        scores += logits
        return int(scores.argmax())

    @property
    def allowed(self) -> NDArray[np.bool_]:
        """(vocab_size,)"""
        if self._allowed is None:
            bits = np.unpackbits(self._bits, bitorder="little")
            self._allowed = bits[: self._vocab_size].view(np.bool_)
        return self._allowed


class GrammarState:
    """A function of the output tokens alone: it takes in whatever came since it last looked, so preemption, recompute
    and chunking leave it as it is. Belongs to one sequence; touched by the worker between `begin` and `finish`, and by
    the step thread otherwise."""

    __slots__ = (
        "_ahead",
        "_compiled",
        "_matcher",
        "_no_end",
        "_num_consumed",
        "_words",
        "failure",
        "mask",
        "may_look_ahead",
    )

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._matcher: LLMatcher | None = None
        self._num_consumed = 0
        self._ahead: list[Mask] = []  # behind one guess, behind two, ...
        self.may_look_ahead = True
        self._words: NDArray[np.int32] = np.zeros((compiled.vocab_size + 31) // 32, np.int32)
        self._no_end = _words_without(compiled.eos_token_ids, compiled.vocab_size)
        self.mask: Mask | None = None  # for the next token
        self.failure: str | None = None  # why it can be followed no longer

    def mask_behind(self, num_guesses: int) -> Mask | None:
        """What may follow the output and so many tokens of the draft; None where that was not found out."""
        if num_guesses:
            is_known = num_guesses <= len(self._ahead) and self.may_look_ahead
            return self._ahead[num_guesses - 1] if is_known else None
        return self.mask

    def follow(self, token_ids: list[int], num_prompt_tokens: int) -> None:
        """Takes in the new output tokens and sets `mask`, or `failure`."""
        self.mask = None
        self._ahead = []
        if self.failure is not None:
            return
        if self._matcher is None:
            self._matcher, self._num_consumed = self._compiled.matcher.deep_copy(), 0
        started_s = time.thread_time()
        matcher = self._matcher
        for token_id in token_ids[num_prompt_tokens + self._num_consumed :]:
            matcher.consume_token(token_id)
        self._num_consumed = len(token_ids) - num_prompt_tokens
        mask = self._next_mask(matcher)
        if mask is None:
            self.failure = matcher.get_error()[:200]
        elif time.thread_time() - started_s > SLOWEST_MASK_S:
            self.failure = TOO_SLOW
        else:
            self.mask = mask

    def _next_mask(self, matcher: LLMatcher) -> Mask | None:
        matcher.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
        if matcher.is_error():
            return None
        is_end = not (self._words & self._no_end).any()
        return Mask(self._words, self._compiled.vocab_size, is_end)

    def look_ahead(self, draft: tuple[int, ...]) -> None:
        """After `follow`: the masks behind guesses, as far as the grammar allows them. An end token has none."""
        matcher, following = self._matcher, self.mask_behind(0)
        if matcher is None or not self.may_look_ahead:
            return
        until_s = time.thread_time() + LOOK_AHEAD_S
        ahead: list[Mask] = []
        is_broken = False
        for guess in draft:
            if following is None or not following.allows(guess):
                break
            if guess in self._compiled.eos_token_ids or time.thread_time() > until_s:
                break
            matcher.consume_token(guess)
            following = self._next_mask(matcher)
            if following is None:
                is_broken = True
            else:
                ahead.append(following)
        if is_broken or (ahead and not matcher.rollback(len(ahead))):
            self._stop_looking_ahead()
        self._ahead = ahead

    def give_up(self) -> None:
        """It is stuck in another thread. What it only looked ahead for is not needed."""
        if self.mask is None:
            self.failure = TOO_SLOW
        else:
            self._stop_looking_ahead()

    def _stop_looking_ahead(self) -> None:
        """For good; and the matcher, which stands somewhere behind a guess, is built again."""
        self._matcher = None
        self.may_look_ahead = False


def _words_without(token_ids: Iterable[int], vocab_size: int) -> NDArray[np.int32]:
    """All bits of the vocabulary but these."""
    bits = np.zeros((vocab_size + 31) // 32 * 32, np.bool_)
    bits[:vocab_size] = True
    bits[list(token_ids)] = False
    return np.packbits(bits, bitorder="little").view(np.int32)


class MaskWorker:
    """One thread, started when the first grammar comes. A stuck one is left behind and replaced."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] | None = None
        self._job: _Job | None = None

    def begin(self, sequences: list[Sequence], drafts: list[tuple[int, ...]] | None = None) -> None:
        """Starts on the next masks of those that have a grammar; nothing else is done for the others."""
        each = drafts or [()] * len(sequences)
        rows = [
            (s.grammar, s, draft)
            for s, draft in zip(sequences, each, strict=True)
            if s.grammar is not None
        ]
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
            job.rows[num_done][0].give_up()
            rest = job.rows[num_done + 1 :]
            self._job = self._start(rest) if rest else None
        self._job = None

    def _start(self, rows: list[_Row]) -> _Job:
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            arguments = (self._jobs,)
            # a thread must not outlive who asks it: with its model, one of several, it goes
            weakref.finalize(self, self._jobs.put, None).atexit = False
            threading.Thread(
                target=_work, args=arguments, name="noria-grammar", daemon=True
            ).start()
        job = _Job(rows)
        self._jobs.put(job)
        return job


_Row = tuple[GrammarState, "Sequence", tuple[int, ...]]


class _Job:
    __slots__ = ("is_done", "is_given_up", "num_done", "rows")

    def __init__(self, rows: list[_Row]) -> None:
        self.rows = rows
        self.num_done = 0
        self.is_given_up = False
        self.is_done = threading.Event()


def _work(jobs: queue.SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        for state, sequence, draft in job.rows:
            try:
                state.follow(sequence.token_ids, sequence.num_prompt_tokens)
                if draft:
                    state.look_ahead(draft)
            except Exception:
                _log.exception("following a grammar failed")
                state.failure = "it could not be followed"
            if job.is_given_up:
                return
            job.num_done += 1
        job.is_done.set()
        del job, state, sequence  # a thread that waits must not keep what it did last
