"""The chat page in a real browser, talking to the real server with the real model."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest
from aiohttp import web
from chat_page import answer_length, finished, send

pytestmark = pytest.mark.browser

LAST = "document.querySelector('.assistant:last-child')"
STORED = (
    "Object.entries(localStorage).filter(([key]) => key.startsWith('noria.chat.'))"
    ".map(([, text]) => JSON.parse(text))"
)
STORY = "Tell me a long story about a river and the people who live by it."


async def test_tokens_arrive_one_by_one_and_an_answer_can_be_stopped_continued_and_found_again(
    open_chat, server_url
):
    page = await open_chat()
    await send(page, STORY, temperature=0)
    lengths = []
    while len(set(lengths)) < 12:  # a dozen different lengths while it grows
        lengths.append(await answer_length(page))
        await asyncio.sleep(0.005)
    assert lengths == sorted(lengths)
    await page.press("Escape")
    await finished(page, 5)
    stopped = await answer_length(page)
    assert "stopped" in await page.run(f"{LAST}.querySelector('.stats').textContent")
    await asyncio.sleep(0.5)
    assert await answer_length(page) == stopped

    before = await page.run(f"{LAST}.querySelector('.markdown:not(.thoughts *)').textContent")
    await page.run(f"{LAST}.querySelector('.is-continue').click()")
    await page.until(
        f"{LAST}.querySelector('.markdown:not(.thoughts *)').textContent.length > {stopped + 20}",
        60,
    )
    await page.press("Escape")
    await finished(page, 5)
    after = await page.run(f"{LAST}.querySelector('.markdown:not(.thoughts *)').textContent")
    assert after.startswith(before.rstrip())

    address = await page.run("location.href")
    await page.goto("about:blank")
    await page.goto(address)
    await page.until("document.querySelector('#ready')")
    again = await page.run(f"{LAST}.querySelector('.markdown:not(.thoughts *)').textContent")
    assert again == after
    assert STORY in await page.run("document.querySelector('.user').textContent")
    assert page.console == []


async def test_stopping_ends_the_request_on_the_server(open_chat):
    page = await open_chat()
    await send(page, STORY, temperature=0)
    await page.until(f"{LAST}?.querySelector('.stats')")
    await page.press("Escape")
    await finished(page, 5)
    await page.click("#show-server")
    await page.until("document.querySelector('.figure strong').textContent === '0'", 10)


async def test_an_answer_tells_its_first_token_rate_and_length(open_chat):
    page = await open_chat()
    await send(page, "Say hello.", temperature=0, max_tokens=12)
    await finished(page)
    told = await page.run(f"{LAST}.querySelector('.stats').textContent")
    for word in ("first token", "tokens/s", "tokens"):
        assert word in told
    detail = await page.run(f"{LAST}.querySelector('.stats').title")
    assert "prefill" in detail


async def test_another_answer_stands_beside_the_first_and_an_edit_replaces_what_follows(open_chat):
    page = await open_chat()
    await send(page, "Name a river.", temperature=0, max_tokens=8)
    await finished(page)
    await page.run(f"{LAST}.querySelector('.is-again').click()")
    await finished(page)
    assert "2 of 2" in await page.run(f"{LAST}.querySelector('.chooser').textContent")
    await page.run(f"{LAST}.querySelector('.chooser button').click()")
    assert "1 of 2" in await page.run(f"{LAST}.querySelector('.chooser').textContent")
    await page.run("document.querySelector('#prompt').focus()")
    await page.press("ArrowUp")
    await page.until("document.activeElement.value === 'Name a river.'")
    await page.run("document.activeElement.value = ''")
    await page.type("Name a mountain.")
    await page.press("Enter")
    await finished(page)
    (stored,) = await page.run(STORED)
    assert [message["role"] for message in stored["messages"]] == ["user", "assistant"]
    assert stored["messages"][0]["content"] == "Name a mountain."
    assert len(stored["messages"][1]["answers"]) == 1


HOSTILE = """# Title <script>window.hacked = 1</script>

<img src=x onerror="window.hacked = 2"> and <b>bold</b>

