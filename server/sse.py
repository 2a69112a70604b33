"""The bytes of server-sent events: an event, a named event, a comment, the end, and the headers. Pure functions.

Knows no aiohttp and no JSON; data is one line of JSON made elsewhere. Routes and renderers call it.
"""

from __future__ import annotations

STREAM_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache, no-transform",
    "x-accel-buffering": "no",
}

DONE = b"data: [DONE]\n\n"

KEEP_ALIVE = b": keep-alive\n\n"
"""A comment; never begins with `ping` or `data`, which some clients take for something else."""


def escape(data: bytes) -> bytes:
    """JSON with U+0085, U+2028 and U+2029 escaped: some HTTP libraries split lines there."""
    if b"\xc2\x85" in data:
        data = data.replace(b"\xc2\x85", b"\\u0085")
    if b"\xe2\x80" in data:
        data = data.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")
    return data


def event(data: bytes) -> bytes:
    """One event of escaped one-line JSON."""
    return b"data: " + data + b"\n\n"


def named_event(name: bytes, data: bytes, event_id: int | None = None) -> bytes:
    """One event for `EventSource`, with its name and, where given, its id."""
    if event_id is None:
        return b"event: %b\ndata: %b\n\n" % (name, data)
    return b"event: %b\nid: %d\ndata: %b\n\n" % (name, event_id, data)
