"""Several real models, tiny and random, in one process: loaded by one thread, stepped by another, and always right."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import families
import pytest
from aiohttp.test_utils import TestClient, TestServer

from core.config import EngineConfig, KVCacheConfig, ModelConfig
from core.engine import Engine
from core.errors import ModelRefused
from core.sampling_params import SamplingParams
from server.app import create_app
from server.backends.loading import loading_steps
from server.config import build_config
from server.metrics import Metrics
from server.models.pool import ModelPool
from server.plan import plan_lines

NAMES = ("llama", "qwen2", "gpt_neox")  # two on the fast path, one on the general
PROMPTS = ("one two", "three", "four five six")
KV_CACHE = {"num_blocks": 64}


def alone(folder: Path) -> dict[str, str]:
    """What a model says to each prompt in an engine of its own."""
    engine = Engine.from_config(
        ModelConfig(name=str(folder), dtype="float32"), EngineConfig(), KVCacheConfig(**KV_CACHE)
    )
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    texts = [generation.text for generation in engine.generate(list(PROMPTS), params)]
    return dict(zip(PROMPTS, texts, strict=True))


async def ask(client: TestClient[Any, Any], model: str, prompt: str) -> str:
    body = {"model": model, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    answer = await response.json()
    assert response.status == 200, answer
    assert answer["model"] == model
    text: str = answer["choices"][0]["text"]
    return text


async def test_random_requests_to_models_that_come_and_go_get_the_texts_of_each_alone(tmp_path):
    truth = {}
    for name in NAMES:
        folder = families.build(name, tmp_path / name)
        truth[name] = await asyncio.to_thread(alone, folder)
    entries = [{"name": str(tmp_path / name), "dtype": "float32"} for name in NAMES]
    config = build_config({"models": entries, "kv_cache.num_blocks": 64, "models_memory_mib": 4096})
    metrics = Metrics(NAMES[0])
    pool = ModelPool(config, metrics, loading_steps())
    client = TestClient(TestServer(create_app(config, pool, metrics), host="127.0.0.1"))
    await client.start_server()
    try:
        await asyncio.wait_for(pool.loaded(), 60)
        for name in NAMES:  # and learns how much each takes
            await ask(client, name, PROMPTS[0])
        sizes = [pool.find(name).memory_bytes for name in NAMES]
        pool._residents.budget_bytes = sum(sizes) - 1  # from now on there is room for two
        await pool.unload(NAMES[2])
        order = random.Random(3)
        todo = [(order.choice(NAMES), order.choice(PROMPTS)) for _ in range(24)]
        found = await asyncio.gather(*(ask(client, name, prompt) for name, prompt in todo))
        assert found == [truth[name][prompt] for name, prompt in todo]
        report = pool.report()
        assert report["used_mib"] <= report["budget_mib"]
        assert sum(model["unloads"] for model in report["data"]) >= 2
        assert sum(model["loads"] for model in report["data"]) >= 4  # the third again
        assert [model["requests"] + model["waiting"] for model in report["data"]] == [0, 0, 0]
    finally:
        await client.close()


def test_the_plan_tells_what_each_model_takes_and_whether_they_fit_together(tmp_path):
    folders = [families.build(name, tmp_path / name) for name in NAMES[:2]]
    entries = [{"name": str(folder), "dtype": "float32", "pinned": True} for folder in folders]
    settings = {"models": entries, "kv_cache.num_blocks": 1024, "engine.device": "cpu"}
    lines = plan_lines(build_config({**settings, "models_memory_mib": 4096}))
    assert f"{NAMES[1]} (pinned):" in lines
    assert sum(line.startswith("  memory: 4,096 MiB available") for line in lines) == 2
    assert lines[-2].endswith("of 4,096 MiB: all fit")
    sum_mib = int(lines[-2].partition("together ")[2].split()[0])
    lines = plan_lines(build_config({**settings, "models_memory_mib": sum_mib // 2 + 1}))
    assert lines[-4].endswith("they take turns")
    assert lines[-3].startswith("process: ")
    assert (
        lines[-1] == f"warning: {NAMES[1]} does not fit beside what is pinned, and cannot be loaded"
    )


def test_the_plan_names_the_entry_that_cannot_be_loaded(tmp_path):
    folders = [families.build(name, tmp_path / name) for name in NAMES[:1]]
    entries = [{"name": str(folders[0]), "dtype": "float32"}, {"name": str(tmp_path)}]
    settings = {"models": entries, "kv_cache.num_blocks": 64, "engine.device": "cpu"}
    with pytest.raises(
        ModelRefused, match=r"\(models\[1\]\): models\[1\]\.name is a folder without"
    ):
        plan_lines(build_config(settings))
