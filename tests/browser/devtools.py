"""Headless Chromium through its DevTools protocol: JSON over one websocket, which aiohttp already speaks.

`async with chromium(folder) as browser: page = await browser.open(url)`. A page evaluates JavaScript, waits until
something holds, types with real key events and takes screenshots. Nothing else of the protocol is needed here, so no
library is.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

COMMANDS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",  # the tests may run as root in a container; the pages are our own
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--no-first-run",
    "--no-proxy-server",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, COMMANDS)), None)


class Failure(AssertionError):
    """What the page threw, or what did not come true in time."""


class Page:
    """One tab."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self.console: list[
            str
        ] = []  # errors and warnings, violations of the content security policy among them

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        return await self._browser.send(method, parameters, self._session)

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression; promises are awaited."""
        answer = await self.send(
            "Runtime.evaluate",
            expression=script,
            awaitPromise=True,
            returnByValue=True,
            userGesture=True,
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            raise Failure(details.get("exception", {}).get("description") or details["text"])
        return answer["result"].get("value")

    async def until(self, script: str, timeout_s: float = 10.0) -> Any:
        """Waits until the expression is true; its value."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while (value := await self.run(script)) in (None, False, 0, ""):
            if asyncio.get_running_loop().time() > deadline_s:
                raise Failure(f"not within {timeout_s:g} s: {script}; console: {self.console[-3:]}")
            await asyncio.sleep(0.02)
        return value

    async def goto(self, url: str) -> None:
        """Opens the address; what the old document defined is gone when this returns."""
        await self.run("window.isOld = true")
        await self.send("Page.navigate", url=url)
        await self.until("!window.isOld && document.readyState === 'complete'")

    async def click(self, selector: str) -> None:
        await self.until(f"document.querySelector({selector!r}) !== null")
        await self.run(f"document.querySelector({selector!r}).click()")

    async def type(self, text: str) -> None:
        """Into what has the focus."""
        await self.send("Input.insertText", text=text)

    async def press(self, key: str, *, code: str = "", modifiers: int = 0) -> None:
        """One key with real events. `modifiers`: 1 Alt, 2 Control, 8 Shift."""
        text = {"Enter": "\r"}.get(key, "")
        number = {"Enter": 13, "Escape": 27, "ArrowUp": 38}.get(key, 0)
        common = {
            "key": key,
            "code": code or key,
            "modifiers": modifiers,
            "windowsVirtualKeyCode": number,
        }
        await self.send("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.send("Input.dispatchKeyEvent", type="keyUp", **common)

    async def resize(self, width: int, height: int, *, is_phone: bool = False) -> None:
        await self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if is_phone else 1,
            mobile=is_phone,
        )
        await self.send("Emulation.setTouchEmulationEnabled", enabled=is_phone)

    async def prefer(self, scheme: str) -> None:
        """`light` or `dark`, as the system would say."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.send("Emulation.setEmulatedMedia", features=[feature])

    async def screenshot(self, path: Path) -> None:
        answer = await self.send("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))  # noqa: ASYNC240


class Browser:
    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._reader = asyncio.create_task(self._read())

    async def send(
        self, method: str, parameters: dict[str, Any], session: str | None = None
    ) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json(message)
        async with asyncio.timeout(60):
            return await future

    async def _read(self) -> None:
        async for message in self._socket:
            data = message.json()
            if "id" in data:
                future = self._answers.pop(data["id"])
                if "error" in data:
                    future.set_exception(Failure(str(data["error"])))
                else:
                    future.set_result(data["result"])
            elif (page := self._pages.get(data.get("sessionId", ""))) is not None:
                _note(page, data)

    async def open(self, url: str, *, width: int = 1280, height: int = 800) -> Page:
        """A new tab with storage of its own."""
        context = await self.send("Target.createBrowserContext", {})
        target = await self.send(
            "Target.createTarget",
            {"url": "about:blank", "browserContextId": context["browserContextId"]},
        )
        attached = await self.send(
            "Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}
        )
        page = Page(self, attached["sessionId"])
        self._pages[attached["sessionId"]] = page
        for domain in ("Page", "Runtime", "Log"):
            await page.send(f"{domain}.enable")
        await page.resize(width, height)
        await page.goto(url)
        return page

    async def close(self) -> None:
        with contextlib.suppress(Exception):
            await self.send("Browser.close", {})
        self._reader.cancel()
        await self._socket.close()


def _note(page: Page, data: dict[str, Any]) -> None:
    match data["method"]:
        case "Runtime.exceptionThrown":
            details = data["params"]["exceptionDetails"]
            page.console.append(details.get("exception", {}).get("description", details["text"]))
        case "Log.entryAdded" if data["params"]["entry"]["level"] in ("error", "warning"):
            page.console.append(data["params"]["entry"]["text"])


@contextlib.asynccontextmanager
async def chromium(profile: Path) -> AsyncIterator[Browser]:
    """A browser of its own with an empty profile in `profile`. Raises `Failure` if there is none on this machine."""
    command = find_chromium()
    if command is None:
        raise Failure("Chromium is not installed")
    process = await asyncio.create_subprocess_exec(
        command,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        address = await asyncio.wait_for(_address(process), 60)
        async with aiohttp.ClientSession() as session:
            socket = await session.ws_connect(address, max_msg_size=0, heartbeat=None)
            browser = Browser(socket)
            try:
                yield browser
            finally:
                await browser.close()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def _address(process: asyncio.subprocess.Process) -> str:
    assert process.stderr is not None
    seen = []
    async for line in process.stderr:
        seen.append(line.decode(errors="replace"))
        if found := re.search(r"DevTools listening on (ws://\S+)", seen[-1]):
            return found[1]
    raise Failure(f"Chromium did not start: {''.join(seen)[-2000:]}")
