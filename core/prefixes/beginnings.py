"""`BlockBeginnings`: which known block begins as a prompt goes on, where no whole block does.

Knows digests, token ids and block numbers; no pool and no sequences. Used by `PrefixCache` only. SGLang's radix tree
(https://arxiv.org/abs/2312.07104) shares prefixes token by token; here blocks stay whole, and the beginning of one is
copied into the block of whoever shares it.
"""

from __future__ import annotations

from bisect import bisect_left, insort

_TOKEN_BYTES = 8  # token ids are kept as int64


class BlockBeginnings:
    """For each digest of a prefix the blocks that come behind it, sorted by their tokens: of those, the one that shares
    the longest beginning with a text stands next to where the text would stand. So finding it takes O(log n) of the n
    blocks behind one prefix, and adding or removing one moves n pointers."""

    def __init__(self) -> None:
        self._behind: dict[bytes, list[tuple[bytes, int]]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._behind.values()))

    def add(self, parent: bytes, tokens: bytes, block_id: int) -> None:
        insort(self._behind.setdefault(parent, []), (tokens, block_id))

    def remove(self, parent: bytes, tokens: bytes, block_id: int) -> None:
        """Of what was added."""
        blocks = self._behind[parent]
        place = bisect_left(blocks, (tokens, block_id))
        assert blocks[place] == (tokens, block_id), "removed a beginning that is not known"
        del blocks[place]
        if not blocks:
            del self._behind[parent]

    def clear(self) -> None:
        self._behind.clear()

    def find(self, parent: bytes, tokens: bytes) -> tuple[int, int]:
        """A block, and how many of these tokens (as int64) it begins with: the most that any does; (-1, 0) if none
        begins with the first."""
        blocks = self._behind.get(parent, ())
        place = bisect_left(blocks, (tokens,))
        found = (-1, 0)
        for known, block_id in blocks[max(0, place - 1) : place + 1]:
            count = _num_common(known, tokens)
            if count > found[1]:
                found = (block_id, count)
        return found


def _num_common(a: bytes, b: bytes) -> int:
    most = min(len(a), len(b))
    if a[:most] == b[:most]:
        return most // _TOKEN_BYTES
    count = 0
    while a[count : count + _TOKEN_BYTES] == b[count : count + _TOKEN_BYTES]:
        count += _TOKEN_BYTES
    return count // _TOKEN_BYTES
