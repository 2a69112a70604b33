"""Random adds, aborts, failures, drafts and steps against a whole engine: 10,000 of them, with every invariant after
each."""

from __future__ import annotations

import math
import random
from collections import Counter

from dummy_engine import drafting_engine, greedy, guess_with, make_engine, partly_right, solo_text
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from core.errors import PinnedFull, PrefixTooShort
from core.outputs import FinishReason, StepOutput
from core.prefixes.order import PASSED_OVER_PER_SEAT
from core.sequence import Sequence

BLOCK_SIZE = 4


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 14),
        num_spare_blocks=st.integers(0, 8),
        batch_size=st.integers(1, 5),
        budget=st.integers(1, 20),
        policy=st.sampled_from(["continuous", "continuous", "static", "single"]),
        order=st.sampled_from(["fcfs", "longest_prefix"]),
        prefix_caching=st.booleans(),
        target_step_ms=st.sampled_from([0.0, 0.0, 1e-6, 1.0]),
        max_draft=st.sampled_from([0, 0, 1, 4, 9]),
        seed=st.integers(0, 999),
    )
    def start(
        self,
        num_blocks: int,
        num_spare_blocks: int,
        batch_size: int,
        budget: int,
        policy: str,
        order: str,
        prefix_caching: bool,
        target_step_ms: float,
        max_draft: int,
        seed: int,
    ) -> None:
        options = {"max_tokens": max_draft} if max_draft else {}
        make = drafting_engine if max_draft else make_engine
        self.engine, self.runner = make(
            **options,
            num_blocks=num_blocks,
            max_context=BLOCK_SIZE * max(2, num_blocks - num_spare_blocks),
            block_size=BLOCK_SIZE,
            batch_size=batch_size,
            max_batched_tokens=budget,
            policy=policy,
            order=order,
            prefix_caching=prefix_caching,
            target_step_ms=target_step_ms,
        )
        start = self.engine._scheduler._start
        self.engine._scheduler._start = lambda sequence, *rest: (  # type: ignore[method-assign]
            self.note_admission(sequence),
            start(sequence, *rest),
        )
        if max_draft:
            guess_with(self.engine, partly_right(random.Random(seed)))
        self.runner.row_failure = lambda sequence: self.doomed.pop(sequence.sequence_id, None)
        self.scheduler = self.engine._scheduler
        self.doomed: dict[str, str] = {}
        self.arrivals: dict[str, int] = {}
        self.admissions: dict[
            str, int
        ] = {}  # in order of the first; the same as arrivals with fcfs
        self.num_passed_over: Counter[str] = Counter()
        self.max_passed_over = 0
        if order == "longest_prefix" and prefix_caching:
            self.max_passed_over = PASSED_OVER_PER_SEAT * (1 if policy == "single" else batch_size)
        self.sequences: dict[str, Sequence] = {}
        self.texts: dict[str, str] = {}
        self.ends: dict[str, StepOutput] = {}
        self.max_preemptions = math.log2(num_blocks) + 2
        self.shares_blocks = prefix_caching and policy == "continuous"

    @rule(
        prompt=st.text("ab", min_size=1, max_size=14),
        endings=st.lists(st.text("ab", max_size=5), min_size=2, max_size=4),
        max_tokens=st.integers(4, 40),
    )
    def add_together(self, prompt: str, endings: list[str], max_tokens: int) -> None:
        for ending in endings:
            self.add(prompt + ending, max_tokens)

    @rule(prompt=st.text("ab", min_size=1, max_size=14), max_tokens=st.integers(4, 40))
    def add(self, prompt: str, max_tokens: int) -> None:
        name = f"s{len(self.arrivals)}"
        sequence = Sequence(name, list(prompt.encode()), greedy(max_tokens))
        if sequence.num_prompt_tokens >= self.engine.max_model_len:
            return
        self.arrivals[name] = len(self.arrivals)
        self.sequences[name] = sequence
        self.texts[name] = ""
        self.engine.add(sequence)

    @rule(prompt=st.text("ab", min_size=1, max_size=14))
    def pin(self, prompt: str) -> None:
        """Whatever is pinned, all requests still come to their end."""
        pins = self.engine.pins
        if pins is None:
            return
        try:
            pin = pins.pin(list(prompt.encode()), "")
        except (PinnedFull, PrefixTooShort):
            return
        assert pin is None or len(pin.block_ids) == len(prompt) // BLOCK_SIZE
        self.engine.check_invariants()

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        pins = self.engine.pins
        if pins is not None and (ids := sorted(pin.prefix_id for pin in pins)):
            assert pins.unpin(data.draw(st.sampled_from(ids))) is not None
            self.engine.check_invariants()

    @precondition(lambda self: self.sequences)
    @rule(data=st.data(), dice=st.integers(0, 19))
    def harm(self, data: st.DataObject, dice: int) -> None:
        """Now and then an abort, more rarely a row that fails, and most rarely a failing step; else a step."""
        name = data.draw(st.sampled_from(sorted(self.sequences)))
        if dice < 4:
            output = self.engine.abort(name)
            assert output is not None
            self.take(output)
            assert self.engine.abort(name) is None
        elif dice < 6:
            self.doomed[name] = "non_finite"
        elif dice == 6:
            self.runner.failing_steps = {self.runner.num_steps}
        else:
            self.step_once()

    @rule()
    def step(self) -> None:
        self.step_once()

    @rule(count=st.integers(2, 12))
    def step_on(self, count: int) -> None:
        for _ in range(count):
            self.step_once()

    def note_admission(self, sequence: Sequence) -> None:
        name = sequence.sequence_id
        if name in self.admissions:
            return  # again, after a preemption
        self.admissions[name] = len(self.admissions)
        for other in self.scheduler.waiting.sequences():
            older = self.arrivals[other.sequence_id] < self.arrivals[name]
            if older and other.sequence_id not in self.admissions:
                self.num_passed_over[other.sequence_id] += 1
                assert self.num_passed_over[other.sequence_id] <= self.max_passed_over

    def step_once(self) -> None:
        before = {name: s.num_preemptions for name, s in self.sequences.items()}
        for output in self.engine.step():
            self.take(output)
        preempted = [s for n, s in self.sequences.items() if s.num_preemptions > before[n]]
        for victim in preempted:
            age = self.admissions[victim.sequence_id]
            assert victim.num_preemptions <= self.max_preemptions
            running = [self.admissions[s.sequence_id] for s in self.scheduler.running]
            assert all(other < age for other in running), "an older one was preempted"
        self.engine.check_invariants()

    def take(self, output: StepOutput) -> None:
        name = output.sequence_id
        assert name not in self.ends, "an output came after the final one"
        self.texts[name] += output.text
        if output.finish_reason is None:
            return
        self.ends[name] = output
        sequence = self.sequences.pop(name)
        prompt = bytes(sequence.token_ids[: sequence.num_prompt_tokens])
        expected = solo_text(prompt, sequence.num_output_tokens)
        assert self.texts[name] == expected, "the text is not that of the solo run"
        if output.finish_reason is FinishReason.LENGTH:
            room = self.engine.max_model_len - len(prompt)
            assert sequence.num_output_tokens == min(sequence.params.max_tokens, room)

    @invariant()
    def order_is_that_of_first_admission_and_then_of_arrival(self) -> None:
        if not hasattr(self, "engine"):
            return
        queue = [*self.scheduler.running, *self.scheduler.waiting.sequences()]
        order = [self.rank(sequence.sequence_id) for sequence in queue]
        assert order == sorted(order)
        stats = self.engine.stats()
        total = stats.num_blocks_used + stats.num_blocks_cached + stats.num_blocks_free
        assert total == self.engine.cache_config.num_blocks

    def rank(self, name: str) -> tuple[bool, int]:
        if name in self.admissions:
            return (False, self.admissions[name])
        return (True, self.arrivals[name])

    @invariant()
    def running_prompts_with_the_same_beginning_hold_the_same_blocks(self) -> None:
        """So nothing was computed twice. The block of a prompt's last token is its own."""
        if not hasattr(self, "engine") or not self.shares_blocks:
            return
        known: dict[bytes, int] = {}
        for sequence in self.scheduler.running:
            for index in range((sequence.num_prompt_tokens - 1) // BLOCK_SIZE):
                prefix = bytes(sequence.token_ids[: (index + 1) * BLOCK_SIZE])
                block_id = sequence.block_ids[index]
                assert known.setdefault(prefix, block_id) == block_id

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(50_000):  # a hundred times four answers, one seat
            if not self.engine.has_work:
                break
            self.step_once()
        assert not self.engine.has_work
        assert not self.sequences
        assert Counter(self.ends.keys()) == Counter(self.arrivals.keys())
        num_pinned = self.engine.pins.num_blocks if self.engine.pins else 0
        assert self.engine.stats().num_blocks_used == num_pinned


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=100,
    stateful_step_count=100,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
