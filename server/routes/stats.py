"""`GET /stats/stream`: the state of the server once a second, for `EventSource` and for the chat page.

Events are `hello`, once, and then `stats`; the stream ends only when the server shuts down or the client leaves.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from server import sse
from server.keys import CONFIG, STATS


def routes() -> list[web.RouteDef]:
    return [web.get("/stats/stream", stream, allow_head=False)]


async def stream(request: web.Request) -> web.StreamResponse:
    feed, timeout_s = request.app[STATS], request.app[CONFIG].server.slow_reader_timeout_s
    response = web.StreamResponse(headers=sse.STREAM_HEADERS)
    await response.prepare(request)
    event = feed.hello()
    try:
        while event:
            async with asyncio.timeout(timeout_s):
                await response.write(event)
            event = await feed.next_event()
    except TimeoutError:  # a reader that takes nothing
        if request.transport is not None:
            request.transport.abort()
    return response
