"""`cases.md` names a test for every fault case, every named test exists, and each of them quotes the id of its case."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

HERE = Path(__file__).parent
_NUMBERS = (
    "001 002 003 004 005 007 010 011 012 013 014 017 019 020 021 023 027 028 029 030 033 035 037 042 043 046 050 "
    "051 053 056 058 059 061 066 069 070 072 073 074 077 078 079 081 082 084 086 088 090 092 093 094 095 097 100"
)
CASES = ["B" + number for number in _NUMBERS.split()]


@cache
def rows() -> dict[str, list[tuple[str, str]]]:
    """Case to its tests as (file, name)."""
    found: dict[str, list[tuple[str, str]]] = {}
    for line in (HERE / "cases.md").read_text(encoding="utf-8").splitlines():
        if match := re.match(r"\| (B\d{3}) \| [^|]+ \|(.*)\|$", line):
            assert match[1] not in found, f"{match[1]} stands there twice"
            found[match[1]] = re.findall(r"`([\w/]+\.py)::(\w+)`", match[2])
    return found


@cache
def docstrings(file: str) -> dict[str, str]:
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    return {
        node.name: ast.get_docstring(node) or ""
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_the_list_has_every_case_and_no_other() -> None:
    assert list(rows()) == CASES


@pytest.mark.parametrize("case", CASES)
def test_a_case_has_tests_that_exist_and_quote_it(case: str) -> None:
    tests = rows()[case]
    assert tests
    for file, name in tests:
        assert case in docstrings(file)[name], f"{file}::{name}"
