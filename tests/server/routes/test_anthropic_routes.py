"""`/v1/messages` through the real application, backend and step thread, read by a strict client."""

from __future__ import annotations

import pytest
from strict_messages import check_message, check_message_error, read_message_stream

USER = [{"role": "user", "content": "hi"}]
BODY = {"model": "dummy", "max_tokens": 8, "messages": USER, "temperature": 0}


async def post(server, body, path="/v1/messages", **options):
    async with server.client.post(path, json=body, **options) as response:
        return response, await response.json()


async def stream(server, body, **options):
    async with server.client.post("/v1/messages", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return read_message_stream(await response.read(), **options)


async def test_a_streamed_message_is_the_whole_one(start_server):
    server = await start_server(script=list("Hé \u2028 \U0001f600".encode()))
    body = {**BODY, "max_tokens": 100}
    _, whole = await post(server, body)
    read = await stream(server, body)
    assert read.text == check_message(whole)["content"][0]["text"] == "Hé \u2028 \U0001f600"
    assert (read.message["stop_reason"], whole["stop_reason"]) == ("end_turn", "end_turn")
    assert len(read.texts) == 6
    await server.idle()


@pytest.mark.parametrize("limit", [1, 5])
async def test_the_reason_says_whether_the_limit_or_a_stop_sequence_ended_it(start_server, limit):
    server = await start_server(script=list(b"one two three"))
    read = await stream(server, {**BODY, "max_tokens": limit})
    assert read.message["stop_reason"] == "max_tokens"
    assert read.message["usage"]["output_tokens"] == limit
    body = {**BODY, "max_tokens": 50, "stop_sequences": ["x", "o t"]}
    read = await stream(server, body)
    assert (read.text, read.message["stop_sequence"]) == ("one tw", "o t")
    _, whole = await post(server, body)
    assert whole["content"] == read.message["content"]
    assert whole["stop_reason"] == "stop_sequence"


async def test_an_answer_without_text_still_has_a_block(start_server):
    server = await start_server(script=[])
    read = await stream(server, BODY)
    assert read.texts == []
    assert (await post(server, BODY))[1]["content"] == [{"type": "text", "text": ""}]


async def test_input_is_split_into_what_was_cached_and_what_was_not(start_server):
    server = await start_server()
    body = {**BODY, "messages": [{"role": "user", "content": "x" * 64}]}
    for cached in (0, 80):
        read = await stream(server, body)
        usage = read.message["usage"]
        assert usage["cache_read_input_tokens"] == cached
        assert usage["input_tokens"] == 82 - cached


@pytest.mark.parametrize(
    ("messages", "system", "prompt"),
    [
        (USER, None, "user: hi\nassistant: "),
        (USER, "be brief", "system: be brief\nuser: hi\nassistant: "),
        (
            [{"role": "user", "content": [{"type": "text", "text": "a", "cache_control": None}]}],
            [{"type": "text", "text": "s"}, {"type": "text", "text": "t"}],
            "system: s\n\nt\nuser: a\nassistant: ",
        ),
        ([*USER, *USER], None, "user: hi\n\nhi\nassistant: "),
        ([*USER, {"role": "assistant", "content": "The"}], None, "user: hi\nassistant: The"),
    ],
)
async def test_messages_become_the_prompt_of_the_template(start_server, messages, system, prompt):
    seen = []

    def script(sequence):
        seen.append(bytes(sequence.token_ids).decode())
        return 65

    server = await start_server(script=script)
    body = {"model": "dummy", "messages": messages, "system": system, "max_tokens": 1}
    _, counted = await post(server, body, "/v1/messages/count_tokens")
    assert counted == {"input_tokens": len(prompt)}
    _, whole = await post(server, body)
    assert whole["usage"]["input_tokens"] == len(prompt)
    assert seen == [prompt]


@pytest.mark.parametrize("stream_on", [False, True])
@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"},
                                                       {"type": "image", "source": {}}]}]},
            "messages[0].content[1]",
        ),
        ({"system": [{"type": "image"}]}, "system[0]"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"stop_sequences": "a"}, "stop_sequences"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tools": [{"name": "f", "input_schema": {}}]}, "tools"),  # the template knows none
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
        ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools[0]"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": 1}},
         "tool_choice.disable_parallel_tool_use"),
        ({"messages": [{"role": "assistant", "content": [
            {"type": "tool_use", "id": "a", "name": "f", "input": {}}]}]}, "messages"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f"}]}]},
         "messages[0].content[0].input"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]},
         "messages[0].content[0].tool_use_id"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, "messages[0].content[0]"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format"),
        ({"output_format": {"type": "json_schema", "schema": {"type": 5}}}, "output_format.schema"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"temperature": 3}, "temperature"),
        ({"n": 2}, "n"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_named_before_anything_runs(start_server, changes, named, stream_on):
    server = await start_server()
    response, answer = await post(server, {**BODY, **changes, "stream": stream_on})
    assert response.status == 400
    error = check_message_error(answer)
    assert error["type"] == "invalid_request_error"
    assert named in error["message"]
    assert server.runner.num_steps == 0


async def test_what_says_nothing_is_accepted(start_server):
    server = await start_server()
    neutral = {
        "metadata": {"user_id": "u"},
        "tools": [],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "disabled"},
        "stop_sequences": [],
        "service_tier": "auto",
        "output_config": {"effort": "low"},
        "system": None,
        "top_k": 5,
    }
    assert (await post(server, {**BODY, **neutral}))[0].status == 200


