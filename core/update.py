"""What a sampled token does to its sequence: append, detokenize, stop or go on. The one place that ends a text.

Knows nothing of blocks, scheduling or other sequences. Used by `Engine` only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from core.byte_detokenizer import ByteDetokenizer
from core.config import ModelShape
from core.detokenizer import Detokenizer
from core.outputs import (
    FinishReason,
    OutputError,
    RequestTimings,
    SampledToken,
    StepOutput,
)
from core.sampling_params import SamplingParams
from core.sequence import Sequence

_log = logging.getLogger("noria.engine")

_NON_FINITE = "The model computed values that are not finite for this request."
_SAMPLING = "The engine failed to choose a token for this request."
_GRAMMAR = "The answer cannot be continued by its grammar: {}."
_DETOKENIZE = "The engine failed to turn the tokens of this request into text."


def advance(
    sequence: Sequence,
    token: SampledToken,
    detokenizer_of: Callable[[Sequence], Detokenizer | ByteDetokenizer],
    shape: ModelShape,
    max_model_len: int,
    now_s: float,
) -> StepOutput:
    """Appends one sampled token and returns its output. Never raises: a failure is this sequence's own error.

    The sampler does not choose end tokens before `min_tokens`; if one comes nevertheless it is an ordinary token.
    """
    if token.failure == "grammar":
        assert sequence.grammar is not None
        why = (sequence.grammar.failure or "no token is allowed").rstrip(".")
        error = OutputError("invalid_value", "grammar", _GRAMMAR.format(why))
        return final_output(sequence, FinishReason.ERROR, error=error)
    if token.failure is not None:
        message = _NON_FINITE if token.failure == "non_finite" else _SAMPLING
        return _failure(sequence, token.failure, message)
    token_id = token.token_id
    if not 0 <= token_id < shape.vocab_size:  # has no text, and may crash a tokenizer (B019, B020)
        _log.error("sequence %s: sampled an id outside the vocabulary", sequence.sequence_id)
        return _failure(sequence, "sampling", _SAMPLING)
    sequence.token_ids.append(token_id)
    sequence.first_token_s = sequence.first_token_s or now_s
    sequence.last_token_s = now_s
    num_tokens = len(sequence.token_ids)
    num_output = num_tokens - sequence.num_prompt_tokens
    is_full = num_output >= sequence.params.max_tokens or num_tokens >= max_model_len
    try:
        text, reason, stop = _take_text(
            sequence, token_id, num_output, is_full, detokenizer_of(sequence), shape.eos_token_ids
        )
    except Exception:
        _log.exception("sequence %s: detokenizing failed", sequence.sequence_id)
        return _failure(sequence, "detokenize", _DETOKENIZE)
    return StepOutput(
        sequence.sequence_id,
        token_id,
        text,
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens,
        num_output,
        token.logprobs,
        reason,
        stop,
        timings=None if reason is None else _timings(sequence),
    )


def finish_pooled(sequence: Sequence, token: SampledToken, now_s: float) -> StepOutput:
    """The end of a sequence that asked for an embedding. The token sampled behind it only tells of a failure."""
    assert sequence.pool is not None
    sequence.first_token_s = sequence.last_token_s = now_s
    embedding = None if token.failure is not None else sequence.pool.embedding()
    if embedding is None:
        return _failure(sequence, "non_finite", _NON_FINITE)
    return msgspec.structs.replace(final_output(sequence, FinishReason.STOP), embedding=embedding)


def final_output(
    sequence: Sequence, reason: FinishReason, *, error: OutputError | None = None
) -> StepOutput:
    """The end of a sequence that brings no token: abort or error."""
    return StepOutput(
        sequence_id=sequence.sequence_id,
        token_id=None,
        text="",
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=sequence.num_cached_tokens,
        num_output_tokens=sequence.num_output_tokens,
        finish_reason=reason,
        error=error,
        timings=_timings(sequence),
    )


def _take_text(
    sequence: Sequence,
    token_id: int,
    num_output: int,
    is_full: bool,
    detokenizer: Detokenizer | ByteDetokenizer,
    eos_token_ids: tuple[int, ...],
) -> tuple[str, FinishReason | None, int | str | None]:
    """The text that the token releases, and whether and why it is the last."""
    params = sequence.params
    is_end, end = False, None
    if num_output > params.min_tokens:
        is_end, end = _end_token(params, token_id, eos_token_ids)
    if sequence.grammar is not None and token_id in eos_token_ids:
        is_end, end = True, None  # a grammar allows an end token only where it is one
    text = ""
    if not is_end or params.include_stop_str_in_output:
        text = detokenizer.push(token_id)
    if is_end or is_full:
        text += detokenizer.finish()
    stop = detokenizer.stop
    if stop is not None:
        return text, FinishReason.STOP, stop
    if is_end:
        return text, FinishReason.STOP, end
    return text, FinishReason.LENGTH if is_full else None, None


def _end_token(
    params: SamplingParams, token_id: int, eos_token_ids: tuple[int, ...]
) -> tuple[bool, int | None]:
    """Whether the token ends the text, and the stop reason: None for the model's own end tokens."""
    if token_id in eos_token_ids and not params.ignore_eos:
        return True, None
    if token_id in params.stop_token_ids:
        return True, token_id
    return False, None


def _failure(sequence: Sequence, cause: str, message: str) -> StepOutput:
    error = OutputError("internal_error", cause, message)
    return final_output(sequence, FinishReason.ERROR, error=error)


def _timings(sequence: Sequence) -> RequestTimings:
    return RequestTimings(
        queued_s=sequence.queued_s,
        scheduled_s=sequence.scheduled_s,
        first_token_s=sequence.first_token_s,
        last_token_s=sequence.last_token_s,
        num_preemptions=sequence.num_preemptions,
        num_draft_tokens=sequence.num_draft_tokens,
        num_accepted_tokens=sequence.num_accepted_tokens,
    )
