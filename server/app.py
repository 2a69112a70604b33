"""`create_app`: routes, middlewares and what starts and stops with the application. Wiring as data, no logic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from aiohttp import web

from server import middlewares
from server.api_keys import load_keys
from server.backends.base import Backend
from server.config import ServerConfig
from server.grammars import Grammars
from server.keys import (
    BACKEND,
    CONFIG,
    COUNTER,
    EXECUTOR,
    GRAMMARS,
    METRICS,
    MODELS,
    STATS,
    VLLM,
)
from server.metrics import Metrics
from server.models.lease import OneModel
from server.models.pool import ModelPool
from server.routes import (
    admin,
    anthropic,
    chat,
    completions,
    embeddings,
    health,
    models,
    native,
    pages,
    prefixes,
    responses,
    stats,
    tokenize,
)
from server.stats_feed import StatsFeed

ROUTE_MODULES = (
    health,
    native,
    completions,
    chat,
    embeddings,
    responses,
    anthropic,
    models,
    tokenize,
    stats,
    prefixes,
    admin,
    pages,
)
# Templates and tokenizing release the interpreter lock only in part: two threads keep one slow prompt from blocking
# the next, more would only take time from the step thread.
EXECUTOR_THREADS = 2


def create_app(
    config: ServerConfig, backend: Backend, metrics: Metrics, beside: Backend | None = None
) -> web.Application:
    """The application around a backend. Raises `ConfigError` if the API keys cannot be read.

    `beside` is a vLLM engine for `/generate_vllm` alone.

    The backend starts with the application and returns at once; when the application shuts down, what still runs ends
    with an error event (whoever wants to drain does so before).
    """
    app = web.Application(
        middlewares=[
            middlewares.record,
            middlewares.errors,
            middlewares.preflight,
            middlewares.make_authenticate(load_keys(config.server)),
        ],
        client_max_size=config.server.max_body_bytes,
    )
    app[CONFIG], app[BACKEND], app[METRICS] = config, backend, metrics
    app[MODELS] = (
        backend
        if isinstance(backend, ModelPool)
        else OneModel(backend, metrics, config.price_per_hour)
    )
    app[VLLM] = backend if backend.name == "vllm" else beside
    app[STATS] = StatsFeed(backend, metrics, config.engine, samples=app[MODELS].samples)
    app.on_response_prepare.append(middlewares.decorate)
    app.cleanup_ctx.extend((_executor, _backend, _grammars, _stats))
    app.on_shutdown.extend((_end_stats, _fail_the_rest))
    for module in ROUTE_MODULES:
        app.add_routes(module.routes())
    return app


async def _executor(app: web.Application) -> AsyncIterator[None]:
    executor = ThreadPoolExecutor(EXECUTOR_THREADS, thread_name_prefix="noria-text")
    app[EXECUTOR] = executor
    # Long texts that only want to be counted have a thread of their own, so that no chat ever waits for them.
    counter = ThreadPoolExecutor(1, thread_name_prefix="noria-count")
    app[COUNTER] = counter
    yield
    for each in (executor, counter):
        each.shutdown(wait=False, cancel_futures=True)


async def _grammars(app: web.Application) -> AsyncIterator[None]:
    app[GRAMMARS] = Grammars()
    preparing = asyncio.create_task(app[GRAMMARS].prepare(app[BACKEND]))
    yield
    preparing.cancel()
    app[GRAMMARS].close()


def _backends(app: web.Application) -> list[Backend]:
    beside = app[VLLM]
    return [app[BACKEND]] if beside is None or beside is app[BACKEND] else [app[BACKEND], beside]


async def _backend(app: web.Application) -> AsyncIterator[None]:
    for backend in _backends(app):
        await backend.start()
    yield
    await _fail_the_rest(app)


async def _fail_the_rest(app: web.Application) -> None:
    """Before aiohttp waits for handlers: streams get their error event instead of a cut connection."""
    await asyncio.gather(*(backend.stop(0) for backend in _backends(app)))


async def _stats(app: web.Application) -> AsyncIterator[None]:
    app[STATS].start()
    yield
    await _end_stats(app)


async def _end_stats(app: web.Application) -> None:
    app[STATS].stop()
