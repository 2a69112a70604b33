"""`python drive_litellm.py URL`: what `litellm` must find."""

from __future__ import annotations

import asyncio
import os
import sys
from importlib.metadata import version
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # else it asks the network at import
import litellm

litellm.suppress_debug_info = True  # prints hints after an error
URL = sys.argv[1]
SHARED: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "any", "num_retries": 0}
CHAT: dict[str, Any] = {
    **SHARED,
    "model": "openai/smollm2-135m-instruct",
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "temperature": 0,
    "max_tokens": 24,
}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {"type": "object", "properties": {"big": {"type": "boolean"}}},
    },
}


def main() -> None:
    whole = litellm.completion(**CHAT)
    said = whole.choices[0].message.content
    assert "Paris" in said
    usage = {"stream_options": {"include_usage": True}}
    chunks = list(litellm.completion(**CHAT, stream=True, **usage))
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == said
    assert len([text for text in texts if text]) > 3
    counted = [chunk.usage for chunk in chunks if getattr(chunk, "usage", None)]
    assert counted[-1].completion_tokens == whole.usage.completion_tokens
    called = litellm.completion(**{**CHAT, "max_tokens": 60}, tools=[TOOL], tool_choice="required")
    assert called.choices[0].message.tool_calls[0].function.name == "look_up"
    text = litellm.text_completion(
        **SHARED,
        model="text-completion-openai/smollm2-135m-instruct",
        prompt="The capital of France is",
        temperature=0,
        max_tokens=8,
    )
    assert "Paris" in text.choices[0].text
    vectors = litellm.embedding(
        **SHARED, model="openai/smollm2-135m-instruct", input=["a river"], encoding_format="float"
    )
    assert len(vectors.data) == 1
    try:
        litellm.completion(**{**CHAT, "temperature": 3})
    except litellm.BadRequestError as error:
        said_why = str(error)
    assert "temperature" in said_why

    async def many() -> None:
        answers = await asyncio.gather(*(litellm.acompletion(**CHAT) for _ in range(8)))
        assert {answer.choices[0].message.content for answer in answers} == {said}

    asyncio.run(many())
    print(version("litellm"))


main()
