"""The pages for people: what is served, what a browser may do with it, and that nothing comes from elsewhere."""

from __future__ import annotations

import re

import pytest

from server.routes.pages import FOLDER, read_files

PAGES = ["/", "/docs"]
FILES = sorted(read_files())


@pytest.mark.parametrize("path", [*PAGES, *(f"/static/{name}" for name in FILES)])
async def test_pages_and_their_files_are_served_without_a_key(start_server, path):
    server = await start_server({"server.api_keys": ["secret"]})
    response = await server.client.get(path)
    assert response.status == 200
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.charset == "utf-8" or response.content_type == "image/svg+xml"
    assert await response.read()


@pytest.mark.parametrize("path", PAGES)
async def test_a_page_may_load_and_reach_only_its_own_server_and_run_no_markup(start_server, path):
    server = await start_server()
    response = await server.client.get(path)
    policy = dict(
        part.strip().split(" ", 1)
        for part in response.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {
        "'self'"
    }
    assert policy["require-trusted-types-for"] == "'script'"
    assert "unsafe" not in response.headers["content-security-policy"]


async def test_a_browser_asks_again_and_gets_only_what_has_changed(start_server):
    server = await start_server()
    first = await server.client.get("/static/app.js")
    assert first.headers["cache-control"] == "no-cache"
    tag = first.headers["etag"]
    again = await server.client.get("/static/app.js", headers={"if-none-match": f'"x", W/{tag}'})
    assert (again.status, await again.read()) == (304, b"")
    assert again.headers["etag"] == tag
    assert (
        await server.client.get("/static/app.js", headers={"if-none-match": '"x"'})
    ).status == 200


@pytest.mark.parametrize("name", ["nothing.js", "..%2fapp.py", "%2e%2e%2fapp.py", "__init__.py"])
async def test_nothing_but_the_files_of_the_pages_is_served(start_server, name):
    server = await start_server()
    response = await server.client.get(f"/static/{name}")
    assert response.status == 404
    assert (await response.json())["error"]["code"] == "not_found"


def test_everything_in_the_folder_is_served_and_travels_with_the_package():
    assert {path.name for path in FOLDER.iterdir()} == set(FILES)
    package_data = (FOLDER.parents[1] / "pyproject.toml").read_text()
    assert {path.suffix for path in FOLDER.iterdir()} <= set(re.findall(r"\*(\.\w+)", package_data))


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host_or_parses_markup(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    hosts = set(re.findall(r"https?://[\w.]+", text))
    assert hosts <= {"http://www.w3.org"}  # names of formats, never fetched
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(", text)


@pytest.mark.parametrize(
    "name", [name for name in FILES if name.endswith((".html", ".js", ".css"))]
)
def test_addresses_are_relative_so_that_a_proxy_may_serve_them_below_any_path(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    assert not re.search(
        r"""(?:src|href|fetch\(|request\(|import\(|from )\s*[=:]?\s*["'`]/""", text
    )


def test_files_of_the_pages_stay_small():
    for name in FILES:
        assert (FOLDER / name).read_text(encoding="utf-8").count("\n") <= 700, name
