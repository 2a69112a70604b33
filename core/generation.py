"""`Generation`: the whole answer of one prompt, for scripts. Joins the outputs that a server would stream."""

from __future__ import annotations

from dataclasses import dataclass

from core.outputs import FinishReason, OutputError, StepOutput, TokenLogprobs
from core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Generation:
    """`token_ids` are the output's, the end token included; `text` is their text as far as it may be shown.

    `logprobs` has one entry per output token if they were asked for, else it is None.
    """

    text: str
    prompt_token_ids: list[int]
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[TokenLogprobs] | None
    num_cached_tokens: int
    error: OutputError | None


class GenerationBuilder:
    """Collects the outputs of one sequence until the final one."""

    def __init__(self, sequence: Sequence) -> None:
        self._prompt_token_ids = list(sequence.token_ids)
        self._wants_logprobs = sequence.params.logprobs is not None
        self._outputs: list[StepOutput] = []

    @property
    def is_finished(self) -> bool:
        return bool(self._outputs) and self._outputs[-1].finish_reason is not None

    def take(self, output: StepOutput) -> None:
        assert not self.is_finished, "an output came after the final one"
        self._outputs.append(output)

    def build(self) -> Generation:
        final = self._outputs[-1]
        assert final.finish_reason is not None
        logprobs = [output.logprobs for output in self._outputs if output.logprobs is not None]
        return Generation(
            text="".join(output.text for output in self._outputs),
            prompt_token_ids=self._prompt_token_ids,
            token_ids=[o.token_id for o in self._outputs if o.token_id is not None],
            finish_reason=final.finish_reason,
            stop_reason=final.stop_reason,
            logprobs=logprobs if self._wants_logprobs else None,
            num_cached_tokens=final.num_cached_tokens,
            error=final.error,
        )
