"""The real `openai` client when things go wrong, and a hundred streams of it at once."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

USER: Any = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "look_up"}}


@pytest.mark.parametrize("streams", [False, True])
async def test_every_error_is_the_exception_of_its_kind(start_server, connect, streams):
    server = await start_server({"server.api_keys": ["right"]}, max_context=64)
    client, sync = connect(server, api_key="right")
    for kind, changes, param, code in (
        (openai.NotFoundError, {"model": "other"}, "model", "model_not_found"),
        (openai.BadRequestError, {"temperature": 3}, "temperature", "invalid_value"),
        (openai.BadRequestError, {"messages": []}, "messages", "invalid_value"),
        (openai.BadRequestError, {"n": 0}, "n", "invalid_value"),
        (openai.BadRequestError, {"top_logprobs": 2}, "top_logprobs", "invalid_value"),
        (openai.BadRequestError, {"modalities": ["audio"]}, "modalities", "unsupported_value"),
        (openai.BadRequestError, {"tools": [TOOL]}, "tools", "unsupported_value"),
        (openai.BadRequestError, {"logit_bias": {"9999": 1}}, "logit_bias", "invalid_value"),
        (
            openai.BadRequestError,
            {"messages": [{"role": "user", "content": "x" * 99}]},
            "messages",
            "context_length_exceeded",
        ),
    ):
        asked = {"model": "dummy", "messages": USER, "stream": streams, **changes}
        with pytest.raises(kind) as caught:
            await client.chat.completions.create(**asked)
        assert (caught.value.param, caught.value.code) == (param, code)
        assert caught.value.request_id
        with pytest.raises(kind):
            await asyncio.to_thread(sync.chat.completions.create, **asked)
    for changes, param in (({"best_of": 2}, "best_of"), ({"echo": True, "logprobs": 1}, "echo")):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="dummy", prompt="a", stream=streams, **changes)
        assert caught.value.param == param
    wrong, wrong_sync = connect(server, api_key="wrong")
    with pytest.raises(openai.AuthenticationError):
        await wrong.models.list()
    with pytest.raises(openai.AuthenticationError):
        await asyncio.to_thread(wrong_sync.models.list)


async def test_faults_of_the_server_are_the_exceptions_that_clients_retry(start_server, connect):
    settings = {"engine.max_waiting": 1, "engine.batch_size": 1, "server.max_body_bytes": 1 << 20}
    server = await start_server(settings, step_time_s=0.01)
    client, _ = connect(server)
    asked: dict[str, Any] = {"model": "dummy", "prompt": "a", "max_tokens": 5}
    crowd = [client.completions.create(**asked) for _ in range(8)]
    answers = await asyncio.gather(*crowd, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, openai.RateLimitError)]
    assert refused
    assert all(error.response.headers["retry-after"] for error in refused)
    assert all(not isinstance(a, Exception) for a in answers if a not in refused)
    with pytest.raises(openai.APIStatusError) as large:
        await client.completions.create(**{**asked, "prompt": "a" * (2 << 20)})
    assert large.value.status_code == 413
    server.runner.failing_steps = {server.runner.num_steps}
    with pytest.raises(openai.InternalServerError):
        await client.completions.create(**asked)
    server.runner.failing_steps = {server.runner.num_steps}
    again = client.with_options(max_retries=1)
    assert (await again.completions.create(**asked)).usage.completion_tokens == 5
    server.backend.begin_drain()
    with pytest.raises(openai.InternalServerError) as draining:
        await client.completions.create(**asked)
    assert draining.value.status_code == 503
    nowhere, _ = connect("http://127.0.0.1:9")
    with pytest.raises(openai.APIConnectionError):
        await nowhere.models.list()


async def test_a_fault_in_mid_stream_raises_after_the_tokens_before_it(start_server, connect):
    server = await start_server(failing_steps={3}, step_time_s=0.01)
    client, _ = connect(server)
    stream = await client.completions.create(model="dummy", prompt="a", max_tokens=9, stream=True)
    chunks = stream.__aiter__()
    texts = [(await anext(chunks)).choices[0].text for _ in range(3)]
    with pytest.raises(openai.APIError) as fault:
        await anext(chunks)
    assert all(texts)
    assert fault.value.code == "internal_error"


async def test_a_hundred_async_streams_at_once_say_what_they_say_alone(start_server, connect):
    server = await start_server()
    client, _ = connect(server, timeout=60)
    options = {"model": "dummy", "temperature": 0, "max_tokens": 12}

    async def one(number: int) -> tuple[str, str | None]:
        texts, reason = [], None
        asked = [{"role": "user", "content": f"number {number}"}]
        async for chunk in await client.chat.completions.create(
            messages=asked, stream=True, **options
        ):
            texts.append(chunk.choices[0].delta.content or "")
            reason = chunk.choices[0].finish_reason or reason
        return "".join(texts), reason

    together = await asyncio.gather(*(one(number) for number in range(100)))
    for number in range(0, 100, 9):
        assert await one(number) == together[number]
    assert len(set(together)) > 50
    assert (await server.idle()).num_running == 0
