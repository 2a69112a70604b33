"""The application as a whole: what starts and stops with it, and that hostile clients leave nothing behind."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import threading

from server.config import LogConfig
from server.keys import EXECUTOR
from server.logs import JsonFormatter, TextFormatter, configure_logging, event


async def test_the_index_lists_the_routes(start_server):
    server = await start_server()
    response = await server.client.get("/")
    assert response.content_type == "text/html"
    assert "/health" in await response.text()


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
