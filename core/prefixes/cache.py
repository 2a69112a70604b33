"""`PrefixCache`: finds blocks that already hold the keys and values of a prompt's beginning.

Each full block has a digest: SHA-256 over the digest of the block before it and its own token ids, so that a digest
stands for the whole prefix. Where a prefix ends inside a block, the known block that shares the longest beginning is
found by its tokens. Knows the pool only to mark contents as findable; never changes a reference count. Used by
`Scheduler` only. The scheme is vLLM's automatic prefix caching; radix trees
(SGLang, https://arxiv.org/abs/2312.07104) find the same prefixes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from core.block_pool import BlockPool
from core.prefixes.beginnings import BlockBeginnings
from core.sequence import Sequence

_ROOT = b"noria prefix v1"  # the domain of plain prompts; a salt or an adapter would get a tagged root of its own


@dataclass(frozen=True, slots=True)
class Entry:
    """One findable block. `parent` is the digest of the block before it; the first has none that is known."""

    block_id: int
    depth: int  # index of the block in its sequence
    tokens: bytes  # as int64; fewer than a block has, if it is the last of a sequence that ended
    parent: bytes


def sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


class PrefixCache:
    """Maps digests of full, written blocks to block ids. Work per token is constant: a sequence keeps its digests.

    `digest` is a parameter so that tests can force collisions: a hit also compares depth and token ids.
    """

    def __init__(
        self, pool: BlockPool, block_size: int, digest: Callable[[bytes], bytes] = sha256
    ) -> None:
        self._pool = pool
        self.block_size = block_size
        self.min_beginning = max(
            1, block_size // 4
        )  # tokens that are worth a copy, or the wait of a step
        self._digest = digest
        self._entries: dict[bytes, Entry] = {}
        self._beginnings = BlockBeginnings()
        self._fresh: dict[bytes, None] = {}  # not yet in `_beginnings`
        self._digest_of_block: dict[int, bytes] = {}
        # Told of each block that becomes known (True) or is forgotten: digest and index in its sequence.
        self.on_change: Callable[[bytes, int, bool], None] | None = None
        pool.on_reclaim = self._forget

    def __len__(self) -> int:
        return len(self._entries)

    def knows(self, digest: bytes) -> bool:
        return digest in self._entries

    def digests(self, sequence: Sequence) -> list[bytes]:
        """Of all blocks that `find` may return."""
        num_blocks = (sequence.num_tokens - 1) // self.block_size
        for index in range(len(sequence.block_digests), num_blocks):
            self._digest_at(sequence, index, self._tokens(sequence, index))
        return sequence.block_digests[:num_blocks]

    def find(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known prefix; never all tokens, since one must be computed to be sampled."""
        found: list[int] = []
        for index in range((sequence.num_tokens - 1) // self.block_size):
            tokens = self._tokens(sequence, index)
            entry = self._entries.get(self._digest_at(sequence, index, tokens))
            if entry is None or entry.depth != index or entry.tokens != tokens:
                break
            found.append(entry.block_id)
        return found

    def publish(self, sequence: Sequence, num_tokens: int) -> None:
        """Makes the full blocks among its first `num_tokens` tokens findable, as far as they are not yet. The caller
        promises that their contents are written before anyone reads them."""
        num_full = num_tokens // self.block_size
        for index in range(sequence.num_published_blocks, num_full):
            tokens = self._tokens(sequence, index)
            digest = self._digest_at(sequence, index, tokens)
            if digest in self._entries:
                continue  # the same prefix, held by another block: that one stays the known one
            block_id = sequence.block_ids[index]
            assert block_id not in self._digest_of_block, "a block was published twice"
            self._add(digest, Entry(block_id, index, tokens, self._parent(sequence, index)))
        sequence.num_published_blocks = max(sequence.num_published_blocks, num_full)

    def publish_end(self, sequence: Sequence) -> None:
        """Before its blocks are released: makes the last one findable too, which is computed in part, unless another
        begins with the same tokens. So the next turn of a conversation goes on where this one ended."""
        num_computed = min(sequence.num_computed_tokens, sequence.num_tokens)
        self.publish(sequence, num_computed)
        depth, count = divmod(num_computed, self.block_size)
        if count < self.min_beginning or depth < sequence.num_published_blocks:
            return
        start = num_computed - count
        tokens = array("q", sequence.token_ids[start:num_computed]).tobytes()
        parent = self._parent(sequence, depth)
        digest = self._digest(parent + tokens)
        if digest not in self._entries and self._beginnings.find(parent, tokens)[1] < count:
            self._add(digest, Entry(sequence.block_ids[depth], depth, tokens, parent))

    def settle(self) -> None:
        """At the start of a step: all that was published is computed now, and its beginnings can be copied."""
        for digest in self._fresh:
            entry = self._entries[digest]
            self._beginnings.add(entry.parent, entry.tokens, entry.block_id)
        self._fresh.clear()

    def find_beginning(
        self, sequence: Sequence, depth: int, token_ids: list[int]
    ) -> tuple[int, int]:
        """Of the computed blocks behind the first `depth` of a sequence, which `find` has found, the one that begins
        with most of these tokens, and with how many: (-1, 0) if none does."""
        tokens = array("q", token_ids).tobytes()
        return self._beginnings.find(self._parent(sequence, depth), tokens)

    def get(self, digest: bytes) -> Entry | None:
        return self._entries.get(digest)

    def tokens_of(self, block_id: int) -> list[int]:
        """Of a block that is known."""
        return array("q", self._entries[self._digest_of_block[block_id]].tokens).tolist()

    def latest(self, count: int) -> list[bytes]:
        """Digests of up to `count` blocks: those in use, then those released last. Each comes behind the blocks before
        it in its prefix, so whatever fits is of use."""
        order = [
            self._digest_of_block[i] for i in self._pool.latest() if i in self._digest_of_block
        ]
        found: dict[bytes, None] = {}
        for digest in order:
            if len(found) >= count:
                break
            chain = []
            while digest not in found and (entry := self._entries.get(digest)) is not None:
                chain.append(digest)
                digest = entry.parent
            if digest in found or digest == _ROOT:
                found.update(dict.fromkeys(reversed(chain)))
        return list(found)[:count]

    def adopt(self, heads: list[tuple[int, bytes]], block_ids: list[int]) -> None:
        """Makes blocks findable whose contents came from elsewhere: for each the place of the block before it in this
        list (-1: none) and its token ids. Only into an empty cache; their digests are computed here, not believed."""
        digests: list[bytes] = []
        depths: list[int] = []
        for (place, tokens), block_id in zip(heads, block_ids, strict=True):
            parent, depth = (digests[place], depths[place] + 1) if place >= 0 else (_ROOT, 0)
            digest = self._digest(parent + tokens)
            digests.append(digest)
            depths.append(depth)
            if digest not in self._entries:
                self._add(digest, Entry(block_id, depth, tokens, parent))

    def _add(self, digest: bytes, entry: Entry) -> None:
        self._entries[digest] = entry
        self._digest_of_block[entry.block_id] = digest
        self._fresh[digest] = None
        self._pool.keep(entry.block_id)
        self._tell(digest, entry.depth, is_known=True)

    def clear(self) -> None:
        """After the pool was reset."""
        forgotten = self._entries
        self._entries = {}
        self._digest_of_block.clear()
        self._beginnings.clear()
        self._fresh.clear()
        for digest, entry in forgotten.items():
            self._tell(digest, entry.depth, is_known=False)

    def check_invariants(self) -> None:
        assert len(self._entries) == len(self._digest_of_block)
        for digest, entry in self._entries.items():
            assert self._digest_of_block[entry.block_id] == digest
        assert self._fresh.keys() <= self._entries.keys()
        assert len(self._beginnings) + len(self._fresh) == len(self._entries)

    def _forget(self, block_id: int) -> None:
        digest = self._digest_of_block.pop(block_id)
        entry = self._entries.pop(digest)
        if digest in self._fresh:
            del self._fresh[digest]
        else:
            self._beginnings.remove(entry.parent, entry.tokens, block_id)
        self._tell(digest, entry.depth, is_known=False)

    def _parent(self, sequence: Sequence, depth: int) -> bytes:
        return sequence.block_digests[depth - 1] if depth else _ROOT

    def _tell(self, digest: bytes, depth: int, *, is_known: bool) -> None:
        if self.on_change is not None:
            self.on_change(digest, depth, is_known)

    def _tokens(self, sequence: Sequence, index: int) -> bytes:
        start = index * self.block_size
        return array("q", sequence.token_ids[start : start + self.block_size]).tobytes()

    def _digest_at(self, sequence: Sequence, index: int, tokens: bytes) -> bytes:
        digests = sequence.block_digests
        if index == len(digests):
            digests.append(self._digest((digests[-1] if digests else _ROOT) + tokens))
        return digests[index]
