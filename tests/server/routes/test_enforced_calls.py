"""A hundred required tool calls of the real default model over HTTP: each parses, and its arguments validate."""

from __future__ import annotations

import asyncio
import json

import jsonschema
import openai
import pytest

from server.backends.loading import make_load
from server.config import build_config

pytestmark = pytest.mark.slow
TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 30},
            "unit": {"enum": ["celsius", "fahrenheit"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "send_mail": {
        "type": "object",
        "properties": {
            "to": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
            "subject": {"type": "string", "maxLength": 40},
            "is_urgent": {"type": "boolean"},
        },
        "required": ["to", "subject"],
        "additionalProperties": False,
    },
}


async def test_a_hundred_required_calls_parse_and_validate(start_server) -> None:
    config = build_config({"server.model_aliases": ["*"]})
    server = await start_server({"server.model_aliases": ["*"]}, load=make_load(config))
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema}}
        for name, schema in TOOLS.items()
    ]
    limit = asyncio.Semaphore(32)
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=600
    ) as client:

        async def call(number: int) -> None:
            named = {"type": "function", "function": {"name": sorted(TOOLS)[number % 2]}}
            async with limit:
                answer = await client.chat.completions.create(
                    model="any",
                    messages=[{"role": "user", "content": f"Task {number}: what about Seoul?"}],
                    tools=tools,
                    tool_choice=named if number % 4 == 0 else "required",
                    parallel_tool_calls=number % 3 == 0,
                    temperature=1,
                    seed=number,
                )
            choice = answer.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert choice.message.tool_calls
            for made in choice.message.tool_calls:
                arguments = json.loads(made.function.arguments)
                jsonschema.validate(arguments, TOOLS[made.function.name])

        await asyncio.gather(*(call(number) for number in range(100)))
