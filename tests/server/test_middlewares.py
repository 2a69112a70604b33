"""What every answer has in common: ids, envelopes, CORS, keys."""

from __future__ import annotations

import asyncio
import logging
import socket

import pytest
from aiohttp import web

from core.errors import ConfigError, QueueFull
from server.api_keys import load_keys
from server.app import create_app
from server.backends.native import NativeBackend
from server.config import build_config
from server.metrics import Metrics

PREFLIGHT = {
    "origin": "https://app.example",
    "access-control-request-method": "POST",
    "access-control-request-headers": "content-type,authorization,x-stainless-lang",
}


def assert_envelope(body, code, error_type="invalid_request_error"):
    assert list(body) == ["error"]
    assert list(body["error"]) == ["message", "type", "param", "code"]
    assert body["error"]["code"] == code
    assert body["error"]["type"] == error_type


@pytest.fixture
async def failing_server(start_server, monkeypatch):
    """A server with extra routes that fail in different ways."""

    async def crash(request):
        raise RuntimeError("secret prompt in /home/me/model")

    async def full(request):
        raise QueueFull("The queue is full.", retry_after_s=3.2)

    async def echo(request):
        return web.json_response({"size": len(await request.read())})

    async def half(request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        raise RuntimeError("in the middle")

    async def stream(request):
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await response.write_eof()
        return response

    async def hang(request):
        await asyncio.sleep(30)

    class Extra:
        @staticmethod
        def routes():
            return [
                web.get("/crash", crash),
                web.get("/full", full),
                web.post("/echo", echo),
                web.get("/half", half),
                web.get("/stream", stream),
                web.get("/hang", hang),
                web.post("/admin/echo", echo),
            ]

    import server.app

    modules = (*server.app.ROUTE_MODULES, Extra)
    monkeypatch.setattr(server.app, "ROUTE_MODULES", modules)

    async def start(settings=None):
        return (await start_server(settings)).client

    return start


async def test_a_clean_request_id_comes_back_and_others_are_replaced(failing_server):
    client = await failing_server()
    for given, is_kept in [
        ("job-1", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("has blank", False),
        ("<script>", False),
        ("", False),
    ]:
        response = await client.get("/health", headers={"x-request-id": given})
        assert (response.headers["x-request-id"] == given) is is_kept
    for path in ("/nope", "/crash", "/full", "/stream", "/metrics"):
        response = await client.get(path, headers={"x-request-id": "mine"})
        assert response.headers["x-request-id"] == "mine"


async def test_errors_of_the_framework_are_json(failing_server):
    client = await failing_server({"server.max_body_bytes": 2048})
    response = await client.get("/nope")
    assert response.status == 404
    assert_envelope(await response.json(), "not_found")
    response = await client.delete("/crash")
    assert response.status == 405
    assert "GET" in response.headers["allow"]
    assert_envelope(await response.json(), "method_not_allowed")
    response = await client.post("/echo", data=b"x" * 2049)
    assert response.status == 413
    assert_envelope(await response.json(), "body_too_large")
    response = await client.post("/echo", data=b"x" * 2048)
    assert response.status == 200


async def test_an_unexpected_error_shows_the_request_id_and_nothing_else(failing_server, caplog):
    """B142"""
    caplog.set_level(logging.ERROR)
    client = await failing_server()
    response = await client.get("/crash", headers={"x-request-id": "r-7"})
    body = await response.json()
    assert response.status == 500
    assert_envelope(body, "internal_error", "server_error")
    assert "r-7" in body["error"]["message"]
    assert "RuntimeError" not in str(body)
    assert "secret" not in str(body)
    assert "RuntimeError" in caplog.text


async def test_a_broken_content_encoding_is_the_clients_error(failing_server):
    client = await failing_server()
    response = await client.post(
        "/echo", data=b"not gzip", headers={"content-encoding": "gzip"}, skip_auto_headers=["x"]
    )
    assert response.status == 400


async def test_retry_after_is_whole_seconds_rounded_up(failing_server):
    client = await failing_server()
    response = await client.get("/full")
    assert (response.status, response.headers["retry-after"]) == (429, "4")
    assert_envelope(await response.json(), "queue_full", "rate_limit_error")


async def test_a_stream_that_breaks_does_not_end_cleanly(failing_server, caplog):
    caplog.set_level(logging.CRITICAL)
    client = await failing_server()
    response = await client.get("/half")
    with pytest.raises(Exception, match=r"(?i)payload|disconnect|reset|chunk"):
        await response.read()


async def test_a_client_that_leaves_is_no_error(failing_server, start_server, caplog):
    """B129"""
    client = await failing_server()
    for path in ("/hang", "/stream"):
        with socket.create_connection((client.host, client.port)) as sock:
            sock.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
            await asyncio.sleep(0.05)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # RST
    await asyncio.sleep(0.1)
    text = await (await client.get("/metrics")).text()
    assert 'http_requests_total{handler="/hang",method="GET",status="499"} 1.0' in text
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("origin", ["https://app.example", "http://localhost:3000", "null"])
async def test_preflights_need_no_key_and_reflect_the_names(failing_server, origin):
    """B139"""
    client = await failing_server({"server.api_keys": ["k"]})
    for path in ("/echo", "/health", "/nope", "/v1/chat/completions"):
        response = await client.options(path, headers={**PREFLIGHT, "origin": origin})
        assert response.status == 204
        headers = response.headers
        assert headers["access-control-allow-origin"] == "*"
        assert (
            headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
        )
        assert "POST" in headers["access-control-allow-methods"]
        assert headers["access-control-max-age"] == "600"


async def test_an_options_request_that_is_no_preflight_needs_a_key(failing_server):
    """B139"""
    client = await failing_server({"server.api_keys": ["k"]})
    for headers in ({}, {"origin": "https://a.example"}):
        assert (await client.options("/echo", headers=headers)).status == 401


async def test_errors_and_streams_carry_cors_headers(failing_server):
    """B139"""
    client = await failing_server({"server.max_body_bytes": 1024})
    origin = {"origin": "https://a.example"}
    responses = [
        await client.get("/full", headers=origin),
        await client.get("/nope", headers=origin),
        await client.get("/stream", headers=origin),
        await client.post("/echo", data=b"x" * 2000, headers=origin),
    ]
    keyed = await failing_server({"server.api_keys": ["k"]})
    responses.append(await keyed.get("/stream", headers=origin))
    assert [response.status for response in responses] == [429, 404, 200, 413, 401]
    for response in responses:
        assert response.headers["access-control-allow-origin"] == "*"
        exposed = response.headers["access-control-expose-headers"]
        assert "x-request-id" in exposed
        assert "retry-after" in exposed


async def test_only_listed_origins_are_allowed(failing_server):
    client = await failing_server({"server.cors_origins": ["https://a.example"]})
    allowed = await client.get("/health", headers={"origin": "https://a.example"})
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    assert allowed.headers["vary"] == "origin"
    other = await client.options("/health", headers=PREFLIGHT)
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer secret-1"}, 200),
        ({"authorization": "bearer  secret-2"}, 200),
        ({"x-api-key": "secret-1"}, 200),
        ({"authorization": "Basic secret-1"}, 401),
        ({"authorization": "secret-1"}, 401),
        ({"authorization": "Bearer "}, 401),
        ({"authorization": "Bearer secret"}, 401),
        ({"authorization": "Bearer secret-1x"}, 401),
        ({"authorization": "Bearer sécret"}, 401),
        ({"x-api-key": ""}, 401),
        ({"x-api-key": "wrong", "authorization": "Bearer secret-2"}, 200),
    ],
)
async def test_keys_are_taken_from_two_headers(failing_server, headers, status):
    """B138"""
    client = await failing_server({"server.api_keys": ["secret-1", "secret-2"]})
    response = await client.post("/echo", data=b"{}", headers=headers)
    assert response.status == status
    if status == 401:
        assert response.headers["www-authenticate"] == "Bearer"
        assert_envelope(await response.json(), "invalid_api_key", "authentication_error")


