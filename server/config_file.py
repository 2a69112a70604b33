"""YAML as people mean it: reading a configuration file and the values of environment and `--set`.

PyYAML follows YAML 1.1, where `on` is true, `010` is 8, `1:30` is 90 and `1e-3` is a string. Here the scalars of
YAML 1.2 hold, a number with a leading zero is no number, and a key that stands twice is an error. Called by
`server/config.py` only.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

from core.errors import ConfigError


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars below instead of YAML 1.1's, and with unique keys."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            name = str(getattr(key, "value", key))
            if name in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {name!r} stands twice", key.start_mark
                )
            seen.add(name)
        return super().construct_mapping(node, deep)


_NULL, _BOOL = "tag:yaml.org,2002:null", "tag:yaml.org,2002:bool"
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
for _tag, _pattern, _first in (
    (_NULL, r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (_BOOL, r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (_INT, r"[-+]?(0|[1-9][0-9]*)", list("-+0123456789")),
    (
        _FLOAT,
        r"[-+]?(0|[1-9][0-9]*)?(\.[0-9]+)?([eE][-+]?[0-9]+)?|[-+]?(0|[1-9][0-9]*)\.([eE][-+]?[0-9]+)?",
        list("-+0123456789."),
    ),
):
    _Loader.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})\Z"), _first)


def _whole(loader: _Loader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node), 10)


def _fraction(loader: _Loader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node))


_Loader.add_constructor(_INT, _whole)
_Loader.add_constructor(_FLOAT, _fraction)


def parse_yaml(text: str, where: str) -> Any:
    """The value of a YAML text. Raises `ConfigError`, one line that begins with `where`."""
    try:
        return yaml.load(text, Loader=_Loader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" (line {mark.line + 1})" if mark else ""
        raise ConfigError(
            f"{where} is not valid YAML: {error.problem or 'syntax'}{line}."
        ) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else "syntax"
        raise ConfigError(f"{where} is not valid YAML: {first}.") from None


def read_text(path: str) -> str:
    """The text of a configuration or key file. Raises `ConfigError` that names the file."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{path} cannot be read: {reason}.") from None


def first_key(text: str) -> str | None:
    """The first key of a YAML mapping, without trusting the rest: other programs have a `config.yaml` too."""
    try:
        is_in_mapping = False
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.MappingStartEvent) and not is_in_mapping:
                is_in_mapping = True
            elif isinstance(event, yaml.ScalarEvent):
                return str(event.value) if is_in_mapping else None
            elif isinstance(event, yaml.SequenceStartEvent | yaml.MappingEndEvent):
                return None
    except yaml.YAMLError:
        return None
    return None
