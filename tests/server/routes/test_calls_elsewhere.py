"""Tools, schemas and thoughts of `/v1/messages` and `/v1/responses`, read by strict clients and by `openai`."""

from __future__ import annotations

import json

import jsonschema
import msgspec
import openai
import pytest
from strict_messages import check_message, read_message_stream
from strict_responses import check_response, read_response_stream

from server.protocol import other_answers

QUESTION = "How is the weather in Seoul?"
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Seoul", "Busan"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
CALL = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Seoul", "days": 3}}\n</tool_call>'
)
TEXT = f'Let me see.\n{CALL}\n<tool_call>\n{{"name": "noop", "arguments": {{}}}}\n</tool_call>'
ARGUMENTS = '{"city": "Seoul", "days": 3}'
MESSAGE_TOOLS = [
    {"name": "get_weather", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
    {
        "type": "custom",
        "name": "noop",
        "description": "Nothing.",
        "input_schema": {"type": "object"},
    },
]
RESPONSE_TOOLS = [
    {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True},
    {"type": "function", "name": "noop", "description": "Nothing.", "parameters": None},
]
MESSAGE = {
    "model": "dummy",
    "max_tokens": 300,
    "messages": [{"role": "user", "content": QUESTION}],
    "tools": MESSAGE_TOOLS,
    "temperature": 0,
}
RESPONSE = {"model": "dummy", "input": QUESTION, "tools": RESPONSE_TOOLS, "temperature": 0}
WRITTEN = '{"name": "get_weather", "arguments": ' + ARGUMENTS + "}"


async def message(server, **changes):
    """The answer as one body and as a stream, which say the same but for ids."""
    body = {**MESSAGE, **changes}
    async with server.client.post("/v1/messages", json=body) as response:
        assert response.status == 200, await response.text()
        whole = check_message(await response.json())
        msgspec.json.decode(await response.read(), type=other_answers.AnthropicMessage)
    async with server.client.post("/v1/messages", json={**body, "stream": True}) as response:
        read = read_message_stream(await response.read())

    def bare(blocks):
        return [{k: v for k, v in block.items() if k != "id"} for block in blocks]

    assert bare(read.message["content"]) == bare(whole["content"])
    assert read.message["stop_reason"] == whole["stop_reason"]
    return read


async def respond(server, **changes):
    body = {**RESPONSE, **changes}
    async with server.client.post("/v1/responses", json=body) as response:
        assert response.status == 200, await response.text()
        whole = check_response(await response.json())
        msgspec.json.decode(await response.read(), type=other_answers.Response)
    async with server.client.post("/v1/responses", json={**body, "stream": True}) as response:
        read = read_response_stream(await response.read())
    assert told(read.response) == told(whole)
    assert read.response["status"] == whole["status"]
    return read


def told(response):
    """What the items say, without ids."""
    shown = []
    for item in response["output"]:
        if item["type"] == "function_call":
            shown.append((item["name"], item["arguments"]))
        else:
            shown.append((item["type"], item["content"][0]["text"]))
    return shown


async def test_calls_of_the_model_are_blocks_of_a_message(start_server):
    """B095"""
    server = await start_server(script=list(TEXT.encode()), tool_format="hermes")
    read = await message(server)
    assert read.message["stop_reason"] == "tool_use"
    text, call, other = read.message["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (call["name"], call["input"]) == ("get_weather", json.loads(ARGUMENTS))
    assert (other["name"], other["input"]) == ("noop", {})
    assert len(read.pieces) > 10, "arguments are streamed"
    read = await message(server, tool_choice={"type": "auto", "disable_parallel_tool_use": True})
    assert [block["type"] for block in read.message["content"]] == ["text", "tool_use"]
    read = await message(server, tool_choice={"type": "none"})
    assert (read.text, read.message["stop_reason"]) == (TEXT, "end_turn")


async def test_calls_of_the_model_are_items_of_a_response(start_server):
    """B095"""
    server = await start_server(script=list(TEXT.encode()), tool_format="hermes")
    read = await respond(server)
    calls = [("get_weather", ARGUMENTS), ("noop", "{}")]
    assert told(read.response) == [("message", "Let me see."), *calls]
    assert read.response["status"] == "completed"
    assert len(read.pieces) > 10, "arguments are streamed"
    assert [tool["name"] for tool in read.response["tools"]] == ["get_weather", "noop"]
    read = await respond(server, parallel_tool_calls=False, top_logprobs=1)
    assert told(read.response) == [("message", "Let me see."), calls[0]]
    assert read.response["parallel_tool_calls"] is False
    part = read.response["output"][0]["content"][0]
    assert 0 < len(part["logprobs"]) <= len("Let me see.\n<tool_call>")
    read = await respond(server, tool_choice="none")
    assert (read.text, read.response["tool_choice"]) == (TEXT, "none")


@pytest.mark.parametrize("name", [None, "get_weather"])
async def test_a_required_call_is_made_by_any_model_on_both_routes(start_server, name):
    server = await start_server()
    any_choice = {"type": "any", "disable_parallel_tool_use": True}
    choices = (any_choice, "required")
    if name:
        choices = ({"type": "tool", "name": name}, {"type": "function", "name": name})
    for seed in range(5):
        read = await message(server, tool_choice=choices[0], seed=seed, temperature=1)
        (block,) = read.message["content"]
        assert read.message["stop_reason"] == "tool_use"
        if block["name"] == "get_weather":
            jsonschema.validate(block["input"], SCHEMA)
        read = await respond(
            server, tool_choice=choices[1], seed=seed, temperature=1, parallel_tool_calls=False
        )
        (item,) = read.response["output"]
        assert item["name"] == name or name is None
        if item["name"] == "get_weather":
            jsonschema.validate(json.loads(item["arguments"]), SCHEMA)


async def test_results_of_tools_go_back_to_the_model(start_server):
    seen = []

    def script(sequence):
        seen.append(bytes(sequence.token_ids[: sequence.num_prompt_tokens]).decode())
        return 256

    server = await start_server(script=script)
    use = {"type": "tool_use", "id": "toolu_1", "name": "noop", "input": {"a": 1}}
    turns = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""}, {"type": "text", "text": "Look:"}, use]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
            {"type": "text", "text": "And now?"}]},
    ]  # fmt: skip
    await message(server, messages=turns, tools=None)
    items = [
        {"role": "user", "content": QUESTION},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Look:", "annotations": []}],
        },
        {"type": "function_call", "call_id": "c", "name": "noop", "arguments": '{"a":1}'},
        {"type": "function_call_output", "call_id": "c", "output": "sunny"},
        {"role": "user", "content": "And now?"},
    ]
    await respond(server, input=items, tools=[])
    assert set(seen) == {
        f"user: {QUESTION}\nassistant: Look:\n"
        '{"name": "noop", "arguments": {"a":1}}\n'
        "tool: sunny\nuser: And now?\nassistant: "
    }


