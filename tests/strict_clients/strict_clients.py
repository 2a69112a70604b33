"""Clients that accept nothing but what the wire contract says, and three that parse as known tools do.

All work byte by byte on what came over the wire. A broken rule is an AssertionError that names it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

DONE = "[DONE]"


def strict_json(text: str) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"not JSON: {name}")

    return json.loads(text, parse_constant=refuse)


@dataclass(slots=True)
class Event:
    """One event; `data` is parsed JSON, or the end mark."""

    data: Any
    name: str | None = None
    id: str | None = None


@dataclass(slots=True)
class StrictFraming:
    """Rules 1 to 5: LF LF after each event, `data:` with one space, one line of JSON, nothing else."""

    allows_names: bool = False
    allows_comments: bool = False
    events: list[Event] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)
    _buffer: bytes = b""

    def feed(self, data: bytes) -> None:
        assert b"\r" not in data, "rule 1: no carriage returns"
        self._buffer += data
        while (end := self._buffer.find(b"\n\n")) >= 0:
            self._event(self._buffer[:end])
            self._buffer = self._buffer[end + 2 :]
            assert not self._buffer.startswith(b"\n"), "rule 1: exactly two line feeds"

    def close(self) -> list[Event]:
        assert self._buffer == b"", "rule 1: the last event is not ended"
        return self.events

    def _event(self, block: bytes) -> None:
        assert block, "rule 4: an empty event"
        fields: dict[str, str] = {}
        for line in block.decode("utf-8").split("\n"):
            if line.startswith(":"):
                assert self.allows_comments, "rule 3: a comment"
                assert not line[1:].strip().startswith(("ping", "data"))
                self.comments.append(line[1:].strip())
                continue
            name, separator, value = line.partition(": ")
            assert separator, f"rule 1: {line!r}"
            assert not value.startswith(" "), f"rule 1: {line!r}"
            assert name in ("data", "event", "id"), f"rule 4: {line!r}"
            assert name not in fields, f"rule 4: {line!r}"
            assert name == "data" or self.allows_names, f"rule 4: {line!r}"
            assert len(line.splitlines()) == 1, "rule 5: a line separator inside"
            fields[name] = value
        if not fields:
            return
        assert fields.get("data"), "rule 4: empty data"
        data = DONE if fields["data"] == DONE else strict_json(fields["data"])
        self.events.append(Event(data, fields.get("event"), fields.get("id")))


def read_events(body: bytes, *, step: int = 1, **options: bool) -> list[Event]:
    """All events of a body that arrives `step` bytes at a time."""
    framing = StrictFraming(**options)
    for start in range(0, len(body), step):
        framing.feed(body[start : start + step])
    return framing.close()


@dataclass(slots=True)
class Choice:
    """What one choice said."""

    texts: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass(slots=True)
class OpenAIStream:
    id: str
    choices: dict[int, Choice]
    usage: dict[str, Any] | None
    chunks: list[dict[str, Any]]
    error: dict[str, Any] | None = None


def read_openai_stream(
    body: bytes,
    *,
    object_name: str,
    num_choices: int = 1,
    has_usage: bool = False,
    is_continuous: bool = False,
    may_fail: bool = False,
    step: int = 7,
) -> OpenAIStream:
    """Rules 2 and 6 to 14 for a stream that has ended."""
    events = read_events(body, step=step)
    assert events, "nothing came"
    assert events[-1].data == DONE, "rule 2: the end mark is last"
    chunks = [event.data for event in events[:-1]]
    assert DONE not in chunks, "rule 2: one end mark"
    stream = OpenAIStream("", {}, None, chunks)
    if chunks and "error" in chunks[-1]:
        assert may_fail, chunks[-1]
        stream.error = check_error(chunks.pop())
    if has_usage and stream.error is None:
        last = chunks.pop()
        assert last["choices"] == [], "rule 6: usage comes last, without choices"
        stream.usage = check_usage(last["usage"])
        _check_constants(stream, last, object_name)
    for chunk in chunks:
        _check_constants(stream, chunk, object_name)
        assert (chunk.get("usage") is not None) == is_continuous, "rules 6 and 7"
        if is_continuous:
            check_usage(chunk["usage"])
        assert len(chunk["choices"]) == 1, "sglang and others index choices[0] of every chunk"
        _read_choice(stream, chunk["choices"][0], object_name)
    assert set(stream.choices) <= set(range(num_choices))
    if stream.error is None:
        assert set(stream.choices) == set(range(num_choices))
        for choice in stream.choices.values():
            assert choice.finish_reason in ("stop", "length", "tool_calls", "content_filter")
    return stream


def _check_constants(stream: OpenAIStream, chunk: dict[str, Any], object_name: str) -> None:
    assert chunk["object"] == object_name, "rule 11"
    assert type(chunk["created"]) is int, "rule 12"
    assert isinstance(chunk["model"], str), "rule 12"
    assert stream.id in ("", chunk["id"]), "rule 12: the id changes"
    stream.id = chunk["id"]


def _read_choice(stream: OpenAIStream, part: dict[str, Any], object_name: str) -> None:
    index = part["index"]
    is_first = index not in stream.choices
    choice = stream.choices.setdefault(index, Choice())
    assert choice.finish_reason is None, "rule 13: a chunk after the finish reason"
    choice.finish_reason = part["finish_reason"]
    if object_name == "chat.completion.chunk":
        delta = part["delta"]
        assert isinstance(delta, dict), "rule 12"
        assert delta.get("role") == ("assistant" if is_first else None), "rule 8"
        text = delta.get("content") or ""
        says_more = delta.get("tool_calls") or delta.get("reasoning_content")
    else:
        text, says_more = part["text"], None
    assert text or says_more or choice.finish_reason, "rule 10: an empty chunk"
    choice.texts.append(text)
    if part["logprobs"] is not None:
        choice.logprobs.append(part["logprobs"])


def check_usage(usage: dict[str, Any]) -> dict[str, Any]:
    total = usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["total_tokens"] == total
    assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    return usage


def check_error(envelope: dict[str, Any]) -> dict[str, Any]:
    """Rule 14, and section 4: the whole envelope, nothing that belongs in a log."""
    assert set(envelope) == {"error"}
    error = envelope["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert 0 < len(error["message"]) <= 500
    for leak in ("Traceback", "Error(", "/home/", "site-packages", ".py", "Exception"):
        assert leak not in error["message"], leak
    return dict(error)


@dataclass(slots=True)
class NativeStream:
    tokens: list[str]
    final: dict[str, Any] | None
    error: dict[str, Any] | None = None

    @property
    def text(self) -> str:
        return "".join(self.tokens) + (self.final["token"] if self.final else "")


def read_native_stream(body: bytes, *, may_fail: bool = False, step: int = 3) -> NativeStream:
    """`POST /generate_stream` (section 1.2)."""
    events = [event.data for event in read_events(body, step=step)]
    assert events.pop() == DONE
    assert DONE not in events
    if events and "error" in events[-1]:
        assert may_fail, events[-1]
        return NativeStream(
            [event["token"] for event in events[:-1]], None, check_error(events[-1])
        )
    return _native(events)


def read_event_source(body: bytes, *, may_fail: bool = False, step: int = 3) -> NativeStream:
    """`GET /generate_stream` (section 1.3)."""
    events = read_events(body, step=step, allows_names=True)
    last = events[-1]
    assert [event.name for event in events[:-1]] == ["token"] * (len(events) - 1)
    ids = [int(event.id or "") for event in events if event.name != "error"]
    assert ids == sorted(ids)
    assert all(i > 0 for i in ids)
    if last.name == "error":
        assert may_fail, last.data
        return NativeStream([e.data["token"] for e in events[:-1]], None, check_error(last.data))
    assert last.name == "done"
    return _native([event.data for event in events])


def _native(events: list[dict[str, Any]]) -> NativeStream:
    *tokens, final = events
    assert set(final) == {"token", "sequence_id", "finish_reason", "usage"}
    assert final["finish_reason"] in ("stop", "length")
    check_usage(final["usage"])
    for event in tokens:
        assert set(event) == {"token", "sequence_id"}
        assert event["token"]
        assert event["sequence_id"] == final["sequence_id"]
    return NativeStream([event["token"] for event in tokens], final)


def read_like_sglang(body: bytes) -> str:
    """Lines, six characters cut off, `choices[0]` of every chunk that has choices."""
    text = ""
    for line in body.split(b"\n"):
        line = line.strip()
        if not line:
            continue
        chunk = line.decode("utf-8").removeprefix("data: ")
        if chunk == DONE:
            break
        data = json.loads(chunk)
        if data["choices"]:
            text += data["choices"][0]["text"]
    return text


def read_like_guidellm(body: bytes) -> list[dict[str, Any]]:
    """Lines as HTTP libraries split text, every one of them data, all of them JSON but the end mark."""
    found = []
    for line in body.decode("utf-8").splitlines():
        if not line.strip():
            continue
        assert line.startswith("data:")
        payload = line[len("data:") :].strip()
        if payload == DONE:
            return found
        found.append(json.loads(payload))
    raise AssertionError("no end mark")
