"""`engine.order: longest_prefix`: who is next, for how long somebody may be passed over, and what that costs."""

from __future__ import annotations

import pytest
from dummy_engine import make_engine, make_sequence, run_to_end, solo_text, text_of
from hypothesis import given, settings
from hypothesis import strategies as st

from core.block_pool import BlockPool
from core.prefixes.cache import PrefixCache
from core.prefixes.order import BLOCKS_FILED_AT_ONCE, PASSED_OVER_PER_SEAT, LongestPrefixQueue
from core.sampling_params import SamplingParams
from core.sequence import Sequence

SIZE = 4


def ordered_engine(**options: object):
    return make_engine(
        **{"num_blocks": 256, "block_size": SIZE, "batch_size": 1, "order": "longest_prefix"}
        | options
    )


def order_of_ends(outputs: list) -> list[str]:
    return [output.sequence_id for output in outputs if output.finish_reason is not None]


def test_of_those_that_wait_the_longest_cached_prefix_comes_first() -> None:
    engine, _ = ordered_engine()
    engine.add(make_sequence("long", "abcdefghijklmnop"))
    engine.add(make_sequence("short", "ABCDEFGH"))
    run_to_end(engine)
    for name, prompt in [
        ("none", "zzzzzzzzzzzz"),
        ("one", "ABCDxxxxxxxx"),
        ("three", "abcdefghijklxxxx"),
        ("two", "ABCDEFGHxxxx"),
    ]:
        engine.add(make_sequence(name, prompt))
    outputs = run_to_end(engine)
    assert order_of_ends(outputs) == ["three", "two", "one", "none"]
    assert text_of(outputs, "two") == solo_text(b"ABCDEFGHxxxx", 8)


def test_without_hits_and_among_equals_it_is_first_come_first_served() -> None:
    engine, _ = ordered_engine()
    engine.add(make_sequence("warm", "abcdefgh"))
    run_to_end(engine)
    names = ["a", "b", "c", "d"]
    for name in names:
        engine.add(make_sequence(name, f"abcdefgh{name}"))
    engine.add(make_sequence("e", "0123456789"))
    engine.add(make_sequence("f", "1234567890"))
    assert order_of_ends(run_to_end(engine)) == [*names, "e", "f"]


def test_a_prefix_that_is_computed_while_others_wait_calls_them_first() -> None:
    engine, _ = ordered_engine()
    for name, prompt in [("a", "aaaaaaaaaaaa"), ("b", "bbbbbbbbbbbb"), ("a2", "aaaaaaaaaaaaX")]:
        engine.add(make_sequence(name, prompt))
    assert order_of_ends(run_to_end(engine)) == ["a", "a2", "b"]


def test_nobody_is_passed_over_more_often_than_the_bound() -> None:
    engine, _ = ordered_engine()
    engine.add(make_sequence("warm", "abcdefgh"))
    run_to_end(engine)
    engine.add(make_sequence("cold", "zzzzzzzzz"))
    for number in range(3 * PASSED_OVER_PER_SEAT):
        engine.add(make_sequence(f"s{number}", f"abcdefgh{number}"))
    order = order_of_ends(run_to_end(engine))
    assert order.index("cold") == PASSED_OVER_PER_SEAT


def test_a_preempted_sequence_goes_before_any_hit() -> None:
    engine, _ = ordered_engine(num_blocks=10, batch_size=2)
    engine.add(make_sequence("old", "aaaaaaaa", max_tokens=24))
    engine.add(make_sequence("young", "bbbbbbbb", max_tokens=24))
    sequences = engine._sequences
    young = sequences["young"]
    while not young.num_preemptions:
        engine.step()
    engine.add(make_sequence("hit", "aaaaaaaaX", max_tokens=1))
    order = order_of_ends(run_to_end(engine))
    assert order.index("hit") > order.index("old")
    assert young.scheduled_s