async def test_a_required_call_without_room_is_no_content(start_server):
    """Cut before its name there is nothing to tell; cut behind it there is a call without an end."""
    server = await start_server(script=list(WRITTEN.encode()))
    for limit in (1, 9, 30):
        read = await message(server, tool_choice={"type": "any"}, max_tokens=limit)
        assert (read.message["content"], read.message["stop_reason"]) == ([], "max_tokens")
        read = await respond(server, tool_choice="required", max_output_tokens=limit)
        assert (read.response["output"], read.response["status"]) == ([], "incomplete")
    limit = len(WRITTEN) - 5
    read = await message(server, tool_choice={"type": "any"}, max_tokens=limit)
    (block,) = read.message["content"]
    assert read.message["stop_reason"] == "max_tokens"
    assert (block["name"], block["input"]) == ("get_weather", {})
    assert "".join(read.pieces) == ARGUMENTS[:-4]
    read = await respond(server, tool_choice="required", max_output_tokens=limit)
    (item,) = read.response["output"]
    assert (item["status"], read.response["status"]) == ("incomplete", "incomplete")


async def test_a_required_call_is_not_cut_by_a_stop_string(start_server):
    server = await start_server(script=list(WRITTEN.encode()))
    read = await message(server, tool_choice={"type": "any"}, stop_sequences=["name", "{", '"'])
    assert read.message["stop_reason"] == "tool_use"
    read = await respond(server, tool_choice="required", stop=["name"], stop_token_ids=[34])
    assert told(read.response) == [("get_weather", ARGUMENTS)]


