"""vLLM's tokens of one sequence become our outputs: the same text, stops and ends as in the native engine, because the
same `advance` makes them. Knows neither streams nor HTTP. Called by `vllm.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from core.detokenizer import make_detokenizer
from core.outputs import SampledToken, StepOutput
from core.sequence import Sequence
from core.update import advance
from server.backends.vllm_engine import Delta, VllmEngine


async def follow(
    engine: VllmEngine,
    sequence: Sequence,
    take: Callable[[StepOutput, float], None],
    queue_timeout_s: float,
) -> None:
    """Gives `take` one output per token, the last of them with a finish reason, and the moment it came.

    Raises what ends the sequence otherwise: `EngineGone`, `TimeoutError` when no token came within `queue_timeout_s`
    (0: no limit), or what vLLM raised.
    """
    model = engine.model
    detokenizer = make_detokenizer(model.tokenizer, list(sequence.token_ids), sequence.params)
    async with (
        asyncio.timeout(queue_timeout_s or None) as queue_limit,
        contextlib.aclosing(engine.generate(sequence)) as deltas,
    ):
        async for delta in deltas:
            queue_limit.reschedule(None)
            now_s = time.monotonic()
            _note(sequence, delta, now_s)
            for token_id, logprobs in delta.tokens:
                output = advance(
                    sequence,
                    SampledToken(token_id, logprobs),
                    lambda _: detokenizer,
                    model.shape,
                    model.max_model_len,
                    now_s,
                )
                take(output, now_s)
                if output.finish_reason is not None:
                    return  # leaving the generator aborts what vLLM may still do
            if delta.ended is not None:
                raise RuntimeError(f"vLLM ended the sequence early: {delta.ended}")
    raise RuntimeError("vLLM ended the sequence without a last token")


def _note(sequence: Sequence, delta: Delta, now_s: float) -> None:
    """On one machine all processes have the same monotonic clock; times from elsewhere are held within ours."""
    sequence.num_cached_tokens = delta.num_cached_tokens
    sequence.num_preemptions = delta.num_preemptions
    if not sequence.scheduled_s:
        scheduled_s = delta.scheduled_s or sequence.queued_s
        sequence.scheduled_s = min(max(scheduled_s, sequence.queued_s), now_s)
