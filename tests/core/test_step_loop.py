"""The step loop: one thread, one final output for every sequence, and no way to kill it from outside."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dummy_engine import end_of, make_engine, make_sequence, reason_of, solo_text, text_of

from core.errand import at_once
from core.errors import EngineDead, ModelRefused
from core.outputs import FinishReason, StepOutput, StepStats
from core.step_loop import Report, StepLoop


class Receiver:
    """Collects what the loop delivers; `wait` blocks until something holds."""

    def __init__(self) -> None:
        self.outputs: list[StepOutput] = []
        self.stats: list[StepStats] = []
        self.phases: list[tuple[Any, ...]] = []
        self.threads: set[str] = set()
        self._changed = threading.Condition()

    def deliver(self, outputs: list[StepOutput], stats: StepStats) -> None:
        with self._changed:
            self.threads.add(threading.current_thread().name)
            self.outputs += outputs
            self.stats.append(stats)
            self._changed.notify_all()

    def on_phase(self, phase: str, message: str, progress: float | None = None) -> None:
        with self._changed:
            self.phases.append((phase, message, progress))
            self._changed.notify_all()

    def wait(self, holds: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(holds, timeout=10)

    def wait_for_ends(self, count: int) -> None:
        self.wait(lambda: sum(o.finish_reason is not None for o in self.outputs) >= count)


LoopMaker = Callable[..., tuple[StepLoop, Receiver, Any, Any]]


@pytest.fixture
def make_loop() -> Iterator[LoopMaker]:
    loops: list[StepLoop] = []

    def make(
        load: Callable[[Report], Any] | None = None, step_time_s: float = 0.0, **options: Any
    ) -> tuple[StepLoop, Receiver, Any, Any]:
        engine, runner = make_engine(**options)
        runner.step_time_s = step_time_s
        receiver = Receiver()
        loop = StepLoop(load or (lambda _: engine), receiver.deliver, receiver.on_phase)
        loops.append(loop)
        return loop, receiver, engine, runner

    yield make
    for loop in loops:
        loop.stop()
        assert loop.join(10)


def test_it_loads_in_its_own_thread_then_serves(make_loop: LoopMaker) -> None:
    where: list[str] = []
    engine, _ = make_engine()

    def load(report: Report) -> Any:
        where.append(threading.current_thread().name)
        report("reading weights", 0.5)
        return engine

    loop, receiver, _, _ = make_loop(load)
    loop.add([make_sequence("early", "before the start", 3)])
    loop.start()
    loop.add([make_sequence("a", "Hi"), make_sequence("b", "Ho")])
    receiver.wait_for_ends(3)
    assert where == ["noria-step"]
    assert receiver.threads == {"noria-step"}
    assert receiver.phases == [("loading", "reading weights", 0.5), ("ready", "", None)]
    assert text_of(receiver.outputs, "a") == solo_text(b"Hi", 8)


def test_an_abort_frees_the_blocks_and_ends_with_abort(make_loop: LoopMaker) -> None:
    """B110, B117: the gauges are right again although nothing runs."""
    loop, receiver, _, _ = make_loop(step_time_s=0.002)
    loop.start()
    loop.add([make_sequence("a", "Hi", 1000)])
    receiver.wait(lambda: len(receiver.outputs) > 3)
    loop.abort(["a", "never heard of"])
    receiver.wait_for_ends(1)
    assert reason_of(receiver.outputs, "a") is FinishReason.ABORT
    receiver.wait(lambda: receiver.stats[-1].num_running == 0)
    assert receiver.stats[-1].num_blocks_used == 0


def test_a_sequence_added_and_aborted_at_once_never_runs(make_loop: LoopMaker) -> None:
    loop, receiver, engine, runner = make_loop()
    loop.add([make_sequence("a", "Hi")])
    loop.abort(["a"])
    loop.start()
    receiver.wait_for_ends(1)
    assert reason_of(receiver.outputs, "a") is FinishReason.ABORT
    assert runner.num_steps == 0
    assert not engine.has_work


def test_idle_it_neither_steps_nor_delivers_nor_burns_time(make_loop: LoopMaker) -> None:
    loop, receiver, _, runner = make_loop()
    loop.start()
    loop.add([make_sequence("a", "Hi", 2)])
    receiver.wait_for_ends(1)
    time.sleep(0.05)
    deliveries, steps = len(receiver.stats), runner.num_steps
    time.sleep(0.1)
    assert (len(receiver.stats), runner.num_steps) == (deliveries, steps)
    assert not loop.heartbeat.has_work


def test_the_heartbeat_shows_a_step_that_hangs(make_loop: LoopMaker) -> None:
    """B130 at unit level."""
    loop, receiver, _, runner = make_loop()
    hanging, release = threading.Event(), threading.Event()

    def hang(step: int, batch: object) -> None:
        hanging.set()
        release.wait(10)

    runner.on_run = hang
    loop.start()
    loop.add([make_sequence("a", "Hi", 1)])
    assert hanging.wait(10)
    first = loop.heartbeat
    time.sleep(0.03)
    assert loop.heartbeat is first
    assert first.has_work
    release.set()
    receiver.wait_for_ends(1)


def test_a_failed_step_ends_its_requests_and_the_next_one_is_served(make_loop: LoopMaker) -> None:
    """B103."""
    loop, receiver, _, runner = make_loop()
    runner.failing_steps = {1}
    loop.start()
    loop.add([make_sequence("a", "Hi")])
    receiver.wait_for_ends(1)
    assert reason_of(receiver.outputs, "a") is FinishReason.ERROR
    loop.add([make_sequence("b", "Hi")])
    receiver.wait_for_ends(2)
    assert text_of(receiver.outputs, "b") == solo_text(b"Hi", 8)


def test_a_receiver_that_raises_does_not_stop_the_loop(make_loop: LoopMaker) -> None:
    loop, receiver, _, _ = make_loop()
    deliver, calls = receiver.deliver, [0]

    def fragile(outputs: list[StepOutput], stats: StepStats) -> None:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("the receiver failed")
        deliver(outputs, stats)

    loop._deliver_outputs = fragile
    loop.start()
    loop.add([make_sequence("a", "Hi")])
    receiver.wait_for_ends(1)
    assert loop.is_alive


def test_an_add_that_is_refused_is_an_error_output(make_loop: LoopMaker) -> None:
    """B105."""
    loop, receiver, _, _ = make_loop(num_blocks=4)
    loop.start()
    loop.add([make_sequence("big", "x" * 100), make_sequence("ok", "Hi")])
    receiver.wait_for_ends(2)
    error = end_of(receiver.outputs, "big").error
    assert error is not None
    assert error.code == "context_length_exceeded"
    assert text_of(receiver.outputs, "ok") == solo_text(b"Hi", 8)


def test_a_loop_that_dies_fails_everything_and_all_that_comes_later(
    make_loop: LoopMaker, caplog: pytest.LogCaptureFixture
) -> None:
    loop, receiver, engine, runner = make_loop(batch_size=2)
    runner.on_run = lambda step, batch: time.sleep(0.005)
    real_step = engine.step

    def broken() -> list[StepOutput]:
        if runner.num_steps == 3:
            raise MemoryError
        return real_step()

    engine.step = broken
    loop.start()
    loop.add([make_sequence(name, "Hi") for name in "abcd"])
    receiver.wait_for_ends(4)
    assert loop.join(10)
    loop.add([make_sequence("late", "Hi")])
    for name in ("a", "b", "c", "d", "late"):
        error = end_of(receiver.outputs, name).error
        assert error is not None
        assert error.code == "engine_dead"
    assert receiver.phases[-1][0] == "dead"
    assert "the step loop died" in caplog.text


def test_outputs_of_the_step_in_which_the_loop_dies_are_not_lost(make_loop: LoopMaker) -> None:
    loop, receiver, engine, _ = make_loop()
    forget = engine._forget

    def fragile(sequence: Any, reason: FinishReason) -> None:
        if sequence.sequence_id == "b":
            raise MemoryError
        forget(sequence, reason)

    engine._forget = fragile
    loop.add([make_sequence(name, "Hi", 1) for name in "abc"])
    loop.start()
    receiver.wait(lambda: receiver.phases[-1:] != [] and receiver.phases[-1][0] == "dead")
    assert loop.join(10)
    assert reason_of(receiver.outputs, "a") is FinishReason.LENGTH
    for name in "bc":
        assert end_of(receiver.outputs, name)


def test_a_model_that_is_refused_leaves_a_dead_loop_with_the_reason(make_loop: LoopMaker) -> None:
    def load(report: Report) -> Any:
        raise ModelRefused("this model has a recurrent state")

    loop, receiver, _, _ = make_loop(load)
    loop.add([make_sequence("a", "Hi")])
    loop.start()
    receiver.wait_for_ends(1)
    assert loop.join(10)
    assert receiver.phases == [("dead", "this model has a recurrent state", None)]


def test_stop_drains_what_runs_and_then_ends(make_loop: LoopMaker) -> None:
    """B132 at unit level."""
    loop, receiver, _, _ = make_loop(step_time_s=0.001)
    loop.start()
    loop.add([make_sequence("a", "Hi", 20)])
    receiver.wait(lambda: len(receiver.outputs) > 0)
    loop.stop(drain_timeout_s=10)
    assert loop.join(10)
    assert text_of(receiver.outputs, "a") == solo_text(b"Hi", 20)
    assert ("draining", "", None) in receiver.phases


def test_stop_without_patience_ends_the_rest_with_shutdown(make_loop: LoopMaker) -> None:
    """B132 at unit level."""
    loop, receiver, _, _ = make_loop(step_time_s=0.002, batch_size=1)
    loop.start()
    loop.add([make_sequence("a", "Hi", 1000), make_sequence("b", "Hi", 1000)])
    receiver.wait(lambda: len(receiver.outputs) > 0)
    loop.stop(drain_timeout_s=0.01)
    assert loop.join(10)
    for name in "ab":
        error = end_of(receiver.outputs, name).error
        assert error is not None
        assert error.cause == "shutdown"


def test_stop_while_loading_ends_at_the_next_report(make_loop: LoopMaker) -> None:
    started = threading.Event()

    def load(report: Report) -> Any:
        while True:
            started.set()
            report("downloading", 0.1)
            time.sleep(0.001)

    loop, _, _, _ = make_loop(load)
    loop.start()
    assert started.wait(10)
    loop.stop()
    assert loop.join(10)


def test_an_errand_is_done_in_the_step_thread_a_bit_after_each_step(make_loop: LoopMaker) -> None:
    loop, receiver, engine, runner = make_loop()
    loop.start()
    seen: list[tuple[str, int]] = []

    def work(given: Any) -> Any:
        assert given is engine
        for _ in range(5):
            seen.append((threading.current_thread().name, runner.num_steps))
            yield
        return "done"

    loop.add([make_sequence("a", "Hi", max_tokens=20)])
    receiver.wait(lambda: bool(receiver.outputs))
    assert loop.run_beside(work).result(10) == "done"
    receiver.wait_for_ends(1)
    assert {name for name, _ in seen} == {"noria-step"}
    steps = [step for _, step in seen]
    assert all(later - earlier <= 1 for earlier, later in itertools.pairwise(steps))
    assert text_of(receiver.outputs, "a") == solo_text(b"Hi", 20)


def test_an_errand_is_done_while_nothing_else_is_there_to_do(make_loop: LoopMaker) -> None:
    loop, _, _, _ = make_loop()
    loop.start()
    assert loop.run_beside(at_once(lambda engine: engine.max_model_len)).result(10) == 2048


def test_an_errand_that_fails_hurts_only_who_asked(make_loop: LoopMaker) -> None:
    loop, receiver, _, _ = make_loop()
    loop.start()
    with pytest.raises(ZeroDivisionError):
        loop.run_beside(at_once(lambda engine: 1 // 0)).result(10)
    loop.add([make_sequence("a", "Hi")])
    receiver.wait_for_ends(1)
    assert text_of(receiver.outputs, "a") == solo_text(b"Hi", 8)


def test_no_errand_is_left_waiting_when_the_loop_ends(make_loop: LoopMaker) -> None:
    loop, _, _, _ = make_loop()
    loop.start()
    is_closed = threading.Event()

    def endless(engine: Any) -> Any:
        try:
            while True:
                yield
        finally:
            is_closed.set()

    running = loop.run_beside(endless)
    time.sleep(0.01)
    loop.stop()
    assert loop.join(10)
    late = loop.run_beside(at_once(lambda engine: None))
    for future in (running, late):
        with pytest.raises(EngineDead):
            future.result(10)
    assert is_closed.is_set()


def test_an_errand_nobody_waits_for_any_more_is_not_begun(make_loop: LoopMaker) -> None:
    loop, _, _, _ = make_loop()
    done: list[int] = []
    future = loop.run_beside(at_once(lambda engine: done.append(1)))
    assert future.cancel()
    loop.start()
    loop.run_beside(at_once(lambda engine: None)).result(10)
    assert done == []


def test_an_errand_that_cannot_even_begin_hurts_only_who_asked(make_loop: LoopMaker) -> None:
    loop, _, _, _ = make_loop()
    loop.start()

    def refuses(engine: Any) -> Any:
        raise ModelRefused("no")

    with pytest.raises(ModelRefused):
        loop.run_beside(refuses).result(10)
    assert loop.is_alive
