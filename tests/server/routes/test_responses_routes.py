"""`/v1/responses` through the real application: read by a strict client, and by the real `openai` client."""

from __future__ import annotations

import openai
import pytest
from openai.types.responses import Response
from strict_clients import check_error
from strict_responses import check_response, read_response_stream

BODY = {"model": "dummy", "input": "hi", "temperature": 0, "max_output_tokens": 8}


async def post(server, body):
    async with server.client.post("/v1/responses", json=body) as response:
        return response, await response.json()


async def stream(server, body, **options):
    async with server.client.post("/v1/responses", json={**body, "stream": True}) as response:
        assert response.status == 200, await response.read()
        return read_response_stream(await response.read(), **options)


def text_of(response):
    return response["output"][0]["content"][0]["text"]


async def test_a_streamed_response_is_the_whole_one(start_server):
    server = await start_server(script=list("Hé \u2028 \U0001f600".encode()))
    body = {**BODY, "max_output_tokens": 100}
    _, whole = await post(server, body)
    assert whole["status"] == "completed"
    read = await stream(server, body)
    assert read.text == text_of(check_response(whole)) == "Hé \u2028 \U0001f600"
    assert len(read.deltas) == 6
    await server.idle()


async def test_a_response_that_reaches_its_limit_is_incomplete(start_server):
    server = await start_server()
    read = await stream(server, BODY)
    _, whole = await post(server, BODY)
    for response in (read.response, whole):
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["usage"]["output_tokens"] == 8


async def test_an_empty_response_is_told_without_deltas(start_server):
    server = await start_server(script=[])
    read = await stream(server, BODY)
    assert read.deltas == []
    assert text_of(read.response) == ""


@pytest.mark.parametrize(
    "asked", [{"top_logprobs": 2}, {"include": ["message.output_text.logprobs"]}]
)
async def test_logprobs_come_with_the_deltas_and_at_the_end(start_server, asked):
    server = await start_server(script=list("aé".encode()))
    read = await stream(server, {**BODY, **asked})
    assert [len(delta["logprobs"]) for delta in read.deltas] == [1, 2]
    entries = read.response["output"][0]["content"][0]["logprobs"]
    assert len(entries) == 3
    assert {len(entry["top_logprobs"]) for entry in entries} == {asked.get("top_logprobs", 0)}


@pytest.mark.parametrize(
    ("given", "instructions", "prompt"),
    [
        ("hi", None, "user: hi\nassistant: "),
        ("hi", "be brief", "system: be brief\nuser: hi\nassistant: "),
        (
            [
                {"role": "developer", "content": "d"},
                {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
                {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed",
                 "content": [{"type": "output_text", "text": "b", "annotations": []}]},
                {"role": "user", "content": "c"},
            ],
            None,
            "system: d\nuser: a\nassistant: b\nuser: c\nassistant: ",
        ),
    ],
)  # fmt: skip
async def test_input_becomes_the_prompt_of_the_template(start_server, given, instructions, prompt):
    seen = []

    def script(sequence):
        seen.append(bytes(sequence.token_ids).decode())
        return 65

    server = await start_server(script=script)
    body = {"input": given, "instructions": instructions, "max_output_tokens": 1}
    _, whole = await post(server, body)
    assert seen == [prompt]
    assert whole["usage"]["input_tokens"] == len(prompt)
    assert whole["instructions"] == instructions


@pytest.mark.parametrize("stream_on", [False, True])
@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": None}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"type": "function_call_output"}]}, "input[0].call_id"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"input": [{"type": "function_call", "call_id": "a", "name": "f"}]}, "input[0].arguments"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input[0]"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"prompt": {"id": "p"}}, "prompt"),
        ({"background": True}, "background"),
        ({"truncation": "auto"}, "truncation"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "name": "f"}]}, "tools"),  # the template knows none
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 5}]}, "tools[0].parameters"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        (
            {"text": {"format": {"type": "json_schema", "schema": {"type": 5}}}},
            "text.format.schema",
        ),
        ({"max_tokens": 5}, "max_tokens"),
        ({"reasoning": "high"}, "reasoning"),
        ({"user": 5}, "user"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"top_logprobs": 21}, "top_logprobs"),
        ({"temperature": 3}, "temperature"),
        ({"n": 2}, "n"),
        ({"instructions": 5}, "instructions"),
    ],
)
async def test_what_is_wrong_is_named_before_anything_runs(start_server, changes, param, stream_on):
    server = await start_server()
    response, answer = await post(server, {**BODY, **changes, "stream": stream_on})
    assert response.status == 400
    assert check_error(answer)["param"] == param
    assert server.runner.num_steps == 0


async def test_what_says_nothing_is_accepted(start_server):
    server = await start_server()
    neutral = {
        "store": True, "metadata": {"a": "b"}, "user": "u", "tools": [], "tool_choice": "auto",
        "parallel_tool_calls": False, "truncation": "disabled", "previous_response_id": None, "include": [],
        "reasoning": {"effort": "low"}, "text": {"format": {"type": "text"}, "verbosity": "low"},
        "stream_options": {"include_obfuscation": False}, "background": False,
    }  # fmt: skip
    response, answer = await post(server, {**BODY, **neutral})
    assert response.status == 200
    assert answer["metadata"] == {"a": "b"}
    assert answer["store"] is False


async def test_a_failure_in_mid_stream_is_told_in_the_last_events(start_server):
    """B002"""
    server = await start_server(failing_steps={3}, step_time_s=0.01)
    read = await stream(server, {**BODY, "max_output_tokens": 20}, may_fail=True)
    assert len(read.deltas) == 3
    assert read.error["code"] == "internal_error"


async def test_the_openai_client_creates_and_streams_responses(start_server):
    server = await start_server(script=list(b" Hello there"))
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="k", max_retries=0
    ) as client:
        whole = await client.responses.create(model="dummy", input="hi", instructions="be brief")
        assert whole.output_text == " Hello there"
        Response.model_validate(whole.model_dump(), strict=False)
        events = await client.responses.create(model="dummy", input="hi", stream=True)
        kinds = [event.type async for event in events]
        assert kinds[0] == "response.created"
        assert kinds.count("response.output_text.delta") == 12
        assert kinds[-1] == "response.completed"
        asked = [{"role": "user", "content": "hi"}]
        async with client.responses.stream(model="dummy", input=asked) as events:
            texts = [e.delta async for e in events if e.type == "response.output_text.delta"]
            final = await events.get_final_response()
        assert "".join(texts) == final.output_text == " Hello there"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="dummy", input="b", previous_response_id=final.id)
        assert "stores no responses" in refused.value.message
        for ask in (client.responses.retrieve, client.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await ask(final.id)


async def test_the_openai_client_raises_when_a_response_fails_in_mid_stream(start_server):
    server = await start_server(failing_steps={3}, step_time_s=0.01)
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="k", max_retries=0
    ) as client:
        events = await client.responses.create(model="dummy", input="hi", stream=True)
        with pytest.raises(openai.APIError, match="failed to answer"):
            async for _ in events:
                pass


async def test_the_openai_client_still_raises_the_right_errors(start_server):
    server = await start_server(has_chat_template=False)
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="k", max_retries=0
    ) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="dummy", input="hi")
        assert refused.value.param == "input"
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="other", input="hi")
