"""`RestartBudget`: how often, and after which pause, an engine that died is started again. Knows no engine."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class RestartBudget:
    """At most `limit` restarts within `window_s`; the pause before each is twice the one before."""

    first_pause_s: float = 1.0
    limit: int = 3
    window_s: float = 600.0
    _restarts_s: list[float] = field(default_factory=list)

    def take(self, now_s: float) -> tuple[int, float] | None:
        """The number of this restart within the window and the pause before it; None when the budget is spent."""
        self._restarts_s = [moment for moment in self._restarts_s if now_s - moment < self.window_s]
        num_before = len(self._restarts_s)
        if num_before >= self.limit:
            return None
        self._restarts_s.append(now_s)
        return num_before + 1, self.first_pause_s * 2**num_before
