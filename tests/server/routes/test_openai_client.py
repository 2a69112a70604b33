"""The real `openai` client against a running server."""

from __future__ import annotations

import openai
import pytest


@pytest.fixture
async def client(start_server):
    server = await start_server(script=list(b" Hello there"))
    for base in (f"{server.url}/v1",):
        async with openai.AsyncOpenAI(base_url=base, api_key="any", max_retries=0) as client:
            yield client


async def test_chat_streams_through_the_client(client):
    stream = await client.chat.completions.create(
        model="dummy",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == " Hello there"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage.completion_tokens == 13


async def test_answers_and_errors_have_the_clients_types(client):
    answer = await client.chat.completions.create(
        model="dummy", messages=[{"role": "user", "content": "Hi"}], logprobs=True, top_logprobs=1
    )
    assert answer.choices[0].message.content == " Hello there"
    assert answer.choices[0].logprobs.content[0].token == " "
    completion = await client.completions.create(model="dummy", prompt="Hi", max_tokens=3)
    assert completion.choices[0].text == " He"
    assert (await client.models.list()).data[0].id == "dummy"
    assert (await client.models.retrieve("dummy")).id == "dummy"
    with pytest.raises(openai.NotFoundError) as missing:
        await client.completions.create(model="other", prompt="Hi")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.completions.create(model="dummy", prompt="Hi", temperature=3)
    assert bad.value.param == "temperature"
