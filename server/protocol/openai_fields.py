"""What completions and chat share beyond the sampling fields: stream options and the format of the answer.

Knows no aiohttp.
"""

from __future__ import annotations

from typing import Any

import msgspec

from core.errors import InvalidValue, UnsupportedValue
from server.protocol.fields import IGNORED_BY_OPENAI, REFUSED

NAMES = IGNORED_BY_OPENAI | REFUSED.keys() | {"priority", "response_format", "stream_options"}


class StreamOptions(msgspec.Struct, frozen=True):
    """Whether a stream tells its usage at the end, and in every chunk; ignored without `stream`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def is_continuous(self) -> bool:
        return bool(self.include_usage and self.continuous_usage_stats)


class OpenAIFields(msgspec.Struct, frozen=True):
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None


def check_response_format(value: dict[str, Any] | None) -> None:
    """Plain text only, until there is a grammar engine."""
    if value is None:
        return
    kind = value.get("type")
    if not isinstance(kind, str):
        raise InvalidValue("response_format.type must be a string.", param="response_format.type")
    if kind in ("json_object", "json_schema"):
        raise UnsupportedValue(
            f"response_format of type {kind} is not supported.", param="response_format"
        )
    if kind != "text":
        raise InvalidValue("response_format.type is not known.", param="response_format.type")
