"""The block pool: order of reuse, reference counts, and a state machine over all operations."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.block_pool import BlockPool

NUM_BLOCKS = 12


def test_blocks_never_used_come_lowest_first_so_that_neighbours_lie_together() -> None:
    pool = BlockPool(8)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2) == [3, 4]


def test_recycled_blocks_come_back_in_their_old_order() -> None:
    pool = BlockPool(8)
    pool.release(pool.allocate(3))
    assert pool.allocate(3) == [0, 1, 2]


def test_never_used_blocks_are_taken_before_cached_ones_are_reclaimed() -> None:
    pool = BlockPool(4)
    reclaimed: list[int] = []
    pool.on_reclaim = reclaimed.append
    table = pool.allocate(2)
    for block_id in table:
        pool.keep(block_id)
    pool.release(table)
    assert pool.num_cached == 2
    assert pool.allocate(2) == [2, 3]
    assert reclaimed == []
    assert pool.allocate(1) == [1], "the tail of the prefix goes first"
    assert reclaimed == [1]


def test_a_second_release_of_the_same_table_does_nothing() -> None:
    """B111."""
    pool = BlockPool(4)
    table = pool.allocate(3)
    pool.release(table)
    pool.release(table)
    assert table == []
    assert pool.num_free == 4


def test_a_shared_block_is_free_only_after_its_last_holder_let_go() -> None:
    pool = BlockPool(4)
    first = pool.allocate(1)
    second = list(first)
    pool.take(second)
    pool.release(first)
    assert pool.num_used == 1
    pool.release(second)
    assert pool.num_free == 4


def test_a_cached_block_that_is_taken_is_not_reclaimed() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.keep(table[0])
    pool.release(table)
    pool.take([0])
    assert pool.allocate(1) == [1]
    assert pool.num_available == 0
    with pytest.raises(AssertionError):
        pool.allocate(1)


class PoolMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.tables: list[list[int]] = []
        self.findable: set[int] = set()
        self.pool.on_reclaim = self.findable.remove

    @rule(count=st.integers(0, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        if count <= self.pool.num_available:
            table = self.pool.allocate(count)
            assert not self.findable & set(table)
            self.tables.append(table)

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from([b for table in self.tables for b in table]))
        self.pool.keep(block_id)
        self.findable.add(block_id)

    @precondition(lambda self: self.findable)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        table = sorted(data.draw(st.sets(st.sampled_from(sorted(self.findable)))))
        self.pool.take(table)
        self.tables.append(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), twice=st.booleans())
    def release(self, data: st.DataObject, twice: bool) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        if twice:
            self.pool.release(table)

    @rule()
    def reset(self) -> None:
        self.tables.clear()
        self.findable.clear()
        self.pool.reset()

    @invariant()
    def counts_equal_tables(self) -> None:
        self.pool.check_invariants(self.tables)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
