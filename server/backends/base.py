"""The small protocol that every backend speaks: native and vLLM. Routes know nothing else of an engine.

All of it lives on the event loop. A backend never blocks the loop and never raises anything but `NoriaError`.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from core.config import MemoryPlan, ModelShape
from core.interfaces import TextTokenizer
from core.outputs import StepOutput, StepStats
from core.sampling_params import SamplingParams
from core.structured.compiler import CompiledGrammar

Phase = Literal["loading", "ready", "draining", "dead"]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What routes may know of the loaded model.

    `root` is the hub id where there is one, else the served name; never a path. `max_model_len` is prompt plus
    output, after context and pool. `generation_defaults` holds sampling fields of the model's generation config.
    """

    name: str
    root: str
    created: int
    max_model_len: int
    shape: ModelShape
    plan: MemoryPlan
    tokenizer: TextTokenizer
    generation_defaults: dict[str, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Residence:
    """Whether one of several models is in memory: bytes that it takes there, requests that wait for it, and how long
    its last load took."""

    is_loaded: bool
    memory_bytes: int
    num_waiting: int
    load_s: float | None


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One sequence to compute, fully validated: ids in range, `max_tokens` clamped, room for at least one token.

    One that `pools` ends with an embedding of its prompt and generates nothing; not every backend can do that.
    """

    token_ids: list[int]
    params: SamplingParams
    seed: int
    choice_index: int = 0
    grammar: CompiledGrammar | None = None
    pools: bool = False


@dataclass(slots=True)
class RequestRecord:
    """What is known of one HTTP request, for its log line and the metrics. Made by the request-id middleware
    (`request[keys.RECORD]`), completed by the backend that computes it, read when the answer has ended.

    `arrival_s` is on the monotonic clock. `status` 499 means that the client left before the answer ended. Sums run
    over all sequences of the request; intervals are those of the sequence that ended last, None = never happened.
    """

    request_id: str
    route: str = ""
    model: str | None = None  # with several models only
    arrival_s: float = field(default_factory=time.monotonic)
    status: int = 0
    finish_reasons: tuple[str, ...] = ()
    num_sequences: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    num_tokens_saved: int = 0
    num_preemptions: int = 0
    queue_s: float | None = None
    prefill_s: float | None = None
    first_token_s: float | None = None
    decode_s: float | None = None
    per_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """Told by the backend, never guessed from the HTTP side. Ages are seconds; None before the first heartbeat.

    `is_step_stale`: there is work, and the last step is older than `engine.watchdog_s`.
    """

    phase: Phase
    message: str
    progress: float | None = None
    heartbeat_age_s: float | None = None
    is_step_stale: bool = False


class RequestStream(Protocol):
    """The outputs of all sequences of one HTTP request, through one `asyncio.Queue` of its own."""

    sequence_ids: tuple[str, ...]

    async def get(self) -> list[tuple[int, StepOutput]]:
        """Waits for at least one output and returns all that are there, each with the index of its sequence.

        Every sequence yields exactly one output with a `finish_reason`; it is its last. Asking for more after all
        have finished is our own bug."""

    @property
    def pending_text_bytes(self) -> int:
        """Text that waits in the queue because the handler is stuck behind a slow reader."""

    @property
    def is_finished(self) -> bool:
        """All sequences have delivered their final output to the handler."""

    def close(self, cause: str = "client_gone") -> None:
        """Aborts what has not finished and forgets the stream. Idempotent; called in each handler's one `finally`.

        `cause` is the metric label of `noria:failures_total`: `client_gone`, `slow_reader` or `shutdown`."""


class Backend(Protocol):
    """A source of tokens behind a bounded queue."""

    name: str

    async def start(self) -> None:
        """Begins loading and returns at once."""

    async def loaded(self) -> None:
        """Waits until the model is loaded. Raises the `NoriaError` that says why it cannot be."""

    def start_lines(self) -> tuple[str, ...]:
        """What the start log tells of the model, its memory and its kernels. Only after `loaded`."""

    async def stop(self, timeout_s: float) -> None:
        """Drains for up to `timeout_s`, then fails what is left with `shutdown`, and joins every thread and process of
        the engine."""

    def begin_drain(self) -> None:
        """From now on `submit` raises `Draining`. Idempotent."""

    def status(self) -> BackendStatus: ...

    def stats(self) -> StepStats:
        """The state after the last step or inbox drain."""

    def served_model(self) -> ServedModel:
        """Raises `ModelLoading` or `EngineDead` when there is none."""

    def submit(
        self,
        requests: list[GenerationRequest],
        *,
        request_id: str,
        route: str,
        record: RequestRecord | None = None,
    ) -> RequestStream:
        """Queues all or nothing. Raises `QueueFull`, `Draining`, `ModelLoading` or `EngineDead`.

        `request_id` and `route` are labels for logs; ids of sequences are the backend's own. Handlers pass
        `record=request[keys.RECORD]`, so that arrival counts from the moment the handler was entered."""
