"""A tiny server that speaks the streams of the wire contract, and some that it forbids but real servers send."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import orjson
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

PROMPT_TOKENS = 41  # what the server's template makes of any prompt: no client can know it


@dataclass(slots=True)
class TinyServer:
    """Plays streams. Behaviour is set through attributes; bodies that came in are kept."""

    url: str = ""
    tokens_per_chunk: int = 1
    sends_role_first: bool = False
    sends_comments: bool = False
    sends_usage: bool = True
    fails_after: int | None = None
    cuts_after: int | None = None
    status: int = 200
    has_tokenize: bool = True
    newline: bytes = b"\n"
    bytes_per_write: int = 0
    first_token_s: float = 0.0
    token_s: float = 0.0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)


def frame(server: TinyServer, payload: object) -> bytes:
    data = payload if isinstance(payload, bytes) else orjson.dumps(payload)
    return b"data: " + data + server.newline * 2


async def write(server: TinyServer, response: web.StreamResponse, data: bytes) -> None:
    step = server.bytes_per_write or len(data)
    for start in range(0, len(data), step):
        await response.write(data[start : start + step])
        if server.bytes_per_write:
            await asyncio.sleep(0)


def chunk_of(path: str, text: str, finish_reason: str | None, role: str | None = None) -> object:
    if path == "/generate_stream":
        end = {"finish_reason": finish_reason} if finish_reason else {}
        return {"token": text, "sequence_id": "s", **end}
    if path == "/v1/completions":
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish_reason}
        return {"id": "c", "object": "text_completion", "choices": [choice]}
    delta = ({"role": role} if role else {}) | ({"content": text} if text or role else {})
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason}
    return {"id": "c", "object": "chat.completion.chunk", "choices": [choice]}


async def stream(request: web.Request) -> web.StreamResponse:
    server = request.app[SERVER]
    body = orjson.loads(await request.read())
    server.bodies.append(body)
    server.headers.append({name.lower(): value for name, value in request.headers.items()})
    if server.status != 200:
        return web.json_response({"error": {"message": "no"}}, status=server.status)
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    if server.sends_comments:
        await write(server, response, b": keep-alive" + server.newline * 2)
    if server.sends_role_first:
        await write(server, response, frame(server, chunk_of(request.path, "", None, "assistant")))
    await asyncio.sleep(server.first_token_s)
    num_tokens = body["max_tokens"]
    for start in range(0, num_tokens, server.tokens_per_chunk):
        if server.fails_after is not None and start >= server.fails_after:
            error = {"message": "broken", "type": "server_error", "param": None, "code": "x"}
            await write(server, response, frame(server, {"error": error}))
            await write(server, response, frame(server, b"[DONE]"))
            return response
        if server.cuts_after is not None and start >= server.cuts_after:
            assert request.transport is not None
            request.transport.close()
            return response
        end = min(start + server.tokens_per_chunk, num_tokens)
        text = "".join(f" ŵ{i}" for i in range(start, end))
        await write(server, response, frame(server, chunk_of(request.path, text, None)))
        await asyncio.sleep(server.token_s)
    final = chunk_of(request.path, "", "length")
    counts = {
        "prompt_tokens": PROMPT_TOKENS,
        "completion_tokens": num_tokens,
        "total_tokens": PROMPT_TOKENS + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 16},
    }
    assert isinstance(final, dict)
    if request.path == "/generate_stream":
        final["usage"] = counts
    await write(server, response, frame(server, final))
    if server.sends_usage and request.path != "/generate_stream":
        await write(server, response, frame(server, {"choices": [], "usage": counts}))
    await write(server, response, frame(server, b"[DONE]"))
    return response


async def tokenize(request: web.Request) -> web.Response:
    """Words that begin with y are two tokens."""
    if not request.app[SERVER].has_tokenize:
        raise web.HTTPNotFound
    words = orjson.loads(await request.read())["prompt"].split()
    tokens = [i for word in words for i in ([1, 2] if word.startswith("y") else [1])]
    return web.json_response({"tokens": tokens, "count": len(tokens), "max_model_len": 8192})


async def models(request: web.Request) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "tiny", "object": "model"}]})


async def metrics(request: web.Request) -> web.Response:
    lines = [
        "# TYPE vllm:num_requests_running gauge",
        'vllm:num_requests_running{engine="0",model_name="tiny"} 3.0',
        'vllm:num_requests_waiting{engine="0",model_name="tiny"} 1.0',
        'vllm:num_requests_waiting_by_reason{reason="capacity"} 1.0',
        'vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25',
    ]
    return web.Response(text="\n".join(lines) + "\n")


SERVER: web.AppKey[TinyServer] = web.AppKey("tiny", TinyServer)


def application(server: TinyServer) -> web.Application:
    app = web.Application()
    app[SERVER] = server
    for path in ("/v1/completions", "/v1/chat/completions", "/generate_stream"):
        app.router.add_post(path, stream)
    app.router.add_post("/tokenize", tokenize)
    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", models)
    app.router.add_get("/metrics", metrics)
    return app


def serve(flags: list[str]) -> None:
    """As a process of its own, for loads that start servers; understands the flags of the real one."""
    port = int(flags[flags.index("--port") + 1])
    web.run_app(application(TinyServer()), host="127.0.0.1", port=port)


@pytest.fixture
async def tiny() -> AsyncIterator[TinyServer]:
    server = TinyServer()
    listener = TestServer(application(server))
    await listener.start_server()
    server.url = str(listener.make_url("/")).rstrip("/")
    try:
        yield server
    finally:
        await listener.close()
