"""The native routes through the real application, backend and step thread."""

from __future__ import annotations

import asyncio
import json
import uuid

import pytest
from strict_clients import check_error, read_event_source, read_native_stream
from yarl import URL


async def post(server, path, body, **options):
    async with server.client.post(path, json=body, **options) as response:
        return response.status, json.loads(await response.read())


async def test_basic_generate_answers_the_prompt_followed_by_the_completion(start_server):
    server = await start_server(script=list(b" there"))
    status, answer = await post(server, "/basic_generate", {"prompt": "  Hi\n"})
    assert (status, answer) == (200, {"generated_text": "  Hi\n there"})


async def test_generate_keeps_order_and_length(start_server):
    server = await start_server()
    prompts = ["one", "two", "three", "one"]
    status, answer = await post(server, "/generate", {"prompts": prompts})
    assert status == 200
    assert set(answer) == {"generated_texts"}
    texts = answer["generated_texts"]
    assert [text[: len(p)] for text, p in zip(texts, prompts, strict=True)] == prompts
    assert texts[0] == texts[3]
    for prompt, text in zip(prompts, texts, strict=True):
        assert await post(server, "/basic_generate", {"prompt": prompt}) == (
            200,
            {"generated_text": text},
        )
    assert await post(server, "/generate", {"prompts": []}) == (200, {"generated_texts": []})
    await server.idle()


async def test_the_default_number_of_tokens_is_fifty(start_server):
    server = await start_server()
    _, answer = await post(server, "/basic_generate", {"prompt": "a"})
    assert len(answer["generated_text"]) == 51


async def test_the_stream_joins_to_the_whole_answer(start_server):
    """B014, B017"""
    text = " Ünï\u2028cöde \U0001f600\n\n    indented "
    server = await start_server(script=list(text.encode()))
    body = {"prompt": "a", "max_tokens": 200, "temperature": 0}
    _, answer = await post(server, "/basic_generate", body)
    assert answer["generated_text"] == "a" + text
    response = await server.client.post("/generate_stream", json=body)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    read = read_native_stream(await response.read())
    assert read.text == text
    assert read.final["finish_reason"] == "stop"
    uuid.UUID(read.final["sequence_id"])
    assert read.final["usage"]["completion_tokens"] == len(text.encode()) + 1
    await server.idle()


async def test_the_get_stream_speaks_to_event_source(start_server):
    """B010"""
    server = await start_server()
    query = "prompt=1e3%20%C3%A9&max_tokens=7&temperature=0&ignore_eos=true&stop=zz%0A&stop=y%0A"
    response = await server.client.get(f"/generate_stream?{query}")
    assert response.status == 200
    read = read_event_source(await response.read())
    assert len(read.tokens) == 7
    _, answer = await post(server, "/basic_generate", {"prompt": "1e3 \u00e9", "max_tokens": 7})
    assert answer["generated_text"] == "1e3 \u00e9" + read.text


async def test_a_browser_that_asks_again_is_told_not_to(start_server):
    server = await start_server()
    response = await server.client.get("/generate_stream?prompt=a", headers={"last-event-id": "7"})
    assert response.status == 204
    assert server.runner.num_steps == 0


@pytest.mark.parametrize(
    "query",
    [
        "",
        "prompt=",
        "prompt=a&temperature=x",
        "prompt=a&top_k=1.5",
        "prompt=a&stream=false",
        "prompt=a&prompt=b",
        "prompt=a&logit_bias={}",
        "prompt=%FF",
        "prompt=a%ED%A0%80",
        "prompt=a&stop=%C3",
        "prompt=a&%FF=1",
    ],
)
async def test_a_bad_query_is_refused_before_the_stream(start_server, query):
    """B004, B078"""
    server = await start_server()
    response = await server.client.get(URL(f"/generate_stream?{query}", encoded=True))
    assert response.status == 400
    check_error(await response.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/basic_generate", {}),
        ("/basic_generate", {"prompt": ""}),
        ("/basic_generate", {"prompt": ["a"]}),
        ("/basic_generate", {"prompt": "a", "n": 2}),
        ("/generate", {"prompts": ["x", ""]}),
        ("/generate", {"prompts": "x"}),
        ("/generate", {"prompts": ["x", 5]}),
        ("/generate", {"prompts": ["x"] * 20_000}),
        ("/generate", {"prompts": ["x", "y", "z", "a" * 3000, "b"]}),
        ("/generate_stream", {"prompt": "a", "stream": False}),
        ("/generate_stream", {"prompt": "a", "max_tokens": -5}),
        ("/generate_vllm", {"prompts": ["a", ""]}),
        ("/generate_vllm", {}),
    ],
)
async def test_bad_bodies_are_refused_and_nothing_of_them_runs(start_server, path, body):
    """B003, B004, B058, B069, B081"""
    server = await start_server()
    status, answer = await post(server, path, body)
    assert status == 400
    check_error(answer)
    assert server.runner.num_steps == 0
    assert (await post(server, "/basic_generate", {"prompt": "a"}))[0] == 200
    await server.idle()


