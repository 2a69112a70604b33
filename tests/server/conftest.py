"""A running server over the dummy runner, for every test of HTTP: the real application, backend and step thread.

`start_server` is a factory: `server = await start_server({"engine.batch_size": 2}, script=[72, 105])`. Dotted keys are
settings, keywords go to `make_dummy_runner` and `ByteTokenizer`. The model is ready when the factory returns, unless
`waits=False`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from dummy_loader import MODEL_NAME, make_loader

from core.dummy_runner import ByteTokenizer, DummyRunner, make_dummy_runner
from core.outputs import StepStats
from core.step_loop import Report
from server.app import create_app
from server.backends.base import GenerationRequest
from server.backends.native import LoadedThings, NativeBackend
from server.config import ServerConfig, build_config
from server.metrics import Metrics


@dataclass(slots=True)
class RunningServer:
    """What a test may hold: the client to talk with, and the parts to look into."""

    client: TestClient[web.Request, web.Application]
    backend: NativeBackend
    metrics: Metrics
    runner: DummyRunner
    tokenizer: ByteTokenizer
    config: ServerConfig

    @property
    def url(self) -> str:
        return str(self.client.make_url("/")).rstrip("/")

    def stats(self) -> StepStats:
        return self.backend.stats()

    async def idle(self, timeout_s: float = 5.0) -> StepStats:
        """Waits until nothing runs, nothing waits and no block is held; fails if that does not come true."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            stats = self.stats()
            held = stats.num_running + stats.num_waiting + stats.num_blocks_used
            if not held and not len(self.backend._ledger) and not self.metrics.streams_open:
                return stats
            await asyncio.sleep(0.005)
        raise AssertionError(f"the server did not become idle: {self.stats()}")

    async def scrape(self) -> dict[str, float]:
        """`/metrics` as sample (with labels, without model and engine) to value."""
        text = await (await self.client.get("/metrics")).text()
        samples = {}
        for line in text.splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                for constant in ('engine="0"', f'model_name="{MODEL_NAME}"'):
                    name = name.replace(constant + ",", "").replace("," + constant, "")
                    name = name.replace("{" + constant + "}", "")
                samples[name] = float(value)
        return samples


StartServer = Callable[..., Awaitable[RunningServer]]


@pytest.fixture
async def start_server() -> AsyncIterator[StartServer]:
    servers: list[RunningServer] = []

    async def start(
        settings: dict[str, object] | None = None,
        *,
        load: Callable[[Report], LoadedThings] | None = None,
        waits: bool = True,
        num_eos: int = 1,
        has_chat_template: bool = True,
        tool_format: Any = None,
        has_thoughts: bool = False,
        **options: Any,
    ) -> RunningServer:
        config = build_config({"log.stats_interval_s": 0.2, **(settings or {})})
        options = {"eos_token_ids": tuple(range(256, 256 + num_eos)), **options}
        options.setdefault("vocab_size", 256 + num_eos)
        runner = make_dummy_runner(block_size=config.kv_cache.block_size, **options)
        tokenizer = ByteTokenizer(
            num_eos,
            has_chat_template=has_chat_template,
            tool_format=tool_format,
            has_thoughts=has_thoughts,
        )
        metrics = Metrics(MODEL_NAME)
        backend = NativeBackend(
            config.engine,
            load or make_loader(config, runner, tokenizer),
            metrics,
            config.log.stats_interval_s,
        )
        app = create_app(config, backend, metrics)
        test_server = TestServer(app, host="127.0.0.1")
        await test_server.start_server(shutdown_timeout=2.0)
        client = TestClient(test_server)
        running = RunningServer(client, backend, metrics, runner, tokenizer, config)
        servers.append(running)
        if waits:
            await backend.loaded()
        return running

    yield start
    for running in servers:
        await running.client.close()
        assert running.backend._step_loop.join(2.0), "the step thread is still alive"


def make_request(text: str = "hello", *, max_tokens: int = 8, **params: Any) -> GenerationRequest:
    """A validated request, for tests that talk to a backend directly."""
    from core.sampling_params import SamplingParams

    sampling = SamplingParams(max_tokens=max_tokens, temperature=0, **params)
    return GenerationRequest(list(text.encode()), sampling, seed=0)


@pytest.fixture
def generation_request() -> Callable[..., GenerationRequest]:
    return make_request
