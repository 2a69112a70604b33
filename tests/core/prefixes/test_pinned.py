"""Pinned prefixes: never evicted, and never so many that the pool starves."""

from __future__ import annotations

import pytest
from dummy_engine import end_of, make_engine, make_sequence, run_to_end, solo_text, text_of

from core.engine import Engine
from core.errors import PinnedFull, PrefixTooShort
from core.prefixes.pinned import PinnedPrefix

SIZE = 4
SYSTEM = "You are helpful."  # 16 bytes, 4 blocks


def small_engine(**options: object) -> tuple[Engine, object]:
    return make_engine(**{"num_blocks": 16, "block_size": SIZE, "max_context": 32} | options)


def warm(engine: Engine, prompt: str) -> None:
    engine.add(make_sequence(f"warm {prompt}", prompt, max_tokens=1))
    run_to_end(engine)


def pin(engine: Engine, prompt: str) -> PinnedPrefix | None:
    assert engine.pins is not None
    return engine.pins.pin(list(prompt.encode()), "a label")


def flood(engine: Engine, count: int = 12) -> None:
    for number in range(count):
        engine.add(make_sequence(f"flood {number}", f"{number:02}" * 12))
    run_to_end(engine)


def cached_of(engine: Engine, prompt: str) -> int:
    engine.add(make_sequence("asks", prompt))
    outputs = run_to_end(engine)
    assert text_of(outputs, "asks") == solo_text(prompt.encode(), 8)
    return end_of(outputs, "asks").num_cached_tokens


def test_a_pinned_prefix_survives_what_evicts_all_others() -> None:
    engine, _ = small_engine()
    warm(engine, SYSTEM)
    warm(engine, "Another prompt..")
    assert pin(engine, SYSTEM) is not None
    flood(engine)
    assert cached_of(engine, SYSTEM + " Hi") == 16
    assert cached_of(engine, "Another prompt.. Hi") == 0
    assert engine.stats().num_blocks_used == 4


def test_a_prefix_that_is_not_cached_is_not_pinned() -> None:
    engine, _ = small_engine()
    assert pin(engine, SYSTEM) is None
    warm(engine, SYSTEM[:8])
    assert pin(engine, SYSTEM) is None
    assert engine.stats().num_blocks_used == 0


def test_only_full_blocks_are_pinned_and_a_shorter_prefix_is_refused() -> None:
    engine, _ = small_engine()
    warm(engine, SYSTEM + "xy")
    found = pin(engine, SYSTEM + "xy")
    assert found is not None
    assert found.num_tokens == 16
    with pytest.raises(PrefixTooShort, match="blocks of 4 tokens"):
        pin(engine, "abc")


def test_an_unpinned_prefix_is_as_evictable_as_any() -> None:
    engine, _ = small_engine()
    warm(engine, SYSTEM)
    found = pin(engine, SYSTEM)
    assert found is not None
    assert engine.pins is not None
    assert engine.pins.unpin(found.prefix_id) is not None
    assert engine.pins.unpin(found.prefix_id) is None
    assert engine.stats().num_blocks_used == 0
    assert cached_of(engine, SYSTEM + " Hi") == 16
    flood(engine)
    assert cached_of(engine, SYSTEM + " Hi") == 0


def test_pinning_twice_holds_the_blocks_once() -> None:
    engine, _ = small_engine()
    warm(engine, SYSTEM)
    first, second = pin(engine, SYSTEM), pin(engine, SYSTEM)
    assert first is not None
    assert second is not None
    assert engine.pins is not None
    assert first.prefix_id == second.prefix_id
    assert len(list(engine.pins)) == 1
    engine.pins.unpin(first.prefix_id)
    assert engine.stats().num_blocks_used == 0


def test_prefixes_that_share_blocks_count_them_once_and_keep_them_until_both_are_gone() -> None:
    engine, _ = small_engine()
    warm(engine, SYSTEM)
    warm(engine, SYSTEM + "more")
    short, long = pin(engine, SYSTEM), pin(engine, SYSTEM + "more")
    assert short is not None
    assert long is not None
    assert engine.pins is not None
    assert engine.pins.num_blocks == 5
    engine.pins.unpin(long.prefix_id)
    engine.check_invariants()
    flood(engine)
    assert cached_of(engine, SYSTEM + "more Hi") == 16


def test_pins_leave_room_for_half_of_the_pool_and_for_a_request_of_full_context() -> None:
    for context, expected in ((32, 8), (48, 4), (64, 0)):
        engine, _ = small_engine(max_context=context)
        assert engine.pins is not None
        assert engine.pins.max_blocks == expected
    with pytest.raises(PinnedFull, match="0 tokens can be pinned in this pool"):
        engine.pins.check_room(list(SYSTEM.encode()))


def test_with_as_much_pinned_as_may_be_the_longest_request_still_ends() -> None:
    engine, _ = small_engine()
    for prompt in ("a" * 16, "b" * 16):
        warm(engine, prompt)
        assert pin(engine, prompt) is not None
    warm(engine, "c" * 16)
    with pytest.raises(PinnedFull, match="32 tokens can be pinned in this pool, 32 are"):
        pin(engine, "c" * 16)
    for number in range(4):
        engine.add(make_sequence(f"long {number}", f"{number}" * 8, max_tokens=100))
    outputs = run_to_end(engine)
    for number in range(4):
        expected = solo_text((f"{number}" * 8).encode(), 24)
        assert text_of(outputs, f"long {number}") == expected


def test_a_failed_step_takes_the_pins_with_it_for_no_block_can_be_trusted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine, runner = small_engine()
    warm(engine, SYSTEM)
    assert pin(engine, SYSTEM) is not None
    runner.failing_steps = {runner.num_steps}  # type: ignore[attr-defined]
    engine.add(make_sequence("fails", "Hi"))
    run_to_end(engine)
    assert engine.pins is not None
    assert not list(engine.pins)
    assert "lost 1 pinned prefixes" in caplog.text
    assert cached_of(engine, SYSTEM + " Hi") == 0
