"""Completions, chat, models and tokenizing through the real application, backend and step thread."""

from __future__ import annotations

import asyncio
import json

import pytest
from strict_clients import check_error, check_usage, read_openai_stream

from server.app import EXECUTOR_THREADS

CHAT = "chat.completion.chunk"
USER = [{"role": "user", "content": "hi"}]


async def post(server, path, body):
    async with server.client.post(path, json=body) as response:
        return response.status, json.loads(await response.read())


async def stream(server, path, body, **options):
    async with server.client.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.read()
        name = CHAT if "chat" in path else "text_completion"
        return read_openai_stream(await response.read(), object_name=name, **options)


async def test_completions_answer_all_choices_of_all_prompts(start_server):
    """B037"""
    server = await start_server()
    body = {
        "prompt": ["one", "two words here"],
        "n": 2,
        "max_tokens": 4,
        "ignore_eos": True,
        "seed": 7,
    }
    status, answer = await post(server, "/v1/completions", body)
    assert status == 200
    assert answer["object"] == "text_completion"
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    usage = check_usage(answer["usage"])
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (17, 16)
    read = await stream(
        server,
        "/v1/completions",
        {**body, "stream_options": {"include_usage": True}},
        num_choices=4,
        has_usage=True,
    )
    assert [read.choices[i].text for i in range(4)] == [c["text"] for c in answer["choices"]]
    assert (read.usage["prompt_tokens"], read.usage["completion_tokens"]) == (17, 16)
    assert read.choices[0].text != read.choices[1].text
    await server.idle()


async def test_chat_streams_what_it_answers(start_server):
    """B001, B007, B035"""
    server = await start_server()
    body = {"messages": USER, "n": 2, "max_tokens": 9, "seed": 3}
    status, answer = await post(server, "/v1/chat/completions", body)
    assert status == 200
    assert answer["object"] == "chat.completion"
    for options, flags in (
        (None, {}),
        ({"include_usage": False}, {}),
        ({"include_usage": True}, {"has_usage": True}),
        (
            {"include_usage": True, "continuous_usage_stats": True},
            {"has_usage": True, "is_continuous": True},
        ),
    ):
        read = await stream(
            server,
            "/v1/chat/completions",
            {**body, "stream_options": options},
            num_choices=2,
            **flags,
        )
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert [read.choices[i].text for i in range(2)] == texts


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/completions", "/v1/completions/", "/completions/"]
)
async def test_paths_are_typed_in_many_ways(start_server, path):
    server = await start_server()
    assert (await post(server, path, {"prompt": "a", "max_tokens": 1}))[0] == 200
    chat = path.replace("completions", "chat/completions")
    assert (await post(server, chat, {"messages": USER, "max_tokens": 1}))[0] == 200


async def test_chat_fills_the_room_and_completions_default_to_sixteen(start_server):
    """B072"""
    server = await start_server(max_context=64)
    _, answer = await post(server, "/v1/chat/completions", {"messages": USER})
    usage = answer["usage"]
    assert usage["total_tokens"] == 64
    assert answer["choices"][0]["finish_reason"] == "length"
    _, answer = await post(server, "/v1/completions", {"prompt": "a"})
    assert answer["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream_on", [False, True])
async def test_prompts_at_the_edge_of_the_context(start_server, stream_on):
    """B072, B073"""
    server = await start_server(max_context=64)
    for limit in ({}, {"max_tokens": 64}):
        body = {"prompt": [65] * 63, "stream": stream_on, "stream_options": {"include_usage": True}}
        response = await server.client.post("/v1/completions", json={**body, **limit})
        assert response.status == 200
        if stream_on:
            read = read_openai_stream(
                await response.read(), object_name="text_completion", has_usage=True
            )
            assert read.usage["completion_tokens"] == 1
            assert read.choices[0].finish_reason == "length"
        for length in (64, 65, 192):
            response = await server.client.post(
                "/v1/completions", json={**body, **limit, "prompt": [65] * length}
            )
            assert response.status == 400
            error = check_error(await response.json())
            assert error["code"] == "context_length_exceeded"
            assert "maximum context length is 64 tokens" in error["message"]
            assert str(length) in error["message"]
    refused = (await server.scrape())['noria:rejections_total{reason="too_long"}']
    assert refused == 6


async def test_a_list_with_one_prompt_too_long_runs_nothing(start_server):
    """B081"""
    server = await start_server(max_context=64)
    body = {"prompt": ["a", "b", "c", "x" * 100, "d"]}
    status, answer = await post(server, "/v1/completions", body)
    assert status == 400
    assert check_error(answer)["param"] == "prompt[3]"
    assert server.runner.num_steps == 0
    await server.idle()


