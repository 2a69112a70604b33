"""Values that cross from the step thread to the rest of the world. Frozen: nobody needs a lock to read them.

What is made for every token is a struct of msgspec: made in 0.3 µs instead of a frozen dataclass's 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

import msgspec


class FinishReason(StrEnum):
    """How a request ended. Every request ends with exactly one."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-softmax of the raw logits at one position, clamped to finite values.

    `top` holds (token id, log-probability) pairs, best first; its length is what `SamplingParams.logprobs` asked.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class SampledToken(msgspec.Struct, frozen=True, gc=False):
    """What the runner gives back for one sampled row: a token, or the cause of the failure of that row alone.

    `failure` is `non_finite`, `sampling` or `grammar`; the token id then has no meaning.
    """

    token_id: int
    logprobs: TokenLogprobs | None = None
    failure: str | None = None


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Moments of one sequence on the monotonic clock of the step thread, in seconds; 0.0 = never happened.

    `scheduled_s` is the last time tokens were first planned before the first token (a preemption during prefill
    restarts it); see the intervals in the README.
    """

    queued_s: float
    scheduled_s: float
    first_token_s: float
    last_token_s: float
    num_preemptions: int
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of those


@dataclass(frozen=True, slots=True)
class OutputError:
    """Why a sequence ended with `FinishReason.ERROR`.

    `code` is the public code (`internal_error`, `queue_timeout`, ...); `cause` is the metric label:
    `step`, `sampling`, `grammar`, `detokenize`, `non_finite`, `queue_timeout`, `shutdown` or `engine_dead`.
    """

    code: str
    cause: str
    message: str


class StepOutput(msgspec.Struct, frozen=True, gc=False):
    """One token of one sequence, or its end.

    `token_id` is None when the output carries no new token (abort, error). `text` is the newly released text; it is
    empty while text is held back, and may hold the text of several tokens. The final output, and only it, has a
    `finish_reason`, and then `timings`. Counts are totals so far: `num_output_tokens` includes end tokens.
    `embedding`: see `MeanPool`.
    """

    sequence_id: str
    token_id: int | None
    text: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: OutputError | None = None
    timings: RequestTimings | None = None
    embedding: bytes | None = None


@dataclass(frozen=True, slots=True)
class StepStats:
    """The state of the engine after a step (or after an inbox drain without one), computed from state, never kept
    by increments; and what that step did. Fields named `total_*` are monotone over the life of the engine.
    """

    num_running: int
    num_waiting: int
    num_waiting_prompt_tokens: int
    num_blocks_used: int
    num_blocks_cached: int
    num_blocks_free: int
    step_kind: str = "idle"  # idle, prefill, decode or mixed
    num_sequences: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    duration_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)  # schedule, draft, run, sample, update
    total_preemptions: int = 0
    total_recomputed_tokens: int = 0
    total_prefix_queries: int = 0  # in tokens
    total_prefix_hits: int = 0  # in tokens
    total_steps: int = 0
    total_drafts: int = 0
    total_draft_tokens: int = 0
    total_accepted_tokens: int = 0  # of drafts
    total_accepted_per_position: tuple[int, ...] = ()  # in the draft
