"""`StopMatcher`: finds stop strings in a text that arrives in pieces, and holds back what may still become one.

Linear in the text for any stop strings (B100): one Knuth-Morris-Pratt automaton per stop string, no regular
expressions. Knows nothing of tokens. Used by `Detokenizer` only.
"""

from __future__ import annotations


class StopMatcher:
    """Push text, get the text that is safe to show. After a match `matched` is set and nothing more is released."""

    def __init__(self, stops: tuple[str, ...], *, includes_stop: bool) -> None:
        self._stops = stops
        self._fallbacks = [_fallbacks(stop) for stop in stops]
        self._states = [0] * len(stops)  # characters of each stop that the text ends with
        self._includes_stop = includes_stop
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, *, may_stop: bool = True) -> str:
        """Returns the newly safe text. With `may_stop` false a match is passed over."""
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        start = len(self._held)
        known = self._held + text
        for position, character in enumerate(text, start):
            completed = self._advance(character)
            if completed is not None and may_stop:
                self.matched, self._held = completed, ""
                end = position + 1
                return known[: end if self._includes_stop else end - len(completed)]
        released = len(known) - max(self._states)
        self._held = known[released:]
        return known[:released]

    def finish(self) -> str:
        """What was held back, once no more text can come."""
        held, self._held = self._held, ""
        return held

    def _advance(self, character: str) -> str | None:
        """Moves every automaton by one character; returns the longest stop string that ends here, if any."""
        completed: str | None = None
        for index, stop in enumerate(self._stops):
            state, fallbacks = self._states[index], self._fallbacks[index]
            while state and stop[state] != character:
                state = fallbacks[state]
            state += stop[state] == character
            if state == len(stop):
                state = fallbacks[state]
                if completed is None or len(stop) > len(completed):
                    completed = stop
            self._states[index] = state
        return completed


def _fallbacks(pattern: str) -> list[int]:
    """For every length the longest proper border of that prefix of the pattern."""
    fallbacks = [0] * (len(pattern) + 1)
    border = 0
    for length in range(2, len(pattern) + 1):
        while border and pattern[border] != pattern[length - 1]:
            border = fallbacks[border]
        border += pattern[border] == pattern[length - 1]
        fallbacks[length] = border
    return fallbacks