@pytest.mark.parametrize("stream_on", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "top_k": "many"}),
        ("/v1/completions", {"prompt": "a", "max_tokens": -5}),
        ("/v1/completions", {"prompt": ["hello", ""]}),
        ("/v1/completions", {"prompt": [5, 999]}),
        ("/v1/completions", {"prompt": "a", "n": 5000}),
        ("/v1/completions", {"prompt": "a", "logprobs": True}),
        ("/v1/completions", {"prompt": "a", "echo": True, "logprobs": 1}),
        ("/v1/completions", {}),
        ("/v1/chat/completions", {"messages": [{"content": "hi"}]}),
        ("/v1/chat/completions", {"messages": USER, "audio": {}}),
        ("/v1/chat/completions", {"messages": USER, "tools": [{"type": "function"}]}),
        ("/v1/chat/completions", {"messages": USER, "chat_template": "x"}),
    ],
)
async def test_validation_ends_before_the_stream_begins(start_server, path, body, stream_on):
    """B003, B004, B005, B142"""
    server = await start_server()
    status, answer = await post(server, path, {**body, "stream": stream_on})
    assert status == 400
    check_error(answer)
    assert server.runner.num_steps == 0


async def test_an_unknown_model_is_not_found(start_server):
    """B005"""
    server = await start_server({"server.model_aliases": ["gpt"]})
    status, answer = await post(
        server, "/v1/completions", {"prompt": "a", "model": "no-such-model"}
    )
    assert status == 404
    assert check_error(answer)["code"] == "model_not_found"
    status, answer = await post(server, "/v1/completions", {"prompt": "a", "model": "gpt"})
    assert (status, answer["model"]) == (200, "dummy")


async def test_models_are_listed_and_found(start_server):
    server = await start_server({"server.model_aliases": ["org/alias"]})
    for path in ("/v1/models", "/models", "/v1/models/"):
        listed = await (await server.client.get(path)).json()
        assert listed["object"] == "list"
        (model,) = listed["data"]
        assert set(model) == {"id", "object", "created", "owned_by", "root", "max_model_len"}
    for path in ("/v1/models/dummy", "/models/dummy", "/v1/models/org/alias", "/v1/models/dummy/"):
        assert await (await server.client.get(path)).json() == model
    response = await server.client.get("/v1/models/a/b")
    assert response.status == 404
    check_error(await response.json())
    for path in ("/v1", "/v1/"):
        assert (await server.client.get(path)).status == 200
    assert (await server.client.get("/v1/completions")).status == 405


async def test_text_becomes_tokens_and_back(start_server):
    server = await start_server()
    status, answer = await post(server, "/tokenize", {"prompt": "hé", "model": None})
    assert (status, answer) == (200, {"tokens": [104, 195, 169], "count": 3, "max_model_len": 2048})
    assert (await post(server, "/detokenize", {"tokens": answer["tokens"]}))[1] == {"prompt": "hé"}
    _, answer = await post(server, "/tokenize", {"messages": USER})
    assert answer["count"] == len(b"user: hi\nassistant: ")
    for path, body in (("/tokenize", {}), ("/detokenize", {"tokens": [9999]})):
        status, answer = await post(server, path, body)
        assert status == 400
        check_error(answer)


async def test_a_model_without_a_template_refuses_chats(start_server):
    """B086"""
    server = await start_server(has_chat_template=False)
    status, answer = await post(server, "/v1/chat/completions", {"messages": USER})
    assert status == 400
    assert check_error(answer)["param"] == "messages"


async def test_a_template_that_takes_too_long_costs_only_its_request(start_server, monkeypatch):
    """B094"""
    server = await start_server({"server.template_timeout_s": 0.1})
    release = asyncio.Event()
    loop = asyncio.get_running_loop()
    slow = type(server.tokenizer).encode_chat

    def encode_chat(self, messages, **options):
        if messages[0]["content"] == "slow":
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
        return slow(self, messages, **options)

    monkeypatch.setattr(type(server.tokenizer), "encode_chat", encode_chat)
    body = {"messages": [{"role": "user", "content": "slow"}]}
    status, answer = await post(server, "/v1/chat/completions", body)
    release.set()
    assert status == 400
    check_error(answer)
    status, _ = await post(server, "/v1/chat/completions", {"messages": USER, "max_tokens": 2})
    assert status == 200
    await server.idle()


