"""The tutorial's routes as a client sees them: the body each wants, and one request to its end, streamed or whole."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from loadtest.closed_loop import PlannedRequest
from loadtest.sse_client import RequestRecord, SseParser

STREAM_ROUTE = "/generate_stream"
LIST_ROUTES = ("/generate", "/generate_vllm")


@dataclass(frozen=True, slots=True)
class WholeRequest:
    """A request of the ladder. `request_id` is sent along, so that the server's log lines can be told apart."""

    request_id: str
    planned: PlannedRequest


def body_of(route: str, planned: PlannedRequest) -> bytes:
    """A greedy request for exactly `max_tokens` tokens. List routes get a list of one: each client has one prompt."""
    fields: dict[str, Any] = {
        "max_tokens": planned.max_tokens,
        "min_tokens": planned.max_tokens,
        "ignore_eos": True,
        "temperature": 0,
    }
    if route in LIST_ROUTES:
        fields["prompts"] = [planned.prompt]
    else:
        fields["prompt"] = planned.prompt
    return orjson.dumps(fields)


async def send(
    session: aiohttp.ClientSession, url: str, route: str, request: WholeRequest, timeout_s: float
) -> RequestRecord:
    """Never raises for what a server does: a failed request is a result too."""
    record = RequestRecord(sent_s=time.perf_counter())
    headers = {"content-type": "application/json", "x-request-id": request.request_id}
    body = body_of(route, request.planned)
    try:
        async with asyncio.timeout(timeout_s):
            async with session.post(url + route, data=body, headers=headers) as response:
                record.status = response.status
                if response.status != 200:
                    record.fail(f"HTTP {response.status}: {(await response.text())[:300]}")
                elif route == STREAM_ROUTE:
                    await _read_stream(response, record)
                else:
                    _read_whole(await response.read(), record)
    except TimeoutError:
        record.fail(f"no end within {timeout_s:g} s")
    except (aiohttp.ClientError, ValueError, OSError) as error:
        record.fail(f"{type(error).__name__}: {error}"[:300])
    record.end(time.perf_counter())
    return record


async def _read_stream(response: aiohttp.ClientResponse, record: RequestRecord) -> None:
    parser = SseParser()
    async for chunk in response.content.iter_any():
        now_s = time.perf_counter()
        for event in parser.feed(chunk):
            if not record.take(event, now_s):
                return


def _read_whole(body: bytes, record: RequestRecord) -> None:
    """The whole text at once: its first token cannot be seen from here."""
    answer = orjson.loads(body)
    texts = answer.get("generated_texts") or [answer.get("generated_text")]
    if not all(isinstance(text, str) for text in texts):
        record.fail("the answer holds no text")
        return
    record.texts = texts
    record.text_times_s = [time.perf_counter()]
    record.has_end_mark = True
