"""The application as a whole: what starts and stops with it, and that hostile clients leave nothing behind."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import random
import threading

from server.config import LogConfig
from server.keys import EXECUTOR
from server.logs import JsonFormatter, TextFormatter, configure_logging, event


async def test_closing_the_application_ends_streams_and_threads(start_server, generation_request):
    """B132"""
    server = await start_server(step_time_s=0.005)
    stream = server.backend.submit(
        [generation_request(max_tokens=1000)], request_id="r", route="/x"
    )
    await stream.get()
    await server.client.close()
    outputs = [output for _, output in await asyncio.wait_for(stream.get(), 5)]
    while not stream.is_finished:
        outputs += [output for _, output in await asyncio.wait_for(stream.get(), 5)]
    assert outputs[-1].error.code == "draining"
    stream.close()
    names = {thread.name for thread in threading.enumerate()}
    assert "noria-step" not in names


async def test_the_executor_lives_as_long_as_the_application(start_server):
    server = await start_server()
    executor = server.client.app[EXECUTOR]
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(executor, lambda: 7) == 7
    await server.client.close()
    assert executor._shutdown


def test_lines_are_key_and_value_or_json():
    record = logging.LogRecord("noria.x", logging.INFO, "", 0, "request", (), None)
    record.fields = {"id": "a b", "ms": 1.26, "route": "/x", "empty": ""}
    text = TextFormatter().format(record)
    assert text.endswith('INFO noria.x: request id="a b" ms=1.3 route=/x empty=""')
    parsed = json.loads(JsonFormatter().format(record))
    assert (parsed["event"], parsed["id"], parsed["ms"]) == ("request", "a b", 1.26)


def test_logging_goes_where_it_was_told():
    root, noria = logging.getLogger(), logging.getLogger("noria")
    handlers, level = root.handlers[:], noria.level
    try:
        stream = io.StringIO()
        configure_logging(LogConfig(format="json", level="warning"), stream)
        event(logging.getLogger("noria.test"), logging.INFO, "quiet")
        event(logging.getLogger("noria.test"), logging.WARNING, "loud", a=1, none=None)
        (line,) = stream.getvalue().splitlines()
        assert json.loads(line)["a"] == 1
        assert "none" not in json.loads(line)
    finally:
        root.handlers[:] = handlers
        noria.setLevel(level)


async def post(server, path="/generate", **body):
    body = {"prompts": ["hello"], "max_tokens": 8, "ignore_eos": True, **body}
    async with server.client.post(path, json=body) as response:
        return response.status, response.headers, await response.json()


async def test_overload_is_told_at_once_and_the_accepted_ones_finish(start_server):
    """B126"""
    settings = {"engine.batch_size": 4, "engine.max_waiting": 16}
    server = await start_server(settings, step_time_s=0.002)
    answers = await asyncio.gather(*(post(server) for _ in range(200)))
    statuses = [status for status, _, _ in answers]
    assert statuses.count(200) >= 20
    assert set(statuses) == {200, 429}
    for status, headers, body in answers:
        if status == 429:
            assert body["error"]["code"] == "queue_full"
            assert int(headers["retry-after"]) >= 1
    await server.idle()
    assert (await post(server))[0] == 200


async def test_requests_fail_fast_when_the_engine_is_dead(start_server, caplog):
    """B130"""
    caplog.set_level(logging.CRITICAL)
    server = await start_server(step_time_s=0.002)
    waiting = asyncio.create_task(post(server, max_tokens=1500))
    await asyncio.sleep(0.05)

    def die(*_, **__):
        raise SystemExit("killed")

    server.backend._step_loop._engine.step = die
    status, headers, body = await asyncio.wait_for(waiting, 2)
    assert (status, body["error"]["code"]) == (503, "engine_dead")
    status, headers, _ = await asyncio.wait_for(post(server), 2)
    assert (status, headers["x-should-retry"]) == (503, "false")


async def test_hostile_clients_leave_nothing_behind(start_server, caplog):
    """B112, B113, B117, B129"""
    caplog.set_level(logging.INFO)
    server = await start_server(step_time_s=0.001)
    choice = random.Random(3)

    async def one(number: int) -> None:
        path = choice.choice(["/generate", "/generate_stream", "/v1/completions"])
        body = {"max_tokens": 400, "ignore_eos": True}
        body |= {"prompts": ["a", "b"]} if path == "/generate" else {"prompt": "a"}
        if path == "/v1/completions":
            body |= {"stream": True, "n": 2}
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        _, writer = await asyncio.open_connection(server.client.host, server.client.port)
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
        await asyncio.sleep(choice.random() * 0.1)
        if number % 2:
            writer.transport.abort()
        writer.close()

    await asyncio.gather(*(one(number) for number in range(60)))
    await server.idle(3.0)
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
    gone = [r for r in caplog.records if getattr(r, "fields", {}).get("status") == 499]
    assert gone
    assert (await post(server))[0] == 200
    samples = await server.scrape()
    assert samples['vllm:request_success_total{finished_reason="abort"}'] > 0
    assert samples["noria:streams_open"] == 0


async def test_the_line_of_a_request_tells_tokens_and_times_but_no_text(start_server, caplog):
    caplog.set_level(logging.INFO, "noria")
    server = await start_server(step_time_s=0.001)
    await post(server, prompts=["a secret prompt", "b"], max_tokens=5)
    (record,) = [r for r in caplog.records if r.name == "noria.requests"]
    fields = record.fields
    assert (fields["route"], fields["status"], fields["finish"]) == ("/generate", 200, "length")
    assert (fields["prompt"], fields["generated"], fields["sequences"]) == (16, 10, 2)
    for name in ("queue_ms", "ttft_ms", "tpot_ms", "total_ms"):
        assert fields[name] >= 0
    assert "secret" not in caplog.text
