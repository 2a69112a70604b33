"""The table of clients in `server/README.md`: read, and written from the results of a test run.

A test of a client is marked `@pytest.mark.clients(client=..., runs=...)` and records a property `version`, and
`result` where there is more to say than that it passed.
"""

from __future__ import annotations

import ast
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "server" / "README.md"
BEGIN = "<!-- written by `pytest -m clients --write-client-table`; do not edit by hand -->\n"
END = "<!-- end of what the test run wrote -->\n"
COLUMNS = ("client", "version", "what is run", "result")
NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Row:
    client: str
    version: str
    runs: str
    result: str

    def line(self) -> str:
        return f"| {self.client} | {self.version} | {self.runs} | {self.result} |\n"


def read_rows(text: str) -> list[Row]:
    """The rows between the marks; a text without them has none."""
    _, begin, rest = text.partition(BEGIN)
    if not begin:
        return []
    lines = [line for line in rest.partition(END)[0].splitlines() if line.startswith("| ")]
    return [Row(*(cell.strip() for cell in line.strip("|").split(" | "))) for line in lines[2:]]


def write_rows(text: str, rows: list[Row]) -> str:
    """`text` with the rows between its marks. Raises `ValueError` if it has no marks."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError("the marks of the table are missing")
    header = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n"
    table = header + "".join(row.line() for row in rows)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def listed(folder: Path = Path(__file__).parent) -> list[tuple[str, str]]:
    """(client, what is run) of every test of a client, as the files of the tests say, without importing them."""
    found = []
    for path in sorted(folder.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.clients":
                said = {word.arg: ast.literal_eval(word.value) for word in node.keywords}
                found.append((said["client"], said["runs"]))
    return found


def merge(old: list[Row], new: list[Row], clients: list[str]) -> list[Row]:
    """In the order of `clients`: the new row, else the old one. What did not run now keeps what it has."""
    rows = {row.client: row for row in old}
    for row in new:
        if not row.result.startswith(NOT_RUN) or row.client not in rows:
            rows[row.client] = row
    return [rows[client] for client in clients if client in rows]


@dataclass
class Writer:
    """A plugin that writes the table when the run is over."""

    rows: list[Row] = field(default_factory=list)
    tests: dict[str, pytest.Mark] = field(default_factory=dict)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        mark = item.get_closest_marker("clients")
        if mark is not None and mark.kwargs:
            self.tests[item.nodeid] = mark

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self.tests:
            return
        said = dict(report.user_properties)
        if report.skipped:
            assert isinstance(report.longrepr, tuple)
            result = f"{NOT_RUN}: {report.longrepr[2].removeprefix('Skipped: ')}"
        elif report.failed:
            result = f"failed ({report.when})"
        elif report.when == "call":
            result = str(said.get("result", "passed"))
        else:
            return
        said_once = self.tests[report.nodeid].kwargs
        day = time.strftime("%Y-%m-%d", time.gmtime())
        version = str(said.get("version", ""))
        self.rows.append(Row(said_once["client"], version, said_once["runs"], f"{result}, {day}"))

    def pytest_sessionfinish(self) -> None:
        text = README.read_text(encoding="utf-8")
        rows = merge(read_rows(text), self.rows, [client for client, _ in listed()])
        README.write_text(write_rows(text, rows), encoding="utf-8")
