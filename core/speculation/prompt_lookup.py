"""`PromptLookup`: guesses that a sequence goes on as it, or its prompt, went on before.

An index of n-grams to the place behind their last occurrence, which grows with the sequence: constant work per token,
however long it is. Knows token ids only. Used by `Speculator`. Prompt lookup decoding is from Apoorv Saxena
(https://github.com/apoorvumang/prompt-lookup-decoding); n-grams of the output itself are from LLMA
(https://arxiv.org/abs/2304.04487).
"""

from __future__ import annotations

_SIZES = (4, 2)  # of the n-grams, the longest first
LONGEST_MATCH = 32  # further back nobody looks


class PromptLookup:
    """The index of one sequence, whose tokens are handed in: they may only be appended to."""

    __slots__ = ("_num_indexed", "_places", "_source")

    def __init__(self) -> None:
        self._places: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in _SIZES)
        self._num_indexed = 0  # n-grams that end before this place are known
        self._source = 0  # what stands from here on is the guess for what comes next

    def index(self, token_ids: list[int], limit: int) -> int:
        """Takes in up to `limit` tokens more and returns how many. The last n-gram stays out: nothing is behind it."""
        start, end = self._num_indexed, min(len(token_ids), self._num_indexed + limit)
        for size, places in zip(_SIZES, self._places, strict=True):
            for place in range(max(size, start), end):
                places[tuple(token_ids[place - size : place])] = place
        self._num_indexed = end
        return end - start

    def find(self, token_ids: list[int]) -> int:
        """How many of the last tokens stand also before the place where the guess begins, at most `LONGEST_MATCH`;
        0: there is no guess.

        The place that the guess before came from is kept while it goes on to match. Where text is copied with one
        token changed, one more finds the rest again, since that place moves on in step.
        """
        num_tokens = len(token_ids)
        if self._num_indexed < num_tokens:
            return 0
        longest, source = 0, self._source
        if 0 < source < num_tokens:
            longest = _match(token_ids, source)
        if longest < LONGEST_MATCH:
            for size, places in zip(_SIZES, self._places, strict=True):
                if longest >= size:
                    break
                place = places.get(tuple(token_ids[-size:]))
                if place is not None and place != source:
                    found = _match(token_ids, place)
                    if found > longest:
                        longest, source = found, place
        self._source = source
        return longest

    def advance(self, num_tokens: int) -> None:
        """So many tokens have come since `find`."""
        self._source += num_tokens

    def draft(self, token_ids: list[int], count: int) -> tuple[int, ...]:
        """The next `count` tokens by the place that `find` found. Where it runs into the end, it repeats."""
        start = self._source
        period = len(token_ids) - start
        if count <= period:
            return tuple(token_ids[start : start + count])
        return tuple(token_ids[start + i % period] for i in range(count))


def _match(token_ids: list[int], place: int) -> int:
    """How many tokens before `place` equal the last ones, in order."""
    count = 0
    for back in range(1, min(place, LONGEST_MATCH) + 1):
        if token_ids[place - back] != token_ids[-back]:
            break
        count = back
    return count
