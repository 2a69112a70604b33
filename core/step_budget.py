"""`StepBudget`: how many prompt tokens a step may take beside running streams so that it stays near a target time.

Learns what steps cost from the steps themselves. Knows no sequences and no clock. Used by `Scheduler`; the idea of
bounding prefill by its effect on decodes is from Sarathi-Serve (https://arxiv.org/abs/2403.02310).
"""

from __future__ import annotations

import statistics
from collections import deque

MIN_TOKENS = 8  # a prompt gets on by so much in every step, whatever the target
_REMEMBERED = 5  # steps of each kind; medians of so many are not moved by one that was disturbed


class StepBudget:
    """`target_s`: seconds that a step should take at most. 0: no bound.

    A step without prefill tells what the decodes cost; what another takes longer, divided by its prompt tokens, is the
    cost of one. While prefill goes on the first figure grows old; what it lacks then counts as cost of prompt tokens,
    and their sum, which is what matters, stays right.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._decode_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._token_s: deque[float] = deque(maxlen=_REMEMBERED)
        self._num_tokens: deque[int] = deque([MIN_TOKENS], maxlen=_REMEMBERED)

    def num_prefill_tokens(self, limit: int) -> int:
        """At most `limit`, and at most twice what was tried lately: small chunks tell little about large ones."""
        if not self._target_s:
            return limit
        count = 2 * max(self._num_tokens)
        if self._token_s:
            room_s = self._target_s - self._usual_decode_s()
            cost_s = statistics.median(self._token_s)
            count = min(count, int(max(0.0, room_s) / cost_s)) if cost_s > 0 else count
        return min(limit, max(MIN_TOKENS, count))

    def observe(self, num_prefill: int, num_decode: int, duration_s: float) -> None:
        """What a step computed and how long it took."""
        if not self._target_s:
            return
        if not num_prefill:
            self._decode_s.append(duration_s)
        elif num_prefill >= MIN_TOKENS:  # the last few tokens of a prompt tell nothing
            decode_s = self._usual_decode_s() if num_decode else 0.0
            self._token_s.append(max(0.0, duration_s - decode_s) / num_prefill)
            self._num_tokens.append(num_prefill)

    def _usual_decode_s(self) -> float:
        return statistics.median(self._decode_s) if self._decode_s else 0.0
