"""The parser reads every legal framing, split anywhere (B010, B012)."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest import sse_client
from loadtest.sse_client import SseEvent, SseParser

NEWLINES = st.sampled_from([b"\n", b"\r\n", b"\r"])
# One line of data each: no line ends inside, all of Unicode otherwise.
DATA = st.text(st.characters(exclude_characters="\r\n", exclude_categories=["Cs"]), max_size=12)
COMMENTS = st.sampled_from([b"", b": ping", b":", b"retry: 10", b"unknown: field"])


def parse(chunks: list[bytes]) -> list[SseEvent]:
    parser = SseParser()
    return [event for chunk in chunks for event in parser.feed(chunk)]


def cut(body: bytes, points: list[int]) -> list[bytes]:
    edges = [0, *sorted(point % (len(body) + 1) for point in points), len(body)]
    return [body[start:end] for start, end in pairwise(edges)]


@st.composite
def bodies(draw: st.DrawFn) -> tuple[bytes, list[str]]:
    """A stream and the data it holds, each line with a line end of its own choice."""
    parts: list[bytes] = []
    data = draw(st.lists(DATA, max_size=6))
    for text in data:
        comment = draw(COMMENTS)
        if comment:
            parts += [comment, draw(NEWLINES)]
        space = b" " if text.startswith(" ") or draw(st.booleans()) else b""
        newline = draw(NEWLINES)
        parts += [b"data:", space, text.encode(), newline, newline]
    return b"".join(parts), data


@given(bodies(), st.lists(st.integers(0, 10_000), max_size=20))
def test_any_framing_split_anywhere_gives_the_same_events(
    body_and_data: tuple[bytes, list[str]], points: list[int]
) -> None:
    """B010: LF, CRLF, CR, `data:` without a space, comments, splits inside CRLF."""
    body, data = body_and_data
    assert [event.data.decode() for event in parse(cut(body, points))] == data


@given(bodies())
def test_one_byte_at_a_time_keeps_characters_whole(body_and_data: tuple[bytes, list[str]]) -> None:
    """B012: a character split over reads is not destroyed."""
    body, data = body_and_data
    single = [body[i : i + 1] for i in range(len(body))]
    assert [event.data.decode() for event in parse(single)] == data


@given(st.lists(st.binary(max_size=30), max_size=10))
def test_no_bytes_whatever_break_the_parser(chunks: list[bytes]) -> None:
    assert parse(chunks) == parse([b"".join(chunks)])


def test_an_event_ends_at_a_lone_cr_without_waiting_for_the_next_byte() -> None:
    assert [event.data for event in parse([b"data: a\r\r"])] == [b"a"]


def test_an_lf_behind_a_split_cr_is_no_second_line_end() -> None:
    assert [event.data for event in parse([b"data: a\r", b"\ndata: b\r", b"\n\r", b"\n"])] == [
        b"a\nb"
    ]


def test_names_ids_and_several_data_lines_are_read() -> None:
    body = b"event: token\nid: 7\ndata: a\ndata:  b\n\ndata\n\n"
    assert parse([body]) == [SseEvent(b"a\n b", "token", "7"), SseEvent(b"", "", "7")]


def test_a_byte_order_mark_is_skipped_even_when_split() -> None:
    assert [event.data for event in parse([b"\xef", b"\xbb\xbfdata: a\n\n"])] == [b"a"]


def test_an_event_without_data_and_an_unfinished_one_are_not_returned() -> None:
    assert parse([b"event: x\n\n: comment\n\ndata: half\n"]) == []


def test_a_line_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse_client, "MAX_LINE_BYTES", 10)
    with pytest.raises(ValueError, match="exceeds 10 bytes"):
        parse([b"data: 123456"])
