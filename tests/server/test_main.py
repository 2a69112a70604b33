"""The process: flags, exit codes, signals. Runs the real command, over the dummy runner where a model is needed."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from server.__main__ import ready_line
from server.config import build_config
from server.serving import base_url, is_loopback, why_insecure

ROOT = Path(__file__).parents[2]
DUMMY = str(Path(__file__).parent / "serve_dummy.py")


async def run(*arguments: str, cwd: Path = ROOT) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, cwd=cwd, stdout=-1, stderr=-1
    )
    out, err = await asyncio.wait_for(process.communicate(), 20)
    return process.returncode or 0, out.decode(), err.decode()


@asynccontextmanager
async def dummy(
    *arguments: str, step_time_s: float = 0.0
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A server process and its URL; it is ready."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, DUMMY, str(step_time_s), *arguments, stdout=-1, stderr=-1
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
        found = re.search(r"http://\S+", line)
        assert found is not None, line
        yield process, found[0]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_version_help_and_print_config_answer_without_serving():
    code, out, _ = await run("-m", "server", "--version")
    assert (code, out.startswith("noria ")) == (0, True)
    code, out, _ = await run(
        "-m", "server", "--print-config", "--port", "81", "--set", "engine.batch_size=3"
    )
    assert code == 0
    assert "port: 81  # --port" in out
    assert "batch_size: 3  # --set" in out


async def test_a_bad_setting_is_one_line_and_exit_code_2():
    code, _, err = await run("-m", "server", "--set", "engine.batch_size=none")
    assert code == 2
    assert err.count("\n") == 1
    assert "engine.batch_size must be an integer" in err


async def test_other_hosts_need_a_key_or_insecure():
    code, _, err = await run("-m", "server", "--host", "0.0.0.0")
    assert code == 2
    assert "--insecure" in err
    open_config = build_config({"server.host": "0.0.0.0"})
    assert why_insecure(open_config, is_insecure=False) is not None
    assert why_insecure(open_config, is_insecure=True) is None
    keyed = build_config({"server.host": "0.0.0.0", "server.api_keys": ["k"]})
    assert why_insecure(keyed, is_insecure=False) is None


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
    ],
)
def test_loopback_is_told_by_address(host, expected):
    assert is_loopback(host) is expected


def test_the_url_shown_can_be_typed():
    assert base_url("0.0.0.0", 8) == "http://127.0.0.1:8"
    assert base_url("::1", 8) == "http://[::1]:8"


@pytest.mark.parametrize("settings", [{"api_keys": ["k"]}, {"api_key_file": "/keys"}])
def test_the_command_shown_when_ready_carries_a_key_wherever_keys_come_from(settings):
    keyed = build_config({f"server.{name}": value for name, value in settings.items()})
    assert "Bearer $KEY" in ready_line("http://127.0.0.1:8", keyed, 1.0)
    assert "Bearer" not in ready_line("http://127.0.0.1:8", build_config({}), 1.0)


async def test_a_reader_that_takes_only_the_first_lines_sees_no_traceback():
    process = await asyncio.create_subprocess_exec(
        "/bin/sh", "-c", f"{sys.executable} -m server --print-config | true", cwd=ROOT, stderr=-1
    )
    _, err = await asyncio.wait_for(process.communicate(), 20)
    assert err == b""


async def test_a_busy_port_is_one_clear_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, _, err = await run(DUMMY, "0", "--port", str(port))
    assert code == 2
    assert (
        err
        == f"noria: 127.0.0.1:{port} is in use by another program; choose another with --port.\n"
    )


async def test_a_refused_model_is_a_sentence_and_exit_code_1():
    code, out, err = await run(DUMMY, "0", "--model", "refused")
    assert code == 1
    assert "This model is refused, and this is why." in err
    assert "Traceback" not in err
    assert "ready" not in out


async def test_sigterm_while_idle_ends_the_process_at_once():
    async with dummy() as (process, _):
        started_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 5) == 0
        assert time.monotonic() - started_s < 2


async def test_who_watches_the_server_does_not_hold_up_its_end_and_sees_a_clean_one():
    async with dummy() as (process, url), aiohttp.ClientSession() as session:
        async with session.get(f"{url}/stats/stream") as response:
            assert (await response.content.readline()) == b"event: hello\n"
            started_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            rest = await asyncio.wait_for(response.read(), 5)  # raises if the stream is cut
        assert rest.endswith(b"\n\n")
        assert await asyncio.wait_for(process.wait(), 5) == 0
        assert time.monotonic() - started_s < 2


async def test_sigterm_while_loading_ends_the_process_at_once():
    process = await asyncio.create_subprocess_exec(
        sys.executable, DUMMY, "0", "--model", "slow", stdout=-1, stderr=-1
    )
    assert process.stderr is not None
    assert b"listening" in await asyncio.wait_for(process.stderr.readline(), 20)
    process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(process.wait(), 5) == 0


async def stream(session: aiohttp.ClientSession, url: str, num_tokens: int) -> str:
    body = {"prompt": "a", "max_tokens": num_tokens, "ignore_eos": True}
    async with session.post(f"{url}/generate_stream", json=body) as response:
        assert response.status == 200
        return await response.text()


async def wait_for_running(session: aiohttp.ClientSession, url: str, count: int) -> None:
    for _ in range(400):
        async with session.get(f"{url}/metrics") as response:
            found = re.search(r"vllm:num_requests_running{.*} (\S+)", await response.text())
        if found is not None and float(found[1]) == count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("requests did not begin to run")


async def test_sigterm_drains_streams_and_refuses_new_work():
    """B132"""
    async with dummy(step_time_s=0.02) as (process, url), aiohttp.ClientSession() as session:
        body = {"prompts": ["b"], "max_tokens": 50, "ignore_eos": True}
        streams = [asyncio.create_task(stream(session, url, 50)) for _ in range(2)]
        whole = asyncio.create_task(session.post(f"{url}/generate", json=body))
        await wait_for_running(session, url, 3)
        process.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        async with session.get(f"{url}/health") as response:
            assert response.status == 503
        async with session.post(f"{url}/generate", json=body) as response:
            assert response.status == 503
            assert (await response.json())["error"]["code"] == "draining"
            assert "retry-after" in response.headers
        for text in await asyncio.gather(*streams):
            assert text.count('"finish_reason":"length"') == 1
            assert text.endswith("data: [DONE]\n\n")
        async with await whole as response:
            assert response.status == 200
        assert await asyncio.wait_for(process.wait(), 5) == 0


@pytest.mark.parametrize("is_second_signal", [True, False])
async def test_what_cannot_finish_in_time_gets_an_error_event(is_second_signal):
    """B132"""
    timeout_s = 60 if is_second_signal else 0.2
    settings = ("--set", f"server.shutdown_timeout_s={timeout_s}")
    async with dummy(*settings, step_time_s=0.02) as (process, url):
        async with aiohttp.ClientSession() as session:
            task = asyncio.create_task(stream(session, url, 1500))
            await wait_for_running(session, url, 1)
            started_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            await asyncio.sleep(0.1)
            if is_second_signal:
                process.send_signal(signal.SIGTERM)
            text = await asyncio.wait_for(task, 5)
        assert '"error"' in text
        assert "finish_reason" not in text
        assert text.endswith("data: [DONE]\n\n")
        assert await asyncio.wait_for(process.wait(), 5) == 0
        assert time.monotonic() - started_s < 5


async def test_bytes_that_are_no_http_get_the_envelope_and_see_nothing_of_themselves():
    """B074, B142"""
    post = b"POST /generate HTTP/1.1\r\nhost: x\r\n"
    long = b"secret" * 20_000
    async with dummy() as (_, url):
        host, _, port = url.removeprefix("http://").partition(":")
        for sent in (
            b"\x16\x03\x01 secret\r\n\r\n",
            b"GET / HTTP/9.9\r\nsecret: secret\r\n\r\n",
            b"SECRET /generate HTTP/1.1\r\nhost: x\r\n\r\n",
            post + b"content-length: secret\r\n\r\n",
            post + b"transfer-encoding: chunked\r\n\r\nsecret\r\n",
            b"GET /generate_stream?prompt=" + long + b" HTTP/1.1\r\nhost: x\r\n\r\n",
            b"GET / HTTP/1.1\r\nhost: x\r\nx: " + long + b"\r\n\r\n",
        ):
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(sent)
            answer = await asyncio.wait_for(reader.read(), 5)
            writer.close()
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b" 400 " in head.partition(b"\r\n")[0], answer
            assert b"x-request-id: req-" in head.lower()
            assert b"aiohttp" not in answer
            assert b"secret" not in answer.lower()
            error = json.loads(body)["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == "invalid_value"
        async with aiohttp.ClientSession(url) as session, session.get("/health") as response:
            assert response.status == 200
