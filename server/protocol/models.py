"""`GET /v1/models`: what is served, in the API's words. Knows no aiohttp."""

from __future__ import annotations

from typing import Any

from server.backends.base import ServedModel


def model_object(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.created,
        "owned_by": "noria",
        "root": model.root,
        "max_model_len": model.max_model_len,
    }


def model_list(model: ServedModel) -> dict[str, Any]:
    return {"object": "list", "data": [model_object(model)]}
