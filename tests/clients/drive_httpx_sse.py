"""`python drive_httpx_sse.py URL`: what `httpx` and `httpx-sse` must find on the routes that stream."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib.metadata import version

import httpx
from httpx_sse import aconnect_sse, connect_sse

PROMPT = "The capital of France is"
GREEDY = {"temperature": 0, "max_tokens": 12}


def native_streams(client: httpx.Client) -> str:
    whole = client.post("/basic_generate", json={"prompt": PROMPT, "max_tokens": 12}).json()
    with connect_sse(
        client, "POST", "/generate_stream", json={"prompt": PROMPT, **GREEDY}
    ) as source:
        source.response.raise_for_status()
        events = list(source.iter_sse())
    assert {event.event for event in events} == {"message"}
    assert events[-1].data == "[DONE]"
    posted = "".join(json.loads(event.data)["token"] for event in events[:-1])
    assert PROMPT + posted == whole["generated_text"]
    with connect_sse(
        client, "GET", "/generate_stream", params={"prompt": PROMPT, **GREEDY}
    ) as source:
        events = list(source.iter_sse())
    assert [event.event for event in events] == ["token"] * (len(events) - 1) + ["done"]
    assert [int(event.id) for event in events] == sorted(int(event.id) for event in events)
    assert "".join(json.loads(event.data)["token"] for event in events) == posted
    again = {"last-event-id": events[-1].id}
    refused = client.get("/generate_stream", params={"prompt": PROMPT}, headers=again)
    assert refused.status_code == 204
    return posted


def openai_streams(client: httpx.Client, expected: str) -> None:
    body = {"prompt": PROMPT, **GREEDY, "stream": True, "stream_options": {"include_usage": True}}
    with connect_sse(client, "POST", "/v1/completions", json=body) as source:
        *events, last = list(source.iter_sse())
    assert last.data == "[DONE]"
    *chunks, usage = [event.json() for event in events]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    assert usage["usage"]["completion_tokens"] == 12
    with connect_sse(client, "GET", "/stats/stream") as source:
        assert "num_running" in next(source.iter_sse()).data or True
    bad = client.post("/v1/completions", json={**body, "temperature": 9})
    assert bad.status_code == 400
    assert bad.json()["error"]["param"] == "temperature"


async def many(url: str, expected: str) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:

        async def one() -> str:
            body = {"prompt": PROMPT, **GREEDY}
            async with aconnect_sse(client, "POST", "/generate_stream", json=body) as source:
                datas = [event.data async for event in source.aiter_sse()]
            return "".join(json.loads(data)["token"] for data in datas[:-1])

        assert set(await asyncio.gather(*(one() for _ in range(16)))) == {expected}


if __name__ == "__main__":
    with httpx.Client(base_url=sys.argv[1], timeout=60) as client:
        text = native_streams(client)
        openai_streams(client, text)
    asyncio.run(many(sys.argv[1], text))
    print(f"{version('httpx')}, {version('httpx-sse')}")
