"""`StepReport`: what one step did and where its time went, and the debug line about it. Used by `Engine` only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from core.batch import Batch
from core.sequence import Sequence

_PARTS = ("schedule", "draft", "run", "sample", "update")


@dataclass(frozen=True, slots=True)
class StepReport:
    """The fields of `StepStats` that belong to one step. Kept seats of policy `static` count as sequences only."""

    kind: str = "idle"
    num_sequences: int = 0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    duration_s: float = 0.0
    parts_s: dict[str, float] = field(default_factory=dict)

    def timed(self, moments_s: list[float]) -> StepReport:
        """With the times between the moments at which the parts began and the last ended."""
        parts = {
            part: end - begin
            for part, (begin, end) in zip(_PARTS, pairwise(moments_s), strict=True)
        }
        return replace(self, duration_s=moments_s[-1] - moments_s[0], parts_s=parts)


IDLE = StepReport()


def report_step(batch: Batch) -> StepReport:
    """Counts tokens before the step is computed. A decode is a row with one token to compute behind its prompt;
    drafts do not count."""
    if not batch.sequences:
        return IDLE
    num_prefill = num_decode = 0
    for sequence, count, draft in batch.rows():
        if _is_decode(sequence):
            num_decode += count - len(draft)
        elif not sequence.is_finished:
            num_prefill += count
    kind = "mixed" if num_prefill and num_decode else "prefill" if num_prefill else "decode"
    return StepReport(kind, len(batch.sequences), num_prefill, num_decode)


def describe(batch: Batch) -> str:
    """The batch in words, for the debug log: `2 sequences, 40 tokens: a=1/17 b=39/39` (computed now / known)."""
    shape = " ".join(_describe_row(*row) for row in batch.rows())
    return f"{len(batch.sequences)} sequences, {batch.num_tokens} tokens: {shape}"


def _describe_row(sequence: Sequence, count: int, draft: tuple[int, ...]) -> str:
    mark = " (finished)" if sequence.is_finished else ""
    mark += f" (draft of {len(draft)})" if draft else ""
    return f"{sequence.label or sequence.sequence_id}={count}/{sequence.num_tokens}{mark}"


def _is_decode(sequence: Sequence) -> bool:
    return (
        not sequence.is_finished
        and sequence.num_output_tokens > 0
        and sequence.num_tokens_to_compute == 1
    )
