"""Errors in the shape that Anthropic's clients read, and when they get it. Knows no aiohttp.

Called by the middlewares (before the headers) and by the renderer of `/v1/messages` (after them).
"""

from __future__ import annotations

import orjson

from core.errors import (
    Busy,
    ContextLengthExceeded,
    Draining,
    ModelLoading,
    NoriaError,
    QueueTimeout,
)
from server import sse
from server.protocol.errors import error_headers, error_object

OVERLOADED = 529  # that API's own status for "try again later"; its clients know it
_OVERLOADED = (Busy, QueueTimeout, Draining, ModelLoading)
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
}


def is_anthropic(path: str) -> bool:
    """Whether whoever asks for this path expects Anthropic's errors, whatever goes wrong."""
    rest = path.removeprefix("/v1")
    return rest == "/messages" or rest.startswith("/messages/")


def anthropic_error_body(error: NoriaError, request_id: str = "") -> bytes:
    """`{"type": "error", "error": {...}, "request_id": ...}`; valid as a body and as the data of an event."""
    message = error_object(error, request_id)["message"]
    if isinstance(error, ContextLengthExceeded):
        message = f"prompt is too long: {message}"  # coding tools shorten the chat when they see it
    kind = "overloaded_error" if isinstance(error, _OVERLOADED) else "api_error"
    answer = {
        "type": "error",
        "error": {"type": _TYPES.get(error.status, kind), "message": message},
        "request_id": request_id or None,
    }
    return sse.escape(orjson.dumps(answer))


def render_anthropic_error(
    error: NoriaError, request_id: str = ""
) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an error answer."""
    status = OVERLOADED if isinstance(error, _OVERLOADED) else error.status
    return status, error_headers(error), anthropic_error_body(error, request_id)
