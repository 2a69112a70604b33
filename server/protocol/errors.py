"""What an error looks like on the wire: the OpenAI envelope, for HTTP answers and for events inside a stream.

Knows no aiohttp. Called by the middlewares (before the headers) and by whoever writes a stream (after them).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import orjson

from core.errors import (
    BY_CODE,
    Busy,
    Draining,
    EngineDead,
    InternalError,
    InvalidApiKey,
    ModelLoading,
    NoriaError,
    QueueTimeout,
)
from core.outputs import OutputError

MAX_MESSAGE_LENGTH = 500
DEFAULT_RETRY_AFTER_S = 1.0
_RETRYABLE = (Busy, QueueTimeout, Draining, ModelLoading)


def error_object(error: NoriaError, request_id: str = "") -> dict[str, str | None]:
    """The inner object of the envelope. An internal error shows nothing but the request id."""
    message = error.message
    if isinstance(error, InternalError) or error.status == 500:
        message = "The server failed to answer this request."
        if request_id:
            message += f" Request id: {request_id}"
    if len(message) > MAX_MESSAGE_LENGTH:
        message = message[: MAX_MESSAGE_LENGTH - 1] + "…"
    return {"message": message, "type": error.type, "param": error.param, "code": error.code}


def error_body(error: NoriaError, request_id: str = "") -> bytes:
    """`{"error": {...}}` as bytes; valid as a body and, without line breaks, as the data of an event."""
    body = orjson.dumps({"error": error_object(error, request_id)})
    # The same three escapes as in every streamed event: some clients split lines at these characters.
    for char, escaped in ((0x85, rb"\u0085"), (0x2028, rb"\u2028"), (0x2029, rb"\u2029")):
        body = body.replace(chr(char).encode(), escaped)
    return body


def render_error(error: NoriaError, request_id: str = "") -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body of an error answer. The request id's own header is set by the middleware."""
    return error.status, error_headers(error), error_body(error, request_id)


def error_headers(error: NoriaError) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if error.retry_after_s is not None or error.status == 429 or isinstance(error, _RETRYABLE):
        wait_s = DEFAULT_RETRY_AFTER_S if error.retry_after_s is None else error.retry_after_s
        headers["retry-after"] = str(max(1, math.ceil(wait_s)))
    if isinstance(error, EngineDead):
        headers["x-should-retry"] = "false"
    if isinstance(error, InvalidApiKey):
        headers["www-authenticate"] = "Bearer"
    return headers


def error_of_output(
    error: OutputError, classes: Mapping[str, type[NoriaError]] = BY_CODE
) -> NoriaError:
    """The exception that stands for a sequence's failed end, to raise before or to write after the headers."""
    return classes.get(error.code, InternalError)(error.message)
