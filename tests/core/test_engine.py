"""The engine over the dummy runner: the same text everywhere, every end, and every fault for itself."""

from __future__ import annotations

import gc
import logging

import pytest
from dummy_engine import (
    end_of,
    greedy,
    make_engine,
    make_sequence,
    reason_of,
    run_to_end,
    solo_text,
    text_of,
)

from core.errors import ContextLengthExceeded, InvalidValue
from core.outputs import FinishReason, OutputError, SampledToken
from core.sampling_params import SamplingParams
from core.sequence import Sequence

PROMPTS = ["Hi", "Tell me a story", "Tell me a story about blocks", "x" * 40, "Tell me a joke"]


@pytest.mark.parametrize("policy", ["continuous", "static", "single"])
@pytest.mark.parametrize("budget", [3, 512])
@pytest.mark.parametrize("num_blocks", [20, 256])
@pytest.mark.parametrize("prefix_caching", [True, False])
def test_the_text_is_the_same_alone_batched_chunked_preempted_and_warm(
    policy: str, budget: int, num_blocks: int, prefix_caching: bool
) -> None:
    """B013, B118, B123: standing rule 17."""
    engine, _ = make_engine(
        policy=policy,
        max_batched_tokens=budget,
        num_blocks=num_blocks,
        prefix_caching=prefix_caching,
        block_size=4,
        batch_size=4,
    )
    for _ in range(2):  # the second time with a warm cache
        results = engine.generate(PROMPTS, greedy(30))
        engine.check_invariants()
        assert [r.text for r in results] == [solo_text(p.encode(), 30) for p in PROMPTS]
    assert (engine.stats().total_prefix_hits > 0) == prefix_caching


def test_a_seeded_draw_does_not_depend_on_neighbours() -> None:
    engine, _ = make_engine()
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=7)
    alone = engine.generate(["Hello"], params)[0].text
    beside = engine.generate(["other", "Hello", "more"], params)[1].text
    assert alone == beside
    assert alone != solo_text(b"Hello", 20)


@pytest.mark.parametrize("num_blocks", [1, 2, 5])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_prompts_around_a_block_border_give_the_same_text_warm(num_blocks: int, extra: int) -> None:
    """B118: at least one token is recomputed."""
    engine, _ = make_engine(block_size=4)
    prompt = "abcdefghijklmnopqrstuvwxyz"[: num_blocks * 4 + extra]
    cold = engine.generate([prompt], greedy(9))[0]
    warm = engine.generate([prompt], greedy(9))[0]
    assert cold.text == warm.text == solo_text(prompt.encode(), 9)
    assert warm.num_cached_tokens == len(prompt) - 1


@pytest.mark.parametrize("length", [23, 24, 25, 73])
def test_a_chunked_prompt_is_sampled_only_when_its_last_token_is_computed(length: int) -> None:
    """B123."""
    engine, _ = make_engine(max_batched_tokens=24)
    prompt = ("lorem ipsum " * 9)[:length]
    engine.add(make_sequence("a", prompt, 5))
    steps_without_output = 0
    while not (outputs := engine.step()):
        steps_without_output += 1
    assert steps_without_output == (length - 1) // 24
    outputs += run_to_end(engine)
    assert text_of(outputs, "a") == solo_text(prompt.encode(), 5)


def test_decodes_go_on_in_every_step_beside_a_long_prefill() -> None:
    """B124 at unit level: decode rows are never held back by the budget."""
    engine, _ = make_engine(max_batched_tokens=4)
    for name in "abc":
        engine.add(make_sequence(name, "hi", 60))
    for _ in range(4):
        engine.step()
    engine.add(make_sequence("long", "y" * 50, 2))
    for _ in range(20):
        names = [output.sequence_id for output in engine.step()]
        assert {"a", "b", "c"} <= set(names)