@pytest.mark.parametrize(
    "path",
    [
        "/nope",
        "/echo",
        "/version",
        "/generate_vllm",
        "/tokenize",
        "/v1/models",
        "/health/../echo",
        "/%2Fhealth",
        "/healthx",
        "/health/ready/x",
        "/generate_stream?prompt=a&api_key=k",
        "/stream?api_key=k",
    ],
)
async def test_every_path_but_the_open_list_needs_a_key(failing_server, path):
    """B138"""
    client = await failing_server({"server.api_keys": ["k"]})
    for method in ("GET", "POST"):
        assert (await client.request(method, path)).status == 401


async def test_the_open_list_is_open(failing_server):
    client = await failing_server({"server.api_keys": ["k"]})
    for path in ("/", "/health", "/health/ready", "/health/live", "/metrics"):
        assert (await client.get(path)).status == 200
    closed = await failing_server({"server.api_keys": ["k"], "metrics.open": False})
    assert (await closed.get("/metrics")).status == 401


async def test_a_key_file_adds_keys_and_an_empty_one_is_refused(failing_server, tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\n\n  one  \ntwo\n")
    client = await failing_server({"server.api_key_file": str(file)})
    assert (await client.get("/stream")).status == 401
    response = await client.get("/stream", headers={"x-api-key": "two"})
    assert response.status == 200
    file.write_text("# nothing\n")
    config = build_config({"server.api_key_file": str(file)})
    with pytest.raises(ConfigError, match="has none"):
        load_keys(config.server)
    metrics = Metrics("m")
    with pytest.raises(ConfigError):
        create_app(config, NativeBackend(config.engine, lambda report: None, metrics), metrics)


async def test_each_request_has_one_line_without_key_and_query(failing_server, caplog):
    caplog.set_level(logging.DEBUG, "noria.requests")
    client = await failing_server({"server.api_keys": ["hunter2"]})
    await client.get("/full?prompt=tell", headers={"x-api-key": "hunter2", "x-request-id": "r1"})
    lines = [record for record in caplog.records if record.name == "noria.requests"]
    assert len(lines) == 1
    fields = lines[0].fields
    assert (fields["id"], fields["route"], fields["status"]) == ("r1", "/full", 429)
    assert "hunter2" not in str(fields)
    assert "tell" not in str(fields)


async def test_admin_routes_are_closed_without_an_admin_key(failing_server):
    for settings in ({}, {"server.api_keys": ["k"]}):
        client = await failing_server(settings)
        response = await client.post("/admin/echo", headers={"authorization": "Bearer k"})
        assert response.status == 403
        assert_envelope(await response.json(), "admin_disabled", "permission_error")


async def test_only_the_admin_key_opens_admin_routes_and_it_opens_nothing_else(failing_server):
    client = await failing_server({"server.api_keys": ["k"], "server.admin_key": "root"})
    for key, status in (("root", 200), ("k", 401), ("", 401)):
        response = await client.post("/admin/echo", headers={"authorization": f"Bearer {key}"})
        assert response.status == status
    assert (await client.post("/admin/echo", headers={"x-api-key": "root"})).status == 200
    assert (await client.post("/echo", headers={"x-api-key": "root"})).status == 401
    assert (await client.post("/echo", headers={"x-api-key": "k"})).status == 200
