"""From an HTTP request to a checked object and to tokens. The part of a handler that comes before the queue.

Heavy work goes to the executor: large bodies, templates, tokenizing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar

from aiohttp import web

from core.errors import BodyTooLarge, Busy, InvalidValue
from server.backends.base import ServedModel
from server.keys import CONFIG, COUNTER, EXECUTOR, LEASE, MODELS, RECORD, metrics_of
from server.models.lease import Lease
from server.protocol.body import check_content_type, parse_object

T = TypeVar("T")
LARGE_BODY_BYTES = 65536


async def read(
    request: web.Request,
    check: Callable[[dict[str, Any], ServedModel], T],
    *,
    is_counting: bool = False,
) -> tuple[T, ServedModel]:
    """Reads the body and gives its object, and the model it asks for, to `check`, which is pure. The model stays loaded
    for as long as the answer takes. Raises `NoriaError`.

    `is_counting`: nothing is generated from it, so a large one must keep no chat waiting.
    """
    body = await read_bytes(request)
    executor = _executor(request, body, is_counting=is_counting)
    lease = request.app[MODELS].only()
    if lease is not None:
        request[LEASE] = lease
        return await parse(
            request, body, lambda value: check(value, lease.model), executor
        ), lease.model
    value = await parse(request, body, lambda value: value, executor)
    model = (await hold(request, value.get("model"))).model
    return await _off_loop_if_large(body, lambda: check(value, model), executor), model


async def hold(request: web.Request, name: object) -> Lease:
    """The model of this name, the default one where that is no text, for as long as the answer takes. Waits until it is
    loaded. Raises `NoriaError`."""
    return _keep(
        request, await request.app[MODELS].acquire(name if isinstance(name, str) else None)
    )


def hold_resident(request: web.Request, name: str | None) -> Lease | None:
    """The same, if it is loaded: else None, and it stays as it is. Raises `NoriaError`."""
    lease = request.app[MODELS].resident(name)
    return None if lease is None else _keep(request, lease)


def _keep(request: web.Request, lease: Lease) -> Lease:
    request[LEASE] = lease
    if lease.is_one_of_several:
        request[RECORD].model = lease.model.name
    return lease


def _executor(request: web.Request, body: bytes, *, is_counting: bool) -> ThreadPoolExecutor:
    return request.app[COUNTER if is_counting and len(body) > LARGE_BODY_BYTES else EXECUTOR]


async def read_bytes(request: web.Request) -> bytes:
    """The body, if its type and size are allowed."""
    check_content_type(request.headers.get("content-type"))
    limit = request.app[CONFIG].server.max_body_bytes
    if request.content_length is not None and request.content_length > limit:
        raise BodyTooLarge(
            f"The request body has {request.content_length} bytes; at most {limit} are allowed."
        )
    return await request.read()


async def parse(
    request: web.Request,
    body: bytes,
    check: Callable[[dict[str, Any]], T],
    executor: ThreadPoolExecutor | None = None,
) -> T:
    """The checked object; a large body is read and checked in the executor."""
    return await _off_loop_if_large(
        body, lambda: check(parse_object(body)), executor or request.app[EXECUTOR]
    )


async def _off_loop_if_large(body: bytes, work: Callable[[], T], executor: ThreadPoolExecutor) -> T:
    if len(body) <= LARGE_BODY_BYTES:
        return work()
    return await asyncio.get_running_loop().run_in_executor(executor, work)


async def tokenize(
    request: web.Request,
    work: Callable[[], T],
    kind: Literal["template", "tokenize"],
    param: str | None = None,
    *,
    is_counting: bool = False,
) -> T:
    """Runs `work` in the executor for at most `server.template_timeout_s`, and waits no longer than that for its turn.
    `param` names the field in errors. Raises `NoriaError`."""
    timeout_s = request.app[CONFIG].server.template_timeout_s
    metrics = metrics_of(request)
    begun_s: list[float] = []

    def begin() -> T:
        begun_s.append(time.monotonic())
        return work()

    started_s = time.monotonic()
    executor = _executor(request, await request.read(), is_counting=is_counting)
    future = asyncio.get_running_loop().run_in_executor(executor, begin)
    try:
        await asyncio.wait({future}, timeout=timeout_s)
        if not future.done() and begun_s:  # its turn came late: it has the same time as others
            left_s = begun_s[0] + timeout_s - time.monotonic()
            await asyncio.wait({future}, timeout=max(0.0, left_s))
        if future.done():
            return await future
        if not begun_s:
            raise Busy(f"Other prompts kept this one waiting for {timeout_s:g} s. Try again.")
        metrics.observe_failure("template")
        raise InvalidValue(
            f"The prompt could not be turned into tokens within {timeout_s:g} s.",
            param=param or ("messages" if kind == "template" else "prompt"),
        )
    finally:
        future.cancel()
        metrics.observe_executor(kind, time.monotonic() - started_s)
