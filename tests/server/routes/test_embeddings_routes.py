"""`/v1/embeddings` over the dummy runner (whose hidden states count ids modulo 8), and through the `openai` client."""

from __future__ import annotations

import asyncio
import base64

import numpy as np
import openai
import pytest
from strict_clients import check_error


async def post(server, body, status=200):
    async with server.client.post("/v1/embeddings", json=body) as response:
        assert response.status == status, await response.read()
        return await response.json()


def expected(text):
    counts = np.bincount([byte % 8 for byte in text.encode()], minlength=8)
    return counts / np.linalg.norm(counts)


async def test_every_form_of_input_gives_vectors_in_order(start_server):
    server = await start_server({"engine.max_batched_tokens": 16})
    long = "a long text that takes several steps, one chunk each" * 3
    for given, texts in (
        ("hi", ["hi"]),
        (["hi", long, "hi"], ["hi", long, "hi"]),
        ([104, 105], ["hi"]),
        ([[104, 105], [105]], ["hi", "i"]),
    ):
        answer = await post(server, {"model": "dummy", "input": given})
        assert answer["object"] == "list"
        assert answer["model"] == "dummy"
        num_tokens = sum(map(len, texts))
        assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        for index, (item, text) in enumerate(zip(answer["data"], texts, strict=True)):
            assert (item["object"], item["index"]) == ("embedding", index)
            np.testing.assert_allclose(item["embedding"], expected(text), rtol=1e-6)
    await server.idle()


async def test_vectors_do_not_miss_what_the_prefix_cache_knows(start_server):
    server = await start_server()
    text = "x" * 60 + "abc"
    for _ in range(2):
        answer = await post(server, {"input": text})
        np.testing.assert_allclose(answer["data"][0]["embedding"], expected(text), rtol=1e-6)
    body = {"prompt": text, "max_tokens": 1}
    told = await (await server.client.post("/v1/completions", json=body)).json()
    cached = told["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == 62  # what it computed is shared


@pytest.mark.parametrize("policy", ["continuous", "static", "single"])
async def test_streams_go_on_beside_embeddings_under_every_policy(start_server, policy):
    settings = {"engine.policy": policy, "engine.max_batched_tokens": 32}
    server = await start_server(settings, num_blocks=24, checks_context=True)
    chat = {"prompt": "hello", "max_tokens": 40, "temperature": 0}
    alone = await (await server.client.post("/v1/completions", json=chat)).json()
    texts = [f"text {index} " * 20 for index in range(6)]
    crowd = [server.client.post("/v1/completions", json=chat) for _ in range(3)]
    answer, *others = await asyncio.gather(post(server, {"input": texts}), *crowd)
    for item, text in zip(answer["data"], texts, strict=True):
        np.testing.assert_allclose(item["embedding"], expected(text), rtol=1e-6)
    for other in others:
        assert (await other.json())["choices"][0]["text"] == alone["choices"][0]["text"]
    await server.idle()


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input[1]"),
        ({"input": [999]}, "input[0]"),
        ({"input": {}}, "input"),
        ({"input": ["a", "x" * 100]}, "input[1]"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"encoding_format": 5}, "encoding_format"),
        ({"dimensions": 4}, "dimensions"),
        ({"model": 5}, "model"),
    ],
)
async def test_what_is_wrong_is_named_before_anything_runs(start_server, changes, param):
    server = await start_server(max_context=64)
    answer = await post(server, {"input": "a", **changes}, status=400)
    assert check_error(answer)["param"] == param
    assert server.runner.num_steps == 0


async def test_a_failed_step_is_an_error_and_no_vector(start_server):
    server = await start_server(failing_steps={0})
    check_error(await post(server, {"input": "a"}, status=500))
    await server.idle()


async def test_embeddings_are_counted_and_timed(start_server):
    server = await start_server()
    response = await server.client.post("/v1/embeddings", json={"input": ["abc", "de"]})
    assert "prefill;dur=" in response.headers["server-timing"]
    await server.idle()
    samples = await server.scrape()
    assert samples["vllm:prompt_tokens_total"] == 5
    assert samples["vllm:generation_tokens_total"] == 0
    assert samples['vllm:request_success_total{finished_reason="stop"}'] == 2


@pytest.mark.parametrize("encoding", ["float", "base64", openai.NOT_GIVEN])
async def test_the_openai_client_reads_both_encodings(start_server, encoding):
    server = await start_server()
    async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="k") as client:
        answer = await client.embeddings.create(
            model="dummy", input=["hi", "ho"], encoding_format=encoding
        )
        assert answer.usage.prompt_tokens == 4
        for item, text in zip(answer.data, ["hi", "ho"], strict=True):
            vector = item.embedding
            if isinstance(vector, str):
                vector = np.frombuffer(base64.b64decode(vector), dtype="<f4")
            np.testing.assert_allclose(vector, expected(text), rtol=1e-6)
