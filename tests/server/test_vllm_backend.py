"""The real vLLM behind the real server, as clients see it. `NORIA_VLLM_PYTHON` names a Python that has vLLM and what
Noria needs; `pytest -m vllm tests/server/test_vllm_backend.py` starts it, and leaves no process behind.

In float32, so that texts can be compared with the native engine's. `server/README.md` lists what differs, and why.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from strict_clients import (
    check_error,
    read_event_source,
    read_like_guidellm,
    read_like_sglang,
    read_native_stream,
    read_openai_stream,
)

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]
START_S = 300.0  # a busy machine compiles slowly
COMMON = (
    "model.dtype=float32",
    "model.max_model_len=2048",
    "kv_cache.max_memory_mib=512",
    "log.stats_interval_s=1",
    "vllm.engine_args={enforce_eager: true}",
)
PROMPTS = ["The capital of France is", "Once upon a time", "def fibonacci(n):"]


@dataclass(slots=True)
class Server:
    process: subprocess.Popen[bytes]
    url: str
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")


def vllm_python() -> str:
    python = os.environ.get("NORIA_VLLM_PYTHON", "")
    if not python:
        pytest.fail("set NORIA_VLLM_PYTHON to a Python that has vLLM and Noria's dependencies")
    return python


def start(folder: Path, *settings: str, ready_text: str = "Noria is ready") -> Server:
    log_path = folder / "server.log"
    flags = [word for setting in (*COMMON, *settings) for word in ("--set", setting)]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [vllm_python(), "-m", "server", "--port", "0", *flags],
            cwd=ROOT,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        text = log_path.read_text(errors="replace")
        found = re.search(r"Noria is ready at (\S+)", text)
        if found and ready_text in text:
            return Server(process, found[1], log_path)
        time.sleep(0.2)
    process.kill()
    process.wait()
    pytest.fail(f"the server did not become ready:\n{log_path.read_text(errors='replace')[-4000:]}")


def engine_pids(server_pid: int) -> set[int]:
    """All descendants of a process."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                stat = Path(f"/proc/{name}/stat").read_text()
            except OSError:
                continue
            parents[int(name)] = int(stat.rpartition(")")[2].split()[1])
    found = {server_pid}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return found - {server_pid}


def alive(pids: set[int]) -> set[int]:
    return {
        pid
        for pid in pids
        if os.path.exists(f"/proc/{pid}")
        and Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    }


