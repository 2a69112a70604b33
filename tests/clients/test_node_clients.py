"""Packages of npm against the real server with the default model, on a Node that they want."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from environments import Install

Drive = Callable[..., None]


@pytest.mark.clients(
    client="openai (npm)",
    runs="chat whole, streamed and by its helper, required tools, parsed JSON schema, completions, responses, "
    "embeddings, models; error classes; breaking off a stream",
)
def test_the_openai_package_of_npm(node_with: Install, drive: Drive) -> None:
    drive(node_with("openai"), "drive_openai.mjs")


@pytest.mark.clients(
    client="@ai-sdk/openai-compatible (npm)",
    runs="`generateText`, `streamText`, usage, `Output.object`, required and named tools, completion and embedding "
    "models; errors whole and in a stream",
)
def test_the_ai_sdk(node_with: Install, drive: Drive) -> None:
    drive(node_with("@ai-sdk/openai-compatible", "ai"), "drive_ai_sdk.mjs")


@pytest.mark.clients(
    client="eventsource-parser (npm)",
    runs="the streams of `/generate_stream` POST and GET, completions, chat, messages and responses, without one "
    "error of the parser",
)
def test_eventsource_parser(node_with: Install, drive: Drive) -> None:
    drive(node_with("eventsource-parser"), "drive_eventsource_parser.mjs")
