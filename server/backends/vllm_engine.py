"""`VllmEngine`: the few things that `vllm.py` asks of vLLM's `AsyncLLM`, in our own words.

vLLM computes in processes of its own (an engine process and its workers) and talks to this one through sockets on our
event loop. vLLM is imported inside functions only; `vllm_start.py` makes the `AsyncLLM`. Nothing here knows HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from core.outputs import FinishReason, StepStats, TokenLogprobs
from core.sequence import Sequence
from server.backends.base import ServedModel
from server.backends.vllm_params import to_logprobs, to_vllm

SHUTDOWN_S = 5.0


class EngineGone(Exception):
    """vLLM's engine process has ended."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens of one sequence, usually one; moments are on the monotonic clock, 0.0 = unknown."""

    tokens: list[tuple[int, TokenLogprobs | None]]
    num_cached_tokens: int
    scheduled_s: float
    num_preemptions: int
    ended: FinishReason | None


@dataclass(slots=True)
class StepCounter:
    """vLLM's figures as our `StepStats`. `record` is what vLLM calls after each step, on the event loop.

    Totals go on when the engine is restarted, as those of a server should. vLLM tells no times of a step: a step lasts
    from the results before to its own, while there was work.
    """

    num_blocks: int = 0
    on_stats: Callable[[StepStats, int], None] = lambda stats, num_new: None
    total_preemptions: int = 0
    total_queries: int = 0
    total_hits: int = 0
    total_steps: int = 0
    last_s: float = 0.0  # when the last step came back
    _is_busy: bool = field(default=False)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        now_s = time.monotonic()
        if scheduler_stats is None:
            return
        prefix = scheduler_stats.prefix_cache_stats
        if prefix is not None:
            self.total_queries += prefix.queries
            self.total_hits += prefix.hits
        num_new = num_prompt = num_first = 0
        if iteration_stats is not None:
            self.total_preemptions += iteration_stats.num_preempted_reqs
            num_new = iteration_stats.num_generation_tokens
            num_prompt = iteration_stats.num_prompt_tokens
            num_first = len(iteration_stats.time_to_first_tokens_iter)
        duration_s = now_s - self.last_s if self._is_busy else 0.0
        num_decode = max(0, num_new - num_first)
        num_running = scheduler_stats.num_running_reqs
        num_used = round(scheduler_stats.kv_cache_usage * self.num_blocks)
        did_work = num_new > 0 or num_prompt > 0
        self.total_steps += did_work
        self.last_s, self._is_busy = now_s, num_running > 0
        self.on_stats(
            StepStats(
                num_running=num_running,
                num_waiting=scheduler_stats.num_waiting_reqs
                + getattr(scheduler_stats, "num_skipped_waiting_reqs", 0),
                num_waiting_prompt_tokens=0,
                num_blocks_used=num_used,
                num_blocks_cached=0,  # vLLM does not say which free blocks hold a prefix
                num_blocks_free=self.num_blocks - num_used,
                step_kind=_kind(num_prompt, num_decode) if did_work else "idle",
                num_sequences=num_decode + num_first,
                num_prefill_tokens=num_prompt,
                num_decode_tokens=num_decode,
                duration_s=duration_s,
                total_preemptions=self.total_preemptions,
                total_prefix_queries=self.total_queries,
                total_prefix_hits=self.total_hits,
                total_steps=self.total_steps,
            ),
            num_new,
        )

    def log_engine_initialized(self) -> None:
        """Asked of every logger; the start log is ours."""

    def log(self) -> None:
        """Asked of every logger; the line of figures is ours."""

    def record_sleep_state(self, is_awake: int, level: int) -> None:
        """Asked of every logger."""


def _kind(num_prompt: int, num_decode: int) -> str:
    if num_prompt and num_decode:
        return "mixed"
    return "prefill" if num_prompt else "decode"


class VllmEngine:
    """One running `AsyncLLM`. Made in a thread; from then on used on the event loop, except `shutdown`."""

    def __init__(
        self,
        llm: Any,
        model: ServedModel,
        *,
        lines: tuple[str, ...] = (),
        info: dict[str, str] | None = None,
        startup_s: dict[str, float] | None = None,
    ) -> None:
        self._llm: Any = llm
        self.model = model
        self.lines = lines
        self.info = info or {}
        self.startup_s = startup_s or {}

    async def open(self, on_death: Callable[[], None]) -> None:
        """One token, to see that the engine answers; `on_death` is called on the loop once its process has ended."""
        from core.sampling_params import SamplingParams

        probe = Sequence("warm-up", [0], SamplingParams(max_tokens=1, temperature=0))
        async for _ in self.generate(probe):
            pass
        handler = (
            self._llm.output_handler
        )  # the task that hands vLLM's outputs out; it ends with the engine

        def tell(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                on_death()

        handler.add_done_callback(tell)

    async def generate(self, sequence: Sequence) -> AsyncGenerator[Delta, None]:
        """The tokens of one sequence. Leaving the loop early aborts it. Raises `EngineGone`."""
        from vllm.v1.engine.exceptions import EngineDeadError

        params = sequence.params
        wanted = to_vllm(
            params, sequence.seed, sequence.choice_index, self.model.shape.eos_token_ids
        )
        prompt = {"type": "token", "prompt_token_ids": list(sequence.token_ids)}
        if self._llm is None:
            raise EngineGone
        outputs = self._llm.generate(prompt, wanted, sequence.sequence_id)
        try:
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield _delta(output, params.logprobs)
        except EngineDeadError as error:
            raise EngineGone from error

    def shutdown(self) -> None:
        """Blocks until vLLM's processes have ended, by force after `SHUTDOWN_S`. For a thread. Idempotent."""
        llm, self._llm = (
            self._llm,
            None,
        )  # its destructor must not be left to the end of the interpreter
        if llm is not None:
            llm.shutdown(timeout=SHUTDOWN_S)


def _delta(output: Any, num_top: int | None) -> Delta:
    completion = output.outputs[0]
    found = completion.logprobs if num_top is not None else None
    tokens: list[tuple[int, TokenLogprobs | None]] = [
        (token_id, None if not found else to_logprobs(token_id, found[index], num_top or 0))
        for index, token_id in enumerate(completion.token_ids)
    ]
    moments = output.metrics
    reason = completion.finish_reason
    known = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
    return Delta(
        tokens=tokens,
        num_cached_tokens=output.num_cached_tokens or 0,
        scheduled_s=getattr(moments, "scheduled_ts", 0.0),
        num_preemptions=getattr(moments, "num_preemptions", 0),
        ended=None if reason is None else known.get(reason, FinishReason.ERROR),
    )
