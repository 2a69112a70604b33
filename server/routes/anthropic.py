"""Anthropic's `POST /v1/messages` and `POST /v1/messages/count_tokens`, with and without `/v1`."""

from __future__ import annotations

import functools

import orjson
from aiohttp import web

from server.keys import GRAMMARS, RECORD
from server.protocol.answer_blocks import AnswerBlocks
from server.protocol.answer_parser import make_answer_parser
from server.protocol.anthropic import parse_count, parse_message
from server.protocol.anthropic_renderer import MessageRenderer
from server.protocol.fields import UnknownFields
from server.protocol.prompts import resolve
from server.protocol.tally import Tally
from server.routes.incoming import read, tokenize
from server.routes.openai import both_ways
from server.routes.streaming import answer_stream, collect


def routes() -> list[web.RouteDef]:
    handlers = AnthropicRoutes()
    return [
        *both_ways(web.post, "/messages", handlers.create),
        *both_ways(web.post, "/messages/count_tokens", count_tokens),
    ]


class AnthropicRoutes:
    """The handler; the only state is which unknown fields were logged."""

    def __init__(self) -> None:
        self._unknown = UnknownFields()

    async def create(self, request: web.Request) -> web.StreamResponse:
        checked, model = await read(
            request, lambda body, model: parse_message(body, model, self._unknown)
        )
        work = functools.partial(checked.prompt.tokenize_within, model, "messages")
        ids = await tokenize(request, work, "template")
        grammar = await request.app[GRAMMARS].compile(checked.grammar, model.tokenizer)
        requests = resolve([ids], checked.params, model, grammar=grammar, names=["messages"])
        record = request[RECORD]
        tally = Tally([len(ids)], 1, record.arrival_s)
        answer = AnswerBlocks(make_answer_parser(model.tokenizer, checked.prompt.tools, ids))
        renderer = MessageRenderer(model.name, tally, answer, record.request_id)
        if checked.streams:
            return await answer_stream(request, requests, lambda _: renderer)
        await collect(request, requests, renderer.add)
        return web.Response(body=renderer.body(), content_type="application/json")


async def count_tokens(request: web.Request) -> web.Response:
    prompt, model = await read(request, parse_count, is_counting=True)
    work = functools.partial(prompt.tokenize, model.tokenizer)
    ids = await tokenize(request, work, "template", is_counting=True)
    body = orjson.dumps({"input_tokens": len(ids)})
    return web.Response(body=body, content_type="application/json")
