"""`Operation`: what the OpenAPI document tells of one route, and which errors whole kinds of routes have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

WORK = (400, 401, 404, 413, 415, 429, 500, 503)  # of routes that compute
TEXT = (400, 401, 404, 413, 415, 500, 503)  # of those that only read a body
LOOK = (401, 500, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """`path` is the one that is documented, `aliases` are others that do the same. `events` are (name, shape) of the
    stream, '' for events without a name."""

    method: str
    path: str
    tag: str
    summary: str
    text: str = ""
    aliases: tuple[str, ...] = ()
    request: str | None = None  # the name of a schema in `requests.py`
    query: str | None = None  # the same, for fields in the query beside a body
    is_body_optional: bool = False
    example: dict[str, Any] | None = None
    answer: type[Struct] | None = None
    events: tuple[tuple[str, type[Struct]], ...] = ()
    media_type: str = ""  # of an answer that is neither JSON nor events
    errors: tuple[int, ...] = ()
    is_open: bool = False
    no_content: str = ""  # when the answer is 204
    is_refused: bool = False  # there for clients that ask; never answers but with an error
    error_shape: str = "ErrorBody"


def v1(path: str) -> tuple[str, ...]:
    return (f"/v1{path}/", path, f"{path}/")
