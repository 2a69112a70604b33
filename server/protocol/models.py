"""`GET /v1/models`: what is served, in the API's words. Knows no aiohttp."""

from __future__ import annotations

from typing import Any

from server.models.lease import ModelCard


def model_object(card: ModelCard) -> dict[str, Any]:
    told: dict[str, Any] = {
        "id": card.name,
        "object": "model",
        "created": card.created,
        "owned_by": "noria",
        "root": card.root,
        "max_model_len": card.max_model_len,
    }
    if card.max_model_len is None:  # one of several, and never loaded
        del told["max_model_len"]
    return told


def model_list(cards: list[ModelCard]) -> dict[str, Any]:
    return {"object": "list", "data": [model_object(card) for card in cards]}
