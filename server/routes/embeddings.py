"""`POST /v1/embeddings`, with and without `/v1`. Its texts are prompts in the same queue and batch as all others."""

from __future__ import annotations

import asyncio
import dataclasses
import functools

from aiohttp import web

from server.keys import CONFIG, EXECUTOR
from server.protocol.embeddings import PARAMS, embeddings_body, parse_embedding
from server.protocol.fields import UnknownFields
from server.protocol.prompts import resolve
from server.protocol.prompts import tokenize as tokenize_prompts
from server.routes.incoming import read, tokenize
from server.routes.openai import both_ways
from server.routes.streaming import Outputs, collect


def routes() -> list[web.RouteDef]:
    return both_ways(web.post, "/embeddings", EmbeddingRoutes().create)


class EmbeddingRoutes:
    """The handler; the only state is which unknown fields were logged."""

    def __init__(self) -> None:
        self._unknown = UnknownFields()

    async def create(self, request: web.Request) -> web.Response:
        max_waiting = request.app[CONFIG].engine.max_waiting
        checked, model = await read(
            request,
            lambda body, model: parse_embedding(
                body, model, self._unknown, max_waiting=max_waiting
            ),
        )
        work = functools.partial(tokenize_prompts, model, checked.inputs, checked.names)
        ids = await tokenize(request, work, "tokenize")
        requests = resolve(ids, PARAMS, model, names=checked.names)
        found = [b""] * len(requests)

        def add(outputs: Outputs) -> None:
            for index, output in outputs:
                found[index] = output.embedding or b""

        pooled = [dataclasses.replace(asked, pools=True) for asked in requests]
        await collect(request, pooled, add)
        render = functools.partial(
            embeddings_body, found, model.name, sum(map(len, ids)), is_base64=checked.is_base64
        )
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(request.app[EXECUTOR], render)
        return web.Response(body=body, content_type="application/json")
