"""What every request passes: record and id, errors to JSON, CORS, API keys. Each is short; none knows a route.

Order, outermost first: `record`, `errors`, `preflight`, `authenticate`. Headers that belong on every
answer, streams and errors included, are set by `decorate` when an answer is prepared.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from core.errors import (
    AdminDisabled,
    BodyTooLarge,
    ContextLengthExceeded,
    InternalError,
    InvalidApiKey,
    InvalidValue,
    MethodNotAllowed,
    NoriaError,
    NotFound,
)
from server.api_keys import carries_key, is_admin, is_open
from server.backends.base import RequestRecord
from server.config import ServerConfig
from server.keys import CONFIG, LEASE, METRICS, RECORD, metrics_of
from server.logs import log_request
from server.protocol.anthropic_errors import is_anthropic, render_anthropic_error
from server.protocol.errors import render_error

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

CLIENT_GONE = 499  # nginx's word for a client that left; never sent
MAX_PREFLIGHT_HEADERS = 4096
_CLEAN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/+=@-]{0,127}")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, \t-]*")
_METHODS = frozenset({"GET", "HEAD", "POST", "OPTIONS", "PUT", "PATCH", "DELETE"})
_STARTED: web.RequestKey[web.StreamResponse] = web.RequestKey("started", web.StreamResponse)
_log = logging.getLogger("noria.http")


@web.middleware
async def record(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Gives the request its record, and when the answer has ended its log line and HTTP metrics."""
    given = request.headers.get("x-request-id", "")
    request_id = given if _CLEAN_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"
    entry = RequestRecord(request_id=request_id, route=route_of(request))
    request[RECORD] = entry
    response: web.StreamResponse | None = None
    try:
        response = await handler(request)
        entry.status = entry.status or response.status
        return response
    except asyncio.CancelledError:
        entry.status = CLIENT_GONE
        raise
    finally:
        _finish(request, entry, response)


def _finish(
    request: web.Request, entry: RequestRecord, response: web.StreamResponse | None
) -> None:
    elapsed_s = time.monotonic() - entry.arrival_s
    log_request(entry, elapsed_s)
    if (lease := request.get(LEASE)) is not None:
        lease.release()
    if isinstance(response, web.Response):
        sent = len(response.body) if isinstance(response.body, bytes) else 0
    else:
        sent = response.body_length if response is not None and response.prepared else 0
    method = request.method if request.method in _METHODS else "other"
    received = request.content_length or 0
    request.app[METRICS].observe_http(entry.route, method, entry.status, elapsed_s, received, sent)


def route_of(request: web.Request) -> str:
    """The route as it stands in the table: few values, and nothing a client typed."""
    resource = request.match_info.route.resource
    return resource.canonical if resource is not None else "unmatched"