def assert_all_end(pids: set[int], timeout_s: float = 20.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while alive(pids) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert not alive(pids)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    running = start(tmp_path_factory.mktemp("vllm"), "engine.backend=vllm")
    pids = engine_pids(running.process.pid)
    assert pids
    try:
        yield running
        pids |= engine_pids(running.process.pid)
        running.process.terminate()
        assert running.process.wait(60) == 0, running.log()[-3000:]
    finally:
        if running.process.poll() is None:
            running.process.kill()
            running.process.wait()
        assert_all_end(pids)


@pytest.fixture
async def http(server: Server):
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
        yield session


async def post(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    async with http.post(path, json=body) as response:
        return response.status, await response.json()


async def post_stream(http: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> bytes:
    async with http.post(path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.read()


async def complete(http: aiohttp.ClientSession, prompt: str, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, **fields}
    status, answer = await post(http, "/v1/completions", body)
    assert status == 200, answer
    return answer["choices"][0]


async def scrape(http: aiohttp.ClientSession) -> dict[str, float]:
    async with http.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    pairs = [line.rpartition(" ") for line in lines if line and not line.startswith("#")]
    return {re.sub(r"\{.*", "", name): float(value) for name, _, value in pairs}


async def test_native_streams_are_read_by_strict_clients(http):
    body = {"prompt": PROMPTS[0], "max_tokens": 12, "ignore_eos": True}
    read = read_native_stream(await post_stream(http, "/generate_stream", body))
    assert read.final["usage"]["completion_tokens"] == 12
    assert 1 < len(read.tokens) <= 12
    async with http.get("/generate_stream", params={**body, "ignore_eos": "true"}) as response:
        assert len(read_event_source(await response.read()).tokens) > 1


async def test_openai_streams_are_read_by_strict_clients(http):
    body = {"prompt": PROMPTS[0], "max_tokens": 8, "n": 3, "logprobs": 2, "temperature": 1}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
    raw = await post_stream(http, "/v1/completions", body)
    read = read_openai_stream(raw, object_name="text_completion", num_choices=3, has_usage=True)
    assert read.usage["completion_tokens"] == 24
    assert len({choice.text for choice in read.choices.values()}) > 1
    assert all(choice.logprobs for choice in read.choices.values())
    chat = {"messages": [{"role": "user", "content": "Say hello."}], "stream": True}
    raw = await post_stream(http, "/v1/chat/completions", {**chat, "max_tokens": 12})
    read = read_openai_stream(raw, object_name="chat.completion.chunk")
    assert read.choices[0].text
    plain = {"prompt": PROMPTS[1], "max_tokens": 10, "temperature": 0, "stream": True}
    raw = await post_stream(http, "/v1/completions", plain)
    assert read_like_sglang(raw) == (await complete(http, PROMPTS[1], max_tokens=10))["text"]
    assert read_like_guidellm(raw)


async def test_one_token_one_event(http):
    body = {"prompt": "1 2 3 4 5", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    read = read_native_stream(await post_stream(http, "/generate_stream", body))
    assert len(read.tokens) >= 18  # but for texts that are held back


async def test_stop_strings_stop_tokens_and_lengths(http):
    whole = await complete(http, PROMPTS[1], max_tokens=24, ignore_eos=True)
    assert whole["finish_reason"] == "length"
    text = whole["text"]
    stop = text[10:14]
    cut = await complete(http, PROMPTS[1], max_tokens=24, stop=[stop])
    assert (cut["text"], cut["finish_reason"]) == (text[: text.index(stop)], "stop")
    kept = await complete(
        http, PROMPTS[1], max_tokens=24, stop=stop, include_stop_str_in_output=True
    )
    assert kept["text"] == text[: text.index(stop) + len(stop)]
    status, tokens = await post(http, "/tokenize", {"prompt": PROMPTS[1] + text})
    assert status == 200
    ended = await complete(http, PROMPTS[1], max_tokens=24, stop_token_ids=tokens["tokens"][6:8])
    assert ended["finish_reason"] == "stop"
    assert text.startswith(ended["text"])
    late = await complete(http, PROMPTS[1], max_tokens=24, stop=[stop], min_tokens=20)
    assert len(late["text"]) > len(cut["text"])


async def test_a_seed_gives_the_same_text_again(http):
    hot = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
    texts = [(await complete(http, PROMPTS[1], seed=seed, **hot))["text"] for seed in (7, 7, 8)]
    assert texts[0] == texts[1] != texts[2]
    free = {(await complete(http, PROMPTS[1], **hot))["text"] for _ in range(3)}
    assert len(free) > 1
    nucleus = await complete(http, PROMPTS[0], temperature=1, top_p=0)
    assert nucleus["text"] == (await complete(http, PROMPTS[0]))["text"]


async def test_greedy_texts_and_logprobs_are_the_native_engines(http, default_model_folder):
    """Same weights, same ids, float32: what is left is the order of additions."""
    native = await asyncio.to_thread(native_answers)
    num_equal = 0
    for prompt, (expected, values) in zip(PROMPTS, native, strict=True):
        choice = await complete(http, prompt, max_tokens=24, logprobs=2)
        num_equal += choice["text"] == expected
        assert choice["text"][:20] == expected[:20]
        found = choice["logprobs"]["token_logprobs"]
        assert max(abs(a - b) for a, b in zip(found[:8], values[:8], strict=True)) < 0.05
    assert num_equal >= len(PROMPTS) - 1


def native_answers() -> list[tuple[str, list[float]]]:
    from core.config import EngineConfig, KVCacheConfig, ModelConfig
    from core.engine import Engine
    from core.model.loader import load_model
    from core.sampling_params import SamplingParams

    engine_config = EngineConfig(batch_size=4)
    model = ModelConfig(dtype="float32", max_model_len=2048)
    loaded = load_model(model, engine_config, KVCacheConfig(num_blocks=256), lambda *_: None)
    engine = Engine(engine_config, loaded.runner, loaded.tokenizer)
    params = SamplingParams(max_tokens=24, temperature=0, logprobs=2)
    answers = engine.generate([loaded.tokenizer.encode(p) for p in PROMPTS], params)
    return [(a.text, [entry.logprob for entry in a.logprobs or []]) for a in answers]


async def test_a_crowd_gets_the_texts_of_the_lonely(http):
    alone = [(await complete(http, prompt))["text"] for prompt in PROMPTS]
    many = await asyncio.gather(*(complete(http, p, max_tokens=16) for p in PROMPTS * 4))
    assert sum(m["text"] == t for m, t in zip(many, alone * 4, strict=True)) >= 10


async def test_the_openai_client_works(server, http):
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0
    ) as client:
        name = (await client.models.list()).data[0].id
        stream = await client.chat.completions.create(
            model=name,
            messages=[{"role": "user", "content": "Say hello."}],
            stream=True,
            max_tokens=8,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        assert chunks[-1].usage.completion_tokens == 8
        with pytest.raises(openai.BadRequestError):
            await client.completions.create(model=name, prompt="Hi", temperature=3)


async def test_bad_requests_are_refused_before_vllm_sees_them(http):
    for body in ({"prompt": ""}, {"prompt": "a", "temperature": 3}, {"prompt": "a", "n": True}):
        status, answer = await post(http, "/v1/completions", body)
        assert status == 400
        check_error(answer)
    status, answer = await post(http, "/v1/completions", {"prompt": "word " * 3000})
    assert check_error(answer)["code"] == "context_length_exceeded"
    status, answer = await post(http, "/generate_vllm", {"prompts": ["a", ""]})
    assert status == 400
    assert await post(http, "/generate_vllm", {"prompts": []}) == (200, {"generated_texts": []})
    status, answer = await post(http, "/generate_vllm", {"prompts": PROMPTS, "max_tokens": 4})
    assert len(answer["generated_texts"]) == 3


async def test_clients_that_leave_free_everything(http):
    """B112"""
    body = {"prompt": PROMPTS[1], "max_tokens": 1900, "ignore_eos": True}
    streams = [await http.post("/generate_stream", json=body) for _ in range(4)]
    for stream in streams:
        await stream.content.readuntil(b"\n\n")
    assert (await scrape(http))["vllm:num_requests_running"] > 0
    for stream in streams:
        stream.close()
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        samples = await scrape(http)
        if not samples["vllm:num_requests_running"] and not samples["vllm:kv_cache_usage_perc"]:
            break
        await asyncio.sleep(0.1)
    assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0
    assert samples["noria:streams_open"] == 0


async def test_log_and_metrics_say_what_the_native_ones_say(server, http):
    log = server.log()
    assert re.search(r"KV cache: [\d,]+ blocks x \d+ = [\d,]+ tokens", log)
    assert re.search(r"Maximum concurrency for 2,048 tokens per request: \d+\.\d\dx", log)
    assert re.search(r"stats .*generated_tokens_per_s=\d+", log)
    assert re.search(r"request id=\S+ route=/v1/completions status=200 .*ttft_ms=", log)
    samples = await scrape(http)
    for name in (
        "vllm:generation_tokens_total",
        "vllm:prompt_tokens_total",
        "vllm:prefix_cache_queries_total",
        "vllm:iteration_tokens_total_count",
        "vllm:request_queue_time_seconds_count",
        "noria:kv_blocks_capacity",
    ):
        assert samples[name] > 0, name


async def test_a_killed_engine_ends_its_streams_turns_red_and_comes_back(server, http):
    """The last test of this server: it takes as long as a start."""
    body = {"prompt": PROMPTS[1], "max_tokens": 1900, "ignore_eos": True}
    streams = [await http.post("/generate_stream", json=body) for _ in range(6)]
    joined = asyncio.create_task(post(http, "/generate", {"prompts": ["a"], "max_tokens": 1900}))
    for stream in streams:
        await stream.content.readuntil(b"\n\n")
    before = engine_pids(server.process.pid)
    [engine] = [pid for pid in before if b"EngineCore" in _command(pid)]
    os.kill(engine, signal.SIGKILL)
    for stream in streams:
        rest = await asyncio.wait_for(stream.read(), 10)
        assert json.loads(rest.split(b"data: ")[-2])["error"]["code"] == "engine_dead"
        assert rest.endswith(b"data: [DONE]\n\n")
    assert (await joined)[0] == 503
    async with http.get("/health") as red:
        assert red.status == 503
    status, answer = await post(http, "/generate", {"prompts": ["a"]})
    assert (status, check_error(answer)["code"]) == (503, "loading")
    deadline_s = time.monotonic() + START_S
    while time.monotonic() < deadline_s:
        async with http.get("/health") as health:
            if health.status == 200:
                break
        await asyncio.sleep(0.5)
    assert (await complete(http, PROMPTS[0], max_tokens=4))["text"]
    assert "engine restart restart=1 limit=3" in server.log()
    tracker = {pid for pid in before if b"resource_tracker" in _command(pid)}
    helper = {pid for pid in before if b"vllm_reaper" in _command(pid)}
    assert_all_end(before - tracker - helper)


def _command(pid: int) -> bytes:
    path = Path(f"/proc/{pid}/cmdline")
    return path.read_bytes() if path.exists() else b""


async def test_vllm_beside_the_native_engine_and_nothing_is_left_of_a_killed_server(tmp_path):
    running = await asyncio.to_thread(start, tmp_path, "vllm.enabled=true")
    pids: set[int] = set()
    try:
        async with aiohttp.ClientSession(running.url) as http:
            body = {"prompts": PROMPTS, "max_tokens": 8, "temperature": 0}
            status, native = await post(http, "/generate", body)
            assert status == 200
            deadline_s = time.monotonic() + START_S
            while time.monotonic() < deadline_s:
                status, answer = await post(http, "/generate_vllm", body)
                if status != 503:
                    break
                assert check_error(answer)["code"] == "loading"
                await asyncio.sleep(0.5)
            assert status == 200, answer
            texts = [p + t for p, t in zip(PROMPTS, answer["generated_texts"], strict=True)]
            assert texts == native["generated_texts"]
            async with http.get("/metrics") as response:
                assert 'vllm:generation_tokens_total{engine="1"' in await response.text()
            async with http.get("/health") as response:
                assert (await response.json())["vllm"] == "ready"
        assert "beside: Maximum concurrency for 2,048 tokens" in running.log()
        pids = engine_pids(running.process.pid)
        assert pids
    finally:
        running.process.kill()
        running.process.wait()
    assert_all_end(pids)
