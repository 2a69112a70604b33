"""The part of a handler that comes after the queue: submit, wait, write, and one `finally` for every way out.

Knows renderers by their protocol and backends by theirs; knows no fields.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from aiohttp import web

from core.errors import InternalError, NoriaError
from core.outputs import FinishReason, StepOutput
from server import sse
from server.backends.base import Backend, GenerationRequest, RequestStream
from server.keys import CONFIG, LEASE, RECORD, metrics_of
from server.protocol.errors import error_of_output

Outputs = list[tuple[int, StepOutput]]

SMALL_WRITE_BYTES = 32768  # less than what a transport takes without pausing
SLOW_WRITE_S = 0.05  # a write that waited longer has a slow reader
_log = logging.getLogger("noria.http")


class Renderer(Protocol):
    """Outputs to the bytes of a stream."""

    keep_alive: bytes  # what tells a client after a long silence that its answer is still worked on

    def write(self, outputs: Outputs, *, merges: bool = False) -> bytes: ...

    def end(self) -> bytes:
        """After the last output of all sequences."""

    def fail(self, error: NoriaError) -> bytes:
        """Instead of the rest."""


async def collect(
    request: web.Request,
    requests: list[GenerationRequest],
    add: Callable[[Outputs], None],
    backend: Backend | None = None,
) -> None:
    """Runs requests to their end and gives every output to `add`. Raises `NoriaError` if one fails.

    A client that hangs up cancels the handler, and with it whatever still runs.
    """
    stream = _submit(request, requests, backend)
    try:
        while not stream.is_finished:
            outputs = await stream.get()
            _raise_failure(outputs)
            add(outputs)
    finally:
        stream.close()


async def answer_stream(
    request: web.Request,
    requests: list[GenerationRequest],
    make_renderer: Callable[[tuple[str, ...]], Renderer],
) -> web.StreamResponse:
    """Runs requests and writes their outputs as they come. `make_renderer` is given the ids of the sequences.

    Raises `NoriaError` only before the headers, which go out with the first output or after `early_headers_s`.
    """
    config, metrics = request.app[CONFIG], metrics_of(request)
    stream = _submit(request, requests)
    cause = "client_gone"
    metrics.streams_open += 1
    try:
        renderer = make_renderer(stream.sequence_ids)
        outputs = await _get(stream, config.server.early_headers_s)
        _raise_failure(outputs)
        response = web.StreamResponse(headers=sse.STREAM_HEADERS)
        await response.prepare(request)
        writer = _Writer(request, response)
        await _write_all(stream, outputs, renderer, writer, config.sse.keepalive_s)
        return response
    except _SlowReader:
        cause = "slow_reader"
        metrics.observe_cut()
        _log.warning("%s: slow reader cut", request[RECORD].request_id)
        if request.transport is not None:
            request.transport.abort()
        return response
    finally:
        metrics.streams_open -= 1
        stream.close(cause)


def _submit(
    request: web.Request, requests: list[GenerationRequest], backend: Backend | None = None
) -> RequestStream:
    record = request[RECORD]
    return (backend or request[LEASE].backend).submit(
        requests, request_id=record.request_id, route=record.route, record=record
    )


async def _get(stream: RequestStream, timeout_s: float) -> Outputs:
    """The next outputs, or none if it takes longer; 0 waits for ever."""
    if timeout_s <= 0:
        return await stream.get()
    try:
        async with asyncio.timeout(timeout_s):
            return await stream.get()
    except TimeoutError:
        return []


async def _write_all(
    stream: RequestStream,
    outputs: Outputs,
    renderer: Renderer,
    writer: _Writer,
    keepalive_s: float,
) -> None:
    """Writes events until all sequences have ended or one has failed. `outputs` are the first, if there are any."""
    is_silent = False
    while True:
        good, error = _split_at_failure(outputs)
        data = writer.render(renderer, good)
        if error is not None:
            data += renderer.fail(error)
        elif stream.is_finished:
            data += renderer.end()
        elif is_silent:
            data += renderer.keep_alive
        if data:
            await writer.write(data)
        if error is not None or stream.is_finished:
            await writer.finish()
            return
        outputs = await (_get(stream, keepalive_s) if keepalive_s > 0 else stream.get())
        is_silent = not outputs


class _SlowReader(Exception):
    """The client has taken nothing for `slow_reader_timeout_s`."""


class _Writer:
    """Writes to one client and notices when it does not read.

    While a write waits, outputs gather in the stream; they are then merged up to `slow_reader_kib` of text an event.
    """

    def __init__(self, request: web.Request, response: web.StreamResponse) -> None:
        config = request.app[CONFIG].server
        self._request = request
        self._response = response
        self._timeout_s = config.slow_reader_timeout_s
        self._merge_bytes = config.slow_reader_kib * 1024
        self._is_slow = False

    def render(self, renderer: Renderer, outputs: Outputs) -> bytes:
        if not self._is_slow or len(outputs) < 2:
            return renderer.write(outputs)
        metrics_of(self._request).observe_merge(len(outputs))
        groups: list[Outputs] = [[]]
        size_bytes = 0
        for item in outputs:
            size_bytes += len(item[1].text.encode("utf-8", "replace"))
            if size_bytes > self._merge_bytes and groups[-1]:
                groups.append([])
                size_bytes = 0
            groups[-1].append(item)
        return b"".join([renderer.write(group, merges=True) for group in groups])

    async def write(self, data: bytes) -> None:
        """Raises `_SlowReader`, or `ConnectionError` if the client is gone."""
        transport = self._request.transport
        if (
            len(data) < SMALL_WRITE_BYTES
            and transport is not None
            and transport.get_write_buffer_size() == 0
        ):
            self._is_slow = False
            await self._response.write(data)
            return
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._response.write(data)
        except TimeoutError:
            raise _SlowReader from None
        self._is_slow = loop.time() - started_s > SLOW_WRITE_S

    async def finish(self) -> None:
        """Ends the body. A client that closes at the end mark has got everything."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._response.write_eof()
        except TimeoutError:
            raise _SlowReader from None
        except ConnectionError:
            pass


def _failure(output: StepOutput) -> NoriaError | None:
    if output.error is not None:
        return error_of_output(output.error)
    if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        return InternalError("aborted")
    return None


def _split_at_failure(outputs: Outputs) -> tuple[Outputs, NoriaError | None]:
    for place, (_, output) in enumerate(outputs):
        if output.finish_reason is not None and (error := _failure(output)) is not None:
            return outputs[:place], error
    return outputs, None


def _raise_failure(outputs: Outputs) -> None:
    _, error = _split_at_failure(outputs)
    if error is not None:
        raise error
