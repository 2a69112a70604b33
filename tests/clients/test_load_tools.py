"""Tools that measure servers, against the real one: they must finish, count every token, and find no failure."""

from __future__ import annotations

import json
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