def test_embeddings_wait_in_line_since_they_use_no_hits() -> None:
    from core.pooling import MeanPool

    engine, _ = ordered_engine()
    engine.add(make_sequence("warm", "abcdefgh"))
    run_to_end(engine)
    engine.add(make_sequence("first", "zzzz"))
    pooled = make_sequence("pooled", "abcdefghijk")
    pooled.pool = MeanPool()
    engine.add(pooled)
    assert order_of_ends(run_to_end(engine)) == ["first", "pooled"]


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=18)


@settings(deadline=None, max_examples=200)
@given(
    computed=st.lists(PROMPTS, max_size=6),
    waiting=st.lists(PROMPTS, min_size=1, max_size=12),
    more=st.lists(PROMPTS, max_size=4),
    gone=st.sets(st.integers(0, 11), max_size=4),
)
def test_the_next_has_as_long_a_hit_as_anybody(
    computed: list[list[int]],
    waiting: list[list[int]],
    more: list[list[int]],
    gone: set[int],
) -> None:
    """Against a search through all; blocks are learned and reclaimed before and after the queue is filled."""
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE)
    queue = LongestPrefixQueue(cache, 1000)

    def compute(prompts: list[list[int]]) -> None:
        for token_ids in prompts:
            sequence = Sequence("c", list(token_ids), SamplingParams())
            hits = cache.find(sequence)
            pool.take(hits)
            num_new = -(-len(token_ids) // SIZE) - len(hits)
            if num_new > pool.num_available:
                pool.release(hits)
                continue
            sequence.block_ids = hits + pool.allocate(num_new)
            sequence.num_published_blocks = len(hits)
            cache.publish(sequence, len(token_ids))
            pool.release(sequence.block_ids)

    compute(computed)
    for number, token_ids in enumerate(waiting):
        queue.push(Sequence(f"w{number}", list(token_ids), SamplingParams()))
    for number in gone:
        if f"w{number}" in queue:
            queue.remove(f"w{number}")
    if len(queue):
        queue.next()
    compute(more)
    while len(queue):
        queue.check_invariants()
        hits = {s.sequence_id: len(cache.find(s)) for s in queue.sequences()}
        chosen = queue.next()
        assert hits[chosen.sequence_id] == max(hits.values())
        equals = [name for name, count in hits.items() if count == hits[chosen.sequence_id]]
        if not hits[chosen.sequence_id]:
            assert chosen.sequence_id == equals[0]
        queue.take(chosen)
    queue.check_invariants()
    assert not queue._wanted
    assert not any(queue._known.values())


def test_a_thousand_that_wait_are_not_looked_through_at_every_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Work is counted, not timed: look-ups of digests per step stay as few as with nobody waiting."""
    engine, _ = ordered_engine(num_blocks=4096, batch_size=4, max_batched_tokens=64)
    shared = "one prefix for all of them, 64 characters long, in sixteen blocks"[:64]
    for number in range(1000):
        engine.add(make_sequence(f"s{number}", f"{shared}{number:04} and more", max_tokens=64))
    num_lookups = 0
    knows = PrefixCache.knows

    def counted(self: PrefixCache, digest: bytes) -> bool:
        nonlocal num_lookups
        num_lookups += 1
        return knows(self, digest)

    monkeypatch.setattr(PrefixCache, "knows", counted)
    for _ in range(60):
        engine.step()
    before = num_lookups
    assert before <= 1000 * 20 * 2, (
        "each block of each prompt is looked up once, and for each admission once"
    )
    for _ in range(20):
        engine.step()
    assert num_lookups - before <= 20 * 4 * 20


def test_a_crowd_is_filed_a_few_at_a_time() -> None:
    pool = BlockPool(4)
    queue = LongestPrefixQueue(PrefixCache(pool, SIZE), 1000)
    for number in range(200):
        queue.push(Sequence(f"w{number}", [number] * 41, SamplingParams()))
    queue.next()
    assert len(queue._filed) == -(-BLOCKS_FILED_AT_ONCE // 10)
