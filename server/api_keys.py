"""API keys: where they come from, and whether a request carries one. Deny by default; the open list is explicit.

Keys are compared in constant time on bytes, always against all of them. They are never logged.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable

from aiohttp import web

from core.errors import ConfigError
from server.config import HttpConfig, ServerConfig
from server.config_file import read_text

# Resources (as they stand in the route table, not as typed in a URL) that need no key.
OPEN_RESOURCES = frozenset(
    {"/", "/docs", "/openapi.json", "/static/{name}", "/health", "/health/ready", "/health/live"}
)
ADMIN_PREFIX = "/admin/"
QUERY_KEY_RESOURCE = "/generate_stream"


def load_keys(config: HttpConfig) -> tuple[bytes, ...]:
    """All keys of the configuration. Raises `ConfigError` if the key file cannot be read or holds none: an empty
    file must not open the server to everyone."""
    keys = [key.encode() for key in config.api_keys]
    if config.api_key_file is not None:
        lines = (line.strip() for line in read_text(config.api_key_file).splitlines())
        from_file = [line.encode() for line in lines if line and not line.startswith("#")]
        if not from_file:
            raise ConfigError(
                "server.api_key_file must be a file with one key per line; it has none."
            )
        keys += from_file
    return tuple(keys)


def asks_for_key(config: HttpConfig) -> bool:
    """Whether clients need a key, wherever keys come from. A file without any stops the start, so it counts."""
    return bool(config.api_keys) or config.api_key_file is not None


def is_open(request: web.Request, config: ServerConfig) -> bool:
    """Whether this request needs no key. An unknown path is not open."""
    resource = request.match_info.route.resource
    if resource is None:
        return False
    canonical = resource.canonical
    return canonical in OPEN_RESOURCES or (canonical == "/metrics" and config.metrics.open)


def is_admin(request: web.Request) -> bool:
    """Whether it needs the admin key, which no other key replaces."""
    resource = request.match_info.route.resource
    return resource is not None and resource.canonical.startswith(ADMIN_PREFIX)


def carries_key(request: web.Request, keys: Iterable[bytes], config: HttpConfig) -> bool:
    offered = [_bytes(value) for value in request.headers.getall("x-api-key", [])]
    for value in request.headers.getall("authorization", []):
        scheme, _, credentials = value.partition(" ")
        if scheme.lower() == "bearer":
            offered.append(_bytes(credentials.strip()))
    resource = request.match_info.route.resource
    if (
        config.key_in_query
        and request.method == "GET"
        and resource is not None
        and resource.canonical == QUERY_KEY_RESOURCE
    ):
        offered += [_bytes(value) for value in request.query.getall("api_key", [])]
    matches = [hmac.compare_digest(given, key) for given in offered for key in keys]
    return any(matches)


def _bytes(value: str) -> bytes:
    # Bytes that are no UTF-8 arrive as lone surrogates; they are compared like all others.
    return value.encode("utf-8", "surrogatepass")
