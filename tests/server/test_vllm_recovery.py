"""What `VllmBackend` makes of an engine that answers, dies, comes back or does not: without vLLM, over a played one."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp.test_utils import TestClient, TestServer
from strict_clients import check_error, read_native_stream

from core.config import MemoryPlan
from core.dummy_runner import ByteTokenizer, make_dummy_runner
from core.errors import ModelRefused
from core.outputs import FinishReason
from core.sequence import Sequence
from server.app import create_app
from server.backends.base import ServedModel
from server.backends.restart_budget import RestartBudget
from server.backends.vllm import VllmBackend
from server.backends.vllm_engine import Delta, EngineGone, StepCounter
from server.backends.vllm_reaper import Reaper
from server.config import build_config
from server.metrics import Metrics

TEXT = b" one two three four five six seven eight"


def played_model() -> ServedModel:
    shape = make_dummy_runner(vocab_size=257, eos_token_ids=(256,), max_context=4096).shape
    plan = MemoryPlan(1 << 30, 0.3, None, 0, 0, 1024, 16, 256, 4096, "vLLM")
    return ServedModel("dummy", "dummy", 1700000000, 4096, shape, plan, ByteTokenizer())


class PlayedEngine:
    """Gives the bytes of `TEXT` over and over, one every millisecond; `die` is the end of its process."""

    lines = ("a played engine",)

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.info: dict[str, str] = {}
        self.startup_s: dict[str, float] = {}
        self.num_running = 0
        self.is_shut_down = False
        self._dead = asyncio.Event()
        self._on_death: Callable[[], None] = lambda: None

    async def open(self, on_death: Callable[[], None]) -> None:
        self._on_death = on_death

    async def generate(self, sequence: Sequence) -> AsyncGenerator[Delta, None]:
        self.num_running += 1
        try:
            for number in range(sequence.params.max_tokens):
                await asyncio.sleep(0.001)
                if self._dead.is_set():
                    raise EngineGone
                is_last = number + 1 == sequence.params.max_tokens
                token = TEXT[number % len(TEXT)]
                yield Delta([(token, None)], 0, 0.0, 0, FinishReason.LENGTH if is_last else None)
        finally:
            self.num_running -= 1

    def die(self) -> None:
        self._dead.set()
        self._on_death()

    def shutdown(self) -> None:
        self.is_shut_down = True


class Played:
    """A server over played engines; `plan` says what each further start does."""

    def __init__(self, settings: dict[str, object]) -> None:
        self.config = build_config({"engine.backend": "vllm", **settings})
        self.metrics = Metrics("dummy")
        self.engines: list[PlayedEngine] = []
        self.failing_starts = 0
        self.model = played_model()
        self.backend = VllmBackend(
            self.config.engine,
            self._start,
            StepCounter(),
            self.metrics,
            budget=RestartBudget(first_pause_s=0.01),
        )
        self.client = TestClient(TestServer(create_app(self.config, self.backend, self.metrics)))

    def _start(self, report: Callable[..., None]) -> PlayedEngine:
        report("starting a played engine")
        if self.failing_starts:
            self.failing_starts -= 1
            raise ModelRefused("vLLM cannot start: it is played so.")
        engine = PlayedEngine(self.model)
        self.engines.append(engine)
        return engine

    async def ready(self) -> None:
        async with asyncio.timeout(5):
            while (await self.client.get("/health")).status != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def play() -> AsyncIterator[Callable[..., Played]]:
    made: list[Played] = []

    async def start(**settings: object) -> Played:
        played = Played({key.replace("__", "."): value for key, value in settings.items()})
        made.append(played)
        await played.client.start_server()
        return played

    yield start
    for played in made:
        await played.client.close()
        assert all(engine.is_shut_down for engine in played.engines)
        assert played.backend._reaper._helper is None


async def test_texts_stop_strings_and_lengths_are_those_of_the_native_engine(play):
    played = await play()
    await played.ready()
    body = {"prompt": "a", "max_tokens": 40, "temperature": 0, "stop": ["three"]}
    answer = await played.client.post("/v1/completions", json=body)
    choice = (await answer.json())["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (" one two ", "stop")
    stream = await played.client.post("/generate_stream", json={"prompt": "a", "max_tokens": 8})
    read = read_native_stream(await stream.read())
    assert read.tokens == list(" one two")
    assert read.final["finish_reason"] == "length"
    await asyncio.sleep(0.05)
    assert played.engines[0].num_running == 0  # the early end told the engine


async def test_everything_goes_to_generate_vllm_too(play):
    played = await play()
    await played.ready()
    answer = await played.client.post(
        "/generate_vllm", json={"prompts": ["a", "b"], "max_tokens": 4}
    )
    assert await answer.json() == {"generated_texts": [" one", " one"]}
    answer = await played.client.post("/generate_vllm", json={"prompts": []})
    assert await answer.json() == {"generated_texts": []}


async def test_a_client_that_leaves_ends_its_sequence_in_the_engine(play):
    """B112"""
    played = await play()
    await played.ready()
    stream = await played.client.post("/generate_stream", json={"prompt": "a", "max_tokens": 4000})
    await stream.content.readuntil(b"\n\n")
    stream.close()
    async with asyncio.timeout(3):
        while played.engines[0].num_running or len(played.backend._ledger):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert played.metrics.total("vllm:request_success", "abort") == 1


async def test_a_full_queue_is_429(play):
    played = await play(engine__batch_size=1, engine__max_waiting=1)
    await played.ready()
    body = {"prompt": "a", "max_tokens": 3000}
    streams = [await played.client.post("/generate_stream", json=body) for _ in range(2)]
    refused = await played.client.post("/generate_stream", json=body)
    assert refused.status == 429
    check_error(await refused.json())
    for stream in streams:
        stream.close()


async def test_a_dead_engine_ends_its_streams_with_an_error_turns_red_and_comes_back(play):
    played = await play()
    await played.ready()
    body = {"prompt": "a", "max_tokens": 4000}
    stream = await played.client.post("/generate_stream", json=body)
    await stream.content.readuntil(b"\n\n")
    joined = asyncio.create_task(
        played.client.post("/generate", json={"prompts": ["a"], "max_tokens": 4000})
    )
    await asyncio.sleep(0.05)
    played.failing_starts = 1
    played.engines[0].die()
    rest = await stream.read()
    assert b'"code":"engine_dead"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    assert (await joined).status == 503
    red = await played.client.get("/health")
    assert red.status == 503
    assert (
        await played.client.get("/health/live")
    ).status == 200  # it is coming back: no restart from outside
    refused = await played.client.post("/generate_stream", json=body)
    assert refused.status == 503
    assert "retry-after" in refused.headers
    await played.ready()
    assert played.engines[0].is_shut_down
    answer = await played.client.post("/generate", json={"prompts": ["a"], "max_tokens": 4})
    assert await answer.json() == {"generated_texts": ["a one"]}
    assert played.metrics.sum_of("noria:failures") == 2


async def test_an_engine_that_dies_again_and_again_is_given_up(play):
    played = await play()
    for number in range(4):
        await played.ready()
        assert len(played.engines) == number + 1
        played.engines[-1].die()
    async with asyncio.timeout(5):
        while (await played.client.get("/health/live")).status == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    answer = await played.client.post("/generate", json={"prompts": ["a"]})
    assert answer.status == 503
    assert check_error(await answer.json())["code"] == "engine_dead"
    assert len(played.engines) == 4


async def test_an_engine_that_cannot_start_says_why(play):
    played = await play()
    await played.ready()
    other = Played({})
    other.failing_starts = 1
    await other.client.start_server()
    async with asyncio.timeout(5):
        while (await other.client.get("/health/live")).status == 200:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert "played so" in (await (await other.client.get("/health")).json())["error"]["message"]
    await other.client.close()


async def test_a_drain_lets_running_sequences_finish_and_fails_the_rest(play):
    """B132"""
    played = await play()
    await played.ready()
    short, long = [
        await played.client.post("/generate_stream", json={"prompt": "a", "max_tokens": n})
        for n in (100, 4000)
    ]
    started_s = time.monotonic()
    await played.backend.stop(0.5)
    assert time.monotonic() - started_s < 3
    assert len(read_native_stream(await short.read()).tokens) == 100
    assert read_native_stream(await long.read(), may_fail=True).error["code"] == "draining"


def test_restarts_are_bounded_within_a_window_and_wait_ever_longer():
    budget = RestartBudget(first_pause_s=1, limit=3, window_s=100)
    assert [budget.take(now_s) for now_s in (0, 10, 20, 30)] == [(1, 1), (2, 2), (3, 4), None]
    assert budget.take(105) == (3, 4)  # the first is forgotten


SLEEPER = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); "


def test_the_reaper_ends_an_engine_and_its_workers_when_the_server_is_killed():
    """Nobody is left to stop them but the helper."""
    script = (
        "import os, subprocess, sys, time\n"
        "from server.backends.vllm_reaper import Reaper, _below\n"
        "reaper = Reaper(); reaper.start()\n"
        f"subprocess.Popen([sys.executable, '-c', {SLEEPER + 'time.sleep(60)'!r}], start_new_session=True)\n"
        "while len(_below(os.getpid())) < 3: time.sleep(0.05)\n"
        "reaper.look()\n"
        "print(*(pid for pid, _ in _below(os.getpid())), flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    run = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, timeout=30)
    pids = [int(word) for word in run.stdout.split()]
    assert len(pids) == 3  # the engine, its worker, the helper
    deadline_s = time.monotonic() + 10
    while any(map(is_alive, pids)) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not any(map(is_alive, pids))


def is_alive(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def test_the_reaper_ends_a_dead_engines_rest_and_then_itself():
    reaper = Reaper()
    reaper.start()
    helper = reaper._helper
    first, second = (
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(2)
    )
    reaper.look()
    reaper.kill_rest()
    assert first.wait(5) == second.wait(5) == -9
    reaper.finish()
    assert helper.returncode == 0
    reaper.look()  # nobody is there, and nothing happens
