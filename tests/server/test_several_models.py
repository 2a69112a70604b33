"""Several models in one process, over dummies: routing, loading on demand, unloading, and nothing lost on the way."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import re
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from dummy_loader import make_loader

from core.config import MIB
from core.dummy_runner import ByteTokenizer, make_dummy_runner
from core.errors import ModelRefused, ModelUnavailable
from server.app import create_app
from server.backends.loading import LoadingSteps
from server.config import build_config
from server.config_models import public_name
from server.keys import STATS
from server.metrics import Metrics
from server.models.pool import ModelPool
from server.protocol import admin_answers, answers

KEY = {"authorization": "Bearer root"}
MODEL_MIB = 100


@dataclass
class Workshop:
    """Loads dummies whose every token is the first letter of their name; counts and can hold up or fail loads."""

    loads: Counter[str] = field(default_factory=Counter)
    gates: dict[str, threading.Event] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    step_time_s: float = 0.0
    sizes: dict[str, int] = field(default_factory=dict)  # MiB
    runners: dict[str, Any] = field(default_factory=dict)

    def steps(self) -> LoadingSteps:
        return LoadingSteps(
            make_load=self.make_load,
            needed_bytes=lambda config, limit, report: (
                self.sizes.get(config.model.name, MODEL_MIB) * MIB
            ),
            free_bytes=lambda config: 1000 * MIB,
            prepare=lambda config: None,
            trim=lambda: None,
        )

    def make_load(self, config: Any, limit_bytes: int, aliases: tuple[str, ...]) -> Any:
        name = public_name(config.model)
        letter = ord(name[0])
        runner = make_dummy_runner(
            block_size=16,
            eos_token_ids=(256,),
            vocab_size=257,
            script=lambda sequence: letter,
            step_time_s=self.step_time_s,
        )
        self.runners[name] = runner
        load = make_loader(config, runner, ByteTokenizer())

        def load_and_count(report: Any) -> Any:
            assert threading.current_thread().name == "noria-load"
            report("reading weights", 0.25)
            if name in self.gates:
                assert self.gates[name].wait(10)
            if name in self.refused:
                raise ModelRefused(f"model.name {name} is refused, and this is why.")
            self.loads[name] += 1
            things = load(report)
            plan = things.model.plan
            size = MODEL_MIB * MIB - plan.kv_bytes
            model = dataclasses.replace(
                things.model,
                name=name,
                aliases=aliases,
                plan=dataclasses.replace(plan, weights_bytes=size),
            )
            return dataclasses.replace(things, model=model)

        return load_and_count


@dataclass
class Pooled:
    client: TestClient[web.Request, web.Application]
    pool: ModelPool
    workshop: Workshop

    async def complete(
        self, model: str | None, max_tokens: int = 4, **more: Any
    ) -> tuple[int, Any]:
        body = {"prompt": "Hi", "max_tokens": max_tokens, "temperature": 0, **more}
        response = await self.client.post(
            "/v1/completions", json=body | ({"model": model} if model else {})
        )
        return response.status, await response.json()

    async def text(self, model: str | None, max_tokens: int = 4) -> str:
        status, answer = await self.complete(model, max_tokens)
        assert status == 200, answer
        return answer["choices"][0]["text"]

    def state(self, name: str) -> str:
        return self.pool.states()[name]["state"]

    async def admin(self, path: str, **body: Any) -> tuple[int, Any]:
        response = await self.client.post(f"/admin/models/{path}", json=body, headers=KEY)
        return response.status, await response.json()

    async def until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 10
        while not holds():
            assert time.monotonic() < deadline_s, self.pool.states()
            await asyncio.sleep(0.005)


StartPool = Callable[..., Awaitable[Pooled]]


@pytest.fixture
async def start_pool() -> AsyncIterator[StartPool]:
    started: list[Pooled] = []

    async def start(
        models: str = "abc", workshop: Workshop | None = None, waits: bool = True, **settings: Any
    ) -> Pooled:
        workshop = workshop or Workshop()
        entries = [{"name": name} if isinstance(name, str) else name for name in models]
        given = {"models": entries, "server.admin_key": "root", "log.stats_interval_s": 0.2}
        config = build_config(
            {**given, **{key.replace("__", "."): settings[key] for key in settings}}
        )
        metrics = Metrics(public_name(config.models[0]))
        pool = ModelPool(config, metrics, workshop.steps())
        client = TestClient(TestServer(create_app(config, pool, metrics), host="127.0.0.1"))
        await client.start_server()
        if waits:
            await asyncio.wait_for(pool.loaded(), 10)
        started.append(Pooled(client, pool, workshop))
        return started[-1]

    yield start
    for each in started:
        for gate in each.workshop.gates.values():
            gate.set()
        await each.client.close()


async def test_each_request_is_answered_by_the_model_it_names(start_pool):
    pooled = await start_pool()
    assert [await pooled.text(name) for name in ("b", "a", None, "c")] == [
        "bbbb",
        "aaaa",
        "aaaa",
        "cccc",
    ]
    assert pooled.workshop.loads == {"a": 1, "b": 1, "c": 1}
    listed = await (await pooled.client.get("/v1/models")).json()
    assert [model["id"] for model in listed["data"]] == ["a", "b", "c"]


async def test_only_the_default_is_loaded_before_anybody_asks(start_pool):
    pooled = await start_pool()
    assert [pooled.state(name) for name in "abc"] == ["loaded", "unloaded", "unloaded"]
    one = await (await pooled.client.get("/v1/models/b")).json()
    assert one["id"] == "b"
    assert "max_model_len" not in one


async def test_aliases_lead_to_their_model_and_unknown_names_nowhere(start_pool):
    pooled = await start_pool(
        ["a", {"name": "b", "aliases": ["bee"]}], **{"server__model_aliases": ["first"]}
    )
    status, answer = await pooled.complete("bee")
    assert (answer["model"], answer["choices"][0]["text"]) == ("b", "bbbb")
    assert await pooled.text("first") == "aaaa"
    status, answer = await pooled.complete("z")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    assert (await pooled.client.get("/v1/models/z")).status == 404
    assert (await (await pooled.client.get("/v1/models/bee")).json())["id"] == "b"


ROUTES: list[tuple[str, dict[str, Any]]] = [
    ("/basic_generate", {"prompt": "Hi"}),
    ("/generate", {"prompts": ["Hi", "Ho"]}),
    ("/generate_stream", {"prompt": "Hi"}),
    ("/v1/completions", {"prompt": "Hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "stream": True}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 4}),
    ("/v1/messages", {"messages": [{"role": "user", "content": "Hi"}]}),
]


@pytest.mark.parametrize(("path", "body"), ROUTES)
async def test_every_route_that_generates_asks_the_named_model(start_pool, path, body):
    pooled = await start_pool()
    given = {"model": "b", **body} | ({} if "max_output_tokens" in body else {"max_tokens": 4})
    response = await pooled.client.post(path, json=given)
    assert response.status == 200, await response.text()
    text = await response.text()
    assert "bbbb" in text or text.count('"b"') >= 4, text
    assert "aa" not in re.sub(r"[0-9a-f-]{8,}", "", text)  # apart from random ids
    assert pooled.workshop.loads["b"] == 1


async def test_routes_that_only_read_ask_the_named_model_too(start_pool):
    pooled = await start_pool()
    for path, body in (
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [72]}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "Hi"}]}),
    ):
        response = await pooled.client.post(path, json={"model": "b", **body})
        assert response.status == 200, await response.text()
        assert pooled.workshop.loads["b"] == 1
        refused = await pooled.client.post(path, json={"model": "z", **body})
        assert refused.status == 404
    get = await pooled.client.get(
        "/generate_stream", params={"prompt": "Hi", "model": "c", "max_tokens": "2"}
    )
    assert '"token":"c"' in await get.text()


async def test_the_least_recently_used_goes_when_memory_is_short(start_pool):
    pooled = await start_pool(models_memory_mib=250)
    for name in ("b", "a", "c"):
        await pooled.text(name)
    assert [pooled.state(name) for name in "abc"] == ["loaded", "unloaded", "loaded"]
    assert await pooled.text("b") == "bbbb"
    assert [pooled.state(name) for name in "abc"] == ["unloaded", "loaded", "loaded"]
    assert pooled.workshop.loads == {"a": 1, "b": 2, "c": 1}


async def test_a_pinned_model_is_loaded_at_the_start_and_stays(start_pool):
    pooled = await start_pool(["a", {"name": "b", "pinned": True}, "c"], models_memory_mib=250)
    for name in ("c", "a", "c", "a"):
        await pooled.text(name)
    assert pooled.workshop.loads["b"] == 1
    assert pooled.state("b") == "loaded"
    status, answer = await pooled.admin("unload", model="b")
    assert (status, answer["error"]["code"]) == (409, "model_pinned")
    status, answer = await pooled.admin("load", model="b", pinned=False)
    assert (status, answer["pinned"], answer["state"]) == (200, False, "loaded")
    status, answer = await pooled.admin("unload", model="b")
    assert (status, answer["state"], answer["unloads"]) == (200, "unloaded", 1)


async def test_an_answer_that_runs_is_finished_before_its_model_goes(start_pool):
    pooled = await start_pool("ab", Workshop(step_time_s=0.003), models_memory_mib=150)
    running = asyncio.create_task(pooled.text("a", max_tokens=60))
    await pooled.until(lambda: pooled.pool.stats().num_running == 1)
    assert await pooled.text("b") == "bbbb"
    assert await running == "a" * 60
    assert pooled.state("a") == "unloaded"


async def test_requests_for_a_model_that_is_going_wait_for_it_to_come_back(start_pool):
    pooled = await start_pool("ab", Workshop(step_time_s=0.002), models_memory_mib=150)
    first = asyncio.create_task(pooled.text("a", max_tokens=40))
    await pooled.until(lambda: pooled.pool.find("a").num_leases == 1)
    other = asyncio.create_task(pooled.text("b"))
    await pooled.until(lambda: pooled.pool.find("a").is_closing)
    later = asyncio.create_task(pooled.text("a"))
    assert await asyncio.gather(first, other, later) == ["a" * 40, "bbbb", "aaaa"]
    assert pooled.workshop.loads == {"a": 2, "b": 1}


async def test_a_model_that_waits_for_room_does_not_count_as_if_it_had_it(start_pool):
    pooled = await start_pool("ab", Workshop(step_time_s=0.003), models_memory_mib=150)
    running = asyncio.create_task(pooled.text("a", max_tokens=60))
    await pooled.until(lambda: pooled.pool.stats().num_running == 1)
    waiting = asyncio.create_task(pooled.text("b"))
    await pooled.until(lambda: pooled.state("b") == "loading" and pooled.pool.find("a").is_closing)
    assert pooled.pool.report()["used_mib"] == 100
    assert await asyncio.gather(running, waiting) == ["a" * 60, "bbbb"]
    assert pooled.pool.report()["used_mib"] == 100


async def test_nobody_goes_for_a_model_that_would_not_fit_all_the_same(start_pool):
    workshop = Workshop(sizes={"d": 250})
    pooled = await start_pool(
        [{"name": "a", "pinned": True}, "b", "c", "d"], workshop, models_memory_mib=300
    )
    for name in "bc":
        await pooled.text(name)
    status, answer = await pooled.admin("load", model="d")
    assert (status, answer["error"]["code"]) == (503, "model_unavailable")
    assert "d needs 250 MiB; of models_memory_mib 300 what is pinned leaves 200" in str(answer)
    assert [pooled.state(name) for name in "abcd"] == ["loaded", "loaded", "loaded", "failed"]


async def test_a_model_that_nobody_uses_goes_after_its_time(start_pool):
    pooled = await start_pool([{"name": "a", "pinned": True}, "b"], keep_alive_s=0.1)
    await pooled.text("b")
    await pooled.until(lambda: pooled.state("b") == "unloaded")
    assert pooled.state("a") == "loaded"
    assert await pooled.text("b") == "bbbb"


async def test_three_models_share_room_for_two_and_nothing_is_lost(start_pool):
    """Shown by 4 of the plan, in small."""
    pooled = await start_pool(workshop=Workshop(step_time_s=0.0005), models_memory_mib=250)
    order = random.Random(5)
    seats = asyncio.Semaphore(12)

    async def one(name: str, max_tokens: int) -> None:
        async with seats:
            assert await pooled.text(name, max_tokens) == name * max_tokens

    await asyncio.gather(*(one(order.choice("abc"), order.randint(1, 12)) for _ in range(150)))
    report = pooled.pool.report()
    loads = {model["id"]: model["loads"] for model in report["data"]}
    assert loads == dict(pooled.workshop.loads)
    assert sum(loads.values()) > 3
    assert report["used_mib"] <= report["budget_mib"] == 250
    assert sum(model["requests"] + model["waiting"] for model in report["data"]) == 0


async def test_a_client_that_leaves_while_its_model_loads_leaves_nothing_behind(start_pool):
    pooled = await start_pool("ab")
    pooled.workshop.gates["b"] = threading.Event()
    leaving = asyncio.create_task(pooled.text("b"))
    staying = asyncio.create_task(pooled.text("b"))
    await pooled.until(lambda: pooled.pool.report()["data"][1]["waiting"] == 2)
    leaving.cancel()
    await pooled.until(lambda: pooled.pool.report()["data"][1]["waiting"] == 1)
    pooled.workshop.gates.pop("b").set()
    assert await staying == "bbbb"
    await pooled.until(lambda: pooled.pool.report()["data"][1]["requests"] == 0)


async def test_a_model_that_cannot_be_loaded_harms_no_other(start_pool):
    pooled = await start_pool("ab")
    pooled.workshop.refused.add("b")
    status, answer = await pooled.complete("b")
    assert (status, answer["error"]["code"]) == (503, "model_unavailable")
    assert "this is why" not in answer["error"]["message"]
    assert await pooled.text("a") == "aaaa"
    response = await pooled.client.post("/v1/completions", json={"prompt": "Hi", "model": "b"})
    assert response.status == 503
    assert 1 <= int(response.headers["retry-after"]) <= 5
    status, answer = await pooled.admin("load", model="b")
    assert (status, "models[1].name b is refused" in answer["error"]["message"]) == (503, True)
    assert pooled.state("b") == "failed"
    pooled.workshop.refused.clear()
    status, answer = await pooled.admin("load", model="b")
    assert (status, answer["state"]) == (200, "loaded")
    assert await pooled.text("b") == "bbbb"


async def test_who_asks_while_a_failed_load_is_put_away_is_answered_too(start_pool):
    pooled = await start_pool("ab")
    pooled.workshop.refused.add("b")
    slot = pooled.pool.find("b")
    first = asyncio.create_task(pooled.complete("b"))
    while slot.state != "failed":  # noqa: ASYNC110
        await asyncio.sleep(0)
    assert slot.loading is not None
    with pytest.raises(ModelUnavailable):
        await asyncio.wait_for(pooled.pool.load("b"), 5)
    assert (await first)[0] == 503


async def test_a_model_that_needs_more_than_the_budget_is_told_so(start_pool):
    pooled = await start_pool(
        ["a", {"name": "b", "pinned": True}], models_memory_mib=150, waits=False
    )
    await asyncio.wait_for(pooled.pool.loaded(), 10)
    status, answer = await pooled.admin("load", model="a")
    assert status == 503
    assert (
        "a needs 100 MiB; of models_memory_mib 150 what is pinned leaves 50"
        in answer["error"]["message"]
    )


async def test_a_model_whose_engine_died_is_loaded_again(start_pool):
    pooled = await start_pool("ab")
    await pooled.text("b")

    def explode(step: int, batch: Any) -> None:
        raise SystemExit

    pooled.workshop.runners["b"].on_run = explode
    status, answer = await pooled.complete("b")
    assert status in (500, 503), answer
    assert await pooled.text("a") == "aaaa"
    await pooled.until(lambda: pooled.pool.find("b").backend.status().phase == "dead")
    assert await pooled.text("b") == "bbbb"
    assert pooled.workshop.loads["b"] == 2


async def test_the_memory_of_a_model_that_died_is_free_before_another_counts_on_it(
    start_pool, monkeypatch
):
    pooled = await start_pool("abc", models_memory_mib=250)
    await pooled.text("b")

    def explode(step: int, batch: Any) -> None:
        raise SystemExit

    pooled.workshop.runners["b"].on_run = explode
    await pooled.complete("b")
    backend = pooled.pool.find("b").backend
    await pooled.until(lambda: backend.status().phase == "dead")
    may_stop, stop = asyncio.Event(), backend.stop

    async def stop_later(timeout_s: float) -> None:
        await may_stop.wait()
        await stop(timeout_s)

    monkeypatch.setattr(type(backend), "stop", lambda self, timeout_s: stop_later(timeout_s))
    again = asyncio.create_task(pooled.text("b"))
    await pooled.until(lambda: pooled.state("b") != "loaded")
    third = asyncio.create_task(pooled.text("c"))
    await asyncio.sleep(0.1)
    assert pooled.workshop.loads["c"] == 0
    monkeypatch.undo()
    may_stop.set()
    assert await asyncio.wait_for(asyncio.gather(again, third), 10) == ["bbbb", "cccc"]


async def test_health_and_the_list_of_models_tell_how_far_loading_is(start_pool):
    workshop = Workshop(gates={"a": threading.Event()})
    pooled = await start_pool("ab", workshop, waits=False)
    await pooled.until(lambda: pooled.pool.find("a").progress == 0.25)
    response = await pooled.client.get("/health")
    told = await response.json()
    assert (response.status, told["status"], told["progress"]) == (503, "loading", 0.25)
    assert told["models"]["a"] == {
        "state": "loading",
        "progress": 0.25,
        "message": "reading weights",
    }
    workshop.gates["a"].set()
    await pooled.pool.loaded()
    told = await (await pooled.client.get("/health")).json()
    assert told["models"] == {"a": {"state": "loaded"}, "b": {"state": "unloaded"}}


async def test_watchers_see_a_model_load(start_pool):
    pooled = await start_pool("ab")
    gate = pooled.workshop.gates["b"] = threading.Event()
    headers = {**KEY, "accept": "text/event-stream"}
    async with pooled.client.get("/admin/models", headers=headers) as response:
        seen = []
        asking = asyncio.create_task(pooled.text("b"))
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            report = msgspec.json.decode(line[6:], type=admin_answers.ModelReports)
            seen.append((report.data[1].state, report.data[1].progress))
            if seen[-1] == ("loading", 0.25):
                gate.set()
            if seen[-1][0] == "loaded":
                break
    assert seen[0][0] in ("unloaded", "loading")
    assert ("loading", 0.25) in seen
    assert await asking == "bbbb"


async def test_the_report_tells_what_each_model_does_and_costs(start_pool):
    pooled = await start_pool("ab", Workshop(step_time_s=0.002), price_per_hour=3.6)
    await pooled.text("b", 20)
    response = await pooled.client.get("/admin/models", headers=KEY)
    report = msgspec.json.decode(await response.read(), type=admin_answers.ModelReports)
    first, second = report.data
    assert (first.id, first.is_default, first.generated_tokens, first.ttft_ms) == (
        "a",
        True,
        0,
        None,
    )
    assert second.generated_tokens == 20
    assert second.memory_mib == 100
    assert second.seconds_to_load >= 0
    assert 2 <= second.tpot_ms < 50
    assert 0 < second.tokens_per_s <= 500
    assert second.cost_per_million_tokens == pytest.approx(
        1e6 / second.tokens_per_s * 3.6 / 3600, rel=0.01
    )


async def test_unloading_ends_as_it_should_though_whoever_asked_for_it_gives_up(start_pool):
    pooled = await start_pool("ab", Workshop(step_time_s=0.005))
    running = asyncio.create_task(pooled.text("a", 60))
    await pooled.until(lambda: pooled.pool.stats().num_running == 1)
    asking = asyncio.create_task(pooled.admin("unload", model="a"))
    await pooled.until(lambda: pooled.pool.find("a").is_closing)
    asking.cancel()
    after = asyncio.create_task(pooled.text("a"))  # waits, and has it loaded again
    assert await running == "a" * 60
    assert await after == "aaaa"
    assert pooled.workshop.loads["a"] == 2
    assert pooled.pool.report()["data"][0]["unloads"] == 1
    for name in "ab":
        await pooled.pool.unload(name)
    await pooled.until(lambda: pooled.pool.report()["used_mib"] == 0)


async def test_a_model_that_was_unloaded_takes_no_memory(start_pool):
    pooled = await start_pool("ab")
    await pooled.text("b")
    await pooled.pool.unload("b")
    first, second = pooled.pool.report()["data"]
    assert (first["memory_mib"], second["memory_mib"]) == (100, None)


async def test_watchers_of_the_server_see_each_model(start_pool):
    workshop = Workshop(step_time_s=0.002)
    workshop.gates["c"] = threading.Event()
    pooled = await start_pool("abc", workshop)
    feed = pooled.client.app[STATS]
    feed.sample()
    asking = asyncio.create_task(pooled.text("c"))
    await pooled.text("b", 20)
    await pooled.until(lambda: pooled.pool.states()["c"].get("progress") == 0.25)
    models = msgspec.convert(feed.sample(), answers.StatsSample).models
    assert [models[name].state for name in "abc"] == ["loaded", "loaded", "loading"]
    assert [models[name].generated_tokens for name in "abc"] == [0, 20, 0]
    assert models["b"].generated_tokens_per_s > 0
    assert (models["c"].waiting, models["c"].progress) == (1, 0.25)
    assert models["b"].blocks.cached + models["b"].blocks.free > 0
    workshop.gates["c"].set()
    await asking


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "model"),
        ({"model": 5}, 400, "model"),
        ({"model": "z"}, 404, "model"),
        ({"model": "a", "pinned": 1}, 400, "pinned"),
        ({"model": "a", "force": True}, 400, "force"),
    ],
)
async def test_a_mistaken_order_is_refused_with_its_field(start_pool, body, status, param):
    pooled = await start_pool("ab")
    found, answer = await pooled.admin("load", **body)
    assert (found, answer["error"]["param"]) == (status, param)


async def test_orders_need_the_admin_key(start_pool):
    pooled = await start_pool("ab")
    for path in ("load", "unload"):
        response = await pooled.client.post(f"/admin/models/{path}", json={"model": "b"})
        assert response.status == 401
    assert (await pooled.client.get("/admin/models")).status == 401


async def test_metrics_carry_the_name_of_their_model_and_go_on_after_a_reload(start_pool):
    pooled = await start_pool("ab", models_memory_mib=150)
    for name in ("a", "b", "a", "b"):
        await pooled.text(name, 3)
    text = await (await pooled.client.get("/metrics")).text()
    samples = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))

    def value(name: str, model: str, more: str = "") -> float:
        return float(samples[f'{name}{{engine="0",model_name="{model}"{more}}}'])

    assert len(samples) == len([line for line in text.splitlines() if not line.startswith("#")])
    for name, loads in (("a", 2), ("b", 2)):
        assert value("vllm:generation_tokens_total", name) == 6
        assert value("noria:model_loads_total", name, ',result="loaded"') == loads
        assert value("vllm:time_to_first_token_seconds_count", name) == 2
    assert (value("noria:model_loaded", "a"), value("noria:model_loaded", "b")) == (0, 1)
    assert value("noria:model_unloads_total", "a", ',reason="pressure"') == 2


async def test_draining_ends_the_wait_for_a_model_and_finishes_what_runs(start_pool):
    pooled = await start_pool("ab", Workshop(step_time_s=0.002))
    pooled.workshop.gates["b"] = threading.Event()
    running = asyncio.create_task(pooled.text("a", 40))
    waiting = asyncio.create_task(pooled.complete("b"))
    await pooled.until(lambda: pooled.pool.report()["data"][1]["waiting"] == 1)
    await pooled.until(lambda: pooled.pool.stats().num_running == 1)
    pooled.pool.begin_drain()
    status, answer = await waiting
    assert (status, answer["error"]["code"]) == (503, "draining")
    pooled.workshop.gates["b"].set()
    await pooled.pool.stop(10)
    assert await running == "a" * 40


async def test_the_bound_on_waiting_holds_while_a_model_loads(start_pool):
    pooled = await start_pool("ab", engine__max_waiting=2)
    pooled.workshop.gates["b"] = threading.Event()
    first = [asyncio.create_task(pooled.text("b")) for _ in range(2)]
    await pooled.until(lambda: pooled.pool.report()["data"][1]["waiting"] == 2)
    status, answer = await pooled.complete("b")
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    pooled.workshop.gates.pop("b").set()
    assert await asyncio.gather(*first) == ["bbbb", "bbbb"]


async def test_waiting_for_a_model_ends_when_the_queue_says_so(start_pool):
    pooled = await start_pool("ab", engine__queue_timeout_s=0.1)
    pooled.workshop.gates["b"] = threading.Event()
    status, answer = await pooled.complete("b")
    assert (status, answer["error"]["code"]) == (503, "queue_timeout")
