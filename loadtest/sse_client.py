"""Reads server-sent events as bytes arrive, and turns one stream into the record of one request.

Nothing here knows Noria: any server that speaks OpenAI's streams (or Noria's native one) can be measured. The parser
and the record do no I/O, so that aiohttp (`loadtest/closed_loop.py`) and gevent (`loadtest/locustfile.py`) share them.

What is measured, and why so:

- *Time to first token* ends at the first **non-empty text**. A chunk that carries only a role is not a token.
- *Tokens* are what the server's `usage` says. Only where it sends none are chunks with text counted instead, and the
  report then says so.
- *Time per output token* is the time from the first to the last text over the tokens of that span. Text that is kept
  back (half a character, a possible stop string) delays the first text; with `continuous_usage_stats` the tokens
  which that first text stands for are known and left out, without it one is assumed.
- *Inter-token latency* is the gap between chunks with text. A server that packs several tokens in a chunk has longer
  and fewer gaps: `tokens_per_chunk` stands beside it.
- An error event, a body that is no event stream, a stream without an end and an answer without tokens are failures.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import orjson

MAX_LINE_BYTES = 64 * 1024 * 1024
END_MARK = b"[DONE]"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class SseEvent:
    """One dispatched event. `data` is the bytes of its data lines joined by LF; `name` is empty for plain messages."""

    data: bytes
    name: str = ""
    last_event_id: str = ""


class SseParser:
    """An incremental parser for `text/event-stream` as WHATWG HTML defines it ("9.2.6 Interpreting an event stream").

    Lines end with LF, CRLF or CR, wherever the network splits them. Works on bytes, so that a character split over
    two reads stays whole. An event that was not closed by a blank line is never returned.
    """

    __slots__ = ("_data", "_is_first_line", "_last_event_id", "_name", "_rest", "_skips_lf")

    def __init__(self) -> None:
        self._rest = b""
        self._skips_lf = False  # the last byte was a CR: an LF that follows belongs to it
        self._is_first_line = True
        self._data: list[bytes] = []
        self._name = ""
        self._last_event_id = ""

    def feed(self, chunk: bytes) -> list[SseEvent]:
        """Takes bytes and returns the events they complete. Raises `ValueError` for a line without end."""
        if not chunk:
            return []
        if (
            not self._rest
            and not self._data
            and not self._name
            and not self._skips_lf
            and chunk.startswith(b"data: ")
            and chunk.endswith(b"\n\n")
            and chunk.count(b"\n") == 2
            and b"\r" not in chunk
        ):  # one whole event of one line, as nearly all reads are: the client must cost little
            self._is_first_line = False
            return [SseEvent(chunk[6:-2], "", self._last_event_id)]
        if self._skips_lf and chunk[:1] == b"\n":
            chunk = chunk[1:]
        self._skips_lf = False
        if b"\r" in chunk:
            self._skips_lf = chunk.endswith(b"\r")
            chunk = chunk.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise ValueError(f"a line of the stream exceeds {MAX_LINE_BYTES} bytes")
        events: list[SseEvent] = []
        for line in lines:
            event = self._take_line(line)
            if event is not None:
                events.append(event)
        return events

    def _take_line(self, line: bytes) -> SseEvent | None:
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line:
            return self._dispatch()
        name, _, value = line.partition(b":")
        if value[:1] == b" ":
            value = value[1:]
        if name == b"data":
            self._data.append(value)
        elif name == b"event":
            self._name = value.decode("utf-8", "replace")
        elif name == b"id" and b"\0" not in value:
            self._last_event_id = value.decode("utf-8", "replace")
        return None  # comments have an empty name; `retry` and unknown fields are ignored

    def _dispatch(self) -> SseEvent | None:
        data, name = self._data, self._name
        self._data, self._name = [], ""
        if not data:
            return None
        return SseEvent(b"\n".join(data), name, self._last_event_id)


@dataclass(slots=True)
class RequestRecord:
    """What one streamed request did. Times are seconds on one monotonic clock of the client.

    `error` is None for a success. `usage` is the last usage object the server sent. `late_s`: how long after the moment
    it was due the client sent it (open loop; `sent_s` is then the moment it was due).
    """

    sent_s: float
    end_s: float = 0.0
    status: int = 0
    text_times_s: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    tokens_at_first_text: int = 1
    finish_reasons: list[str] = field(default_factory=list)
    has_end_mark: bool = False
    error: str | None = None
    late_s: float = 0.0

    def take(self, event: SseEvent, now_s: float) -> bool:
        """Takes one event that arrived at `now_s`. Returns False when nothing more is to be read."""
        if event.data.strip() == END_MARK:
            self.has_end_mark = True
            return False
        try:
            chunk = orjson.loads(event.data)
        except orjson.JSONDecodeError:
            self.fail("an event is not JSON")
            return False
        if not isinstance(chunk, dict):
            self.fail("an event is not a JSON object")
            return False
        if chunk.get("error") or event.name == "error":
            self.fail(f"error event: {_shorten(chunk.get('error') or chunk)}")
            return False
        self._take_usage(chunk)
        for text in _texts(chunk, self.finish_reasons):
            self._take_text(text, now_s)
        if event.name == "done":  # the GET stream has its own end and no mark
            self.has_end_mark = True
            return False
        return True

    def _take_usage(self, chunk: dict[str, Any]) -> None:
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage

    def _take_text(self, text: str, now_s: float) -> None:
        if not self.text_times_s and self.usage is not None:
            self.tokens_at_first_text = max(1, _count(self.usage, "completion_tokens"))
        self.text_times_s.append(now_s)
        self.texts.append(text)

    def fail(self, error: str) -> None:
        """The first error decides; later ones are its consequences."""
        if self.error is None:
            self.error = error

    def end(self, now_s: float) -> None:
        """The stream is over, for whatever reason: judge it."""
        self.end_s = now_s
        if self.error is None and not self.has_end_mark and not self.finish_reasons:
            self.fail("the stream was cut: neither an end mark nor a finish reason")
        if self.error is None and self.num_output_tokens == 0:
            self.fail("no tokens")

    @property
    def is_ok(self) -> bool:
        return self.error is None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def is_counted_by_server(self) -> bool:
        return self.usage is not None and _count(self.usage, "completion_tokens") > 0

    @property
    def num_output_tokens(self) -> int:
        """Tokens by the server's usage, else chunks that carried text."""
        if self.usage is not None and self.is_counted_by_server:
            return _count(self.usage, "completion_tokens")
        return len(self.text_times_s)

    @property
    def num_prompt_tokens(self) -> int | None:
        """By the server's usage only: a client does not know the template."""
        return _count(self.usage, "prompt_tokens") if self.usage is not None else None

    @property
    def num_cached_tokens(self) -> int:
        details = (self.usage or {}).get("prompt_tokens_details")
        return _count(details, "cached_tokens") if isinstance(details, dict) else 0

    @property
    def ttft_s(self) -> float | None:
        return self.text_times_s[0] - self.sent_s if self.text_times_s else None

    @property
    def tpot_s(self) -> float | None:
        """Seconds per token from the first to the last text; None for an answer that has no such span."""
        num_tokens = self.num_output_tokens - self.tokens_at_first_text
        if len(self.text_times_s) < 2 or num_tokens < 1:
            return None
        return (self.text_times_s[-1] - self.text_times_s[0]) / num_tokens

    @property
    def gaps_s(self) -> list[float]:
        times = self.text_times_s
        return [later - earlier for earlier, later in pairwise(times)]

    @property
    def e2e_s(self) -> float:
        return self.end_s - self.sent_s


def _texts(chunk: dict[str, Any], finish_reasons: list[str]) -> list[str]:
    """The non-empty texts of a chunk of any dialect; finish reasons are appended to the list given."""
    choices = chunk.get("choices")
    parts = choices if isinstance(choices, list) else [chunk]
    texts: list[str] = []
    for part in parts:
        if not isinstance(part, dict):
            continue
        reason = part.get("finish_reason")
        if isinstance(reason, str):
            finish_reasons.append(reason)
        delta = part.get("delta")
        source = delta if isinstance(delta, dict) else part
        for key in ("content", "reasoning_content", "text", "token"):
            text = source.get(key)
            if isinstance(text, str) and text:
                texts.append(text)
                break
    return texts


def _count(usage: dict[str, Any], key: str) -> int:
    value = usage.get(key)
    return value if type(value) is int and value > 0 else 0


def _shorten(value: object) -> str:
    return str(value)[:300]
