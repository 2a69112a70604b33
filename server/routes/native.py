"""The native routes: `/basic_generate`, `/generate`, `/generate_stream` (POST and GET), `/generate_vllm`."""

from __future__ import annotations

import functools
from typing import Any
from urllib.parse import unquote_to_bytes

import orjson
from aiohttp import web

from core.errors import InvalidValue, NoriaError, VllmUnavailable
from server.backends import vllm_install
from server.backends.base import Backend, GenerationRequest, ServedModel
from server.keys import BACKEND, CONFIG, GRAMMARS, RECORD, VLLM
from server.protocol.fields import UnknownFields
from server.protocol.native import (
    GENERATE_DEFAULTS,
    STREAM_DEFAULTS,
    VLLM_DEFAULTS,
    NativeRequest,
    body_of_query,
    parse_list,
    parse_one,
)
from server.protocol.native_renderer import EventSourceRenderer, NativeRenderer
from server.protocol.prompts import names_of, resolve
from server.protocol.prompts import tokenize as tokenize_prompts
from server.protocol.tally import Tally
from server.routes.incoming import hold, parse, read, read_bytes, tokenize
from server.routes.streaming import Outputs, Renderer, answer_stream, collect


def routes() -> list[web.RouteDef]:
    handlers = NativeRoutes()
    return [
        web.post("/basic_generate", handlers.basic_generate),
        web.post("/generate", handlers.generate),
        web.post("/generate_stream", handlers.generate_stream),
        web.get("/generate_stream", handlers.generate_stream_for_browsers, allow_head=False),
        web.post("/generate_vllm", handlers.generate_vllm),
    ]


class NativeRoutes:
    """Handlers; the only state is which unknown fields were logged."""

    def __init__(self) -> None:
        self._unknown = UnknownFields()

    async def basic_generate(self, request: web.Request) -> web.Response:
        checked, model = await read(
            request,
            lambda body, model: parse_one(
                body, model, GENERATE_DEFAULTS, self._unknown, streams=False
            ),
        )
        texts = await _generate(request, model, checked)
        return _json({"generated_text": checked.prompts[0] + texts[0]})

    async def generate(self, request: web.Request) -> web.Response:
        checked, model = await read(
            request,
            lambda body, model: parse_list(
                body, model, GENERATE_DEFAULTS, self._unknown, max_waiting=_max_waiting(request)
            ),
        )
        texts = await _generate(request, model, checked) if checked.prompts else []
        joined = [prompt + text for prompt, text in zip(checked.prompts, texts, strict=True)]
        return _json({"generated_texts": joined})

    async def generate_stream(self, request: web.Request) -> web.StreamResponse:
        checked, model = await read(
            request,
            lambda body, model: parse_one(
                body, model, STREAM_DEFAULTS, self._unknown, streams=True
            ),
        )
        return await _stream(request, model, checked, NativeRenderer)

    async def generate_stream_for_browsers(self, request: web.Request) -> web.StreamResponse:
        """`EventSource` asks again when a stream has ended; 204 tells it not to."""
        if "last-event-id" in request.headers:
            return web.Response(status=204)
        _check_unicode(request.rel_url.raw_query_string)
        query = [(name, text) for name, text in request.query.items() if name != "api_key"]
        body = body_of_query(query)
        model = (await hold(request, body.get("model"))).model
        checked = parse_one(body, model, STREAM_DEFAULTS, self._unknown, streams=True)
        return await _stream(request, model, checked, EventSourceRenderer)

    async def generate_vllm(self, request: web.Request) -> web.Response:
        """A bad body is refused first; then it is said what is missing."""
        body = await read_bytes(request)
        backend = request.app[VLLM]
        model, unready = _model_of(backend or request.app[BACKEND])
        checked = await parse(
            request,
            body,
            lambda value: parse_list(
                value, model, VLLM_DEFAULTS, self._unknown, max_waiting=_max_waiting(request)
            ),
        )
        if backend is None:
            is_enabled = request.app[CONFIG].vllm.enabled
            raise VllmUnavailable(vllm_install.why_unavailable(is_enabled=is_enabled))
        if model is None:
            assert unready is not None
            raise unready
        texts = await _generate(request, model, checked, backend) if checked.prompts else []
        return _json({"generated_texts": texts})


def _model_of(backend: Backend) -> tuple[ServedModel | None, NoriaError | None]:
    try:
        return backend.served_model(), None
    except NoriaError as error:
        return None, error


def _max_waiting(request: web.Request) -> int:
    return request.app[CONFIG].engine.max_waiting


async def _resolve(
    request: web.Request, model: ServedModel, checked: NativeRequest
) -> list[GenerationRequest]:
    names = names_of(checked.prompts, "prompts", is_list=True) if checked.is_list else ["prompt"]
    work = functools.partial(tokenize_prompts, model, checked.prompts, names)
    ids = await tokenize(request, work, "tokenize")
    grammar = await request.app[GRAMMARS].compile(checked.grammar, model.tokenizer)
    return resolve(ids, checked.params, model, grammar=grammar, names=names)


async def _generate(
    request: web.Request,
    model: ServedModel,
    checked: NativeRequest,
    backend: Backend | None = None,
) -> list[str]:
    """The completions of all prompts, in order."""
    requests = await _resolve(request, model, checked)
    pieces: list[list[str]] = [[] for _ in requests]

    def add(outputs: Outputs) -> None:
        for index, output in outputs:
            pieces[index].append(output.text)

    await collect(request, requests, add, backend)
    return ["".join(texts) for texts in pieces]


async def _stream(
    request: web.Request,
    model: ServedModel,
    checked: NativeRequest,
    kind: type[NativeRenderer] | type[EventSourceRenderer],
) -> web.StreamResponse:
    requests = await _resolve(request, model, checked)
    record = request[RECORD]
    tally = Tally([len(requests[0].token_ids)], 1, record.arrival_s)

    def make_renderer(sequence_ids: tuple[str, ...]) -> Renderer:
        return kind(sequence_ids[0], tally, record.request_id)

    return await answer_stream(request, requests, make_renderer)


def _check_unicode(raw_query: str) -> None:
    """A query may hold bytes that no JSON body can. They are looked for where they still are bytes: the decoded query
    shows `%FF` as the text `%FF`."""
    try:
        unquote_to_bytes(raw_query).decode()
    except UnicodeError:
        raise InvalidValue("The query is not valid UTF-8.") from None


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
