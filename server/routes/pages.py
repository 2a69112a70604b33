"""The pages for people: the chat at `/`, the reference at `/docs`, and the files of both below `/static/`.

Everything is read once and served from memory. A page may load nothing but these files, talk to nobody but this
server, and turn no text into markup: the headers below tell the browser so.
"""

from __future__ import annotations

import functools
import hashlib
from dataclasses import dataclass
from pathlib import Path

from aiohttp import web

from core.errors import NotFound
from server.protocol.openapi import document_bytes

FOLDER = Path(__file__).parents[1] / "static"
CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
CONTENT_SECURITY_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",  # with the next: no text ever becomes HTML, not even by mistake
        "trusted-types 'none'",
    )
)
HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    # Asked for again each time and answered with 304: after an update no browser mixes old files with new ones.
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    body: bytes
    content_type: str
    etag: str


def routes() -> list[web.RouteDef]:
    return [
        web.get("/", functools.partial(_serve, "index.html")),
        web.get("/docs", functools.partial(_serve, "docs.html")),
        web.get("/openapi.json", openapi),
        web.get("/static/{name}", static),
    ]


async def static(request: web.Request) -> web.Response:
    return await _serve(request.match_info["name"], request)


async def openapi(request: web.Request) -> web.Response:
    return web.Response(body=document_bytes(), content_type="application/json")


async def _serve(name: str, request: web.Request) -> web.Response:
    """The file, or 304 where the browser has it."""
    file = read_files().get(name)
    if file is None:
        raise NotFound("There is no such path.")
    headers = {**HEADERS, "etag": file.etag}
    known = {
        tag.strip().removeprefix("W/")
        for tag in request.headers.get("if-none-match", "").split(",")
    }
    if file.etag in known:
        return web.Response(status=304, headers=headers)
    return web.Response(body=file.body, headers={**headers, "content-type": file.content_type})


@functools.cache
def read_files() -> dict[str, PageFile]:
    """All files of the pages by name. No name that a client sends ever becomes a path."""
    files = {}
    for path in sorted(FOLDER.iterdir()):
        if path.suffix in CONTENT_TYPES:
            body = path.read_bytes()
            etag = f'"{hashlib.sha256(body).hexdigest()[:24]}"'
            files[path.name] = PageFile(body, CONTENT_TYPES[path.suffix], etag)
    return files
