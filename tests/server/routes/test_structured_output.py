"""Structured output over HTTP, with the dummy model: any token it may choose is as good as any other."""

from __future__ import annotations

import asyncio
import re
import time

import openai
import orjson
import pydantic
import pytest

from core.structured.compiler import GrammarCompiler
from core.structured.follow import GrammarState
from server import grammars

USER = [{"role": "user", "content": "Hi"}]
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=9)
    age: int = pydantic.Field(ge=0, le=99)


@pytest.fixture
async def client(start_server):
    server = await start_server()
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0
    ) as made:
        yield made


async def test_the_client_parses_what_its_own_model_described(client) -> None:
    answer = await client.chat.completions.parse(
        model="dummy", messages=USER, response_format=Person, temperature=1, seed=3
    )
    assert 0 <= answer.choices[0].message.parsed.age <= 99
    assert answer.choices[0].finish_reason == "stop"


async def test_a_stream_joins_to_the_same_answer(client) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    options = {"model": "dummy", "messages": USER, "response_format": wanted, "seed": 5, "n": 3}
    whole = await client.chat.completions.create(**options)
    texts = ["", "", ""]
    async for chunk in await client.chat.completions.create(stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    for text in texts:
        assert set(orjson.loads(text)) == {"name", "age"}


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_regex": "[a-f]{4}"}, "[a-f]{4}"),
        ({"regex": "[a-f]{4}"}, "[a-f]{4}"),
        ({"guided_choice": ["red", "blue"]}, "red|blue"),
        ({"structured_outputs": {"choice": ["red", "blue"]}}, "red|blue"),
        ({"structured_outputs": {"regex": "[0-9]+x"}}, "[0-9]+x"),
        ({"guided_grammar": 'start: "<" /[a-z]+/ ">"'}, "<[a-z]+>"),
        ({"grammar": 'root ::= "<" [a-z]+ ">"'}, "<[a-z]+>"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
    ],
)
async def test_every_spelling_works_on_every_route(start_server, fields, pattern) -> None:
    server = await start_server()
    body = {"max_tokens": 400, "temperature": 1, "seed": 1, **fields}
    for path, prompt in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": USER}),
        ("/generate", {"prompts": ["a"]}),
    ):
        answer = await (await server.client.post(path, json={**body, **prompt})).json()
        text = (
            answer["generated_texts"][0][1:]
            if path == "/generate"
            else answer["choices"][0].get("text") or answer["choices"][0]["message"]["content"]
        )
        assert re.fullmatch(pattern, text), text


async def test_logprobs_are_those_of_the_model_and_stop_strings_still_stop(client) -> None:
    answer = await client.chat.completions.create(
        model="dummy", messages=USER, logprobs=True, extra_body={"regex": "[a-c]{6}"}
    )
    assert len(answer.choices[0].logprobs.content) == 6
    answer = await client.completions.create(
        model="dummy",
        prompt="a",
        stop=["-"],
        max_tokens=99,
        extra_body={"regex": "[a-c]{6}-[a-c]{6}"},
    )
    assert re.fullmatch("[a-c]{6}", answer.choices[0].text)


async def test_a_grammar_that_cannot_be_compiled_is_that_requests_own_error(client) -> None:
    """B097"""
    good = client.completions.create(model="dummy", prompt="a", max_tokens=50)
    bad = client.completions.create(model="dummy", prompt="a", extra_body={"guided_regex": "(["})
    fine, refused = await asyncio.gather(good, bad, return_exceptions=True)
    assert fine.choices[0].finish_reason == "length"
    assert isinstance(refused, openai.BadRequestError)
    assert refused.param == "guided_regex"
    with pytest.raises(openai.BadRequestError) as two:
        await client.completions.create(
            model="dummy", prompt="a", extra_body={"regex": "a", "guided_choice": ["a"]}
        )
    assert "exclude each other" in str(two.value)


async def test_hostile_grammars_hold_up_no_other_stream(start_server) -> None:
    """Deep nesting, ambiguous and exponential grammars, while another stream's gaps are watched. B097, B100"""
    server = await start_server(step_time_s=0.005, max_context=4096, num_blocks=600)
    nested: dict[str, object] = {"type": "string"}
    for _ in range(20):
        nested = {"type": "object", "properties": {"a": nested}, "required": ["a"]}
    hostile = [
        {"guided_grammar": "start: s\ns: s s s | s s | /[a-z]/"},
        {"guided_regex": "(.*a.{20}){3}"},
        {"guided_regex": "((a{1,100}){1,100}){1,100}"},
        {"guided_regex": "(a|a)*b" * 50},
        {"guided_regex": "a{20000}"},
        {"guided_json": nested},
        {
            "guided_json": {
                "type": "array",
                "items": {"pattern": "^(.*a.{30}){5}$", "type": "string"},
            }
        },
    ]
    body = {"prompt": "a", "max_tokens": 400, "temperature": 0}
    gaps: list[float] = []

    async def watch() -> None:
        response = await server.client.post("/generate_stream", json=body)
        last_s = 0.0
        async for _ in response.content:
            now_s = time.monotonic()
            if last_s:
                gaps.append(now_s - last_s)
            last_s = now_s

    async def attack(fields: dict[str, object]) -> int:
        request = {"prompt": "a", "max_tokens": 200, "temperature": 1, "seed": 1, **fields}
        return (await server.client.post("/v1/completions", json=request)).status

    await watch()
    quiet_s = max(gaps)  # what this machine does to anybody, now
    gaps.clear()
    watcher = asyncio.create_task(watch())
    await asyncio.sleep(0.1)
    for fields in hostile:
        assert await attack(fields) in (200, 400)
    await watcher
    assert len(gaps) > 400
    assert (
        max(gaps) < 1 + quiet_s
    )  # a grammar that blocked would take seconds; a busy machine takes some of 0.1 s


async def test_many_first_grammars_at_once_read_the_vocabulary_once(client, monkeypatch) -> None:
    made: list[GrammarCompiler] = []

    def make(tokenizer):
        time.sleep(0.05)
        made.append(GrammarCompiler(tokenizer))
        return made[-1]

    monkeypatch.setattr(grammars, "GrammarCompiler", make)
    texts = [f"[a-f]{{{length}}}" for length in range(1, 21)]
    answers = await asyncio.gather(
        *(
            client.completions.create(
                model="dummy", prompt="a", max_tokens=40, extra_body={"regex": text}
            )
            for text in texts
        )
    )
    assert [len(answer.choices[0].text) for answer in answers] == list(range(1, 21))
    assert len(made) == 1


async def test_a_grammar_that_can_be_followed_no_longer_ends_its_own_request(
    client, monkeypatch
) -> None:
    follow = GrammarState.follow

    def fail_later(self, token_ids, num_prompt_tokens):
        follow(self, token_ids, num_prompt_tokens)
        if len(token_ids) - num_prompt_tokens == 3:
            self.failure, self.mask = "it is too complex", None

    monkeypatch.setattr(GrammarState, "follow", fail_later)
    options = {"model": "dummy", "prompt": "a", "max_tokens": 9}
    bound, free = await asyncio.gather(
        client.completions.create(**options, extra_body={"regex": "[a-z]+"}),
        client.completions.create(**options),
        return_exceptions=True,
    )
    assert isinstance(bound, openai.BadRequestError)
    assert "too complex" in bound.message
    assert free.usage.completion_tokens == 9
    with pytest.raises(openai.APIError, match="too complex"):
        async for _ in await client.completions.create(
            **options, stream=True, extra_body={"regex": "[a-z]+"}
        ):
            pass
