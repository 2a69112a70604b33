"""`/admin/models`: what is loaded, as one body or as it changes; loading and unloading by hand.

The admin key is asked for by the middleware `authenticate`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from server import sse
from server.keys import BACKEND, CONFIG, MODELS
from server.protocol.model_orders import parse_load, parse_unload
from server.routes.incoming import parse, read_bytes

LOOK_S = 0.2  # how often a watcher's news are looked for


def routes() -> list[web.RouteDef]:
    return [
        web.get("/admin/models", show, allow_head=False),
        web.post("/admin/models/load", load),
        web.post("/admin/models/unload", unload),
    ]


async def show(request: web.Request) -> web.StreamResponse:
    if "text/event-stream" in request.headers.get("accept", ""):
        return await _watch(request)
    return _json(request.app[MODELS].report())


async def load(request: web.Request) -> web.Response:
    asked = await parse(request, await read_bytes(request), parse_load)
    return _json(await request.app[MODELS].load(str(asked.model), pinned=asked.pinned))


async def unload(request: web.Request) -> web.Response:
    asked = await parse(request, await read_bytes(request), parse_unload)
    return _json(await request.app[MODELS].unload(str(asked.model)))


async def _watch(request: web.Request) -> web.StreamResponse:
    """An event now, and whenever a state or a progress has changed, until the server shuts down."""
    models, timeout_s = request.app[MODELS], request.app[CONFIG].server.slow_reader_timeout_s
    response = web.StreamResponse(headers=sse.STREAM_HEADERS)
    await response.prepare(request)
    known: dict[str, Any] | None = None
    try:
        while request.app[BACKEND].status().phase != "draining":
            states = models.states()
            if states != known:
                known = states
                async with asyncio.timeout(timeout_s):
                    await response.write(
                        sse.named_event(b"models", sse.escape(orjson.dumps(models.report())))
                    )
            await asyncio.sleep(LOOK_S)
    except TimeoutError:  # a reader that takes nothing
        if request.transport is not None:
            request.transport.abort()
    return response


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