async def test_schemas_bind_messages_and_responses(start_server):
    server = await start_server()
    form = {"type": "json_schema", "name": "w", "schema": SCHEMA, "strict": True}
    for seed in range(5):
        for own in ({"output_config": {"format": form}}, {"output_format": form}):
            read = await message(server, tools=None, seed=seed, temperature=1, **own)
            jsonschema.validate(json.loads(read.text), SCHEMA)
        read = await respond(server, tools=None, text={"format": form}, seed=seed, temperature=1)
        jsonschema.validate(json.loads(read.text), SCHEMA)
        assert read.response["text"]["format"] == form


async def test_thoughts_are_blocks_and_items_of_their_own(start_server):
    script = list(b"<think>\nHm.\n</think>\n\nYes.")
    server = await start_server(script=script, has_thoughts=True)
    read = await message(server, tools=None)
    assert read.message["content"] == [
        {"type": "thinking", "thinking": "Hm.", "signature": ""},
        {"type": "text", "text": "Yes."},
    ]
    read = await respond(server, tools=None)
    assert told(read.response) == [("reasoning", "Hm."), ("message", "Yes.")]
    assert 0 < read.response["usage"]["output_tokens_details"]["reasoning_tokens"] < len(script)


async def test_counting_checks_and_counts_tools(start_server):
    server = await start_server(tool_format="hermes")
    counts = []
    for tools in (None, MESSAGE_TOOLS):
        body = {"messages": MESSAGE["messages"], "tools": tools}
        async with server.client.post("/v1/messages/count_tokens", json=body) as response:
            counts.append((await response.json())["input_tokens"])
    assert counts[1] > counts[0] + 100
    for wrong in ({"temperature": 3}, {"max_tokens": 0}, {"n": 2}, {"stop_sequences": [""]}):
        body = {"messages": MESSAGE["messages"], **wrong}
        async with server.client.post("/v1/messages/count_tokens", json=body) as response:
            assert response.status == 400, wrong
            assert next(iter(wrong)) in (await response.json())["error"]["message"]


async def test_the_openai_client_gets_calls_and_parsed_answers(start_server):
    server = await start_server(script=list(TEXT.encode()), tool_format="hermes")
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="k", max_retries=0
    ) as client:
        whole = await client.responses.create(model="dummy", input=QUESTION, tools=RESPONSE_TOOLS)
        calls = [item for item in whole.output if item.type == "function_call"]
        assert [(call.name, call.arguments) for call in calls] == [
            ("get_weather", ARGUMENTS), ("noop", "{}")]  # fmt: skip
        async with client.responses.stream(
            model="dummy", input=QUESTION, tools=RESPONSE_TOOLS
        ) as events:
            pieces = [e.delta async for e in events if "arguments.delta" in e.type]
            final = await events.get_final_response()
        assert "".join(pieces) == ARGUMENTS + "{}"
        assert final.output_text == "Let me see."
        chosen = {"type": "function", "name": "noop"}
        forced = await client.responses.create(
            model="dummy", input=QUESTION, tools=RESPONSE_TOOLS, tool_choice=chosen
        )
        assert forced.output[0].type == "function_call"
        assert forced.tool_choice.name == "noop"
