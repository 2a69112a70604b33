"""Packages of Python against the real server with the default model, each in an environment of its own."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from environments import Install

Drive = Callable[..., None]
FRANCE = "What is the capital of France?"


@pytest.mark.clients(
    client="anthropic",
    runs="messages whole and streamed, `count_tokens`, `stop_sequences`, prefill; the exception of each error; 8 async "
    "streams; the same again with pings in every silence of 10 ms",
)
def test_the_anthropic_package(python_with: Install, drive: Drive, pinging_server: str) -> None:
    client = python_with("anthropic")
    drive(client, "drive_anthropic.py", pinging_server)
    drive(client, "drive_anthropic.py")


@pytest.mark.clients(
    client="httpx with httpx-sse",
    runs="`/generate_stream` POST and GET, `/v1/completions`, `/stats/stream`; 16 async streams",
)
def test_httpx_sse(python_with: Install, drive: Drive) -> None:
    drive(python_with("httpx", "httpx-sse"), "drive_httpx_sse.py")
