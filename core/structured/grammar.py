"""`Grammar`: what an answer must look like, as it was asked for. Plain data; knows no library and no request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

GrammarKind = Literal["json_schema", "regex", "choice", "lark"]

WHITESPACE = r"[ ]{1,16}|\n[ \t]{0,16}"
"""Between the parts of a JSON text: as printers write it, and never without end."""
ANY_OBJECT = '{"type":"object"}'


@dataclass(frozen=True, slots=True)
class Grammar:
    """`text` is a JSON schema, a regular expression, a JSON list of strings, or a grammar in Lark's or GBNF's notation.

    `param` is the path of the request's field that asked for it, for errors.
    """

    kind: GrammarKind
    text: str
    param: str = field(default="grammar", compare=False)