def test_ids_without_text_end_their_own_sequence_only() -> None:
    """B019, B020."""
    for bad in (-7, 257 + 64, 2**40):
        engine, _ = make_engine(
            script=lambda sequence, bad=bad: bad if sequence.sequence_id == "bad" else 65
        )
        engine.add(make_sequence("bad", "one", 4))
        engine.add(make_sequence("good", "two", 4))
        outputs = run_to_end(engine)
        final = end_of(outputs, "bad")
        assert final.finish_reason is FinishReason.ERROR
        assert final.error is not None
        assert final.error.cause == "sampling"
        assert final.token_id is None
        assert text_of(outputs, "good") == "AAAA"


@pytest.mark.parametrize("param", ["prompt", "stop_token_ids", "logit_bias"])
@pytest.mark.parametrize("bad", [300, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused_before_anything_is_queued(
    param: str, bad: int
) -> None:
    """B019, B020."""
    engine, _ = make_engine()
    params = {"stop_token_ids": (bad,)} if param == "stop_token_ids" else {}
    if param == "logit_bias":
        params = {"logit_bias": {bad: 1.0}}  # type: ignore[dict-item]
    token_ids = [65, bad] if param == "prompt" else [65]
    with pytest.raises(InvalidValue) as caught:
        engine.add(Sequence("a", token_ids, SamplingParams(**params)))  # type: ignore[arg-type]
    assert caught.value.param == param
    assert not engine.has_work


@pytest.mark.parametrize("last_ids", [[], [256]])
def test_held_text_comes_out_when_no_stop_string_follows(last_ids: list[int]) -> None:
    """B023: once ended by the limit, once by the end token."""
    engine, _ = make_engine(script=[*b"xabcab", *last_ids])
    engine.add(make_sequence("a", "p", max_tokens=6 + len(last_ids), stop=("abcabd",)))
    outputs = run_to_end(engine)
    assert text_of(outputs, "a") == "xabcab"
    assert reason_of(outputs, "a") is (FinishReason.STOP if last_ids else FinishReason.LENGTH)


def test_no_end_comes_before_min_tokens_and_then_at_once() -> None:
    """B030: the length of the prompt plays no part."""
    for prompt in ("p", "a longer prompt"):
        engine, _ = make_engine()
        engine.add(make_sequence("a", prompt, 7, min_tokens=3, logit_bias={256: 60.0}))
        final = end_of(run_to_end(engine), "a")
        assert (final.num_output_tokens, final.finish_reason) == (4, FinishReason.STOP)


def test_an_end_id_that_a_sampler_lets_slip_before_min_tokens_ends_nothing() -> None:
    """B030."""
    engine, runner = make_engine()
    real = runner.sample

    class Leaky:
        def __getattr__(self, name: str) -> object:
            return getattr(runner, name)

        def sample(self, batch: object, logits: object) -> list[list[SampledToken]]:
            return [drawn and [SampledToken(256)] for drawn in real(batch, logits)]  # type: ignore[arg-type]

    engine.runner = Leaky()  # type: ignore[assignment]
    engine.add(make_sequence("a", "p", 9, min_tokens=3))
    assert end_of(run_to_end(engine), "a").num_output_tokens == 4


def test_every_end_id_ends_even_as_the_very_first_token() -> None:
    """B033: the second of three end ids, given by the prefill step."""
    engine, _ = make_engine(eos_token_ids=(256, 257, 258), vocab_size=259, script=[257])
    result = engine.generate(["question"], greedy(50))[0]
    assert (result.text, result.finish_reason, result.stop_reason) == ("", FinishReason.STOP, None)
    assert result.token_ids == [257]


def test_ignore_eos_gives_exactly_the_tokens_asked_for() -> None:
    engine, _ = make_engine(script=[65, 256, 66])
    result = engine.generate(["p"], greedy(6, min_tokens=6, ignore_eos=True))[0]
    assert len(result.token_ids) == 6
    assert result.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("includes", "text"), [(False, "ab"), (True, "ab!")])
def test_a_stop_token_ends_the_text_before_or_behind_it(includes: bool, text: str) -> None:
    engine, _ = make_engine(script=[*b"ab!cd"])
    params = greedy(9, stop_token_ids=(33,), include_stop_str_in_output=includes)
    result = engine.generate(["p"], params)[0]
    assert (result.text, result.stop_reason, len(result.token_ids)) == (text, 33, 3)


def test_a_stop_string_ends_the_request_and_is_its_stop_reason() -> None:
    """B021."""
    engine, _ = make_engine(script=[*b"hello world"])
    result = engine.generate(["p"], greedy(20, stop=("lo w",)))[0]
    assert (result.text, result.finish_reason, result.stop_reason) == ("hel", "stop", "lo w")


def test_logprobs_come_one_for_each_token() -> None:
    engine, _ = make_engine()
    result = engine.generate(["p"], greedy(5, logprobs=2))[0]
    assert result.logprobs is not None
    assert [entry.token_id for entry in result.logprobs] == result.token_ids
    assert all(len(entry.top) == 2 for entry in result.logprobs)


@pytest.mark.parametrize("cause", ["non_finite", "sampling"])
def test_a_failing_row_fails_alone(cause: str) -> None:
    """B102."""
    engine, runner = make_engine()
    runner.row_failure = lambda s: cause if s.sequence_id == "b" else None
    for name in "abcd":
        engine.add(make_sequence(name, f"prompt {name}"))
    outputs = run_to_end(engine)
    error = end_of(outputs, "b").error
    assert error is not None
    assert error.cause == cause
    for name in "acd":
        assert text_of(outputs, name) == solo_text(f"prompt {name}".encode(), 8)


def test_a_failing_detokenizer_fails_alone() -> None:
    """B102."""
    engine, _ = make_engine(script=lambda s: 7 if s.sequence_id == "b" else 65)
    decode = engine.tokenizer.decode

    def fragile(token_ids: list[int]) -> str:
        if 7 in token_ids:
            raise RuntimeError("cannot decode")
        return decode(token_ids)

    engine.tokenizer.decode, engine.tokenizer.piece = fragile, None  # type: ignore[method-assign]
    for name in "abcd":
        engine.add(make_sequence(name, f"prompt {name}"))
    outputs = run_to_end(engine)
    error = end_of(outputs, "b").error
    assert error is not None
    assert error.cause == "detokenize"
    assert [text_of(outputs, name) for name in "acd"] == ["A" * 8] * 3


def test_a_failed_step_ends_the_running_and_leaves_the_waiting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """B103: the batch is never tried again."""
    engine, runner = make_engine(batch_size=2)
    for name in "abcd":
        engine.add(make_sequence(name, f"prompt {name}"))
    runner.failing_steps = {3}
    outputs = run_to_end(engine)
    for name in "ab":
        final = end_of(outputs, name)
        assert final.error is not None
        assert (final.error.code, final.error.cause) == ("internal_error", "step")
    for name in "cd":
        assert text_of(outputs, name) == solo_text(f"prompt {name}".encode(), 8)
    assert runner.num_resets == 1
    assert engine.stats().num_blocks_used == 0
    assert "a step failed" in caplog.text


def test_a_runner_that_samples_an_unfinished_prefill_fails_the_step() -> None:
    """B123."""
    engine, runner = make_engine(max_batched_tokens=4)
    real = runner.sample

    class Hasty:
        def __getattr__(self, name: str) -> object:
            return getattr(runner, name)

        def sample(self, batch: object, logits: object) -> list[list[SampledToken]]:
            return [drawn or [SampledToken(65)] for drawn in real(batch, logits)]  # type: ignore[arg-type]

    engine.runner = Hasty()  # type: ignore[assignment]
    engine.add(make_sequence("a", "a longer prompt"))
    assert reason_of(run_to_end(engine), "a") is FinishReason.ERROR


def test_a_prompt_that_can_never_fit_is_refused_and_blocks_nobody() -> None:
    """B105: a pool of 1,024 tokens."""
    engine, _ = make_engine(num_blocks=64, block_size=16)
    assert engine.max_model_len == 1024
    for length in (1100, 1024):
        with pytest.raises(ContextLengthExceeded):
            engine.add(make_sequence("big", "x" * length))
    for name in "abcd":
        engine.add(make_sequence(name, name))
    engine.add(make_sequence("grows", "y" * 600, 700))
    outputs = run_to_end(engine)
    for name in "abcd":
        assert reason_of(outputs, name) is FinishReason.LENGTH
    final = end_of(outputs, "grows")
    assert (final.finish_reason, final.num_output_tokens) == (FinishReason.LENGTH, 424)


def test_the_context_limit_ends_a_request_with_length() -> None:
    engine, _ = make_engine(max_context=20)
    result = engine.generate(["0123456789"], greedy(100))[0]
    assert (len(result.token_ids), result.finish_reason) == (10, FinishReason.LENGTH)


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_a_small_pool_preempts_boundedly_and_changes_no_text(prefix_caching: bool) -> None:
    """B107: a pool of 768 tokens, six requests of 40 that grow by 240."""
    engine, _ = make_engine(num_blocks=48, block_size=16, prefix_caching=prefix_caching)
    prompts = {name: f"{name}: " + "lorem ipsum " * 3 + "!" for name in "abcdef"}
    for name, prompt in prompts.items():
        engine.add(make_sequence(name, prompt, 240))
    outputs = run_to_end(engine)
    assert engine.stats().total_preemptions > 0
    for name, prompt in prompts.items():
        final = end_of(outputs, name)
        assert text_of(outputs, name) == solo_text(prompt.encode(), 240)
        assert (final.num_prompt_tokens, final.num_output_tokens) == (len(prompt), 240)
        assert final.timings is not None
        assert final.timings.num_preemptions <= 5
    first = end_of(outputs, "a")
    assert first.timings is not None
    assert first.timings.num_preemptions == 0


def test_an_abort_at_any_moment_leaves_the_neighbours_alone() -> None:
    """B110."""
    for moment in range(41):
        engine, _ = make_engine(block_size=4, num_blocks=128, max_batched_tokens=16)
        for name in "abcde":
            engine.add(make_sequence(name, f"neighbour {name}", 45))
        engine.add(make_sequence("gone", "neighbour gone", 45))
        outputs = [output for _ in range(moment) for output in engine.step()]
        aborted = engine.abort("gone")
        assert aborted is not None
        assert aborted.finish_reason is FinishReason.ABORT
        engine.check_invariants()
        outputs += run_to_end(engine)
        for name in "abcde":
            assert text_of(outputs, name) == solo_text(f"neighbour {name}".encode(), 45)


def test_abort_after_the_end_and_a_second_abort_do_nothing() -> None:
    """B111."""
    engine, _ = make_engine()
    engine.add(make_sequence("a", "x", 1))
    engine.add(make_sequence("b", "y", 5))
    assert reason_of(engine.step(), "a") is FinishReason.LENGTH
    assert engine.abort("a") is None
    assert engine.abort("b") is not None
    assert engine.abort("b") is None
    engine.check_invariants()
    stats = engine.stats()
    assert stats.num_blocks_used == 0
    assert stats.num_blocks_free + stats.num_blocks_cached == engine.cache_config.num_blocks


def test_nothing_stays_behind_after_five_hundred_requests() -> None:
    """B117: every fifth is aborted."""
    engine, _ = make_engine(batch_size=8)

    def serve(number: int) -> None:
        name = f"r{number}"
        engine.add(make_sequence(name, f"request {number}", 3))
        if number % 5 == 0:
            for _ in range(number % 3):
                engine.step()
            engine.abort(name)

    for number in range(500):
        serve(number)
        if number % 7 == 0:
            engine.step()
    run_to_end(engine)
    assert not engine._sequences
    assert not engine._detokenizers
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_blocks_used) == (0, 0, 0)
    gc.collect()
    names = {f"r{number}" for number in range(500)}  # other tests may hold sequences of theirs
    assert not [o for o in gc.get_objects() if type(o) is Sequence and o.sequence_id in names]