async def test_errors_have_the_shape_and_status_of_that_api(start_server):
    server = await start_server({"server.api_keys": ["k"]}, max_context=64)
    headers = {"x-api-key": "k"}
    long = [{"role": "user", "content": "x" * 100}]
    cases = [
        ({}, {}, 401, "authentication_error"),
        ({"model": "other"}, headers, 404, "not_found_error"),
        ({"messages": long}, headers, 400, "invalid_request_error"),
    ]
    for changes, sent, status, kind in cases:
        response, answer = await post(server, {**BODY, **changes}, headers=sent)
        error = check_message_error(answer)
        assert (response.status, error["type"]) == (status, kind)
        assert response.headers["request-id"] == answer["request_id"]
    assert error["message"].startswith("prompt is too long: ")
    async with server.client.get("/v1/messages", headers=headers) as response:
        assert response.status == 405
        check_message_error(await response.json())
    server.backend.begin_drain()
    response, answer = await post(server, BODY, headers=headers)
    assert response.status == 529
    assert check_message_error(answer)["type"] == "overloaded_error"
    assert "retry-after" in response.headers


async def test_a_failure_in_mid_stream_is_the_last_event(start_server):
    """B002"""
    server = await start_server(failing_steps={3}, step_time_s=0.01)
    read = await stream(server, {**BODY, "max_tokens": 20}, may_fail=True)
    assert len(read.texts) == 3
    assert read.error["type"] == "api_error"
    response, answer = await post(await start_server(failing_steps={0}), BODY)
    assert response.status == 500
    check_message_error(answer)


async def test_silence_is_told_by_pings_if_that_is_asked_for(start_server):
    """B011"""
    server = await start_server({"sse.keepalive_s": 0.05}, step_time_s=0.15)
    assert 3 <= (await stream(server, {**BODY, "max_tokens": 3})).num_pings <= 10
    server = await start_server({"sse.keepalive_s": 5}, step_time_s=0.01)
    assert (await stream(server, BODY)).num_pings == 1
    server = await start_server(
        {"sse.keepalive_s": 0.05, "server.early_headers_s": 0.05}, step_time_s=0.3
    )
    async with server.client.post("/v1/messages", json={**BODY, "stream": True}) as response:
        assert (await response.content.readline()) == b"event: ping\n", "before the message"
