"""Whatever the bytes: a 4xx envelope before any stream, nothing of it runs, and the next request is as ever."""

from __future__ import annotations

import asyncio
import random
import threading

import orjson
from strict_clients import check_error

JSON = {"content-type": "application/json"}
ROUTES = {
    "/basic_generate": {"prompt": "a"},
    "/generate": {"prompts": ["a"]},
    "/generate_stream": {"prompt": "a"},
    "/generate_vllm": {"prompts": ["a"]},
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [1]},
}
RAW = [
    b"",
    b"{'prompt': 'a'}",
    b'{"prompt": "a"} {"prompt": "b"}',
    b'{"prompt": "a',
    b'{"prompt": "a" // comment\n}',
    b'{"prompt": "\xe9"}',
    b'\xef\xbb\xbf{"prompt": "a"}',
    rb'{"prompt": "a", "prompts": ["a", "\udbff"], "stop": ["a", "\udfff"]}',
    rb'{"prompt": "a", "metadata": {"k": "\ud83d"}}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "temperature": 1e400}',
    b'{"prompt": "a", "frequency_penalty": -1e5000}',
    b'{"prompt": "a", "logit_bias": {"5": Infinity}}',
    b'{"prompt": "a", "metadata": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}",
    b'{"prompt": "a", "logit_bias": ' + b"[" * 500 + b"]" * 500 + b"}",
    b"[" * 100_000,
    b"[1, 2]",
    b'"text"',
    b"null",
]
VALUES = [
    None,
    True,
    0,
    -1,
    1.5,
    2**63,
    2**70 * 1.0,
    "",
    "x",
    "10",
    [],
    [None],
    ["x"],
    [1],
    {},
    {"a": 1},
]
FIELDS = [
    "prompt", "prompts", "messages", "tokens", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p",
    "seed", "stop", "stop_token_ids", "logit_bias", "n", "logprobs", "top_logprobs", "stream", "stream_options",
    "model", "tools", "tool_choice", "response_format", "echo", "best_of", "suffix", "user", "request_id",
    "repetition_penalty", "ignore_eos", "max_completion_tokens", "chat_template_kwargs", "add_generation_prompt",
]  # fmt: skip


async def alive(server) -> None:
    async with server.client.post(
        "/basic_generate", json={"prompt": "a", "max_tokens": 2}
    ) as answer:
        assert answer.status == 200
    async with server.client.get("/health") as answer:
        assert answer.status == 200


async def test_malformed_bodies_are_refused_on_every_route(start_server):
    """B042, B074, B077, B078"""
    server = await start_server()
    for path in ROUTES:
        for raw in RAW:
            async with server.client.post(path, data=raw, headers=JSON) as answer:
                assert answer.status == 400, (path, raw[:60])
                check_error(orjson.loads(await answer.read()))
    assert server.runner.num_steps == 0
    await alive(server)
    await server.idle()


async def test_random_fields_never_break_the_server(start_server):
    """B004, B142"""
    server = await start_server({"engine.max_waiting": 64}, max_context=64)
    chance = random.Random(7)
    for _ in range(600):
        path, body = chance.choice(list(ROUTES.items()))
        body = {**body, "max_tokens": 3}
        for _ in range(chance.randint(1, 3)):
            body[chance.choice(FIELDS)] = chance.choice(VALUES)
        async with server.client.post(
            path, data=orjson.dumps(body), headers={"content-type": "application/json"}
        ) as answer:
            assert answer.status in (200, 400, 404, 501), (path, body)
            if answer.status != 200:
                check_error(orjson.loads(await answer.read()))
            else:
                await answer.read()
    await alive(server)
    await server.idle()


async def test_while_the_model_loads_requests_are_told_to_come_back(start_server):
    release = threading.Event()

    def load(report):
        release.wait(10)
        raise RuntimeError("never mind")

    server = await start_server(load=load, waits=False)
    try:
        for path, body in ROUTES.items():
            async with server.client.post(path, json=body) as answer:
                assert answer.status == (501 if path == "/generate_vllm" else 503)
                error = check_error(orjson.loads(await answer.read()))
                assert error["code"] in ("loading", "vllm_unavailable")
                assert answer.status == 501 or int(answer.headers["retry-after"]) > 0
            async with server.client.post(
                path, data=b"a", headers={"content-type": "text/plain"}
            ) as answer:
                assert answer.status == 415
        for path in ("/v1/models", "/generate_stream?prompt=a"):
            async with server.client.get(path) as answer:
                assert answer.status == 503
    finally:
        release.set()


async def test_long_texts_that_are_only_counted_keep_no_chat_waiting(start_server):
    """B128"""
    server = await start_server()
    may_go, begun = threading.Event(), threading.Event()
    encode_chat, decode = server.tokenizer.encode_chat, server.tokenizer.decode

    def wait(work):
        def slow(given, **options):
            if len(str(given)) > 70_000:
                begun.set()
                assert may_go.wait(10)
            return work(given, **options)

        return slow

    server.tokenizer.encode = wait(server.tokenizer.encode)
    server.tokenizer.encode_chat = wait(encode_chat)
    server.tokenizer.decode = wait(decode)
    long = "x" * 80_000
    turns = [{"role": "user", "content": long}]
    slow = [
        ("/tokenize", {"prompt": long}),
        ("/tokenize", {"messages": turns}),
        ("/v1/messages/count_tokens", {"messages": turns}),
        ("/detokenize", {"tokens": [120] * 80_000}),
    ]
    pending = [asyncio.create_task(server.client.post(path, json=body)) for path, body in slow]
    assert await asyncio.to_thread(begun.wait, 10)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    for path, body in (("/v1/chat/completions", chat), ("/tokenize", {"prompt": "short"})):
        async with asyncio.timeout(5), server.client.post(path, json=body) as response:
            assert response.status == 200
    assert not any(task.done() for task in pending)
    may_go.set()
    assert [response.status for response in await asyncio.gather(*pending)] == [200] * 4