def test_a_long_request_is_not_overtaken_by_later_short_ones() -> None:
    """B125: first come, first served, whatever the size."""
    engine, _ = make_engine(num_blocks=16, block_size=4, batch_size=4, max_batched_tokens=16)
    for number in range(3):
        engine.add(make_sequence(f"before{number}", "ab", 12))
    engine.step()
    engine.add(make_sequence("long", "L" * 50, 4))
    for number in range(100):
        engine.add(make_sequence(f"short{number}", "cd", 2))
        names = {output.sequence_id for output in engine.step()}
        if "long" in names:
            return
        assert not any(name.startswith("short") for name in names)
    raise AssertionError("the long request never started")


def test_waiting_too_long_ends_with_queue_timeout() -> None:
    now = [0.0]
    engine, _ = make_engine(batch_size=1, queue_timeout_s=5.0)
    engine._clock = lambda: now[0]
    now[0] = 100.0
    engine.add(make_sequence("runs", "a", 40))
    engine.add(make_sequence("waits", "b", 4))
    outputs = engine.step()
    now[0] = 105.5
    outputs += engine.step()
    final = end_of(outputs, "waits")
    assert final.error is not None
    assert final.error.code == "queue_timeout"
    assert engine.stats().num_waiting == 0
    assert reason_of(outputs + run_to_end(engine), "runs") is FinishReason.LENGTH