async def test_who_waits_behind_slow_prompts_is_told_to_try_again(start_server, monkeypatch):
    server = await start_server({"server.template_timeout_s": 0.2})
    release = asyncio.Event()
    loop = asyncio.get_running_loop()
    fast = type(server.tokenizer).encode_chat

    def encode_chat(self, messages, **options):
        if messages[0]["content"] == "slow":
            asyncio.run_coroutine_threadsafe(release.wait(), loop).result(10)
        return fast(self, messages, **options)

    monkeypatch.setattr(type(server.tokenizer), "encode_chat", encode_chat)
    body = {"messages": [{"role": "user", "content": "slow"}]}
    slow = [
        asyncio.create_task(post(server, "/v1/chat/completions", body))
        for _ in range(EXECUTOR_THREADS)
    ]
    await asyncio.sleep(0.1)
    async with server.client.post("/v1/chat/completions", json={"messages": USER}) as response:
        assert response.status == 503
        assert response.headers["retry-after"]
        assert check_error(await response.json())["code"] == "busy"
    assert [status for status, _ in await asyncio.gather(*slow)] == [400] * len(slow)
    release.set()
    status, _ = await post(server, "/v1/chat/completions", {"messages": USER, "max_tokens": 2})
    assert status == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 99_999}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 99_999}]}),
        ("/v1/responses", {"input": "x" * 99_999}),
    ],
)
async def test_a_chat_that_cannot_fit_is_refused_before_it_is_rendered(
    start_server, monkeypatch, path, body
):
    server = await start_server()
    monkeypatch.setattr(type(server.tokenizer), "encode_chat", None)
    status, answer = await post(server, path, {"model": "dummy", "max_tokens": 1, **body})
    assert status == 400
    message = answer["error"]["message"]
    assert "at least" in message or "too long" in message


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("guided_regex", "[0-9]{3}"),
        ("guided_choice", ["a"]),
        ("structured_outputs", {"regex": "a"}),
        ("response_format", {"type": "json_object"}),
        ("logprobs", True),
    ],
)
async def test_fields_that_would_bind_an_answer_are_refused_where_nothing_reads_them(
    start_server, path, name, value
):
    server = await start_server()
    prompt = {"messages": USER} if "messages" in path else {"input": "hi"}
    status, answer = await post(
        server, path, {"model": "dummy", "max_tokens": 1, **prompt, name: value}
    )
    assert status == 400
    assert name in answer["error"]["message"]


async def test_logprobs_have_the_shape_of_their_route(start_server):
    """B059, B061"""
    server = await start_server()
    body = {"prompt": "a", "logprobs": 2, "max_tokens": 5, "min_tokens": 5, "top_p": 0.05}
    _, answer = await post(server, "/v1/completions", body)
    logprobs = answer["choices"][0]["logprobs"]
    assert {len(logprobs[name]) for name in logprobs} == {5}
    assert "".join(logprobs["tokens"]) == answer["choices"][0]["text"]
    read = await stream(server, "/v1/completions", {**body, "temperature": 0})
    _, answer = await post(server, "/v1/completions", {**body, "temperature": 0})
    offsets = [offset for part in read.choices[0].logprobs for offset in part["text_offset"]]
    assert offsets == answer["choices"][0]["logprobs"]["text_offset"]
    _, answer = await post(
        server,
        "/v1/chat/completions",
        {"messages": USER, "logprobs": True, "top_logprobs": 2, "max_tokens": 3},
    )
    content = answer["choices"][0]["logprobs"]["content"]
    assert [len(entry["top_logprobs"]) for entry in content] == [2, 2, 2]


async def test_end_tokens_stop_and_stop_lists_do_not_switch_them_off(start_server):
    """B027"""
    server = await start_server(script=list(b"ab"))
    for stop in ({}, {"stop": []}, {"stop": None}):
        _, answer = await post(server, "/v1/chat/completions", {"messages": USER, **stop})
        assert answer["choices"][0]["message"]["content"] == "ab"
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 3


async def test_an_empty_answer_is_told_in_one_chunk(start_server):
    server = await start_server(script=[])
    read = await stream(server, "/v1/chat/completions", {"messages": USER})
    assert read.choices[0].texts == [""]
    assert read.choices[0].finish_reason == "stop"
    _, answer = await post(server, "/v1/completions", {"prompt": "a"})
    assert answer["choices"][0]["text"] == ""


