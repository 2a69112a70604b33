"""`models` of the configuration: several models in one process, and the names that clients know them by."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from core.config import ModelConfig
from core.errors import ConfigError
from server.config_rules import RULES, Rule, switch, text, texts


class ModelEntry(ModelConfig, frozen=True, forbid_unknown_fields=True):
    """One of several models: the keys of section `model`, and those that only make sense beside others.

    `pinned`: loaded at the start and never unloaded for others. `served_name`: what clients call it; None: as in
    `public_name`. `aliases`: further names.
    """

    pinned: bool = False
    served_name: str | None = None
    aliases: tuple[str, ...] = ()


_ENTRY_RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **{
            key.removeprefix("model."): rule
            for key, rule in RULES.items()
            if key.startswith("model.")
        },
        "pinned": switch(),
        "served_name": text().or_word(None),
        "aliases": texts(),
    }
)


def read_entries(value: object) -> tuple[ModelEntry, ...]:
    """The models of a configuration. Raises `ConfigError` that names the entry, the key and what it accepts."""
    assert isinstance(value, Sequence)
    entries = [_read_entry(f"models[{place}]", each) for place, each in enumerate(value)]
    _check_names(entries)
    return tuple(entries)


def _read_entry(path: str, value: object) -> ModelEntry:
    if isinstance(value, ModelEntry):
        return value
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, dict) or "name" not in value:
        raise ConfigError(f"{path} must be a mapping with a name, such as {{name: owner/model}}.")
    for key, given in value.items():
        rule = _ENTRY_RULES.get(key)
        if rule is None:
            raise ConfigError(f"{path} has no key {key!r}; it has: {', '.join(_ENTRY_RULES)}.")
        if not rule.accepts(given):
            raise ConfigError(f"{path}.{key} must be {rule.words}, not {given!r}.")
    fields: dict[str, Any] = {
        key: tuple(each) if isinstance(each, list) else each for key, each in value.items()
    }
    return ModelEntry(**fields)


def _check_names(entries: list[ModelEntry]) -> None:
    owner: dict[str, int] = {}
    for place, entry in enumerate(entries):
        for name in (public_name(entry), *entry.aliases):
            if owner.setdefault(name, place) != place:
                raise ConfigError(
                    f"models[{place}] and models[{owner[name]}] are both called {name}; set served_name of one."
                )


def in_terms_of_entries(message: str, place: int) -> str:
    """What loading says about a section `model`, about the entry that stands for it here."""
    keys = "|".join(ModelConfig.__struct_fields__)
    told = re.sub(rf"(?<![\w./-])model\.({keys})\b", rf"models[{place}].\1", message)
    return told.replace(
        "raise kv_cache.memory_fraction", "raise models_memory_mib or kv_cache.memory_fraction"
    ).replace("what remains beside the weights", "what models_memory_mib leaves beside the weights")


def default_name(models: tuple[ModelEntry, ...], model: ModelConfig) -> str:
    """Of the model that answers those who name none."""
    return public_name(models[0]) if models else model.name


def public_name(model: ModelConfig) -> str:
    """The model's name as clients see it: `served_name`, else as configured, but never a path."""
    if isinstance(model, ModelEntry) and model.served_name is not None:
        return model.served_name
    path = Path(os.path.expanduser(model.name))
    if model.name.endswith(".gguf"):
        return path.stem
    return (path.resolve().name or "model") if path.exists() else model.name