@web.middleware
async def errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong becomes the JSON envelope; what is nobody's business goes to the log."""
    try:
        return await handler(request)
    except NoriaError as error:
        if error.status == 500:
            _log.error("%s: %s", request[RECORD].request_id, error.message)
        if isinstance(
            error, ContextLengthExceeded
        ):  # nobody below has counted it: it was never queued
            metrics_of(request).observe_rejection("too_long")
        return _answer(request, error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        return _answer(request, _translate(error), dict(error.headers))
    except (web.RequestPayloadError, HttpProcessingError):
        return _answer(request, InvalidValue("The request body could not be read."))
    except ConnectionError:
        request[RECORD].status = CLIENT_GONE
        return _give_up(request)
    except Exception:
        _log.exception("%s: a request failed", request[RECORD].request_id)
        return _answer(request, InternalError("unexpected"))


def _translate(error: web.HTTPException) -> NoriaError:
    """aiohttp's own refusals in our words."""
    match error.status:
        case 404:
            return NotFound("There is no such path.")
        case 405:
            return MethodNotAllowed("This path does not take this method.")
        case 413:
            return BodyTooLarge("The request body is larger than server.max_body_bytes allows.")
        case status if status < 500:
            return InvalidValue("The request could not be understood.")
    return InternalError("unexpected")


def _answer(
    request: web.Request, error: NoriaError, headers: dict[str, str] | None = None
) -> web.StreamResponse:
    if _STARTED in request:
        return _give_up(request)
    render = render_anthropic_error if is_anthropic(request.path) else render_error
    status, own, body = render(error, request[RECORD].request_id)
    if headers and "Allow" in headers:
        own["allow"] = headers["Allow"]
    return web.Response(status=status, headers=own, body=body)


def _give_up(request: web.Request) -> web.StreamResponse:
    """The answer has begun or the client is gone: nothing honest can be sent any more, so the connection ends. A
    clean end of the stream would look like success."""
    if request.transport is not None:
        request.transport.abort()
    return request.get(_STARTED) or web.Response(status=CLIENT_GONE)


@web.middleware
async def preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answers real preflights on every path, without a key: browsers send none with them."""
    if is_preflight(request):
        return web.Response(status=204)
    return await handler(request)


def is_preflight(request: web.Request) -> bool:
    return (
        request.method == "OPTIONS"
        and "origin" in request.headers
        and "access-control-request-method" in request.headers
    )


def make_authenticate(keys: tuple[bytes, ...]) -> Callable[..., Awaitable[web.StreamResponse]]:
    """The middleware that asks for a key everywhere but on the open list. Without keys it lets all pass but what is
    below /admin: that has a key of its own, and is closed without it, for any web page can call a server on its
    reader's machine."""

    @web.middleware
    async def authenticate(request: web.Request, handler: Handler) -> web.StreamResponse:
        config = request.app[CONFIG]
        if is_admin(request):
            check_admin_key(request, config)
        elif (
            keys and not is_open(request, config) and not carries_key(request, keys, config.server)
        ):
            raise InvalidApiKey("A valid API key is required.")
        return await handler(request)

    return authenticate


def check_admin_key(request: web.Request, config: ServerConfig) -> None:
    key = config.server.admin_key
    if key is None:
        raise AdminDisabled("Routes below /admin are closed: set server.admin_key to use them.")
    if not carries_key(request, (key.encode(),), config.server):
        raise InvalidApiKey("A valid admin key is required.")


async def decorate(request: web.Request, response: web.StreamResponse) -> None:
    """Signal `on_response_prepare`: the headers of every answer, of errors and of streams too."""
    request[_STARTED] = response
    response.headers["server"] = "noria"
    if RECORD in request:
        response.headers["x-request-id"] = request[RECORD].request_id
        if is_anthropic(request.path):  # under the name that its clients look for
            response.headers["request-id"] = request[RECORD].request_id
        timing = server_timing(request[RECORD])
        if timing:
            response.headers["server-timing"] = timing
    origin = request.headers.get("origin")
    if origin is None:
        return
    allowed = request.app[CONFIG].server.cors_origins
    if "*" in allowed:
        response.headers["access-control-allow-origin"] = "*"
    elif origin in allowed:
        response.headers["access-control-allow-origin"] = origin
        response.headers["vary"] = "origin"
    else:
        response.headers["vary"] = "origin"
        return
    response.headers["access-control-expose-headers"] = "x-request-id, retry-after, server-timing"
    if is_preflight(request):
        _allow_preflight(request, response)


def server_timing(entry: RequestRecord) -> str:
    """Where the time of a whole answer went, in the form that browsers and proxies show; empty while nothing has been
    computed, as when the headers of a stream go out."""
    if entry.queue_s is None:
        return ""
    intervals = {
        "queue": entry.queue_s,
        "prefill": entry.prefill_s,
        "first-token": entry.first_token_s,
        "decode": entry.decode_s,
        "total": time.monotonic() - entry.arrival_s,
    }
    return ", ".join(
        f"{name};dur={seconds * 1e3:.3f}"
        for name, seconds in intervals.items()
        if seconds is not None
    )


def _allow_preflight(request: web.Request, response: web.StreamResponse) -> None:
    """Reflects the header names asked for: a star does not cover Authorization, and SDKs send many of their own."""
    names = request.headers.get("access-control-request-headers", "")
    if names and len(names) <= MAX_PREFLIGHT_HEADERS and _HEADER_NAMES.fullmatch(names):
        response.headers["access-control-allow-headers"] = names
    response.headers["access-control-allow-methods"] = "GET, POST, OPTIONS"
    response.headers["access-control-max-age"] = "600"
