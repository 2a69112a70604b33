"""Several engines in one step thread: fair turns, loading beside them, and an end for every sequence."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dummy_engine import end_of, make_engine, make_sequence, solo_text, text_of
from test_step_loop import Receiver

from core.errors import ModelRefused
from core.lane import Report
from core.outputs import FinishReason
from core.turns import SharedLane, Turns


@pytest.fixture
def turns() -> Iterator[Turns]:
    made = Turns()
    made.start()
    yield made
    made.stop()
    assert made.join(10)


def add_lane(
    turns: Turns, load: Callable[[Report], Any] | None = None, step_time_s: float = 0.0
) -> tuple[SharedLane, Receiver, Any]:
    engine, runner = make_engine()
    runner.step_time_s = step_time_s
    receiver = Receiver()
    lane = turns.lane(load or (lambda _: engine), receiver.deliver, receiver.on_phase)
    lane.start()
    return lane, receiver, runner


def test_each_engine_answers_its_own_requests_in_the_same_thread(turns: Turns) -> None:
    first, second = add_lane(turns), add_lane(turns)
    for lane, _, _ in (first, second):
        lane.add([make_sequence("a", "Hi"), make_sequence("b", "Ho")])
    for _, receiver, _ in (first, second):
        receiver.wait_for_ends(2)
        assert receiver.threads == {"noria-step"}
        assert text_of(receiver.outputs, "a") == solo_text(b"Hi", 8)
        assert text_of(receiver.outputs, "b") == solo_text(b"Ho", 8)


def test_engines_with_work_share_the_time_whatever_their_steps_cost(turns: Turns) -> None:
    """One has steps ten times as long and three times the requests; it gets as much time as the other, not more."""
    spent = {"quick": 0.0, "slow": 0.0}
    lanes = {}
    for name, step_time_s, count in (("quick", 0.002, 1), ("slow", 0.02, 3)):
        lane, receiver, runner = add_lane(turns, step_time_s=step_time_s)
        receiver.wait(lambda receiver=receiver: ("ready", "", None) in receiver.phases)

        def note(step: int, batch: Any, name: str = name, step_time_s: float = step_time_s) -> None:
            if name == "slow" or spent["slow"]:  # from when both have work
                spent[name] += step_time_s

        runner.on_run = note
        lanes[name] = (lane, receiver, count)
    for name, (lane, _, count) in lanes.items():
        lane.add([make_sequence(f"{name}{i}", f"Hi {i}", max_tokens=60) for i in range(count)])
    _, receiver, _ = lanes["quick"]
    receiver.wait_for_ends(1)
    assert spent["quick"] > 0
    assert spent["slow"] <= 2 * spent["quick"] + 0.06


def test_an_engine_that_was_idle_does_not_catch_up(turns: Turns) -> None:
    """What it did not use is gone: it gets its share from now on, and not the whole machine for a while."""
    busy, busy_receiver, _ = add_lane(turns, step_time_s=0.002)
    late, late_receiver, _ = add_lane(turns, step_time_s=0.002)
    busy.add([make_sequence("long", "Hi", max_tokens=200)])
    busy_receiver.wait(lambda: len(busy_receiver.outputs) >= 60)
    before = len(busy_receiver.outputs)
    late.add([make_sequence("late", "Ho", max_tokens=40)])
    late_receiver.wait_for_ends(1)
    assert len(busy_receiver.outputs) - before >= 20


def test_an_engine_that_loads_keeps_none_waiting(turns: Turns) -> None:
    serving, receiver, _ = add_lane(turns)
    may_load = threading.Event()
    engine, _ = make_engine()

    def load(report: Report) -> Any:
        report("reading weights", 0.5)
        assert may_load.wait(10)
        return engine

    loading, other, _ = add_lane(turns, load)
    loading.add([make_sequence("b", "Ho")])
    serving.add([make_sequence("a", "Hi")])
    receiver.wait_for_ends(1)
    assert other.phases == [("loading", "reading weights", 0.5)]
    may_load.set()
    other.wait_for_ends(1)
    assert text_of(other.outputs, "b") == solo_text(b"Ho", 8)
    assert other.phases[-1] == ("ready", "", None)


def test_loading_pauses_while_there_are_steps_and_comes_to_its_end() -> None:
    turns = Turns(load_share=0.1)
    turns.start()
    try:
        serving, receiver, _ = add_lane(turns, step_time_s=0.002)
        serving.add([make_sequence("long", "Hi", max_tokens=2000)])
        receiver.wait(lambda: len(receiver.outputs) >= 3)
        engine, _ = make_engine()
        taken_s: list[float] = []

        def load(report: Report) -> Any:
            start_s, cpu_s = time.monotonic(), time.thread_time()
            while time.thread_time() - cpu_s < 0.03:
                report("reading weights", 0.5)
            taken_s.append(time.monotonic() - start_s)
            return engine

        loading, other, _ = add_lane(turns, load)
        loading.add([make_sequence("b", "Ho")])
        other.wait_for_ends(1)
        assert taken_s[0] >= 0.2
        assert len(receiver.outputs) < 2000  # it had its steps all the time
    finally:
        turns.stop()
        assert turns.join(10)


def test_a_load_that_fails_ends_its_own_requests_only(turns: Turns) -> None:
    serving, receiver, _ = add_lane(turns)

    def load(report: Report) -> Any:
        raise ModelRefused("This model is refused.")

    failing, other, _ = add_lane(turns, load)
    failing.add([make_sequence("b", "Ho")])
    other.wait_for_ends(1)
    assert end_of(other.outputs, "b").finish_reason is FinishReason.ERROR
    assert other.phases == [("dead", "This model is refused.", None)]
    serving.add([make_sequence("a", "Hi")])
    receiver.wait_for_ends(1)
    assert text_of(receiver.outputs, "a") == solo_text(b"Hi", 8)


def test_an_engine_that_dies_takes_no_other_with_it(turns: Turns) -> None:
    healthy, receiver, _ = add_lane(turns)
    engine, _ = make_engine()
    engine.step = None  # type: ignore[assignment]
    dying, other, _ = add_lane(turns, lambda _: engine)
    dying.add([make_sequence("b", "Ho")])
    other.wait(lambda: any(phase[0] == "dead" for phase in other.phases))
    healthy.add([make_sequence("a", "Hi")])
    receiver.wait_for_ends(1)
    assert text_of(receiver.outputs, "a") == solo_text(b"Hi", 8)
    other.wait_for_ends(1)
    assert end_of(other.outputs, "b").finish_reason is FinishReason.ERROR


def test_a_lane_that_stops_finishes_its_work_and_lets_go_of_its_engine(turns: Turns) -> None:
    engine, _ = make_engine()
    remains = weakref.ref(engine)
    receiver = Receiver()
    lane = turns.lane(lambda _, made=engine: made, receiver.deliver, receiver.on_phase)
    lane.start()
    lane.add([make_sequence("a", "Hi")])
    lane.stop(10)
    receiver.wait_for_ends(1)
    assert text_of(receiver.outputs, "a") == solo_text(b"Hi", 8)
    deadline_s = time.monotonic() + 5
    while lane.is_alive:
        assert time.monotonic() < deadline_s
        time.sleep(0.001)
    turns.dispose(engine)
    del engine
    while remains() is not None and time.monotonic() < deadline_s:
        gc.collect()
        time.sleep(0.001)
    assert remains() is None


def test_the_end_of_all_turns_leaves_no_sequence_without_an_output() -> None:
    turns = Turns()
    turns.start()
    lane, receiver, _ = add_lane(turns, step_time_s=0.001)
    may_load = threading.Event()

    def load(report: Report) -> Any:
        may_load.wait(10)
        return make_engine()[0]

    loading, other, _ = add_lane(turns, load)
    queued, third, _ = add_lane(turns)
    for each in (lane, loading, queued):
        each.add([make_sequence("a", "Hi", max_tokens=500)])
    receiver.wait(lambda: len(receiver.outputs) > 3)
    turns.stop()
    may_load.set()
    for each in (receiver, other, third):
        each.wait_for_ends(1)
        assert end_of(each.outputs, "a").error is not None
    assert turns.join(10)
