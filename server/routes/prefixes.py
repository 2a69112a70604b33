"""`/admin/prefixes`: compute and pin the beginnings of prompts, list them, let them go. Needs the admin key."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
from aiohttp import web

from core.engine import Engine
from core.errand import Bits, at_once
from core.errors import Busy, InternalError, ModelNotLoaded, NotFound, UnsupportedValue
from core.prefixes.pinned import PinnedPrefix, PinnedPrefixes
from server.backends.native import NativeBackend
from server.keys import LEASE
from server.protocol.admin import (
    PARAMS,
    DeletedPin,
    PinList,
    parse_prefix,
    parse_snapshot,
    pin_list,
    prefix_object,
    snapshot_object,
)
from server.protocol.chat import ChatPrompt
from server.protocol.fields import UnknownFields
from server.protocol.prompts import resolve
from server.routes.incoming import hold_resident, parse, read, read_bytes, tokenize
from server.routes.streaming import Outputs, collect

MAX_TRIES = 3  # a prefix may be evicted between its last step and its pin


def routes() -> list[web.RouteDef]:
    handlers = PrefixRoutes()
    return [
        web.post("/admin/prefixes", handlers.create),
        web.get("/admin/prefixes", list_pins),
        web.delete("/admin/prefixes/{id}", delete_pin),
        web.post("/admin/prefixes/snapshot", save_snapshot),
    ]


class PrefixRoutes:
    """Making one; the only state is which unknown fields were logged."""

    def __init__(self) -> None:
        self._unknown = UnknownFields()

    async def create(self, request: web.Request) -> web.Response:
        asked, model = await read(
            request, lambda body, model: parse_prefix(body, model, self._unknown)
        )
        backend = native_of(request)
        is_chat = isinstance(asked.prompt, ChatPrompt)
        work = functools.partial(asked.tokenize, model)
        ids = await tokenize(request, work, "template" if is_chat else "tokenize")
        requests = resolve([ids], PARAMS, model, names=["messages" if is_chat else "prompt"])
        if asked.is_pinned:
            await backend.run_beside(at_once(lambda engine: pins_of(engine).check_room(ids)))
        num_cached: list[int] = []

        def add(outputs: Outputs) -> None:
            num_cached.extend(output.num_cached_tokens for _, output in outputs)

        pin: PinnedPrefix | None = None
        for _ in range(MAX_TRIES):
            await collect(request, requests, add)
            if asked.is_pinned:
                pin = await backend.run_beside(
                    at_once(lambda engine: pins_of(engine).pin(ids, asked.label))
                )
            if pin is not None or not asked.is_pinned:
                return _json(prefix_object(pin, asked.label, len(ids), num_cached[0]))
        raise Busy("Other requests took the blocks before they could be pinned. Try again.")


async def list_pins(request: web.Request) -> web.Response:
    if hold_resident(request, request.query.get("model")) is None:
        return _json(pin_list((), 0, 0))

    def look(engine: Engine) -> PinList:
        pins, size = pins_of(engine), engine.cache_config.block_size
        return pin_list(pins, pins.num_blocks * size, pins.max_blocks * size)

    return _json(await native_of(request).run_beside(at_once(look)))


async def delete_pin(request: web.Request) -> web.Response:
    prefix_id = request.match_info["id"]
    unpin = at_once(lambda engine: pins_of(engine).unpin(prefix_id))
    is_loaded = hold_resident(request, request.query.get("model")) is not None
    if not is_loaded or await native_of(request).run_beside(unpin) is None:
        raise NotFound("No prefix of this id is pinned.", param="id")
    return _json(DeletedPin(prefix_id, "prefix.deleted", True))


async def save_snapshot(request: web.Request) -> web.Response:
    """Beside the steps; when it answers the file is on the disk."""
    body = await read_bytes(request) if request.can_read_body else b""
    fields = await parse(request, body, parse_snapshot) if body else None
    name = (fields and fields.model) or request.query.get("model")
    if hold_resident(request, name) is None:
        raise ModelNotLoaded("This model is not loaded: it has no prefix cache now.", param="model")

    def work(engine: Engine) -> Bits:
        if engine.snapshots is None:
            raise UnsupportedValue("kv_cache.snapshot_file is not set.")
        return engine.snapshots.save()

    try:
        report = await native_of(request).run_beside(work)
    except OSError as error:
        raise InternalError(f"the prefix snapshot could not be written: {error.strerror}") from None
    return _json(snapshot_object(report))


def native_of(request: web.Request) -> NativeBackend:
    backend = request[LEASE].backend
    if not isinstance(backend, NativeBackend):
        raise UnsupportedValue("Only the native engine lets its prefix cache be managed.")
    return backend


def pins_of(engine: Engine) -> PinnedPrefixes:
    if engine.pins is None:
        raise UnsupportedValue("There is no prefix cache: engine.prefix_caching is false.")
    return engine.pins


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
