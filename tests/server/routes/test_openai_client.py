"""The real `openai` client against a running server: every parameter, sync and async, streamed and whole.

Tools, structured output and responses have files of their own; the default model is asked by `tests/clients`.
"""

from __future__ import annotations

import asyncio
import json
from operator import attrgetter
from typing import Any

import openai
import pytest

USER: Any = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"is_big": {"type": "boolean"}},
    "required": ["is_big"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
CHATS: list[dict[str, Any]] = [
    {},
    {"max_tokens": 3},
    {"max_completion_tokens": 3},
    {"n": 3, "seed": 1, "temperature": 1, "top_p": 0.9, "max_tokens": 20},
    {"logprobs": True, "max_tokens": 9},
    {"logprobs": True, "top_logprobs": 3, "max_tokens": 9},
    {"stop": [" th", "zz"]},
    {"frequency_penalty": 1.5, "presence_penalty": -0.5, "logit_bias": {"65": 5}, "max_tokens": 20},
    {"response_format": {"type": "text"}},
    {"response_format": {"type": "json_object"}, "max_tokens": 40, "seed": 1},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}},
    {"tools": [TOOL], "tool_choice": "none"},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": True, "seed": 2},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
    {"extra_body": {"add_generation_prompt": False}},
    {
        "extra_body": {"min_tokens": 5, "ignore_eos": True, "top_k": 5, "min_p": 0.1},
        "max_tokens": 20,
    },
    {"user": "someone", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
]
COMPLETIONS: list[dict[str, Any]] = [
    {},
    {"echo": True},
    {"suffix": "end"},
    {"best_of": 1, "n": 1},
    {"n": 2, "seed": 1, "temperature": 1, "max_tokens": 20},
    {"logprobs": 2, "max_tokens": 9},
    {"prompt": ["a", "b"], "n": 2, "max_tokens": 5, "seed": 1},
    {"prompt": [[72, 105], [72]], "max_tokens": 5},
    {"stop": "th"},
    {"extra_body": {"regex": "[a-f]{9}"}, "max_tokens": 40, "seed": 1},
]


@pytest.fixture
async def both(start_server, connect):
    """An async and a sync client."""
    return connect(await start_server(script=list(b" Hello there"), num_blocks=600))


def told(choice: Any) -> dict[str, Any]:
    """What a choice says, in a form that a joined stream can be compared with."""
    message = choice.message
    return {
        "text": message.content or "",
        "calls": [[c.function.name, c.function.arguments] for c in message.tool_calls or []],
        "tokens": [entry.token for entry in choice.logprobs.content] if choice.logprobs else [],
        "reason": choice.finish_reason,
    }


def join(chunks: list[Any]) -> list[dict[str, Any]]:
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            empty = {"text": "", "calls": [], "tokens": [], "reason": None}
            said, delta = choices.setdefault(choice.index, empty), choice.delta
            said["text"] += delta.content or ""
            said["reason"] = choice.finish_reason or said["reason"]
            if choice.logprobs:
                said["tokens"] += [entry.token for entry in choice.logprobs.content]
            for call in delta.tool_calls or []:
                if call.index == len(said["calls"]):
                    said["calls"].append([call.function.name, ""])
                said["calls"][call.index][1] += call.function.arguments or ""
    return [choices[index] for index in sorted(choices)]


async def ask_in_all_ways(both: Any, name: str, asked: dict[str, Any]) -> tuple[Any, list[Any]]:
    """The whole answer of the async client, and its chunks; the sync client must say the same of both."""
    create, create_sync = (attrgetter(f"{name}.create")(client) for client in both)
    options = {"model": "dummy", "temperature": 0, **asked}
    streams = {**options, "stream": True, "stream_options": {"include_usage": True}}
    whole = await create(**options)
    chunks = [chunk async for chunk in await create(**streams)]
    whole_sync, chunks_sync = await asyncio.to_thread(
        lambda: (create_sync(**options), list(create_sync(**streams)))
    )
    assert without_ids(whole_sync) == without_ids(whole)
    assert [without_ids(c) for c in chunks_sync] == [without_ids(c) for c in chunks]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert chunks[-1].timings["decode_ms"] is not None
    return whole, chunks


def without_ids(answer: Any) -> dict[str, Any]:
    """What two answers to the same question share: not ids, times, nor what came from the cache."""
    said = json.loads(answer.model_dump_json(exclude={"id", "created", "timings", "usage"}))
    for choice in said["choices"]:
        for call in (choice.get("message") or choice.get("delta") or {}).get("tool_calls") or []:
            call["id"] = None
    return said


