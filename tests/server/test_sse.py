"""The bytes of events."""

from __future__ import annotations

import json

import orjson
from hypothesis import given
from hypothesis import strategies as st

from server import sse


def test_separators_that_some_clients_split_at_are_escaped() -> None:
    text = "a\x85b\u2028c\u2029d\u2027\u00e9\u0080"
    data = sse.escape(orjson.dumps({"t": text}))
    assert json.loads(data) == {"t": text}
    assert len(data.decode().splitlines()) == 1


@given(st.text())
def test_escaping_never_changes_the_value(text: str) -> None:
    data = sse.escape(orjson.dumps(text))
    assert orjson.loads(data) == text
    assert len(data.decode().splitlines()) == 1


def test_events_end_with_two_line_feeds() -> None:
    """B010"""
    assert sse.event(b"{}") == b"data: {}\n\n"
    assert sse.named_event(b"token", b"{}", 3) == b"event: token\nid: 3\ndata: {}\n\n"
    assert sse.named_event(b"error", b"{}") == b"event: error\ndata: {}\n\n"
    assert sse.DONE == b"data: [DONE]\n\n"
    assert sse.KEEP_ALIVE.startswith(b": ")
