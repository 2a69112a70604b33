"""`serve`: listen at once, tell when the model is ready, drain on a signal. Knows no arguments and never exits.

Called by `server/__main__.py`, and by tests with a backend of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import logging
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

from aiohttp import web

from core.errors import ConfigError, NoriaError
from server.api_keys import asks_for_key
from server.app import create_app
from server.backends.base import Backend
from server.config import HttpConfig, ServerConfig
from server.config_models import public_name
from server.connection import Connection
from server.logs import event
from server.metrics import Metrics

BACKLOG = 2048  # load tools open a thousand connections at once
MAX_URL_BYTES = 65536  # GET /generate_stream carries its prompt there
LAST_WORDS_S = 3.0  # for handlers to write their last event after the engine has stopped
_log = logging.getLogger("noria.server")


async def serve(
    config: ServerConfig,
    backend: Backend,
    metrics: Metrics,
    *,
    started_s: float,
    on_ready: Callable[[str], None] = lambda url: None,
    beside: Backend | None = None,
) -> None:
    """Serves until SIGTERM or SIGINT. `on_ready` gets the base URL once the model is loaded. `beside` is a vLLM engine
    for `/generate_vllm` alone; nobody waits until it is loaded.

    Raises `ConfigError` where it cannot listen, and what `Backend.loaded` raises. `started_s` (monotonic) is when the
    process began.
    """
    app = create_app(config, backend, metrics, beside)
    sockets = open_sockets(config.server)
    runner = web.AppRunner(
        app,
        handler_cancellation=True,  # a client that leaves ends its handler, streaming or not
        shutdown_timeout=LAST_WORDS_S,
    )
    signals = _catch_signals()
    listeners: list[asyncio.Server] = []
    try:
        await runner.setup()
        listeners = [await _listen(runner, sock) for sock in sockets]
        url = base_url(config.server.host, sockets[0].getsockname()[1])
        event(
            _log,
            logging.INFO,
            "listening",
            url=url,
            model=",".join(map(public_name, config.models)) or config.model.name,
        )
        loaded = asyncio.ensure_future(backend.loaded())
        first = asyncio.ensure_future(signals.get())
        await asyncio.wait({loaded, first}, return_when=asyncio.FIRST_COMPLETED)
        if loaded.done():
            loaded.result()
            metrics.startup_s = {**metrics.startup_s, "total": time.monotonic() - started_s}
            on_ready(url)
        else:
            loaded.cancel()
        name = await first
        backends = [backend] if beside is None else [backend, beside]
        await _drain(backends, config.server.shutdown_timeout_s, name, signals)
    finally:
        for listener in listeners:
            listener.close()
        for sock in sockets:
            sock.close()
        await runner.cleanup()
        _summarize(metrics, started_s)


async def _listen(runner: web.AppRunner, sock: socket.socket) -> asyncio.Server:
    """What a `SockSite` does, with our own connections."""
    loop, server = asyncio.get_running_loop(), runner.server
    assert server is not None

    def connect() -> Connection:
        # None is no access log at all; aiohttp's own runner passes it, too.
        return Connection(server, loop=loop, access_log=None, max_line_size=MAX_URL_BYTES)  # type: ignore[arg-type]

    return await loop.create_server(connect, sock=sock, backlog=BACKLOG)


async def _drain(
    backends: list[Backend], timeout_s: float, name: str, signals: asyncio.Queue[str]
) -> None:
    """Not ready first, new work 503, running requests finish in time; a second signal skips the wait (B132)."""
    for each in backends:
        each.begin_drain()
    stats = backends[0].stats()
    event(
        _log,
        logging.INFO,
        "draining",
        signal=name,
        running=stats.num_running,
        waiting=stats.num_waiting,
        timeout_s=timeout_s,
    )
    stopping: asyncio.Future[Any] = asyncio.gather(*(each.stop(timeout_s) for each in backends))
    second: asyncio.Future[Any] = asyncio.ensure_future(signals.get())
    await asyncio.wait({stopping, second}, return_when=asyncio.FIRST_COMPLETED)
    if not stopping.done():
        event(_log, logging.WARNING, "drain skipped", signal=second.result())
        stopping.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stopping
        await asyncio.gather(*(each.stop(0) for each in backends))
    second.cancel()


def _catch_signals() -> asyncio.Queue[str]:
    """The names of the signals that ask for an end, as they come."""
    loop = asyncio.get_running_loop()
    names: asyncio.Queue[str] = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        try:
            loop.add_signal_handler(number, names.put_nowait, number.name)
        except NotImplementedError:  # Windows
            signal.signal(number, _forward_to(loop, names))
    return names


def _forward_to(
    loop: asyncio.AbstractEventLoop, names: asyncio.Queue[str]
) -> Callable[[int, object], None]:
    def forward(number: int, frame: object) -> None:
        loop.call_soon_threadsafe(names.put_nowait, signal.Signals(number).name)

    return forward


def open_sockets(config: HttpConfig) -> list[socket.socket]:
    """Listening sockets for every address of the host. Raises `ConfigError`, one line that says what to change."""
    host, port = config.host, config.port
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        raise ConfigError(
            f"server.host must be an address of this machine; {host!r} has none."
        ) from None
    sockets: list[socket.socket] = []
    for family, _, _, _, address in dict.fromkeys(found):
        try:
            sock = socket.create_server(
                (str(address[0]), port), family=family, backlog=BACKLOG, reuse_port=False
            )
        except OSError as error:
            is_busy = error.errno == errno.EADDRINUSE
            if family == socket.AF_INET6 and not is_busy and len(found) > 1:
                continue  # a machine without IPv6 whose `localhost` names ::1 nevertheless
            for opened in sockets:
                opened.close()
            raise ConfigError(_why_not_listening(host, port, error)) from None
        sockets.append(sock)
        port = sock.getsockname()[1]  # port 0: the same free port for all addresses
    return sockets


def _why_not_listening(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{host}:{port} is in use by another program; choose another with --port."
    # create_server puts the address behind the system's own words.
    return f"{host}:{port} cannot be listened on: {(error.strerror or 'unknown').partition(' (')[0].lower()}."


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def base_url(host: str, port: int) -> str:
    """The URL to type on this machine."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{shown}:{port}"


def _summarize(metrics: Metrics, started_s: float) -> None:
    models = metrics.of_all_models()
    event(
        _log,
        logging.INFO,
        "stopped",
        uptime_s=time.monotonic() - started_s,
        **{
            reason: int(sum(each.total("vllm:request_success", reason) for each in models))
            for reason in ("stop", "length", "abort", "error")
        },
        rejections=int(sum(each.sum_of("noria:rejections") for each in models)),
        prompt_tokens=int(sum(each.total("vllm:prompt_tokens") for each in models)),
        generated_tokens=int(sum(each.total("vllm:generation_tokens") for each in models)),
    )


def why_insecure(config: ServerConfig, is_insecure: bool) -> NoriaError | None:
    """Whether the server would be open to others without anyone having said so."""
    http = config.server
    if is_loopback(http.host) or asks_for_key(http) or is_insecure:
        return None
    return ConfigError(
        f"server.host {http.host} can be reached from other machines: set server.api_keys or server.api_key_file, "
        "or pass --insecure."
    )