@pytest.mark.parametrize("changes", CHATS, ids=str)
async def test_every_parameter_of_a_chat_says_the_same_whole_and_streamed_sync_and_async(
    both, changes
):
    whole, chunks = await ask_in_all_ways(both, "chat.completions", {"messages": USER, **changes})
    assert join(chunks) == [told(choice) for choice in whole.choices]
    assert len(whole.choices) == changes.get("n", 1)
    assert chunks[0].choices[0].delta.role == "assistant"


@pytest.mark.parametrize("changes", COMPLETIONS, ids=str)
async def test_every_parameter_of_a_completion_says_the_same_whole_and_streamed_sync_and_async(
    both, changes
):
    whole, chunks = await ask_in_all_ways(both, "completions", {"prompt": "Hi", **changes})
    for choice in whole.choices:
        parts = [p for chunk in chunks for p in chunk.choices if p.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert parts[-1].finish_reason == choice.finish_reason
        if "logprobs" in changes:
            tokens = [token for part in parts for token in part.logprobs.tokens]
            assert tokens == choice.logprobs.tokens


async def test_parameters_do_what_they_say(both):
    client, _ = both
    create = client.chat.completions.create

    async def ask(**changes: Any) -> Any:
        answer = await create(model="dummy", messages=USER, **changes)
        return answer.choices[0]

    assert (await ask()).message.content == " Hello there"
    assert (await ask(stop=" th")).message.content == " Hello"
    short = await ask(max_completion_tokens=3, max_tokens=9)
    assert (short.message.content, short.finish_reason) == (" He", "length")
    entries = (await ask(logprobs=True, top_logprobs=2)).logprobs.content
    assert [len(entry.top_logprobs) for entry in entries] == [2] * len(" Hello there")
    called = await ask(tools=[TOOL], tool_choice="required", parallel_tool_calls=False)
    assert called.finish_reason == "tool_calls"
    (call,) = called.message.tool_calls
    assert json.loads(call.function.arguments).keys() == {"is_big"}
    formatted = {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}
    assert json.loads((await ask(response_format=formatted)).message.content).keys() == {"is_big"}
    completions = client.completions
    echoed = await completions.create(model="dummy", prompt="Hi", echo=True)
    assert echoed.choices[0].text == "Hi Hello there"
    logprobs = (
        (await completions.create(model="dummy", prompt="Hi", logprobs=2)).choices[0].logprobs
    )
    assert len(logprobs.top_logprobs[0]) >= 2


async def test_a_message_is_continued_and_thoughts_stand_apart(start_server, connect):
    seen = []

    def script(sequence):
        seen.append(bytes(sequence.token_ids).decode())
        return 65

    server = await start_server(script=script)
    begun = [*USER, {"role": "assistant", "content": "The"}]
    options = {"continue_final_message": True, "add_generation_prompt": False}
    for client in connect(server):
        asked = {"model": "dummy", "messages": begun, "max_tokens": 1, "extra_body": options}
        if isinstance(client, openai.OpenAI):
            await asyncio.to_thread(client.chat.completions.create, **asked)
        else:
            await client.chat.completions.create(**asked)
    assert seen == ["user: Hi\nassistant: The"] * 2
    server = await start_server(script=list(b"<think>\nhm\n</think>\n\nYes"), has_thoughts=True)
    client, _ = connect(server)
    whole = (await client.chat.completions.create(model="dummy", messages=USER)).choices[0].message
    assert (whole.reasoning_content.strip(), whole.content) == ("hm", "Yes")
    async with client.chat.completions.stream(model="dummy", messages=USER) as events:
        final = (await events.get_final_completion()).choices[0].message
    assert final.content == "Yes"


async def test_models_embeddings_and_responses_have_the_clients_types(both):
    client, sync = both
    assert (await client.models.list()).data[0].id == "dummy"
    assert (await client.models.retrieve("dummy")).id == "dummy"
    vectors = await client.embeddings.create(model="dummy", input=["a", "b"])
    assert [vector.index for vector in vectors.data] == [0, 1]
    response = await client.responses.create(model="dummy", input="Hi")
    assert response.output_text == " Hello there"
    with await asyncio.to_thread(
        lambda: sync.responses.create(model="dummy", input="Hi", stream=True)
    ) as events:
        kinds = await asyncio.to_thread(lambda: [event.type for event in events])
    assert kinds[-1] == "response.completed"
