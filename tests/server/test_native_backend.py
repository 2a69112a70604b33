"""Where the step thread and the event loop meet: streams, bounds, aborts, failures."""

from __future__ import annotations

import asyncio
import gc
import logging
import random
import threading
import time

import pytest

from core.errors import Draining, EngineDead, ModelLoading, QueueFull
from core.outputs import FinishReason
from server.backends.base import RequestRecord


async def collect(stream) -> list[list]:
    """All outputs, one list per sequence; closes the stream."""
    outputs = [[] for _ in stream.sequence_ids]
    try:
        while not stream.is_finished:
            for index, output in await asyncio.wait_for(stream.get(), 10):
                outputs[index].append(output)
    finally:
        stream.close()
    return outputs


async def until(is_true, timeout_s: float = 5.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline_s
        await asyncio.sleep(0.002)


def text_of(outputs) -> str:
    return "".join(output.text for output in outputs)


def submit(server, *requests, label="label", record=None):
    return server.backend.submit(list(requests), request_id=label, route="/test", record=record)


async def test_every_sequence_of_a_request_yields_its_tokens_and_one_end(
    start_server, generation_request
):
    server = await start_server()
    stream = submit(server, generation_request("abc"), generation_request("d", max_tokens=3))
    first, second = await collect(stream)
    assert [len(first), len(second)] == [8, 3]
    for outputs in (first, second):
        assert [output.finish_reason for output in outputs[:-1]] == [None] * (len(outputs) - 1)
        assert outputs[-1].finish_reason is FinishReason.LENGTH
        assert outputs[-1].timings is not None
    assert len(set(stream.sequence_ids)) == 2
    await server.idle()


async def test_equal_client_ids_do_not_mix_answers(start_server, generation_request):
    """B082"""
    server = await start_server(step_time_s=0.002)
    texts = ["one", "two", "three"]
    alone = [text_of((await collect(submit(server, generation_request(t))))[0]) for t in texts]
    streams = [submit(server, generation_request(t), label="job-1") for t in texts]
    done = await collect(streams[0])
    fourth = submit(server, generation_request("one"), label="job-1")
    results = [done, *[await collect(s) for s in streams[1:]], await collect(fourth)]
    assert [text_of(result[0]) for result in results] == [*alone, alone[0]]
    ids = [i for s in (*streams, fourth) for i in s.sequence_ids]
    assert len(set(ids)) == 4


async def test_one_hand_over_per_step_carries_all_outputs(
    start_server, generation_request, monkeypatch
):
    server = await start_server(step_time_s=0.002)
    sizes = []
    receive = server.backend._ledger.receive

    def spy(outputs, stats, delivered_s):
        if outputs:
            sizes.append(len(outputs))
        receive(outputs, stats, delivered_s)

    monkeypatch.setattr(server.backend._ledger, "receive", spy)
    requests = [generation_request(f"prompt {i}", max_tokens=10) for i in range(8)]
    await collect(submit(server, *requests))
    assert sum(sizes) == 80
    assert max(sizes) == 8
    assert len(sizes) <= 12


async def test_closing_a_stream_aborts_within_a_step(start_server, generation_request):
    """B112, B113"""
    server = await start_server(step_time_s=0.005)
    record = RequestRecord("r")
    stream = submit(server, *[generation_request(max_tokens=700) for _ in range(3)], record=record)
    await stream.get()
    stream.close()
    stream.close()
    await server.idle(1.0)
    assert record.finish_reasons == ("abort",) * 3
    assert record.num_tokens_saved > 2000
    samples = await server.scrape()
    assert samples['vllm:request_success_total{finished_reason="abort"}'] == 3
    assert samples['noria:failures_total{cause="client_gone"}'] == 3
    assert samples["noria:aborted_tokens_saved_total"] > 2000


async def test_nothing_stays_after_many_requests(start_server, generation_request):
    """B117"""
    server = await start_server(num_blocks=128)

    async def one(number: int) -> None:
        stream = submit(server, generation_request(f"request {number}", max_tokens=4))
        if number % 5 == 0:
            await asyncio.sleep(random.Random(number).random() * 0.004)
            stream.close()
        else:
            await collect(stream)

    for start in range(0, 500, 50):
        await asyncio.gather(*(one(number) for number in range(start, start + 50)))
    await server.idle()
    gc.collect()
    from server.backends.queue_stream import QueueStream, Ticket

    alive = [thing for thing in gc.get_objects() if isinstance(thing, QueueStream | Ticket)]
    assert alive == []
    samples = await server.scrape()
    reasons = ("stop", "length", "abort", "error")
    ends = [samples[f'vllm:request_success_total{{finished_reason="{r}"}}'] for r in reasons]
    assert sum(ends) == 500


async def test_gauges_fall_to_zero_when_all_are_aborted_while_waiting(
    start_server, generation_request
):
    """B134"""
    server = await start_server({"engine.batch_size": 1}, step_time_s=0.01)
    streams = [submit(server, generation_request(max_tokens=500)) for _ in range(3)]
    await until(lambda: server.stats().num_waiting == 2)
    assert server.stats().num_running == 1
    for stream in streams:
        stream.close()
    await server.idle(1.0)
    samples = await server.scrape()
    assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0


async def test_a_list_is_queued_whole_or_not_at_all(start_server, generation_request):
    """B126"""
    server = await start_server({"engine.batch_size": 1, "engine.max_waiting": 3}, step_time_s=0.01)
    first = submit(server, generation_request(max_tokens=100), generation_request(max_tokens=100))
    with pytest.raises(QueueFull) as caught:
        submit(server, *[generation_request() for _ in range(3)])
    assert caught.value.retry_after_s > 0
    second = submit(server, *[generation_request(max_tokens=1) for _ in range(2)])
    with pytest.raises(QueueFull):
        submit(server, generation_request())
    samples = await server.scrape()
    assert samples['noria:rejections_total{reason="queue_full"}'] == 4
    first.close()
    await collect(second)
    await server.idle()
    await collect(submit(server, generation_request()))


async def test_waiting_prompt_tokens_are_bounded_but_a_long_one_may_come_alone(
    start_server, generation_request
):
    server = await start_server(
        {"engine.batch_size": 1, "engine.max_waiting_tokens": 50}, step_time_s=0.01
    )
    long_one = submit(server, generation_request("x" * 60, max_tokens=100))
    await long_one.get()
    waiting = submit(server, generation_request("y" * 40))
    with pytest.raises(QueueFull, match="50 waiting prompt tokens"):
        submit(server, generation_request("z" * 11))
    waiting.close()
    long_one.close()
    await server.idle()


async def test_the_wait_told_follows_the_rate_of_ends(start_server, generation_request):
    server = await start_server({"engine.batch_size": 1, "engine.max_waiting": 1}, step_time_s=0.02)
    for _ in range(3):
        await collect(submit(server, generation_request(max_tokens=2)))
    streams = [submit(server, generation_request(max_tokens=50)) for _ in range(2)]
    with pytest.raises(QueueFull) as caught:
        submit(server, generation_request())
    assert 0 < caught.value.retry_after_s < 1
    for stream in streams:
        stream.close()


async def test_a_dead_step_thread_ends_streams_and_refuses_new_work(
    start_server, generation_request, caplog
):
    """B130"""
    caplog.set_level(logging.CRITICAL)
    server = await start_server(step_time_s=0.005)
    stream = submit(server, generation_request(max_tokens=500))
    await stream.get()

    def die(*_, **__):
        raise SystemExit("killed")

    server.backend._step_loop._engine.step = die
    outputs = (await collect(stream))[0]
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert outputs[-1].error.code == "engine_dead"
    with pytest.raises(EngineDead):
        submit(server, generation_request())
    response = await server.client.get("/health")
    assert response.status == 503
    assert (await server.client.get("/health/live")).status == 503


async def test_a_failed_step_is_an_error_for_its_requests_only(start_server, generation_request):
    server = await start_server(failing_steps={2})
    outputs = (await collect(submit(server, generation_request())))[0]
    assert outputs[-1].error.code == "internal_error"
    assert (await collect(submit(server, generation_request())))[0][
        -1
    ].finish_reason is FinishReason.LENGTH
    assert (await server.scrape())['noria:failures_total{cause="step"}'] == 1


async def test_draining_and_loading_refuse(start_server, generation_request):
    gate = threading.Event()
    loading = await start_server(load=lambda report: gate.wait(5), waits=False)
    try:
        with pytest.raises(ModelLoading):
            submit(loading, generation_request())
        with pytest.raises(ModelLoading):
            loading.backend.served_model()
    finally:
        gate.set()
    server = await start_server()
    server.backend.begin_drain()
    with pytest.raises(Draining) as caught:
        submit(server, generation_request())
    assert caught.value.retry_after_s
    assert (await server.scrape())['noria:rejections_total{reason="draining"}'] == 1


async def test_stop_lets_what_runs_finish_in_time(start_server, generation_request):
    server = await start_server(step_time_s=0.005)
    stream = submit(server, generation_request(max_tokens=20))
    await stream.get()
    await server.backend.stop(5)
    assert (await collect(stream))[0][-1].finish_reason is FinishReason.LENGTH
    assert not server.backend._step_loop.is_alive


async def test_stop_ends_the_rest_with_an_error(start_server, generation_request):
    """B132"""
    server = await start_server(step_time_s=0.005)
    stream = submit(server, generation_request(max_tokens=1000))
    await stream.get()
    await server.backend.stop(0)
    error = (await collect(stream))[0][-1].error
    assert (error.code, error.cause) == ("draining", "shutdown")


async def test_a_stuck_step_does_not_hold_up_the_end(
    start_server, generation_request, monkeypatch, caplog
):
    """B132"""
    monkeypatch.setattr("server.backends.native.JOIN_GRACE_S", 0.2)
    gate = threading.Event()
    server = await start_server(on_run=lambda step, batch: gate.wait(10))
    try:
        stream = submit(server, generation_request())
        await asyncio.sleep(0.05)
        started_s = time.monotonic()
        await server.backend.stop(0)
        await server.backend.stop(0)
        assert time.monotonic() - started_s < 2
        outputs = (await collect(stream))[0]
        assert outputs[-1].error.cause == "shutdown"
        assert "did not stop in time" in caplog.text
    finally:
        gate.set()


async def test_a_failed_hand_over_is_logged_and_ends_its_streams(
    start_server, generation_request, monkeypatch, caplog
):
    server = await start_server(step_time_s=0.005)
    stream = submit(server, generation_request(max_tokens=500))
    await stream.get()

    def fail(*_):
        raise RuntimeError("no hand-over")

    monkeypatch.setattr(server.backend._ledger, "receive", fail)
    outputs = (await collect(stream))[0]
    monkeypatch.undo()
    assert outputs[-1].error.code == "internal_error"
    assert "a hand-over failed" in caplog.text
    await server.idle()
    await collect(submit(server, generation_request()))


async def test_a_closed_loop_does_not_kill_the_step_thread(
    start_server, generation_request, caplog
):
    server = await start_server(step_time_s=0.002)
    closed = asyncio.new_event_loop()
    closed.close()
    loop, server.backend._loop = server.backend._loop, closed
    stream = submit(server, generation_request(max_tokens=3))
    await asyncio.sleep(0.05)
    assert server.backend._step_loop.is_alive
    server.backend._loop = loop
    stream.close()
    assert "loop is closed" in caplog.text
    assert (await collect(submit(server, generation_request())))[0][-1].finish_reason
    server.backend._ledger.fail(outputs_lost())


def outputs_lost():
    from core.outputs import OutputError

    return OutputError("internal_error", "step", "lost")


async def test_unread_text_is_accounted_and_forgotten_when_read(start_server, generation_request):
    server = await start_server()
    stream = submit(server, generation_request(max_tokens=50))
    await until(lambda: stream.pending_text_bytes == 50)
    assert len(await stream.get()) == 50
    assert stream.pending_text_bytes == 0
    assert stream.is_finished
    stream.close()


async def test_the_record_of_a_request_is_complete(start_server, generation_request):
    server = await start_server(step_time_s=0.002)
    record = RequestRecord("r", "/test")
    await collect(submit(server, generation_request("hello", max_tokens=6), record=record))
    assert (record.num_prompt_tokens, record.num_output_tokens) == (5, 6)
    assert record.finish_reasons == ("length",)
    for value in (record.queue_s, record.prefill_s, record.first_token_s, record.decode_s):
        assert value is not None
        assert value >= 0
    assert record.per_token_s == pytest.approx(record.decode_s / 5)


async def test_an_idle_backend_has_no_timers_and_no_hand_overs(start_server, generation_request):
    server = await start_server({"engine.watchdog_s": 0.05, "log.stats_interval_s": 0.05})
    await collect(submit(server, generation_request()))
    await asyncio.sleep(0.25)
    before = server.backend._handover
    assert server.backend._watchdog is None
    assert server.backend._reporter._timer is None
    await asyncio.sleep(0.1)
    assert server.backend._handover is before
