"""A real server with the built-in model, and headless Chromium, both once for all tests of this folder."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from devtools import Browser, Page, chromium

from loadtest.server_process import DEFAULT_COMMAND, running_server


@pytest.fixture(scope="session")
def server_url(
    tmp_path_factory: pytest.TempPathFactory, default_model_folder: Path
) -> Iterator[str]:
    """The real command. `NORIA_BROWSER_URL` names a server that runs already."""
    if url := os.environ.get("NORIA_BROWSER_URL"):
        yield url.rstrip("/")
        return
    log = tmp_path_factory.mktemp("server") / "log"
    command = [*DEFAULT_COMMAND, "--port", "{port}"]
    with running_server(command, log, ready_path="/health", start_timeout_s=120) as server:
        yield server.url


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Browser]:
    async with chromium(tmp_path / "profile") as browser:
        yield browser


OpenChat = Callable[..., Awaitable[Page]]


@pytest.fixture
def open_chat(browser: Browser, server_url: str) -> OpenChat:
    """Opens the chat page and waits until it can send."""

    async def open_it(url: str = "", **size: int) -> Page:
        page = await browser.open(url or f"{server_url}/", **size)
        await page.until("document.querySelector('#ready')")
        await page.until("document.querySelector('#status').dataset.phase === 'ready'", 60)
        return page

    return open_it
