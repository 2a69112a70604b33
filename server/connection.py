"""One client connection, for bytes that are no HTTP: they never become a request, so no middleware sees them.

Knows no routes. `server/serving.py` makes one per connection; everything but the refusal is aiohttp's.
"""

from __future__ import annotations

import logging
import uuid

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong

from core.errors import InternalError, InvalidValue
from server.protocol.errors import render_error

_log = logging.getLogger("noria.http")


class Connection(web.RequestHandler):
    """aiohttp's connection, whose own words would show the request's bytes (a prompt, if it stood in the URL)."""

    __slots__ = ()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """The JSON envelope for what could not be read, and for a failure outside all handlers. Closes."""
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun")
        request_id = f"req-{uuid.uuid4().hex}"
        error: InvalidValue | InternalError
        if status >= 500:
            _log.error("%s: a connection failed", request_id, exc_info=exc)
            error = InternalError("unexpected")
        elif isinstance(exc, LineTooLong):
            error = InvalidValue("The URL or a header of the request is too long.")
        else:
            error = InvalidValue("The request is not valid HTTP.")
        if status < 500:  # strangers and port scanners; no reason to wake anyone
            _log.debug("%s: %s", request_id, type(exc).__name__)
        status, headers, body = render_error(error, request_id)
        headers |= {"server": "noria", "x-request-id": request_id}
        response = web.Response(status=status, headers=headers, body=body)
        response.force_close()
        return response
