"""Tool calls and thoughts through the real `openai` client: scripted outputs, and calls enforced by a grammar."""

from __future__ import annotations

import json

import openai
import pytest
from strict_clients import read_openai_stream

USER = [{"role": "user", "content": "How is the weather in Seoul?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Seoul", "Busan"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "noop", "description": "Does nothing."}},
]
TEXT = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Seoul", "days": 3}}\n</tool_call>'
    '\n<tool_call>\n{"name": "noop", "arguments": {}}\n</tool_call>'
)


def client_of(server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


async def stream(client, **options):
    """Message and finish reason as the client's own accumulator joins them."""
    async with client.chat.completions.stream(model="dummy", messages=USER, **options) as events:
        async for _ in events:
            pass
        completion = await events.get_final_completion()
    return completion.choices[0]


def calls_of(choice) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]


async def test_calls_of_the_model_are_parsed_streamed_and_not(start_server) -> None:
    """B095"""
    server = await start_server(script=list(TEXT.encode()), tool_format="hermes")
    async with client_of(server) as client:
        whole = (
            await client.chat.completions.create(model="dummy", messages=USER, tools=TOOLS)
        ).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content == "Let me see."
        assert calls_of(whole) == [("get_weather", '{"city": "Seoul", "days": 3}'), ("noop", "{}")]
        assert whole.message.tool_calls[0].id != whole.message.tool_calls[1].id
        streamed = await stream(client, tools=TOOLS)
        assert streamed.finish_reason == "tool_calls"
        assert (streamed.message.content, calls_of(streamed)) == ("Let me see.", calls_of(whole))
        one = await stream(client, tools=TOOLS, parallel_tool_calls=False)
        assert len(calls_of(one)) == 1
        none = await client.chat.completions.create(
            model="dummy", messages=USER, tools=TOOLS, tool_choice="none"
        )
        assert none.choices[0].message.content == TEXT
        assert none.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
async def test_a_required_call_is_made_by_any_model(start_server, choice) -> None:
    """The dummy's template knows no tools, and its tokens are noise."""
    server = await start_server()
    async with client_of(server) as client:
        for seed in range(10):
            answer = await client.chat.completions.create(
                model="dummy",
                messages=USER,
                tools=TOOLS,
                tool_choice=choice,
                parallel_tool_calls=False,
                temperature=1,
                seed=seed,
            )
            assert answer.choices[0].finish_reason == "tool_calls"
            assert answer.choices[0].message.content is None
            ((name, arguments),) = calls_of(answer.choices[0])
            if name == "get_weather":
                found = json.loads(arguments)
                assert found["city"] in ("Seoul", "Busan")
                assert found["days"] <= 9
            else:
                assert choice == "required"
                assert json.loads(arguments) == {}


OPEN = {  # as pydantic writes it: nothing says that there are no other members
    "type": "object",
    "properties": {
        "place": {"$ref": "#/$defs/Place"},
        "days": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "null"}]},
        "near": {"type": "array", "items": {"$ref": "#/$defs/Place"}, "maxItems": 2},
    },
    "required": ["place"],
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"city": {"enum": ["Seoul", "Busan"]}},
            "required": ["city"],
        }
    },
}


@pytest.mark.parametrize("seed", range(4))
async def test_a_required_call_has_no_arguments_that_its_function_does_not_name(
    start_server, seed
) -> None:
    server = await start_server(max_context=4096, num_blocks=600)
    tools = [{"type": "function", "function": {"name": "f", "parameters": OPEN}}]
    options = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 1}
    async with client_of(server) as client:
        answer = await client.chat.completions.create(
            model="dummy", messages=USER, tools=tools, seed=seed, max_tokens=2000, **options
        )
    ((_, arguments),) = calls_of(answer.choices[0])
    found = json.loads(arguments)
    assert found.keys() <= OPEN["properties"].keys()
    for place in (found["place"], *found.get("near", [])):
        assert place.keys() == {"city"}


@pytest.mark.parametrize(
    "changes",
    [
        {"required": ["place", "other"]},
        {"additionalProperties": {"type": "boolean"}},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}, "required": ["b"]}]},
    ],
)
async def test_a_function_that_takes_more_than_it_names_keeps_what_it_says(
    start_server, changes
) -> None:
    server = await start_server()
    tools = [{"type": "function", "function": {"name": "f", "parameters": {**OPEN, **changes}}}]
    async with client_of(server) as client:
        answer = await client.chat.completions.create(
            model="dummy", messages=USER, tools=tools, tool_choice="required", max_tokens=5
        )
        assert answer.choices[0].finish_reason == "length"


