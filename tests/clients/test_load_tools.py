"""Tools that measure servers, against the real one: they must finish, count every token, and find no failure."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from environments import Install, Record, Run

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m-instruct"
NUM_REQUESTS = 16
NUM_TOKENS = 16


@pytest.mark.clients(
    client="locust",
    runs="`loadtest/locustfile.py`: 4 users for 15 s on `/generate_stream`, chat and `/basic_generate`",
)
def test_locust(python_with: Install, run: Run, record_property: Record, model_server: str) -> None:
    client = python_with("locust", "orjson")
    options = ["--headless", "-u", "4", "-r", "4", "-t", "15s", "--max-tokens", "8", "--json"]
    said = run(
        client.program("locust"),
        *("-f", "loadtest/locustfile.py", "-H", model_server, "--only-summary", *options),
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT)},
    )
    entries = {entry["name"]: entry for entry in json.loads(said[said.index("[\n") :])}
    routes = ("/basic_generate", "/generate_stream", "/v1/chat/completions")
    numbers = [entries[route]["num_requests"] for route in routes]
    assert all(numbers)
    assert sum(entry["num_failures"] for entry in entries.values()) == 0
    record_property("version", run(client.program("locust"), "--version").split()[1])
    record_property("result", f"passed: {sum(numbers)} requests, 0 failed")


@pytest.mark.clients(
    client="guidellm",
    runs="`guidellm run`: 16 chats of synthetic text, 4 at a time, 16 tokens each",
)
def test_guidellm(
    python_with: Install,
    run: Run,
    record_property: Record,
    model_server: str,
    default_model_folder: Path,
    tmp_path: Path,
) -> None:
    client = python_with("guidellm", beside=True)
    report = tmp_path / "report.json"
    run(
        client.program("guidellm"),
        "run",
        *("--backend", f"kind=openai_http,target={model_server}"),
        *("--profile", "kind=concurrent,streams=4"),
        *("--constraint", f"kind=max_requests,count={NUM_REQUESTS}"),
        *("--tokenizer", f"kind=hf_auto,model={default_model_folder}"),
        *("--data", f"kind=synthetic_text,prompt_tokens=32,output_tokens={NUM_TOKENS}"),
        *("--output", f"kind=json,path={report}", "--disable-console"),
        cwd=tmp_path,
    )
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]
    assert not requests["errored"]
    assert len(requests["successful"]) == NUM_REQUESTS
    for request in requests["successful"]:
        assert request["output_metrics"]["text_tokens"] == NUM_TOKENS, request
    record_property("version", run(client.program("guidellm"), "--version").split()[-1])
    record_property("result", f"passed: {NUM_REQUESTS} requests, 0 failed")


@pytest.mark.clients(
    client="vllm bench serve",
    runs="backends `openai-chat` and `openai`: 16 random prompts each, 4 at a time, 16 tokens each with `--ignore-eos`",
)
def test_vllm_bench_serve(
    run: Run,
    record_property: Record,
    model_server: str,
    default_model_folder: Path,
    tmp_path: Path,
) -> None:
    python = os.environ.get("NORIA_VLLM_PYTHON", "")
    if not python:
        pytest.skip("NORIA_VLLM_PYTHON names no Python that has vLLM")
    bench = [python, "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    sizes = ["--random-input-len", "32", "--random-output-len", str(NUM_TOKENS), "--ignore-eos"]
    number = ["--num-prompts", str(NUM_REQUESTS), "--max-concurrency", "4"]
    for backend, path in (("openai-chat", "/v1/chat/completions"), ("openai", "/v1/completions")):
        run(
            *(*bench, "--backend", backend, "--base-url", model_server, "--endpoint", path),
            *("--model", MODEL, "--tokenizer", str(default_model_folder)),
            *("--dataset-name", "random", *sizes, *number),
            *("--save-result", "--result-dir", str(tmp_path), "--result-filename", backend),
            cwd=tmp_path,
        )
        result = json.loads((tmp_path / backend).read_text())
        assert result["completed"] == NUM_REQUESTS
        assert result["total_output_tokens"] == NUM_REQUESTS * NUM_TOKENS
    code = "from importlib.metadata import version; print(version('vllm'))"
    record_property("version", run(python, "-c", code).split()[-1])
    record_property("result", f"passed: {2 * NUM_REQUESTS} requests, 0 failed")
