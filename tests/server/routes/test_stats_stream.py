"""`/stats/stream`: what it tells, what it never tells, what it costs, and that it ends."""

from __future__ import annotations

import asyncio
import time

import orjson
import pytest

from core.errors import ModelLoading
from server.keys import STATS
from server.stats_feed import HISTORY_LENGTH, StatsFeed


async def read_event(response):
    """(name, data) of the next event; None at the end of the stream."""
    lines = []
    async with asyncio.timeout(5):
        while line := await response.content.readline():
            if line == b"\n":
                break
            lines.append(line.decode().rstrip("\n"))
    if not lines:
        return None
    name, data = lines
    return name.removeprefix("event: "), orjson.loads(data.removeprefix("data: "))


@pytest.fixture
def start_fast(start_server):
    """A server whose samples come every 20 ms."""

    async def start(*arguments, **options):
        server = await start_server(*arguments, **options)
        server.client.app[STATS].interval_s = 0.02
        server.client.app[STATS]._timer.cancel()
        server.client.app[STATS].start()
        return server

    return start


async def test_the_stream_greets_and_then_tells_the_state_again_and_again(start_fast):
    server = await start_fast({"engine.batch_size": 5})
    response = await server.client.get("/stats/stream")
    assert response.content_type == "text/event-stream"
    assert response.headers["x-accel-buffering"] == "no"
    name, hello = await read_event(response)
    assert name == "hello"
    assert hello["batch_size"] == 5
    assert hello["model"]["id"] == "dummy"
    assert hello["model"]["defaults"]["temperature"] == 1.0
    for _ in range(3):
        name, sample = await read_event(response)
        if name == "hello":  # the model was not yet known at the last sample
            name, sample = await read_event(response)
        assert (name, sample["phase"], sample["running"]) == ("stats", "ready", 0)
    blocks = sample["blocks"]
    assert blocks["used"] + blocks["cached"] + blocks["free"] == hello["model"]["num_blocks"]


async def test_work_shows_in_the_samples_and_in_the_history(start_fast):
    server = await start_fast(step_time_s=0.002)
    body = {"prompt": "a secret prompt", "max_tokens": 60, "ignore_eos": True}
    answer = asyncio.create_task(server.client.post("/basic_generate", json=body))
    response = await server.client.get("/stats/stream")
    samples = []
    while not answer.done():
        name, data = await read_event(response)
        if name == "stats":
            samples.append(data)
    assert max(sample["running"] for sample in samples) == 1
    assert max(sample["blocks"]["used"] for sample in samples) > 0
    assert max(sample["generated_tokens_per_s"] for sample in samples) > 10
    await asyncio.sleep(0.05)
    _, later = await read_event(await server.client.get("/stats/stream"))
    assert max(later["history"]["generated_tokens_per_s"]) > 10
    assert {len(column) for column in later["history"].values()} == {
        len(later["history"]["running"])
    }
    total = server.client.app[STATS].sample()
    assert (total["generated_tokens"], total["finished_requests"]) == (60, 1)


async def test_the_stream_asks_for_a_key_and_shows_none(start_fast):
    server = await start_fast({"server.api_keys": ["secret-key"], "model.name": "/a/private/path"})
    assert (await server.client.get("/stats/stream")).status == 401
    headers = {"authorization": "Bearer secret-key"}
    body = {"prompt": "secret words", "max_tokens": 3, "request_id": "secret-id"}
    await server.client.post("/basic_generate", json=body, headers=headers)
    response = await server.client.get("/stats/stream", headers=headers)
    text = b""
    while text.count(b"event: stats") < 3:
        text += await asyncio.wait_for(response.content.readany(), 5)
    assert b"secret" not in text
    assert b"private" not in text


async def test_a_watcher_that_leaves_ends_its_handler(start_fast):
    server = await start_fast()
    responses = [await server.client.get("/stats/stream") for _ in range(5)]
    for response in responses:
        await read_event(response)
    for response in responses:
        response.close()
    for _ in range(100):
        await asyncio.sleep(0.02)
        handled = server.metrics.total("http_requests", "/stats/stream", "GET", "499")
        if handled == 5:
            break
    assert handled == 5


async def test_the_stream_ends_cleanly_at_shutdown(start_fast):
    server = await start_fast()
    response = await server.client.get("/stats/stream")
    await read_event(response)
    started_s = time.monotonic()
    await server.client.app[STATS]._backend.stop(0)
    server.client.app[STATS].stop()
    while await read_event(response) is not None:
        pass
    assert time.monotonic() - started_s < 2
    assert (await (await server.client.get("/stats/stream")).read()).count(b"event: ") == 1


async def test_those_who_watch_a_model_load_are_greeted_again_when_it_is_there(
    start_fast, monkeypatch
):
    server = await start_fast()

    def raise_loading():
        raise ModelLoading("The model is loading.")

    with monkeypatch.context() as patch:
        patch.setattr(server.backend, "served_model", raise_loading)
        server.client.app[STATS]._knows_model = False
        response = await server.client.get("/stats/stream")
        name, hello = await read_event(response)
        assert (name, hello["model"]) == ("hello", None)
        assert (await read_event(response))[0] == "stats"
    names = [(await read_event(response))[0] for _ in range(5)]
    assert names.count("hello") == 1


async def test_a_sample_costs_the_same_whatever_runs_and_the_history_is_bounded(start_server):
    server = await start_server({"engine.batch_size": 32}, step_time_s=0.001)
    feed: StatsFeed = server.client.app[STATS]

    def cost_s() -> float:
        started_s = time.thread_time()  # of this thread alone: the step thread works beside it
        for _ in range(200):
            feed.sample()
        return (time.thread_time() - started_s) / 200

    idle_s = min(cost_s() for _ in range(3))
    body = {"prompts": ["a"] * 32, "max_tokens": 500, "ignore_eos": True}
    answer = asyncio.create_task(server.client.post("/generate", json=body))
    for _ in range(2000):
        if server.stats().num_running == 32:
            break
        await asyncio.sleep(0.005)
    assert server.stats().num_running == 32
    busy_s = min(cost_s() for _ in range(3))
    assert idle_s < 0.002
    assert busy_s < 10 * idle_s + 0.001
    for _ in range(HISTORY_LENGTH + 20):
        feed._tick()
        feed._timer.cancel()
    assert len(feed._history) == HISTORY_LENGTH
    answer.cancel()
