"""OpenAI's `POST /v1/responses`, with and without `/v1`. Nothing is stored: asking for one by its id says so."""

from __future__ import annotations

from aiohttp import web

from core.errors import InvalidValue, NotFound
from server.backends.base import ServedModel
from server.keys import GRAMMARS, RECORD
from server.protocol.answer_blocks import AnswerBlocks
from server.protocol.answer_parser import make_answer_parser
from server.protocol.fields import UnknownFields
from server.protocol.prompts import resolve
from server.protocol.responses import ResponseRequest, parse_response
from server.protocol.responses_renderer import ResponseRenderer
from server.protocol.tally import Tally
from server.routes.incoming import read, tokenize
from server.routes.openai import both_ways
from server.routes.streaming import answer_stream, collect


def routes() -> list[web.RouteDef]:
    one = "/responses/{id}"
    return [
        *both_ways(web.post, "/responses", ResponseRoutes().create),
        *both_ways(web.get, one, not_stored),
        *both_ways(web.delete, one, not_stored),
    ]


class ResponseRoutes:
    """The handler; the only state is which unknown fields were logged."""

    def __init__(self) -> None:
        self._unknown = UnknownFields()

    async def create(self, request: web.Request) -> web.StreamResponse:
        checked, model = await read(
            request, lambda body, model: parse_response(body, model, self._unknown)
        )
        ids = await tokenize(request, lambda: _tokenize(checked, model), "template", "input")
        grammar = await request.app[GRAMMARS].compile(checked.grammar, model.tokenizer)
        requests = resolve([ids], checked.params, model, grammar=grammar, names=["input"])
        record = request[RECORD]
        parser = make_answer_parser(model.tokenizer, checked.prompt.tools, ids)
        renderer = ResponseRenderer(
            model.name,
            model.tokenizer,
            Tally([len(ids)], 1, record.arrival_s),
            AnswerBlocks(parser, has_logprobs=checked.params.logprobs is not None),
            checked.echoed,
            request_id=record.request_id,
        )
        if checked.streams:
            return await answer_stream(request, requests, lambda _: renderer)
        await collect(request, requests, renderer.add)
        return web.Response(body=renderer.body(), content_type="application/json")


def _tokenize(checked: ResponseRequest, model: ServedModel) -> list[int]:
    """Slow; runs in the executor."""
    try:
        return checked.prompt.tokenize_within(model, "input")
    except InvalidValue as error:
        raise InvalidValue(error.message, param="input") from None


async def not_stored(request: web.Request) -> web.StreamResponse:
    raise NotFound("This server stores no responses; there is none to be found.", param="id")