def test_static_batches_are_full_then_the_rest(caplog: pytest.LogCaptureFixture) -> None:
    """Finished rows keep their seat until the longest ends; the debug log shows batches of 4 and 1."""
    engine, _ = make_engine(policy="static", batch_size=4)
    for index, name in enumerate("abcde"):
        engine.add(make_sequence(name, f"prompt {name}", 3 + 2 * index))
    sizes = []
    with caplog.at_level(logging.DEBUG, logger="noria.step"):
        while engine.has_work:
            engine.step()
            engine.check_invariants()
            sizes.append(engine.stats(is_after_step=True).num_sequences)
    assert sizes == [4] * 9 + [1] * 11
    assert "4 sequences" in caplog.text
    assert "1 sequences" in caplog.text


def test_static_gives_up_seats_rather_than_preempt() -> None:
    engine, _ = make_engine(policy="static", batch_size=3, num_blocks=8, block_size=4)
    engine.add(make_sequence("a", "aaaa", 2))
    engine.add(make_sequence("b", "bbbb", 2))
    engine.add(make_sequence("c", "cccc", 24))
    outputs = run_to_end(engine)
    assert text_of(outputs, "c") == solo_text(b"cccc", 24)
    assert engine.stats().total_preemptions == 0


def test_single_computes_one_at_a_time() -> None:
    engine, _ = make_engine(policy="single")
    for name in "abc":
        engine.add(make_sequence(name, name, 3))
    while engine.has_work:
        engine.step()
        assert engine.stats(is_after_step=True).num_sequences == 1


