"""The prefix cache: what is found, what is not, and a state machine against a plain list of prefixes."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.block_pool import BlockPool
from core.prefixes.cache import PrefixCache, sha256
from core.sampling_params import SamplingParams
from core.sequence import Sequence

SIZE = 4


def computed(
    pool: BlockPool, cache: PrefixCache, token_ids: list[int], num_computed: int | None = None
) -> Sequence:
    """A sequence whose tokens were computed into blocks of its own, and published."""
    sequence = Sequence("s", list(token_ids), SamplingParams())
    sequence.block_ids += pool.allocate(-(-len(token_ids) // SIZE))
    sequence.num_computed_tokens = len(token_ids) if num_computed is None else num_computed
    cache.publish(sequence, sequence.num_computed_tokens)
    return sequence


def wanted(token_ids: list[int]) -> Sequence:
    return Sequence("w", list(token_ids), SamplingParams())


def test_at_least_one_token_is_always_recomputed() -> None:
    """B118."""
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE)
    first = computed(pool, cache, list(range(8)))
    assert cache.find(wanted(list(range(8)))) == first.block_ids[:1]
    assert cache.find(wanted(list(range(9)))) == first.block_ids
    assert cache.find(wanted(list(range(4)))) == []
    assert cache.find(wanted(list(range(5)))) == first.block_ids[:1]


def test_only_full_blocks_whose_contents_are_written_are_published() -> None:
    """B118."""
    pool = BlockPool(16)
    cache = PrefixCache(pool, SIZE)
    sequence = computed(pool, cache, list(range(8)), num_computed=7)
    assert cache.find(wanted(list(range(20)))) == sequence.block_ids[:1]


@pytest.mark.parametrize("digest", [lambda data: b"same", lambda data: sha256(data)[:1]])
def test_a_forced_collision_is_not_a_hit(digest: object) -> None:
    """B120."""
    pool = BlockPool(64)
    cache = PrefixCache(pool, SIZE, digest)  # type: ignore[arg-type]
    a, b, x = [1] * 4, [2] * 4, [9] * 4
    computed(pool, cache, a + x)
    assert cache.find(wanted([*b, *x, 0])) == []
    assert len(cache.find(wanted([*a, *a, 0]))) <= 1
    assert cache.find(wanted([*x, 0])) == []


def test_a_reclaimed_block_is_forgotten() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool, SIZE)
    sequence = computed(pool, cache, list(range(8)))
    pool.release(sequence.block_ids)
    assert len(cache.find(wanted(list(range(9))))) == 2
    pool.allocate(1)
    assert len(cache.find(wanted(list(range(9))))) == 1


def test_the_same_prefix_computed_twice_keeps_the_first_block() -> None:
    pool = BlockPool(8)
    cache = PrefixCache(pool, SIZE)
    first = computed(pool, cache, list(range(4)))
    second = computed(pool, cache, list(range(4)))
    assert cache.find(wanted(list(range(5)))) == first.block_ids
    pool.release(second.block_ids)
    assert pool.num_cached == 0


class CacheMachine(RuleBasedStateMachine):
    """Every hit must lead to blocks that were written with exactly this prefix."""

    digest = staticmethod(sha256)

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(10)
        self.cache = PrefixCache(self.pool, SIZE, self.digest)
        self.contents: dict[int, tuple[int, ...]] = {}  # block id to the whole prefix it stands for
        self.live: list[Sequence] = []

    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=18))
    def add(self, token_ids: list[int]) -> None:
        sequence = Sequence("s", token_ids, SamplingParams())
        hits = self.cache.find(sequence)
        assert len(hits) * SIZE < len(token_ids)
        for index, block_id in enumerate(hits):
            assert self.contents[block_id] == tuple(token_ids[: (index + 1) * SIZE])
        num_new = -(-len(token_ids) // SIZE) - len(hits)
        if num_new + self.pool.num_idle(hits) > self.pool.num_available:
            return
        self.pool.take(hits)
        sequence.block_ids = hits + self.pool.allocate(num_new)
        sequence.num_computed_tokens = len(hits) * SIZE
        sequence.num_published_blocks = len(hits)
        self.live.append(sequence)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), count=st.integers(1, 9))
    def compute(self, data: st.DataObject, count: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        start = sequence.num_computed_tokens
        sequence.num_computed_tokens = min(sequence.num_tokens, start + count)
        for index in range(start // SIZE, len(sequence.block_ids)):
            prefix = tuple(sequence.token_ids[: (index + 1) * SIZE])
            self.contents[sequence.block_ids[index]] = prefix
        self.cache.publish(sequence, sequence.num_computed_tokens)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.pool.release(sequence.block_ids)

    @invariant()
    def everything_adds_up(self) -> None:
        self.pool.check_invariants(sequence.block_ids for sequence in self.live)
        self.cache.check_invariants()


class CollidingCacheMachine(CacheMachine):
    """B120: the same with one digest for everything."""

    digest = staticmethod(lambda data: b"same")


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestCollidingCacheMachine = CollidingCacheMachine.TestCase
TestCollidingCacheMachine.settings = settings(
    max_examples=25, stateful_step_count=40, deadline=None
)
