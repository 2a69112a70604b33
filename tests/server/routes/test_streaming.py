"""When headers go out, how failures are told, and what happens to readers that are slow or gone."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import threading

from strict_clients import check_error, read_events, read_native_stream, read_openai_stream

BODY = {"prompt": "a", "max_tokens": 6, "temperature": 0}


def is_marked(sequence):
    return sequence.token_ids[0] == ord("x")


async def test_a_failure_before_the_first_token_is_an_honest_status(start_server):
    """B002, B005"""
    server = await start_server()
    for path in ("/generate_stream", "/v1/completions"):
        server.runner.failing_steps = {server.runner.num_steps}
        body = BODY if path == "/generate_stream" else {**BODY, "stream": True}
        response = await server.client.post(path, json=body)
        assert response.status == 500
        assert check_error(await response.json())["code"] == "internal_error"
        response = await server.client.post(path, json=body)
        assert response.status == 200
        await response.read()
        await server.idle()


async def test_a_failure_in_mid_stream_is_an_error_event_and_the_end(start_server):
    """B002, B003"""
    server = await start_server(
        step_time_s=0.02,
        row_failure=lambda s: "non_finite" if is_marked(s) and s.num_output_tokens == 3 else None,
    )
    bad = {**BODY, "prompt": "x"}
    response = await server.client.post("/generate_stream", json=bad)
    assert response.status == 200
    async with asyncio.timeout(1):
        read = read_native_stream(await response.read(), may_fail=True)
    assert len(read.tokens) == 3
    assert read.error["code"] == "internal_error"
    response = await server.client.post("/v1/completions", json={**bad, "stream": True})
    read = read_openai_stream(await response.read(), object_name="text_completion", may_fail=True)
    assert read.error is not None
    response = await server.client.get("/generate_stream?prompt=x&temperature=0")
    events = read_events(await response.read(), allows_names=True)
    assert events[-1].name == "error"
    assert (await server.client.post("/v1/completions", json=bad)).status == 500
    assert (await server.client.post("/v1/completions", json=BODY)).status == 200
    await server.idle()


async def test_one_failing_choice_ends_the_stream_and_frees_the_others(start_server):
    server = await start_server(
        step_time_s=0.002,
        row_failure=lambda s: (
            "sampling" if s.choice_index == 1 and s.num_output_tokens == 3 else None
        ),
    )
    body = {"prompt": "a", "n": 2, "max_tokens": 500, "stream": True}
    response = await server.client.post("/v1/completions", json=body)
    read = read_openai_stream(
        await response.read(), object_name="text_completion", num_choices=2, may_fail=True
    )
    assert read.error is not None
    await server.idle(2.0)


async def test_headers_go_out_alone_when_the_first_token_takes_long(start_server):
    """B011"""
    blocker = threading.Event()
    server = await start_server(
        {"server.early_headers_s": 0.1}, on_run=lambda step, batch: blocker.wait(10) and None
    )
    response = await asyncio.wait_for(server.client.post("/generate_stream", json=BODY), 5)
    assert response.status == 200
    blocker.set()
    assert len(read_native_stream(await response.read()).tokens) == 6


async def test_a_failure_after_early_headers_is_an_event(start_server):
    """B011"""
    blocker = threading.Event()

    def fail(step, batch):
        blocker.wait(10)
        raise RuntimeError("broken")

    server = await start_server({"server.early_headers_s": 0.1}, on_run=fail)
    response = await server.client.post("/v1/completions", json={**BODY, "stream": True})
    assert response.status == 200
    blocker.set()
    read = read_openai_stream(await response.read(), object_name="text_completion", may_fail=True)
    assert read.error["code"] == "internal_error"


async def test_comments_are_sent_only_when_asked_for_and_only_in_silence(start_server):
    """B011"""
    server = await start_server({"sse.keepalive_s": 0.05}, step_time_s=0.15)
    response = await server.client.post("/generate_stream", json={**BODY, "max_tokens": 3})
    body = await response.read()
    assert 3 <= body.count(b": keep-alive\n\n") <= 9
    read_events(body, allows_comments=True)
    server = await start_server({"sse.keepalive_s": 5}, step_time_s=0.01)
    response = await server.client.post("/generate_stream", json=BODY)
    read_native_stream(await response.read())


def connect(server, *, receive_bytes: int) -> socket.socket:
    """A connection with a small receive buffer, which nobody reads."""
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.connect((server.client.host, server.client.port))
    return sock


def send(sock: socket.socket, path: str, body: dict) -> None:
    data = json.dumps(body).encode()
    sock.sendall(
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(data)}\r\n\r\n".encode()
        + data
    )


LONG = {
    "prompt": "a",
    "max_tokens": 30_000,
    "n": 8,
    "stream": True,
    "ignore_eos": True,
    "logprobs": 20,
}


async def test_a_reader_that_never_reads_is_cut_and_its_blocks_come_back(start_server):
    """B127"""
    server = await start_server(
        {"server.slow_reader_timeout_s": 0.3}, max_context=32_000, num_blocks=17_000
    )
    sock = connect(server, receive_bytes=2048)
    send(sock, "/v1/completions", LONG)
    async with asyncio.timeout(30):
        while not server.metrics.total("noria:slow_reader_cuts"):
            await asyncio.sleep(0.05)
            response = await server.client.post("/v1/completions", json=BODY)
            assert response.status == 200
    await server.idle()
    sock.close()


async def test_a_client_that_closes_at_the_end_mark_has_got_everything(start_server):
    """B129"""
    server = await start_server()
    for _ in range(5):
        response = await server.client.post("/generate_stream", json=BODY)
        await response.content.readuntil(b"data: [DONE]\n\n")
        response.close()
    stats = await server.idle()
    assert stats.num_running == 0
    assert server.metrics.total("vllm:request_success", "abort") == 0


async def test_resets_at_any_moment_leave_nothing_behind(start_server, caplog):
    """B113, B129"""
    server = await start_server(step_time_s=0.002, max_context=4096)
    for delay_s in (0.0, 0.005, 0.02, 0.05):
        for path in ("/generate_stream", "/v1/completions", "/basic_generate"):
            sock = connect(server, receive_bytes=65536)
            send(sock, path, {**BODY, "max_tokens": 1000, "stream": path != "/basic_generate"})
            await asyncio.sleep(delay_s)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
            sock.close()
    await server.idle()
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_stopping_the_server_ends_streams_with_an_error(start_server):
    server = await start_server(step_time_s=0.01, max_context=4096)
    response = await server.client.post("/generate_stream", json={**BODY, "max_tokens": 2000})
    await response.content.readuntil(b"\n\n")
    await server.backend.stop(0)
    read = read_native_stream((await response.read()), may_fail=True)
    assert read.error is not None


async def test_a_reader_that_pauses_gets_every_character_in_fewer_chunks(start_server):
    """B127"""
    server = await start_server(max_context=32_000, num_blocks=17_000)
    body = {**LONG, "max_tokens": 700, "temperature": 0}
    async with server.client.post("/v1/completions", json={**body, "stream": False}) as response:
        expected = [choice["text"] for choice in (await response.json())["choices"]]
    site = server.client.server.runner.sites  # a kernel may keep megabytes for a connection
    for listener in next(iter(site))._server.sockets:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    sock = connect(server, receive_bytes=2048)
    send(sock, "/v1/completions", body)
    while server.metrics.total("vllm:generation_tokens") < 2 * 8 * 700:  # noqa: ASYNC110
        await asyncio.sleep(0.01)  # until all is computed, and most of it waits for the reader
    await asyncio.sleep(0.1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)  # it reads quickly from now on
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock)
    raw = b""
    async with asyncio.timeout(30):
        while b"data: [DONE]\n\n" not in raw[-200:]:
            raw += await reader.read(1 << 20)
    writer.close()
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert b"chunked" in head.lower()
    payload = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        payload, rest = payload + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    read = read_openai_stream(payload, object_name="text_completion", num_choices=8, step=65536)
    assert [read.choices[i].text for i in range(8)] == expected
    assert server.metrics.total("noria:slow_reader_merges") > 0
    assert len(read.chunks) < 8 * 700
    await server.idle()


async def test_other_routes_answer_while_a_huge_body_is_read(start_server):
    """B079"""
    server = await start_server()
    messages = json.dumps({"messages": [{"role": "user", "content": "word"}] * 200_000}).encode()
    headers = {"content-type": "application/json"}
    upload = asyncio.create_task(
        server.client.post("/v1/chat/completions", data=io.BytesIO(messages), headers=headers)
    )
    slowest = 0.0
    while not upload.done():
        started = asyncio.get_running_loop().time()
        assert (await server.client.get("/health")).status == 200
        slowest = max(slowest, asyncio.get_running_loop().time() - started)
    response = await upload
    assert response.status == 400
    assert check_error(await response.json())["code"] == "invalid_value"
    assert slowest < 1.5
