"""`GET /v1/models`, `GET /v1/models/{id}` and `GET /v1`."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from server.keys import MODELS
from server.models.lease import find_card
from server.protocol.models import model_list, model_object
from server.routes.openai import both_ways


def routes() -> list[web.RouteDef]:
    """An id may hold slashes, so its route takes the rest of the path and stands behind the list's."""
    return [
        web.get("/v1", root),
        web.get("/v1/", root),
        *both_ways(web.get, "/models", list_models),
        web.get("/v1/models/{id:.+}", get_model),
        web.get("/models/{id:.+}", get_model),
    ]


async def root(request: web.Request) -> web.Response:
    return _json({"status": "ok"})


async def list_models(request: web.Request) -> web.Response:
    return _json(model_list(request.app[MODELS].cards()))


async def get_model(request: web.Request) -> web.Response:
    name = request.match_info["id"].rstrip("/")
    return _json(model_object(find_card(name, request.app[MODELS].cards())))


def _json(value: dict[str, Any]) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
