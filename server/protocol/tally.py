"""`Tally`: the counts and times of one request, summed over its sequences, for `usage` and `timings`.

Knows no aiohttp. Fed by renderers with every output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.outputs import RequestTimings, StepOutput


class Tally:
    """Prompt tokens count once per prompt, output tokens over all choices, end tokens included.

    `num_prompt_tokens` has one entry per prompt; sequence i is choice `i % num_choices` of its prompt. `arrival_s` is
    on the monotonic clock.
    """

    __slots__ = (
        "_arrival_s",
        "_num_accepted",
        "_num_cached",
        "_num_choices",
        "_num_draft",
        "_num_output",
        "_num_preemptions",
        "_num_prompt",
        "_started_s",
        "_timings",
    )

    def __init__(
        self, num_prompt_tokens: Sequence[int], num_choices: int, arrival_s: float
    ) -> None:
        self._num_prompt = sum(num_prompt_tokens)
        self._num_choices = num_choices
        self._arrival_s = arrival_s
        self._num_output = [0] * (len(num_prompt_tokens) * num_choices)
        self._num_cached = [0] * len(self._num_output)
        self._timings: RequestTimings | None = None  # of the sequence that ended last
        self._started_s = float("inf")
        self._num_preemptions = self._num_draft = self._num_accepted = 0

    def observe(self, index: int, output: StepOutput) -> None:
        self._num_output[index] = output.num_output_tokens
        self._num_cached[index] = output.num_cached_tokens
        timings = output.timings
        if timings is not None:
            self._timings = timings
            self._num_preemptions += timings.num_preemptions
            self._num_draft += timings.num_draft_tokens
            self._num_accepted += timings.num_accepted_tokens
            if timings.scheduled_s:
                self._started_s = min(self._started_s, timings.scheduled_s)

    def num_output_tokens(self, index: int) -> int:
        return self._num_output[index]

    @property
    def num_prompt_tokens(self) -> int:
        return self._num_prompt

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompts, taken from the prefix cache; once per prompt."""
        return sum(self._num_cached[:: self._num_choices])

    def usage(self) -> dict[str, Any]:
        num_output = sum(self._num_output)
        return {
            "prompt_tokens": self._num_prompt,
            "completion_tokens": num_output,
            "total_tokens": self._num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": self.num_cached_tokens},
        }

    def timings(self) -> dict[str, Any]:
        """In milliseconds; null = never happened. Intervals are those of the sequence that ended last."""
        times = self._timings
        answer: dict[str, Any] = dict.fromkeys(
            ("queue_ms", "prefill_ms", "first_token_ms", "decode_ms", "tokens_per_second")
        )
        answer["cached_tokens"] = self.num_cached_tokens
        answer["preemptions"] = self._num_preemptions
        answer["draft_tokens"] = self._num_draft
        answer["accepted_draft_tokens"] = self._num_accepted
        if times is None or not times.first_token_s:
            return answer
        answer["queue_ms"] = _ms(times.scheduled_s - times.queued_s)
        answer["prefill_ms"] = _ms(times.first_token_s - times.scheduled_s)
        answer["first_token_ms"] = _ms(times.first_token_s - self._arrival_s)
        answer["decode_ms"] = _ms(times.last_token_s - times.first_token_s)
        elapsed_s = times.last_token_s - self._started_s
        if elapsed_s > 0:
            answer["tokens_per_second"] = round(sum(self._num_output) / elapsed_s, 2)
        return answer


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 3)
