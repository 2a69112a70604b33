"""`POST /tokenize` and `POST /detokenize`."""

from __future__ import annotations

import functools
from typing import Any, Literal

import orjson
from aiohttp import web

from server.protocol.chat import ChatPrompt
from server.protocol.tokenize import parse_detokenize, parse_tokenize, tokens_answer
from server.routes.incoming import read
from server.routes.incoming import tokenize as run
from server.routes.openai import both_ways


def routes() -> list[web.RouteDef]:
    return [
        *both_ways(web.post, "/tokenize", tokenize),
        *both_ways(web.post, "/detokenize", detokenize),
    ]


async def tokenize(request: web.Request) -> web.Response:
    prompt, model = await read(request, parse_tokenize, is_counting=True)
    work = functools.partial(prompt.tokenize, model.tokenizer)
    kind: Literal["template", "tokenize"] = (
        "template" if isinstance(prompt, ChatPrompt) else "tokenize"
    )
    ids = await run(request, work, kind, is_counting=True)
    return _json(tokens_answer(ids, model))


async def detokenize(request: web.Request) -> web.Response:
    ids, model = await read(request, parse_detokenize, is_counting=True)
    work = functools.partial(model.tokenizer.decode, ids)
    text = await run(request, work, "tokenize", is_counting=True)
    return _json({"prompt": text})


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
