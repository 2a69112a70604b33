"""The real `openai` client, sync and async, for a running server; closed when the test is over."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

Connect = Callable[..., tuple[openai.AsyncOpenAI, openai.OpenAI]]


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    """`client, sync_client = connect(server)`; keywords go to both."""
    made: list[tuple[openai.AsyncOpenAI, openai.OpenAI]] = []

    def make(server: Any, **options: Any) -> tuple[openai.AsyncOpenAI, openai.OpenAI]:
        url = server if isinstance(server, str) else server.url
        shared: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "any", "max_retries": 0}
        shared |= options
        made.append((openai.AsyncOpenAI(**shared), openai.OpenAI(**shared)))
        return made[-1]

    yield make
    for client, sync_client in made:
        await client.close()
        sync_client.close()
