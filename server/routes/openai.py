"""What the OpenAI routes share: paths with and without `/v1`, and one way to answer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web

from server.backends.base import GenerationRequest
from server.protocol.openai_renderer import OpenAIRenderer
from server.routes.streaming import answer_stream, collect

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def both_ways(
    method: Callable[..., web.RouteDef], path: str, handler: Handler
) -> list[web.RouteDef]:
    """Base URLs are typed with and without `/v1`, paths with and without a slash at the end."""
    return [method(prefix + path + slash, handler) for prefix in ("/v1", "") for slash in ("", "/")]


async def answer(
    request: web.Request,
    requests: list[GenerationRequest],
    renderer: OpenAIRenderer,
    *,
    streams: bool,
) -> web.StreamResponse:
    """A stream of chunks, or one body made of the same outputs."""
    if streams:
        return await answer_stream(request, requests, lambda _: renderer)
    await collect(request, requests, renderer.add)
    return web.Response(body=renderer.body(), content_type="application/json")
