"""The table of clients in `server/README.md` tells of every test of a client, and is written by a run alone."""

from __future__ import annotations

import pytest
from client_table import BEGIN, END, NOT_RUN, README, Row, listed, merge, read_rows, write_rows

OLD = Row("old", "1.0", "what it ran", "passed, 2026-01-01")
NEW = Row("new", "2.0", "what it runs", "passed, 2026-01-02")


def test_the_table_tells_of_the_tests_that_there_are() -> None:
    rows = read_rows(README.read_text(encoding="utf-8"))
    assert [(row.client, row.runs) for row in rows] == listed()
    for row in rows:
        assert row.version, row
        assert row.result.startswith("passed"), row


def test_what_is_written_is_read_again() -> None:
    text = f"before\n{BEGIN}{END}after\n"
    assert read_rows(text) == []
    written = write_rows(text, [OLD, NEW])
    assert read_rows(written) == [OLD, NEW]
    assert written.startswith("before\n")
    assert written.endswith("after\n")
    assert write_rows(written, [OLD, NEW]) == written
    with pytest.raises(ValueError, match="marks"):
        write_rows("no table", [OLD])


def test_a_run_keeps_what_it_did_not_run_and_drops_what_is_no_client_any_more() -> None:
    again = Row("old", "1.1", "what it runs", "failed (call), 2026-01-02")
    skipped = Row("old", "", "what it runs", f"{NOT_RUN}: no such program, 2026-01-03")
    assert merge([OLD], [NEW], ["new", "old"]) == [NEW, OLD]
    assert merge([OLD, NEW], [again], ["old"]) == [again]
    assert merge([OLD], [skipped], ["old"]) == [OLD]
    assert merge([], [skipped], ["old"]) == [skipped]
