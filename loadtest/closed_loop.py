"""A closed loop: C clients, each sending its next request when the last one has ended. All HTTP of the client.

Each request opens a connection of its own: some servers close kept-alive ones under the client, whose next request
then fails, and all servers are to be measured alike.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import aiohttp

from loadtest.sse_client import RequestRecord, SseParser
from loadtest.target import Target

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request of a load, decided before the clock starts."""

    prompt: str
    max_tokens: int


@dataclass(frozen=True, slots=True)
class LoopResult:
    """All records of a closed loop. `num_not_sent`: requests left over when the time limit struck."""

    records: tuple[RequestRecord, ...]
    wall_s: float
    num_not_sent: int = 0


@asynccontextmanager
async def open_session() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=1 << 20, trust_env=False
    ) as session:
        yield session


async def stream_request(
    session: aiohttp.ClientSession, target: Target, planned: PlannedRequest, timeout_s: float
) -> RequestRecord:
    """Runs one request to its end. Never raises for what a server does: a failed request is a result too."""
    body = target.body(planned.prompt, planned.max_tokens)
    record = RequestRecord(sent_s=time.perf_counter())
    try:
        async with asyncio.timeout(timeout_s):
            async with session.post(
                target.url + target.path, data=body, headers=target.headers
            ) as response:
                await _read(response, record)
    except TimeoutError:
        record.fail(f"no end within {timeout_s:g} s")
    except (aiohttp.ClientError, ValueError, OSError) as error:
        record.fail(f"{type(error).__name__}: {error}"[:300])
    record.end(time.perf_counter())
    return record


async def _read(response: aiohttp.ClientResponse, record: RequestRecord) -> None:
    record.status = response.status
    if response.status != 200:
        text = await response.text(errors="replace")
        record.fail(f"HTTP {response.status}: {text[:300]}")
        return
    if response.content_type != "text/event-stream":
        record.fail(f"not an event stream: {response.content_type}")
        return
    parser = SseParser()
    async for chunk in response.content.iter_any():
        now_s = time.perf_counter()
        for event in parser.feed(chunk):
            if not record.take(event, now_s):
                return


async def run_closed_loop(
    target: Target,
    planned: Sequence[PlannedRequest],
    concurrency: int,
    *,
    timeout_s: float,
    time_limit_s: float = float("inf"),
) -> LoopResult:
    """Sends all planned requests, `concurrency` at a time.

    `timeout_s` bounds one request, `time_limit_s` the whole: no request starts after it, running ones are cut.
    """
    records: list[RequestRecord] = []
    todo = iter(planned)
    start_s = time.perf_counter()
    async with open_session() as session:
        await asyncio.gather(
            *(
                _client(session, target, todo, records, timeout_s, start_s + time_limit_s)
                for _ in range(min(concurrency, len(planned)))
            )
        )
    wall_s = time.perf_counter() - start_s
    return LoopResult(tuple(records), wall_s, len(planned) - len(records))


async def _client(
    session: aiohttp.ClientSession,
    target: Target,
    todo: Iterator[PlannedRequest],
    records: list[RequestRecord],
    timeout_s: float,
    deadline_s: float,
) -> None:
    while (left_s := deadline_s - time.perf_counter()) > 0:
        planned = next(todo, None)
        if planned is None:
            return
        records.append(await stream_request(session, target, planned, min(timeout_s, left_s)))


async def with_model(target: Target) -> Target:
    """Fills in the model's name from `/v1/models` where none was given. Native routes need none."""
    if target.model is not None or target.endpoint == "native":
        return target
    async with open_session() as session:
        answer = await get_json(session, target, "/v1/models")
    models = answer.get("data") if isinstance(answer, dict) else None
    if not models:
        raise SystemExit(f"{target.url}/v1/models names no model; give --model.")
    return replace(target, model=str(models[0]["id"]))


async def get_json(session: aiohttp.ClientSession, target: Target, path: str) -> Any:
    """The JSON of a GET; `SystemExit` with a sentence where there is no such server."""
    try:
        async with asyncio.timeout(30):
            async with session.get(target.url + path, headers=target.headers) as response:
                if response.status != 200:
                    raise SystemExit(f"{target.url}{path} answered {response.status}.")
                return await response.json(content_type=None)
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise SystemExit(f"{target.url} cannot be reached: {error}") from None


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, on uvloop where it is installed: the client shares the machine with the server."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
