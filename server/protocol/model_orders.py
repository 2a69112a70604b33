"""`POST /admin/models/load` and `/unload`: what they accept. Knows no aiohttp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from core.errors import InvalidValue
from server.protocol.fields import convert


class ModelUnloadFields(msgspec.Struct, frozen=True):
    model: str | None = None


class ModelLoadFields(ModelUnloadFields, frozen=True):
    pinned: bool | None = None


T = TypeVar("T", bound=ModelUnloadFields)


def parse_load(body: Mapping[str, Any]) -> ModelLoadFields:
    """Raises `InvalidValue`."""
    return _checked(body, convert(body, ModelLoadFields), {"model", "pinned"})


def parse_unload(body: Mapping[str, Any]) -> ModelUnloadFields:
    """Raises `InvalidValue`."""
    return _checked(body, convert(body, ModelUnloadFields), {"model"})


def _checked(body: Mapping[str, Any], fields: T, known: set[str]) -> T:
    """An operator's mistake is refused rather than ignored."""
    if fields.model is None:
        raise InvalidValue("model is needed: the name of one of the models.", param="model")
    for name in body.keys() - known:
        raise InvalidValue(f"{name[:64]} is not a field of this route.", param=name[:64])
    return fields