async def test_a_required_call_that_is_cut_is_never_content(start_server) -> None:
    """Behind its name it is a call without an end, before it is nothing; stop strings do not cut it."""
    written = '{"name": "get_weather", "arguments": {"city": "Seoul", "days": 3}}'
    server = await start_server(script=list(written.encode()))
    ask = {"tools": TOOLS, "tool_choice": "required"}
    async with client_of(server) as client:
        for limit, calls in ((1, None), (25, None), (55, [("get_weather", '{"city": "Seoul", ')])):
            body = {"messages": USER, "max_tokens": limit, "stream": True, **ask}
            response = await server.client.post("/v1/chat/completions", json=body)
            read = read_openai_stream(await response.read(), object_name="chat.completion.chunk")
            assert (read.choices[0].text, read.choices[0].finish_reason) == ("", "length")
            whole = await client.chat.completions.create(
                model="dummy", messages=USER, max_tokens=limit, **ask
            )
            assert whole.choices[0].message.content is None
            assert whole.choices[0].finish_reason == "length"
            assert (calls_of(whole.choices[0]) if calls else None) == calls
        stopped = await client.chat.completions.create(
            model="dummy", messages=USER, stop=["name", "}"], **ask
        )
        assert stopped.choices[0].finish_reason == "tool_calls"
        assert calls_of(stopped.choices[0])[0][0] == "get_weather"


async def test_a_call_that_a_stop_string_cuts_is_no_reason_to_call(start_server) -> None:
    server = await start_server(script=list(TEXT.encode()), tool_format="hermes")
    async with client_of(server) as client:
        cut = await client.chat.completions.create(
            model="dummy", messages=USER, tools=TOOLS, stop=["days"]
        )
        assert cut.choices[0].finish_reason == "stop"


async def test_what_tools_cannot_do_is_refused_in_words(start_server) -> None:
    server = await start_server()
    async with client_of(server) as client:

        async def refuse(param: str, **options) -> str:
            with pytest.raises(openai.BadRequestError) as caught:
                await client.chat.completions.create(model="dummy", messages=USER, **options)
            assert caught.value.param == param
            return caught.value.message

        assert "knows no tools" in await refuse("tools", tools=TOOLS)
        await refuse("tool_choice", tool_choice="required")
        await refuse(
            "tool_choice",
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "other"}},
        )
        await refuse(
            "response_format",
            tools=TOOLS,
            tool_choice="required",
            response_format={"type": "json_object"},
        )
        bad = {"type": "object", "properties": {"a": {"not": {}}}}
        await refuse(
            "tools",
            tools=[{"type": "function", "function": {"name": "f", "parameters": bad}}],
            tool_choice="required",
        )


async def test_the_strict_clients_take_a_stream_of_calls(start_server) -> None:
    server = await start_server(script=list(TEXT.encode()), tool_format="hermes")
    body = {"messages": USER, "tools": TOOLS, "stream": True}
    response = await server.client.post("/v1/chat/completions", json=body)
    read = read_openai_stream(await response.read(), object_name="chat.completion.chunk")
    assert read.choices[0].finish_reason == "tool_calls"
    assert read.choices[0].text == "Let me see."
    first = next(c for c in read.chunks if c["choices"][0]["delta"].get("tool_calls"))
    assert first["choices"][0]["delta"]["tool_calls"][0]["function"]["name"] == "get_weather"


async def test_turns_with_calls_and_results_go_back_to_the_model(start_server) -> None:
    """B088"""
    server = await start_server(script=list(b"Fine."))
    call = {"id": "1", "type": "function", "function": {"name": "noop", "arguments": "{}"}}
    turns = [
        *USER,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
    ]
    ids = (await (await server.client.post("/tokenize", json={"messages": turns})).json())["tokens"]
    assert '{"name": "noop", "arguments": {}}' in bytes(ids).decode()
    async with client_of(server) as client:
        answer = await client.chat.completions.create(model="dummy", messages=turns)
        assert answer.choices[0].message.content == "Fine."


async def test_thoughts_stand_beside_the_answer(start_server) -> None:
    server = await start_server(script=list(b"<think>\nHm.\n</think>\n\nYes."), has_thoughts=True)
    async with client_of(server) as client:
        whole = await client.chat.completions.create(model="dummy", messages=USER)
        assert whole.choices[0].message.content == "Yes."
        assert whole.choices[0].message.reasoning_content == "Hm."
        thoughts = answer = ""
        async for chunk in await client.chat.completions.create(
            model="dummy", messages=USER, stream=True
        ):
            thoughts += getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
            answer += chunk.choices[0].delta.content or ""
        assert (thoughts, answer) == ("Hm.", "Yes.")


async def test_a_stop_string_within_the_thoughts_ends_the_answer_and_says_so(start_server) -> None:
    """B029"""
    server = await start_server(script=list(b"<think>Hm. END of it</think>Yes."), has_thoughts=True)
    async with client_of(server) as client:
        cut = await client.chat.completions.create(model="dummy", messages=USER, stop=["END"])
        message = cut.choices[0].message
        assert (message.content, message.reasoning_content) == ("", "Hm.")
        assert cut.choices[0].finish_reason == "stop"
        whole = await client.chat.completions.create(model="dummy", messages=USER, stop=["x"])
        assert whole.choices[0].message.content == "Yes."
