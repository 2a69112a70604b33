"""Beginnings of blocks: the longest is found, whatever was added and removed."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from core.prefixes.beginnings import BlockBeginnings

texts = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)


def packed(text: tuple[int, ...]) -> bytes:
    return array("q", text).tobytes()


def num_common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@given(st.lists(st.tuples(texts, st.booleans()), max_size=30), st.lists(texts, max_size=8))
def test_the_longest_beginning_is_found(
    blocks: list[tuple[tuple[int, ...], bool]], wanted: list[tuple[int, ...]]
) -> None:
    beginnings = BlockBeginnings()
    for block_id, (text, _) in enumerate(blocks):
        beginnings.add(b"parent", packed(text), block_id)
    for block_id, (text, is_removed) in enumerate(blocks):
        if is_removed:
            beginnings.remove(b"parent", packed(text), block_id)
    left = {i: text for i, (text, is_removed) in enumerate(blocks) if not is_removed}
    assert len(beginnings) == len(left)
    for text in wanted:
        block_id, count = beginnings.find(b"parent", packed(text))
        assert count == max((num_common(text, other) for other in left.values()), default=0)
        assert (block_id == -1) if not count else num_common(left[block_id], text) == count


def test_a_beginning_behind_another_prefix_is_not_found() -> None:
    beginnings = BlockBeginnings()
    beginnings.add(b"one", packed((1, 2)), 0)
    assert beginnings.find(b"other", packed((1, 2))) == (-1, 0)
