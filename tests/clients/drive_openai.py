"""`python drive_openai.py URL`: what the `openai` package must find, sync and async, streamed and whole."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import openai

MODEL = "smollm2-135m-instruct"
USER = [{"role": "user", "content": "What is the capital of France?"}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": USER, "temperature": 0, "max_tokens": 24}
COMPLETION: dict[str, Any] = {"model": MODEL, "prompt": "The capital of France is"}
COMPLETION |= {"temperature": 0, "max_tokens": 12}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "big": {"type": "boolean"}},
    "required": ["city", "big"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}
NUM_STREAMS = 100


def told(choice: Any) -> dict[str, Any]:
    """What a choice says, in a form that can be compared with a joined stream."""
    calls = choice.message.tool_calls or []
    return {
        "content": choice.message.content or "",
        "calls": [(call.function.name, call.function.arguments) for call in calls],
        "tokens": [entry.token for entry in choice.logprobs.content] if choice.logprobs else [],
        "finish_reason": choice.finish_reason,
    }


def join(stream: openai.Stream) -> list[dict[str, Any]]:
    """What the choices of a stream say; its last chunk must carry the usage."""
    chunks = list(stream)
    assert chunks[-1].usage.completion_tokens > 0
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            empty = {"content": "", "calls": [], "tokens": [], "finish_reason": None}
            said = choices.setdefault(choice.index, empty)
            said["content"] += choice.delta.content or ""
            said["finish_reason"] = choice.finish_reason or said["finish_reason"]
            if choice.logprobs:
                said["tokens"] += [entry.token for entry in choice.logprobs.content]
            for call in choice.delta.tool_calls or []:
                if call.index == len(said["calls"]):
                    said["calls"].append((call.function.name, ""))
                name, arguments = said["calls"][call.index]
                said["calls"][call.index] = (name, arguments + (call.function.arguments or ""))
    return [choices[index] for index in sorted(choices)]


def chats(client: openai.OpenAI) -> None:
    usage = {"stream_options": {"include_usage": True}}
    for changes in (
        {},
        {"n": 3, "temperature": 1, "seed": 7},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["Paris"]},
        {"frequency_penalty": 0.5, "presence_penalty": 0.5, "logit_bias": {"260": -100}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "c", "schema": SCHEMA},
            }
        },
        {"response_format": {"type": "json_object"}},
        {
            "tools": [TOOL],
            "tool_choice": "required",
            "parallel_tool_calls": False,
            "max_tokens": 80,
        },
        {
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "look_up"}},
            "max_tokens": 80,
        },
        {"tools": [TOOL], "tool_choice": "none"},
    ):
        asked = {**CHAT, **changes}
        whole = client.chat.completions.create(**asked)
        joined = join(client.chat.completions.create(**asked, **usage, stream=True))
        assert joined == [told(choice) for choice in whole.choices], changes
        check_chat(whole, changes)


def check_chat(whole: Any, changes: dict[str, Any]) -> None:
    message = whole.choices[0].message
    if not changes:
        assert "Paris" in message.content
        assert whole.timings["decode_ms"] > 0, "extra members reach the user"
    if "n" in changes:
        assert len({choice.message.content for choice in whole.choices}) > 1
    if "stop" in changes:
        assert "Paris" not in message.content
    if "response_format" in changes:
        assert message.content.lstrip().startswith("{")
        if whole.choices[0].finish_reason == "stop":
            assert isinstance(json.loads(message.content), dict)
    if changes.get("tool_choice", "none") != "none":
        assert whole.choices[0].finish_reason == "tool_calls"
        arguments = json.loads(message.tool_calls[0].function.arguments)
        assert set(arguments) == {"city", "big"}


def completions(client: openai.OpenAI) -> None:
    for changes in (
        {},
        {"echo": True},
        {"n": 2, "temperature": 1, "seed": 1},
        {"prompt": ["One, two,", "Monday, Tuesday,"], "n": 2},
        {"prompt": [[504, 3575, 282]]},
        {"logprobs": 2},
        {"stop": "."},
    ):
        whole = client.completions.create(**{**COMPLETION, **changes})
        texts = [""] * len(whole.choices)
        for chunk in client.completions.create(**{**COMPLETION, **changes}, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        assert texts == [choice.text for choice in whole.choices], changes
        if changes.get("echo"):
            assert texts[0].startswith("The capital of France is")
        if changes.get("logprobs"):
            assert len(whole.choices[0].logprobs.top_logprobs[0]) in (2, 3)


def everything_else(client: openai.OpenAI) -> None:
    assert client.models.list().data[0].id == client.models.retrieve(MODEL).id == MODEL
    begun = [*USER, {"role": "assistant", "content": "The capital of France is"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False}
    going_on = client.chat.completions.create(**{**CHAT, "messages": begun}, extra_body=extra)
    assert going_on.choices[0].message.content.startswith(" Paris"), going_on
    asked = {"model": MODEL, "input": "What is the capital of France?", "temperature": 0}
    whole = client.responses.create(**asked, max_output_tokens=24)
    assert "Paris" in whole.output_text
    with client.responses.stream(**asked, max_output_tokens=24) as events:
        pieces = [e.delta for e in events if e.type == "response.output_text.delta"]
        assert "".join(pieces) == events.get_final_response().output_text == whole.output_text
    vectors = client.embeddings.create(model=MODEL, input=["a river", "a mountain"])
    assert len(vectors.data) == 2
    assert abs(sum(x * x for x in vectors.data[0].embedding) - 1) < 1e-3


def caught(kind: type[Exception], call: Callable[[], object], what: object) -> Any:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{what} was accepted")


def errors(client: openai.OpenAI) -> None:
    long = [{"role": "user", "content": "a " * 9999}]
    for kind, changes, param in (
        (openai.NotFoundError, {"model": "other"}, "model"),
        (openai.BadRequestError, {"temperature": 3}, "temperature"),
        (openai.BadRequestError, {"messages": []}, "messages"),
        (openai.BadRequestError, {"messages": long}, "messages"),
        (openai.BadRequestError, {"tools": [TOOL]}, "tools"),
        (openai.BadRequestError, {"extra_body": {"regex": "(["}}, "regex"),
    ):
        for streams in (False, True):
            asked = {**CHAT, **changes, "stream": streams}
            call = partial(client.chat.completions.create, **asked)
            error = caught(kind, call, changes)
            assert error.param == param, error
            if changes.get("messages") is long:
                assert error.code == "context_length_exceeded", error
    for changes, param in (({"best_of": 2}, "best_of"), ({"suffix": "end"}, "suffix")):
        call = partial(client.completions.create, **COMPLETION, **changes)
        assert caught(openai.BadRequestError, call, changes).param == param


async def many(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:

        async def one(number: int) -> str:
            asked = {**CHAT, "messages": [{"role": "user", "content": f"Count to {number}."}]}
            stream = await client.chat.completions.create(**{**asked, "max_tokens": 8}, stream=True)
            return "".join([c.choices[0].delta.content or "" async for c in stream if c.choices])

        together = await asyncio.gather(*(one(number) for number in range(NUM_STREAMS)))
        assert all(together)
        for number in (0, 41, 99):
            assert await one(number) == together[number], "another text than alone"


if __name__ == "__main__":
    with openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="any", max_retries=0) as client:
        chats(client)
        completions(client)
        everything_else(client)
        errors(client)
    asyncio.run(many(sys.argv[1]))
    print(openai.__version__)
