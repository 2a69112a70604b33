"""Packages of Python against the real server with the default model, each in an environment of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from environments import Install

Drive = Callable[..., None]
FRANCE = "What is the capital of France?"


@pytest.mark.clients(
    client="openai",
    runs="chat and completions with every parameter, whole and streamed, tools, JSON schemas, continued messages, "
    "responses, embeddings, models; the exception of each error; 100 async streams at once, the same texts as alone",
)
def test_the_openai_package(python_with: Install, drive: Drive) -> None:
    drive(python_with("openai"), "drive_openai.py")


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
    client="langchain-openai",
    runs="`ChatOpenAI`: invoke, stream, batch, async, usage, structured output in both methods, bound tools; `OpenAI`; "
    "`OpenAIEmbeddings`",
)
def test_langchain(python_with: Install, drive: Drive) -> None:
    drive(python_with("langchain-openai"), "drive_langchain.py")


@pytest.mark.clients(
    client="httpx with httpx-sse",
    runs="`/generate_stream` POST and GET, `/v1/completions`, `/stats/stream`; 16 async streams",
)
def test_httpx_sse(python_with: Install, drive: Drive) -> None:
    drive(python_with("httpx", "httpx-sse"), "drive_httpx_sse.py")


@pytest.mark.clients(
    client="llm",
    runs="prompts, streamed or not, a system prompt, a schema, a completion model, a chat of two turns, its log",
)
def test_llm(
    python_with: Install,
    run: Callable[..., str],
    record_property: Callable[[str, object], None],
    model_server: str,
    tmp_path: Path,
) -> None:
    client = python_with("llm")
    shared = f"  model_name: smollm2-135m-instruct\n  api_base: {model_server}/v1\n"
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"- model_id: noria\n{shared}  supports_schema: true\n- model_id: noria-text\n{shared}  completion: true\n"
    )

    def ask(*words: str, **options: object) -> str:
        env = {"LLM_USER_PATH": str(tmp_path)}
        return run(client.program("llm"), *words, env=env, stdin=None, **options)

    greedy = ("-o", "temperature", "0", "-o", "max_tokens")
    streamed = ask("-m", "noria", FRANCE, *greedy, "24")
    assert "Paris" in streamed
    assert ask("-m", "noria", "--no-stream", FRANCE, *greedy, "24") == streamed
    assert ask("-m", "noria", "-s", "Answer in one word.", FRANCE, *greedy, "24")
    assert "Paris" in ask("-m", "noria-text", "The capital of France is", *greedy, "8")
    person = ask("-m", "noria", "--schema", "is_tall bool", "A person", *greedy, "60")
    assert isinstance(json.loads(person)["is_tall"], bool)
    chatted = ask("chat", "-m", "noria", *greedy, "16", input=f"{FRANCE}\nAnd of Italy?\nexit\n")
    assert "Paris" in chatted
    (logged,) = json.loads(ask("logs", "-n", "1", "--json"))
    assert 0 < logged["output_tokens"] <= 16
    record_property("version", ask("--version").split()[-1])


@pytest.mark.clients(
    client="litellm",
    runs="`completion` whole and streamed, `acompletion`, `embedding`, `text_completion`, required tools; the "
    "exception of an error",
)
def test_litellm(python_with: Install, drive: Drive) -> None:
    drive(python_with("litellm"), "drive_litellm.py")
