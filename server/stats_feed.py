"""`StatsFeed`: once a second, one sample of what backend and metrics keep anyway, for all who watch the server.

Nothing here runs per token, per step or per request: a sample reads a handful of numbers, whatever the load, and is
encoded once for all watchers. Knows no HTTP; `server/routes/stats.py` writes what it makes. Lives on the event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import orjson

from core import __version__
from core.config import EngineConfig
from core.errors import NoriaError
from core.sampling_params import MAX_TOKENS
from server import sse
from server.backends.base import Backend, ServedModel
from server.metrics import Metrics
from server.protocol.sampling_fields import openai_defaults

INTERVAL_S = 1.0
HISTORY_LENGTH = 300  # samples
# What the history keeps of a sample, by name; a column each.
HISTORY = ("generated_tokens_per_s", "prompt_tokens_per_s", "running", "waiting", "blocks_used")
_STEP_KINDS = ("prefill", "decode", "mixed")


class StatsFeed:
    """Samples from `start` to `stop`. `hello` is what a new watcher gets first, `next_event` waits for the rest."""

    def __init__(
        self,
        backend: Backend,
        metrics: Metrics,
        config: EngineConfig,
        interval_s: float = INTERVAL_S,
        samples: Callable[[], dict[str, dict[str, Any]]] = dict,
    ) -> None:
        """`samples`: those of `Models`, by name; empty where there is one model."""
        self._backend = backend
        self._metrics = metrics
        self._config = config
        self.interval_s = interval_s
        self._history: deque[tuple[float, ...]] = deque(maxlen=HISTORY_LENGTH)
        self._totals = self._read_totals()
        self._read_samples = samples
        self._generated: dict[str, int] = {}  # by each of several models, at the last sample
        self._sampled_s = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._next: asyncio.Future[bytes] | None = None
        self._is_stopped = False
        self._knows_model = False

    def start(self) -> None:
        """Arms the timer; needs a running loop."""
        self._timer = asyncio.get_running_loop().call_later(self.interval_s, self._tick)

    def stop(self) -> None:
        """No more samples; who waits for one is told the end. Idempotent."""
        self._is_stopped = True
        if self._timer is not None:
            self._timer.cancel()
        if self._next is not None and not self._next.done():
            self._next.set_result(b"")

    def hello(self) -> bytes:
        """The first event: what does not change while the model is served, and the samples so far, oldest first."""
        columns = zip(*self._history, strict=True) if self._history else ((),) * len(HISTORY)
        about = {
            "version": __version__,
            "interval_s": self.interval_s,
            "batch_size": self._config.batch_size,
            "model": self._describe_model(),
            "history": dict(zip(HISTORY, columns, strict=True)),
        }
        return sse.named_event(b"hello", sse.escape(orjson.dumps(about)))

    async def next_event(self) -> bytes:
        """The next sample as an event; empty when the server is shutting down. Who is late misses samples."""
        if self._is_stopped:
            return b""
        if self._next is None or self._next.done():
            self._next = asyncio.get_running_loop().create_future()
        return await asyncio.shield(self._next)

    def _tick(self) -> None:
        self.start()
        model = self._model()
        event = b""
        if model is not None and not self._knows_model:
            self._knows_model = True
            event = self.hello()  # again, for those who watched it load
        sample = self.sample(model)
        self._history.append(
            tuple(
                sample["blocks"]["used"] if name == "blocks_used" else sample[name]
                for name in HISTORY
            )
        )
        if self._next is not None and not self._next.done():
            self._next.set_result(event + sse.named_event(b"stats", orjson.dumps(sample)))

    def sample(self, model: ServedModel | None = None) -> dict[str, Any]:
        """The state now, and rates since the last sample."""
        now_s, totals = time.monotonic(), self._read_totals()
        elapsed_s = max(now_s - self._sampled_s, 1e-6)
        news = {name: totals[name] - self._totals[name] for name in totals}
        self._sampled_s, self._totals = now_s, totals
        stats = self._backend.stats()
        used, cached, free = stats.num_blocks_used, stats.num_blocks_cached, stats.num_blocks_free
        if model is not None and not used + cached + free:
            free = model.plan.num_blocks  # before the first step
        return {
            "phase": self._backend.status().phase,
            "running": stats.num_running,
            "waiting": stats.num_waiting,
            "waiting_prompt_tokens": stats.num_waiting_prompt_tokens,
            "blocks": {"used": used, "cached": cached, "free": free},
            "generated_tokens_per_s": round(news["generated"] / elapsed_s, 1),
            "prompt_tokens_per_s": round(news["prompt"] / elapsed_s, 1),
            "step_ms": round(1e3 * news["steps_s"] / news["steps"], 2) if news["steps"] else None,
            "preemptions": stats.total_preemptions,
            "generated_tokens": int(totals["generated"]),
            "prompt_tokens": int(totals["prompt"]),
            "cached_prompt_tokens": int(totals["cached"]),
            "finished_requests": int(totals["finished"]),
            "models": self._sample_models(elapsed_s),
        }

    def _sample_models(self, elapsed_s: float) -> dict[str, dict[str, Any]]:
        """Of each of several models what `Models.samples` tells, and its rate since the last sample."""
        samples = self._read_samples()
        before = self._generated
        self._generated = {name: each["generated_tokens"] for name, each in samples.items()}
        for name, each in samples.items():
            news = each["generated_tokens"] - before.get(name, 0)
            each["generated_tokens_per_s"] = round(news / elapsed_s, 1)
        return samples

    def _read_totals(self) -> dict[str, float]:
        models = self._metrics.of_all_models()
        steps = [
            each.histogram("noria:step_duration_seconds", kind)
            for each in models
            for kind in _STEP_KINDS
        ]
        return {
            "generated": sum(each.total("vllm:generation_tokens") for each in models),
            "prompt": sum(each.total("vllm:prompt_tokens") for each in models),
            "cached": sum(each.total("vllm:prompt_tokens_cached") for each in models),
            "finished": sum(each.sum_of("vllm:request_success") for each in models),
            "steps": sum(sum(child.counts) for child in steps),
            "steps_s": sum(child.total for child in steps),
        }

    def _model(self) -> ServedModel | None:
        try:
            return self._backend.served_model()
        except NoriaError:
            return None

    def _describe_model(self) -> dict[str, Any] | None:
        model = self._model()
        if model is None:
            return None
        return {
            "id": model.name,
            "max_model_len": model.max_model_len,
            "block_size": model.plan.block_size,
            "num_blocks": model.plan.num_blocks,
            "has_chat_template": model.tokenizer.has_chat_template,
            "defaults": _chat_defaults(model),
        }


def _chat_defaults(model: ServedModel) -> dict[str, float]:
    """What absent sampling fields of a chat mean here."""
    defaults = openai_defaults(model, MAX_TOKENS)
    return {
        "temperature": defaults.temperature,
        "top_p": defaults.top_p,
        "top_k": defaults.top_k,
        "min_p": defaults.min_p,
        "repetition_penalty": defaults.repetition_penalty,
    }
