"""Probes, metrics and the version: what operators and balancers ask. Answers come from the backend's own status."""

from __future__ import annotations

import asyncio
import time

import orjson
from aiohttp import web

from core import __version__
from core.errors import Draining, EngineDead, ModelLoading, NoriaError
from server.backends.base import BackendStatus
from server.keys import BACKEND, METRICS, MODELS, RECORD, VLLM
from server.metrics import CONTENT_TYPE
from server.protocol.errors import error_headers, error_object


def routes() -> list[web.RouteDef]:
    return [
        web.get("/health", ready),
        web.get("/health/ready", ready),
        web.get("/health/live", live),
        web.get("/metrics", metrics),
        web.get("/version", version),
    ]


async def ready(request: web.Request) -> web.Response:
    """Model loaded, not draining, and the last step not older than `engine.watchdog_s` while there is work."""
    status = request.app[BACKEND].status()
    if status.phase == "ready" and not status.is_step_stale:
        told: dict[str, object] = {"status": "ready", "message": status.message}
        if states := request.app[MODELS].states():
            told["models"] = states
        beside = request.app[VLLM]
        if beside is not None:  # its readiness is that of /generate_vllm, not of this server
            told["vllm"] = beside.status().phase
        return _json(told)
    return _unhealthy(request, status, _why_not_ready(status))


async def live(request: web.Request) -> web.Response:
    """The loop turns (it answers) and the step thread lives. Loading and draining are no reason for a restart."""
    status = request.app[BACKEND].status()
    if status.phase == "dead" or (status.is_step_stale and status.phase != "loading"):
        return _unhealthy(request, status, _why_not_ready(status))
    return _json({"status": "live"})


def _why_not_ready(status: BackendStatus) -> NoriaError:
    match status.phase:
        case "loading":
            return ModelLoading(status.message or "The model is loading.")
        case "draining":
            return Draining("The server is shutting down.")
        case "dead":
            return EngineDead(status.message or "The engine has stopped.")
    return EngineDead("The last step is older than engine.watchdog_s although there is work.")


def _unhealthy(request: web.Request, status: BackendStatus, error: NoriaError) -> web.Response:
    """The usual envelope, with the phase and the progress of loading beside it."""
    body: dict[str, object] = {"error": error_object(error, request[RECORD].request_id)}
    body["status"] = "stale" if status.phase == "ready" else status.phase
    if status.progress is not None:
        body["progress"] = round(status.progress, 4)
    if states := request.app[MODELS].states():
        body["models"] = states
    return web.Response(status=error.status, headers=error_headers(error), body=orjson.dumps(body))


async def metrics(request: web.Request) -> web.Response:
    observed = request.app[METRICS]
    start_s = time.monotonic()
    await asyncio.sleep(0)  # one turn of the loop: its lag when no step has been delivered
    observed.loop_lag_s = max(observed.loop_lag_s, time.monotonic() - start_s)
    return web.Response(body=observed.render(), headers={"content-type": CONTENT_TYPE})


async def version(request: web.Request) -> web.Response:
    return _json({"version": __version__})


def _json(value: object) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
