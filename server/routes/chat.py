"""`POST /v1/chat/completions`, with and without `/v1`."""

from __future__ import annotations

import functools

from aiohttp import web

from server.keys import CONFIG, GRAMMARS, RECORD
from server.protocol.chat import parse_chat
from server.protocol.fields import UnknownFields
from server.protocol.parsed_chat import make_chat_renderer
from server.protocol.prompts import resolve
from server.protocol.tally import Tally
from server.routes.incoming import read, tokenize
from server.routes.openai import answer, both_ways


def routes() -> list[web.RouteDef]:
    return both_ways(web.post, "/chat/completions", ChatRoutes().complete)


class ChatRoutes:
    """The handler; the only state is which unknown fields were logged."""

    def __init__(self) -> None:
        self._unknown = UnknownFields()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        max_waiting = request.app[CONFIG].engine.max_waiting
        checked, model = await read(
            request,
            lambda body, model: parse_chat(body, model, self._unknown, max_waiting=max_waiting),
        )
        work = functools.partial(checked.prompt.tokenize_within, model, "messages")
        ids = await tokenize(request, work, "template")
        grammar = await request.app[GRAMMARS].compile(checked.grammar, model.tokenizer)
        requests = resolve(
            [ids],
            checked.params,
            model,
            num_choices=checked.num_choices,
            grammar=grammar,
            names=["messages"],
        )
        record = request[RECORD]
        renderer = make_chat_renderer(
            model.tokenizer,
            checked.tools,
            ids,
            model.name,
            Tally([len(ids)], checked.num_choices, record.arrival_s),
            num_sequences=len(requests),
            has_logprobs=checked.params.logprobs is not None,
            stream_options=checked.stream_options,
            request_id=record.request_id,
        )
        return await answer(request, requests, renderer, streams=checked.streams)
