"""What tests do with the chat page: send a message, look at the answer, wait for its end."""

from __future__ import annotations

from devtools import Page


async def send(page: Page, text: str, **settings: object) -> None:
    """Types a message and presses Enter. `settings` are those of the conversation."""
    if settings:
        await page.click("#show-settings")
        for name, value in settings.items():
            field = f"document.querySelector('#setting-{name}')"
            await page.run(f"{field}.value = {value!r}; {field}.dispatchEvent(new Event('input'))")
        await page.click("#show-settings")
    await page.run("document.querySelector('#prompt').focus()")
    await page.type(text)
    await page.press("Enter")


async def answer_length(page: Page) -> int:
    length = await page.run(
        "document.querySelector('.assistant:last-child .markdown:not(.thoughts *)')?.textContent.length ?? 0"
    )
    return int(length)


async def finished(page: Page, timeout_s: float = 90.0) -> None:
    await page.until("document.querySelector('#stop').hidden", timeout_s)