async def test_equal_request_ids_do_not_mix_answers(start_server):
    """B082"""
    server = await start_server(step_time_s=0.002)
    headers = {"x-request-id": "job-1"}

    async def ask(prompt):
        body = {"prompt": prompt, "temperature": 0, "request_id": "job-1"}
        async with server.client.post("/v1/completions", json=body, headers=headers) as response:
            assert response.headers["x-request-id"] == "job-1"
            return (await response.json())["choices"][0]["text"]

    alone = [await ask(prompt) for prompt in ("a", "b", "c")]
    assert await asyncio.gather(ask("a"), ask("b"), ask("c")) == alone


async def test_many_streams_at_once_say_what_they_say_alone(start_server):
    """B013"""
    server = await start_server(step_time_s=0.001)
    bodies = [{"prompt": f"prompt {i}", "max_tokens": 20, "temperature": 0} for i in range(8)]
    together = await asyncio.gather(*(stream(server, "/v1/completions", b) for b in bodies))
    for body, read in zip(bodies, together, strict=True):
        alone = await stream(server, "/v1/completions", body)
        assert alone.choices[0].text == read.choices[0].text
    await server.idle()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/basic_generate", {"prompt": "hello"}),
    ],
)
async def test_whole_answers_say_in_a_header_where_the_time_went(start_server, path, body):
    server = await start_server(step_time_s=0.002)
    response = await server.client.post(path, json={**body, "max_tokens": 5})
    entries = [entry.split(";dur=") for entry in response.headers["server-timing"].split(", ")]
    spent_ms = {name: float(value) for name, value in entries}
    assert list(spent_ms) == ["queue", "prefill", "first-token", "decode", "total"]
    assert spent_ms["decode"] >= 4 * 2
    assert spent_ms["total"] >= spent_ms["first-token"] >= spent_ms["prefill"] >= 2
    for failed in (
        await server.client.post(path, json={**body, "max_tokens": 0}),
        await server.client.get("/health"),
    ):
        assert "server-timing" not in failed.headers


@pytest.mark.parametrize("stream_on", [False, True])
async def test_timings_stand_beside_usage_and_count_what_came_from_the_cache(
    start_server, stream_on
):
    server = await start_server()
    options = {"stream": stream_on, "stream_options": {"include_usage": True}}
    body = {"messages": [{"role": "user", "content": "x" * 64}], "max_tokens": 4, **options}
    for cached in (0, 80):  # five blocks of 16
        response = await server.client.post("/v1/chat/completions", json=body)
        if stream_on:
            last = (await response.read()).split(b"\n\n")[-3]
            answer = json.loads(last.removeprefix(b"data: "))
        else:
            answer = await response.json()
        timings = answer["timings"]
        assert timings["cached_tokens"] == cached
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached
        assert timings["first_token_ms"] >= timings["prefill_ms"] >= 0
        assert timings["tokens_per_second"] > 0
        assert timings["queue_ms"] is not None
        assert timings["decode_ms"] is not None
        assert timings["preemptions"] == 0


@pytest.mark.parametrize("stream_on", [False, True])
async def test_echo_puts_every_prompt_before_its_choices(start_server, stream_on):
    server = await start_server()
    for prompt, texts in (("one", ["one"]), (["a", "b é"], ["a", "b é"]), ([[104, 105]], ["hi"])):
        body = {"prompt": prompt, "n": 2, "max_tokens": 5, "seed": 1}
        _, plain = await post(server, "/v1/completions", body)
        body["echo"] = True
        if stream_on:
            read = await stream(server, "/v1/completions", body, num_choices=2 * len(texts))
            found = [read.choices[index].text for index in range(2 * len(texts))]
            assert {len(choice.texts) for choice in read.choices.values()} == {5}
        else:
            _, answer = await post(server, "/v1/completions", body)
            found = [choice["text"] for choice in answer["choices"]]
            assert answer["usage"]["completion_tokens"] == 10 * len(texts)
        expected = [texts[i // 2] + choice["text"] for i, choice in enumerate(plain["choices"])]
        assert found == expected


async def test_a_suffix_stands_behind_every_prompt_that_is_a_text(start_server):
    seen = set()

    def script(sequence):
        seen.add(bytes(sequence.token_ids).decode())
        return 65

    server = await start_server(script=script)
    body = {"prompt": ["a", "b"], "suffix": "end", "max_tokens": 1}
    assert (await post(server, "/v1/completions", body))[0] == 200
    assert seen == {"end|a", "end|b"}
    status, answer = await post(server, "/v1/completions", {**body, "prompt": [65]})
    assert status == 400
    assert check_error(answer)["param"] == "suffix"
