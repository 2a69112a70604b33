"""`POST /v1/completions`, with and without `/v1`."""

from __future__ import annotations

from aiohttp import web

from server.keys import CONFIG, GRAMMARS, RECORD
from server.protocol.completions import parse_completion
from server.protocol.fields import UnknownFields
from server.protocol.openai_renderer import CompletionShape, OpenAIRenderer
from server.protocol.prompts import resolve
from server.protocol.tally import Tally
from server.routes.incoming import read, tokenize
from server.routes.openai import answer, both_ways


def routes() -> list[web.RouteDef]:
    return both_ways(web.post, "/completions", CompletionRoutes().complete)


class CompletionRoutes:
    """The handler; the only state is which unknown fields were logged."""

    def __init__(self) -> None:
        self._unknown = UnknownFields()

    async def complete(self, request: web.Request) -> web.StreamResponse:
        max_waiting = request.app[CONFIG].engine.max_waiting
        checked, model = await read(
            request,
            lambda body, model: parse_completion(
                body, model, self._unknown, max_waiting=max_waiting
            ),
        )

        def work() -> tuple[list[list[int]], list[str]]:
            ids = checked.tokenize(model)
            return ids, checked.prefixes(ids, model.tokenizer)

        ids, prefixes = await tokenize(request, work, "tokenize")
        grammar = await request.app[GRAMMARS].compile(checked.grammar, model.tokenizer)
        requests = resolve(
            ids,
            checked.params,
            model,
            num_choices=checked.num_choices,
            grammar=grammar,
            names=checked.names,
        )
        record = request[RECORD]
        renderer = OpenAIRenderer(
            CompletionShape(model.tokenizer),
            model.name,
            Tally([len(prompt) for prompt in ids], checked.num_choices, record.arrival_s),
            num_sequences=len(requests),
            has_logprobs=checked.params.logprobs is not None,
            stream_options=checked.stream_options,
            request_id=record.request_id,
        )
        renderer.begin_with(prefixes)
        return await answer(request, requests, renderer, streams=checked.streams)