@pytest.mark.parametrize("enabled", [False, True])
async def test_generate_vllm_says_what_is_missing(start_server, enabled):
    server = await start_server({"vllm.enabled": enabled})
    for prompts in ([], ["a"]):
        status, answer = await post(server, "/generate_vllm", {"prompts": prompts})
        assert status == 501
        error = check_error(answer)
        assert error["code"] == "vllm_unavailable"
        assert ("vllm.enabled" in error["message"]) == (not enabled)
        assert "not installed" in error["message"]
        assert "pip install" in error["message"] or "docs.vllm.ai" in error["message"]
    for body in ({}, {"prompts": "a"}, {"prompts": [""]}, {"prompts": [], "temperature": 3}):
        assert (await post(server, "/generate_vllm", body))[0] == 400


async def test_only_json_is_read(start_server):
    server = await start_server({"server.max_body_bytes": 100_000})
    for content_type in ("text/plain", "application/json; charset=latin-1"):
        response = await server.client.post(
            "/basic_generate", data=b'{"prompt": "a"}', headers={"content-type": content_type}
        )
        assert response.status == 415
        check_error(await response.json())
    response = await server.client.post("/basic_generate", data=b"x" * 100_001)
    assert response.status in (413, 415)
    headers = {"content-type": "application/json"}
    response = await server.client.post("/basic_generate", data=b"x" * 100_001, headers=headers)
    assert response.status == 413
    check_error(await response.json())

    async def pieces():
        for _ in range(20):
            yield b" " * 10_000

    response = await server.client.post("/basic_generate", data=pieces(), headers=headers)
    assert response.status == 413
    response = await server.client.post(
        "/basic_generate", data=b'{"prompt": "a", "x": "' + b"x" * 80_000 + b'"}', headers=headers
    )
    assert response.status == 200


async def test_stop_strings_act_on_the_completion_only(start_server):
    """B021, B028"""
    server = await start_server(script=list(b"Hello world, hello"))
    for path in ("/basic_generate", "/generate_stream"):
        for include, expected in ((False, "Hello w"), (True, "Hello world")):
            body = {
                "prompt": "orld",
                "stop": ["orld"],
                "include_stop_str_in_output": include,
            }
            response = await server.client.post(path, json=body)
            if path == "/basic_generate":
                text = (await response.json())["generated_text"].removeprefix("orld")
            else:
                text = read_native_stream(await response.read()).text
            assert text == expected


async def test_a_client_that_hangs_up_on_generate_frees_everything(start_server):
    """B112"""
    server = await start_server(step_time_s=0.005, max_context=4096)
    for _ in range(3):
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.1):
                await post(server, "/generate", {"prompts": ["a", "b", "c"], "max_tokens": 700})
        await server.idle(2.0)


async def test_a_client_that_leaves_a_stream_frees_everything(start_server):
    """B113, B129"""
    server = await start_server(step_time_s=0.005, max_context=4096)
    for path in ("/generate_stream", "/generate_stream?prompt=a&max_tokens=900"):
        for events in (0, 2):
            if "?" in path:
                response = await server.client.get(path)
            else:
                response = await server.client.post(path, json={"prompt": "a", "max_tokens": 900})
            for _ in range(events):
                await response.content.readuntil(b"\n\n")
            response.close()
            await server.idle(2.0)


async def test_lists_beyond_the_queue_are_refused_whole(start_server):
    server = await start_server({"engine.max_waiting": 3})
    status, answer = await post(server, "/generate", {"prompts": ["a"] * 4})
    assert status == 400
    check_error(answer)
    assert server.runner.num_steps == 0
