"""Typed keys of what the application holds. Handlers reach state through these and nothing else."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from aiohttp import web

from server.backends.base import Backend, RequestRecord
from server.config import ServerConfig
from server.grammars import Grammars

if TYPE_CHECKING:
    from server.metrics import Metrics
    from server.models.lease import Lease, Models
    from server.stats_feed import StatsFeed

CONFIG: web.AppKey[ServerConfig] = web.AppKey("config", ServerConfig)
BACKEND: web.AppKey[Backend] = web.AppKey("backend")
MODELS: web.AppKey[Models] = web.AppKey("models")
VLLM: web.AppKey[Backend | None] = web.AppKey("vllm")  # behind /generate_vllm, if there is one
GRAMMARS: web.AppKey[Grammars] = web.AppKey("grammars", Grammars)
EXECUTOR: web.AppKey[ThreadPoolExecutor] = web.AppKey("executor", ThreadPoolExecutor)
COUNTER: web.AppKey[ThreadPoolExecutor] = web.AppKey("counter", ThreadPoolExecutor)
METRICS: web.AppKey[Metrics] = web.AppKey("metrics")
STATS: web.AppKey[StatsFeed] = web.AppKey("stats")

# Of a request: its id (`request[RECORD].request_id`) and all that its log line will say.
RECORD: web.RequestKey[RequestRecord] = web.RequestKey("record", RequestRecord)
# The request's hold on its model, from when it is known which; the middleware `record` releases it.
LEASE: web.RequestKey[Lease] = web.RequestKey("lease")


def metrics_of(request: web.Request) -> Metrics:
    """Those of the request's model; of the default one while it is not known which."""
    lease = request.get(LEASE)
    return request.app[METRICS] if lease is None else lease.metrics
