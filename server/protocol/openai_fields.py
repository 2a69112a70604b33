"""What completions and chat share beyond the sampling fields: their names, and stream options.

Knows no aiohttp.
"""

from __future__ import annotations

import msgspec

from server.protocol import structured
from server.protocol.fields import IGNORED_BY_OPENAI, REFUSED

NAMES = (
    IGNORED_BY_OPENAI
    | REFUSED.keys()
    | structured.NAMES
    | {"parallel_tool_calls", "priority", "response_format", "stream_options"}
)


class StreamOptions(msgspec.Struct, frozen=True):
    """Whether a stream tells its usage at the end, and in every chunk; ignored without `stream`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None

    @property
    def is_continuous(self) -> bool:
        return bool(self.include_usage and self.continuous_usage_stats)


class OpenAIFields(msgspec.Struct, frozen=True):
    stream_options: StreamOptions | None = None