def test_stats_tell_the_state_and_only_after_a_step_what_it_did() -> None:
    engine, _ = make_engine(batch_size=2, block_size=4)
    for name in "abc":
        engine.add(make_sequence(name, name + "2345", 3))
    assert engine.stats().num_waiting_prompt_tokens == 15
    engine.step()
    stats = engine.stats(is_after_step=True)
    assert (stats.num_running, stats.num_waiting, stats.num_waiting_prompt_tokens) == (2, 1, 5)
    assert (stats.step_kind, stats.num_prefill_tokens, stats.num_sequences) == ("prefill", 10, 2)
    assert set(stats.parts_s) == {"schedule", "draft", "run", "sample", "update"}
    assert engine.stats().step_kind == "idle"
    engine.step()
    assert engine.stats(is_after_step=True).step_kind == "decode"


def test_fail_all_ends_running_and_waiting() -> None:
    engine, _ = make_engine(batch_size=2)
    for name in "abc":
        engine.add(make_sequence(name, name, 30))
    engine.step()
    outputs = engine.fail_all(OutputError("engine_dead", "engine_dead", "dead"))
    assert sorted(output.sequence_id for output in outputs) == ["a", "b", "c"]
    assert not engine.has_work
    engine.check_invariants()


def test_aborting_from_a_long_queue_does_not_walk_it() -> None:
    engine, _ = make_engine(batch_size=1)
    for number in range(4000):
        engine.add(make_sequence(f"w{number}", "x", 2))
    for number in range(1, 4000):
        assert engine.abort(f"w{number}") is not None
    assert engine.stats().num_waiting == 1