[click](javascript:window.hacked=3) [data](data:text/html,<script>window.hacked=4</script>) [fine](https://example.org/a)

![picture](https://example.org/p.png) <javascript:alert(1)>

| a | b |
| - | -: |
| <svg onload=window.hacked=5> | **strong** |

```html
<script>window.hacked = 6</script>
```

1. one `co<i>de`
   - [x] nested *emphasis*
"""


async def test_hostile_markdown_stays_text(open_chat):
    page = await open_chat()
    script = f"""(async () => {{
        const {{ update }} = await import('./static/markdown.js');
        const box = document.createElement('div');
        box.id = 'hostile';
        document.body.append(box);
        const text = {json.dumps(HOSTILE)};
        for (let end = 1; end <= text.length; end += 1) update(box, text.slice(0, end));
        const whole = document.createElement('div');
        update(whole, text);
        return box.innerHTML === whole.innerHTML;
    }})()"""
    assert await page.run(script)  # streamed character by character, the same nodes come out
    await asyncio.sleep(0.3)
    assert await page.run("window.hacked") is None
    assert (
        await page.run(
            "document.querySelectorAll('#hostile :is(script, img, svg:not(.icon), b, i)').length"
        )
        == 0
    )
    links = await page.run(
        "[...document.querySelectorAll('#hostile a')].map((a) => [a.href, a.rel, a.target])"
    )
    assert [link[0] for link in links] == ["https://example.org/a", "https://example.org/p.png"]
    assert all("noopener" in link[1] and link[2] == "_blank" for link in links)
    text = await page.run("document.querySelector('#hostile').textContent")
    for kept in ("<script>window.hacked = 1</script>", "onerror=", "javascript:window.hacked=3"):
        assert kept in text
    for selector in (
        "h2",
        "table td.is-right strong",
        "pre code",
        "ol ul input[type=checkbox]",
        "em",
    ):
        assert await page.run(f"document.querySelector('#hostile {selector}') !== null"), selector


async def test_long_and_odd_markdown_costs_linear_time(open_chat):
    page = await open_chat()
    pieces = ["*a ", "[", "`", "> ", "- ", "![](", "**", "_x", "|", "<h", "\\\\", "1. ", "# "]
    script = """(async () => {
        const { update } = await import('./static/markdown.js');
        const slow = [];
        for (const piece of PIECES) {
            const start = performance.now();
            update(document.createElement('div'), piece.repeat(20000));
            if (performance.now() - start > 1500) slow.push([piece, performance.now() - start]);
        }
        return slow;
    })()""".replace("PIECES", json.dumps(pieces))
    assert await page.run(script) == []


async def test_no_markup_can_be_made_of_text_even_on_purpose(open_chat):
    page = await open_chat()
    tried = "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'made'; } catch { return 'refused'; } })()"
    assert await page.run(tried) == "refused"


async def test_event_source_reads_the_get_stream_to_its_end_and_does_not_ask_twice(
    open_chat, server_url
):
    page = await open_chat()
    script = """new Promise((resolve) => {
        const seen = { tokens: 0, errors: 0, done: null };
        const source = new EventSource('generate_stream?prompt=The%20river&max_tokens=12&ignore_eos=true');
        source.addEventListener('token', (event) => { seen.tokens += JSON.parse(event.data).token.length > 0; });
        source.addEventListener('done', (event) => { seen.done = JSON.parse(event.data); });
        source.onerror = () => {
            seen.errors += 1;
            if (source.readyState === EventSource.CLOSED) resolve(seen);
        };
        setTimeout(() => resolve({ ...seen, state: source.readyState }), 15000);
    })"""
    seen = await page.run(script)
    assert seen["tokens"] == 12
    assert seen["done"]["finish_reason"] == "length"
    assert seen["done"]["usage"]["completion_tokens"] == 12
    assert "state" not in seen  # the second request got 204, and the browser gave up


async def test_the_page_works_below_a_path_of_a_proxy_and_without_v1(open_chat, server_url):
    import aiohttp

    async def forward(request: web.Request) -> web.StreamResponse:
        async with aiohttp.ClientSession() as session:
            url = f"{server_url}/{request.match_info['rest']}"
            headers = (
                {"content-type": request.headers.get("content-type", "")}
                if request.can_read_body
                else {}
            )
            async with session.request(
                request.method, url, data=await request.read() or None, headers=headers
            ) as answer:
                names = ("content-type", "content-security-policy")
                response = web.StreamResponse(
                    status=answer.status,
                    headers={
                        name: answer.headers[name] for name in names if name in answer.headers
                    },
                )
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                return response

    app = web.Application()
    app.router.add_route("*", "/some/where/{rest:.*}", forward)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        page = await open_chat(f"http://127.0.0.1:{port}/some/where/")
        await send(page, "Say hello.", max_tokens=6)
        await finished(page)
        assert await answer_length(page) > 0
        await page.goto(f"http://127.0.0.1:{port}/some/where/docs")
        await page.until("document.querySelectorAll('article').length > 20")
        assert page.console == []
    finally:
        await runner.cleanup()


async def test_korean_is_complete_and_enter_in_the_middle_of_a_syllable_sends_nothing(open_chat):
    page = await open_chat()
    missing = await page.run("import('./static/texts.js').then((texts) => texts.missingTexts())")
    assert missing == []
    await page.click("#language")
    assert await page.run("document.documentElement.lang") == "ko"
    assert "새 대화" in await page.run("document.querySelector('#new').textContent")
    await page.run("document.querySelector('#prompt').focus()")
    await page.type("안녕")
    event = "new KeyboardEvent('keydown', {key: 'Enter', isComposing: true, bubbles: true})"
    await page.run(f"document.querySelector('#prompt').dispatchEvent({event})")
    assert await page.run("document.querySelector('#prompt').value") == "안녕"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 800), (390, 844)], ids=["desktop", "phone"])
async def test_the_page_fits_its_window_and_can_be_looked_at(
    open_chat, tmp_path: Path, scheme, width, height
):
    page = await open_chat(width=width, height=height)
    await page.resize(width, height, is_phone=width < 500)
    await page.prefer(scheme)
    await send(page, "Write a Python function that adds two numbers.", temperature=0, max_tokens=60)
    await page.until(f"{LAST}?.textContent.length > 120", 60)
    started_s = time.monotonic()
    await page.screenshot(tmp_path / f"{scheme}-{width}.png")
    assert time.monotonic() - started_s < 20
    assert (tmp_path / f"{scheme}-{width}.png").stat().st_size > 5000
    assert await page.run("document.documentElement.scrollWidth") <= width
    await finished(page)
    dark = await page.run("getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(22, 25, 24)") == (scheme == "dark")


async def test_with_one_model_there_is_none_to_choose(open_chat):
    page = await open_chat()
    assert await page.run("document.querySelector('#model-choice').hidden")
