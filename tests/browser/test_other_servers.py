"""What the page does when the server wants a key, is loading, fails or goes away."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import web
from chat_page import finished, send

from server.routes import pages

pytestmark = pytest.mark.browser


@pytest.fixture
async def stand_in():
    """A server of a few lines that serves the real page: `(url, state)`. `gone` cuts every connection."""
    state = {
        "health": (200, {"status": "ready"}),
        "key": None,
        "chat": None,
        "gone": False,
        "stats": 0,
    }

    @web.middleware
    async def cut(request, handler):
        if state["gone"]:
            request.transport.abort()
            return web.Response()
        return await handler(request)

    async def health(request):
        status, body = state["health"]
        return web.json_response(body, status=status)

    async def models(request):
        if state["key"] and request.headers.get("authorization") != f"Bearer {state['key']}":
            error = {"message": "no", "code": "invalid_api_key"}
            return web.json_response({"error": error}, status=401)
        return web.json_response({"data": [{"id": "one"}, {"id": "two"}]})

    async def chat(request):
        state["asked"] = await request.json()
        return await state["chat"](request)

    async def stats(request):
        state["stats"] += 1
        return web.Response(status=404)

    app = web.Application(middlewares=[cut])
    app.add_routes(pages.routes())
    app.add_routes(
        [
            web.get("/health", health),
            web.get("/v1/models", models),
            web.get("/stats/stream", stats),
            web.post("/v1/chat/completions", chat),
        ]
    )
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}/", state
    await runner.cleanup()


def phase(name):
    return f"document.querySelector('#status').dataset.phase === {name!r}"


async def test_a_key_is_asked_for_kept_for_the_tab_only_and_asked_for_again_if_wrong(
    browser, stand_in
):
    url, state = stand_in
    state["key"] = "sesame"
    page = await browser.open(url)
    await page.until("document.querySelector('#key-dialog').open")
    for key, shows_error in (("wrong", True), ("sesame", False)):
        await page.run(
            "document.querySelector('#key').value = ''; document.querySelector('#key').focus()"
        )
        await page.type(key)
        await page.press("Enter")
        if shows_error:
            await page.until(
                "document.querySelector('#key-dialog').open && !document.querySelector('#key-error').hidden"
            )
    await page.until(phase("ready"))
    assert await page.run("sessionStorage.getItem('noria.key')") == "sesame"
    assert "sesame" not in await page.run("JSON.stringify(localStorage)")


async def test_loading_shows_how_far_it_is_and_the_page_goes_on_by_itself(browser, stand_in):
    url, state = stand_in
    body = {"status": "loading", "progress": 0.25, "error": {"message": "converting weights"}}
    state["health"] = (503, body)
    page = await browser.open(url)
    await page.until("document.querySelector('progress')?.value === 0.25")
    assert "converting weights" in await page.run("document.querySelector('.empty').textContent")
    assert await page.run("document.querySelector('#send').disabled")
    state["health"] = (200, {"status": "ready"})
    await page.until(phase("ready"))


async def test_a_server_that_goes_away_is_told_and_found_again(browser, stand_in):
    url, state = stand_in
    page = await browser.open(url)
    await page.until(phase("ready"))

    async def break_off(request):
        state["gone"] = True
        request.transport.abort()
        return web.Response()

    state["chat"] = break_off
    await send(page, "hello")
    await page.until("document.querySelector('.error') !== null")
    await page.until(phase("gone"))
    assert "cannot be reached" in await page.run("document.querySelector('#banner').textContent")
    state["gone"] = False
    await page.click("#retry")
    await page.until(phase("ready"))
    assert await page.run("document.querySelector('#banner').hidden")


@pytest.mark.parametrize(
    ("stream", "shown"),
    [
        ('data: {"choices":[{"delta":{"content":"Hel"}}]}\n\n', "connection was lost"),
        (
            'data: {"error":{"message":"The pump broke.","code":"internal_error"}}\n\ndata: [DONE]\n\n',
            "The pump broke.",
        ),
    ],
)
async def test_an_answer_that_ends_badly_says_so_and_can_be_asked_for_again(
    browser, stand_in, stream, shown
):
    url, state = stand_in

    async def fail(request):
        return web.Response(text=stream, content_type="text/event-stream")

    async def answer(request):
        text = 'data: {"choices":[{"delta":{"content":"fine"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        return web.Response(text=text, content_type="text/event-stream")

    state["chat"] = fail
    page = await browser.open(url)
    await page.until(phase("ready"))
    await send(page, "hello", temperature=0.5, seed=7)
    await page.until("document.querySelector('.error') !== null")
    assert shown in await page.run("document.querySelector('.error').textContent")
    state["chat"] = answer
    await page.click(".error button")
    await finished(page)
    assert "fine" in await page.run("document.querySelector('.assistant:last-child').textContent")
    asked = state["asked"]
    assert (asked["temperature"], asked["seed"], asked["stream"]) == (0.5, 7, True)
    assert asked["messages"] == [{"role": "user", "content": "hello"}]


async def test_a_full_server_says_when_to_come_back(browser, stand_in):
    url, state = stand_in

    async def refuse(request):
        body = {"error": {"message": "full", "code": "queue_full"}}
        return web.json_response(body, status=429, headers={"retry-after": "7"})

    state["chat"] = refuse
    page = await browser.open(url)
    await page.until(phase("ready"))
    await send(page, "hello")
    await page.until("document.querySelector('.error') !== null")
    assert "in 7 s" in await page.run("document.querySelector('.error').textContent")


async def test_a_server_without_statistics_is_not_asked_for_them_again_and_again(browser, stand_in):
    url, state = stand_in
    page = await browser.open(url)
    await page.until(phase("ready"))
    await asyncio.sleep(1.5)
    assert state["stats"] == 1
    assert not await page.run("document.querySelector('#send').disabled")


async def test_with_several_models_one_is_chosen_below_the_prompt_and_stays_chosen(
    browser, stand_in
):
    url, state = stand_in

    async def answer(request):
        text = 'data: {"choices":[{"delta":{"content":"fine"},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'
        return web.Response(text=text, content_type="text/event-stream")

    state["chat"] = answer
    page = await browser.open(url)
    await page.until(phase("ready"))
    options = "[...document.querySelectorAll('#model option')].map((each) => each.value).join()"
    assert await page.run(options) == "one,two"
    assert await page.run("document.querySelector('#model').value") == "one"
    await send(page, "hello")
    await finished(page)
    assert "model" not in state["asked"]
    await page.run(
        "document.querySelector('#model').value = 'two';"
        "document.querySelector('#model').dispatchEvent(new Event('change'))"
    )
    assert await page.run("document.querySelector('#status-text').textContent") == "two"
    await send(page, "again")
    await finished(page)
    assert state["asked"]["model"] == "two"
    await page.goto(url)
    await page.until(phase("ready"))
    assert await page.run("document.querySelector('#model').value") == "two"
    assert await page.run("document.querySelector('#status-text').textContent") == "two"
    label = "document.querySelector('#model-choice label').textContent"
    assert await page.run(label) in ("Model", "모델")
