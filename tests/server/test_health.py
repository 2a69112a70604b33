"""Probes tell the truth about loading, draining, death and stuck steps."""

from __future__ import annotations

import asyncio
import threading

from core.errors import ModelRefused


async def status_of(server, path="/health"):
    response = await server.client.get(path)
    return response.status, await response.json(), response.headers


async def test_a_loaded_server_is_ready_and_live(start_server):
    server = await start_server()
    for path in ("/health", "/health/ready", "/health/live"):
        status, _, _ = await status_of(server, path)
        assert status == 200


async def test_a_loading_server_is_live_but_not_ready_and_tells_progress(start_server):
    gate = threading.Event()

    def load(report):
        report("reading weights", 0.25)
        gate.wait(5)
        raise ModelRefused("This model is not for us.")

    server = await start_server(load=load, waits=False)
    try:
        await asyncio.sleep(0.05)
        status, body, headers = await status_of(server)
        assert status == 503
        assert body["error"]["code"] == "loading"
        assert (body["status"], body["progress"]) == ("loading", 0.25)
        assert "retry-after" in headers
        assert (await status_of(server, "/health/live"))[0] == 200
    finally:
        gate.set()


async def test_a_model_that_cannot_be_loaded_leaves_a_dead_engine(start_server):
    def load(report):
        raise ModelRefused("This model is not for us.")

    server = await start_server(load=load, waits=False)
    await asyncio.sleep(0.05)
    status, body, headers = await status_of(server, "/health/live")
    assert (status, body["error"]["code"]) == (503, "engine_dead")
    assert headers["x-should-retry"] == "false"


async def test_a_draining_server_is_live_but_not_ready(start_server):
    server = await start_server()
    server.backend.begin_drain()
    status, body, headers = await status_of(server)
    assert (status, body["error"]["code"]) == (503, "draining")
    assert "retry-after" in headers
    assert (await status_of(server, "/health/live"))[0] == 200


async def test_a_stuck_step_turns_readiness_red_and_new_work_away(start_server, generation_request):
    """B130"""
    gate = threading.Event()
    server = await start_server(
        {"engine.watchdog_s": 0.05}, on_run=lambda step, batch: gate.wait(5)
    )
    try:
        stream = server.backend.submit([generation_request()], request_id="a", route="/x")
        await asyncio.sleep(0.15)
        status, body, _ = await status_of(server)
        assert (status, body["error"]["code"], body["status"]) == (503, "engine_dead", "stale")
    finally:
        gate.set()
    stream.close()
    await server.idle()
    assert (await status_of(server))[0] == 200


async def test_version_and_metrics_answer(start_server):
    server = await start_server()
    assert (await (await server.client.get("/version")).json())["version"]
    samples = await server.scrape()
    assert samples["vllm:num_requests_running"] == 0
