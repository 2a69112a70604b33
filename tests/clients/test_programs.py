"""curl, as the strict parsers read it; nginx, LiteLLM's proxy and systemd as `server/README.md` sets them up."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from client_table import README
from environments import Record, Run
from strict_clients import read_event_source, read_native_stream, read_openai_stream
from strict_messages import read_message_stream
from strict_responses import read_response_stream

from loadtest.server_process import free_port

MODEL = "smollm2-135m-instruct"
MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "max_tokens": 12}
JSON = ["-H", "content-type: application/json"]


def program(name: str) -> str:
    path = shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin")
    if path is None:
        pytest.skip(f"there is no {name} here")
    return path


def snippet(kind: str, holding: str = "") -> str:
    """The first block of code of this kind in the README that holds some text."""
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(rf"^```{kind}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return next(block for block in blocks if holding in block)


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, url: str, **options: object) -> Iterator[None]:
    """A process that listens at `url`, until the block is left."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, **options)
    try:
        deadline_s = time.monotonic() + 120
        probe = [program("curl"), "-s", "-o", os.devnull, url]
        while subprocess.run(probe, check=False).returncode:
            assert process.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < deadline_s, log.read_text(errors="replace")
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(30)


def arrivals_s(curl: str, url: str, body: dict[str, object]) -> list[float]:
    """When the lines of a stream came, counted from the first."""
    command = [curl, "-sN", url, *JSON, "-d", json.dumps(body)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        times = [time.monotonic() for line in process.stdout if line.startswith(b"data: ")]
    assert process.returncode == 0
    return [moment - times[0] for moment in times]


@pytest.mark.clients(
    client="curl",
    runs="every route that streams, byte by byte through the strict parsers; whole answers; an error",
)
def test_curl(run: Run, record_property: Record, model_server: str) -> None:
    curl = program("curl")

    def post(path: str, body: dict[str, object]) -> bytes:
        words = ("-sN", "--fail", f"{model_server}{path}", *JSON, "-d", json.dumps(body))
        return run(curl, *words).encode()

    chat = {"messages": MESSAGES, **GREEDY}
    native = read_native_stream(post("/generate_stream", {"prompt": "The river", **GREEDY}))
    query = "prompt=The%20river&temperature=0&max_tokens=12"
    named = run(curl, "-sN", f"{model_server}/generate_stream?{query}").encode()
    assert read_event_source(named).tokens == native.tokens
    streamed = {"stream": True, **chat}
    read = read_openai_stream(
        post("/v1/chat/completions", streamed), object_name="chat.completion.chunk"
    )
    whole = json.loads(post("/v1/chat/completions", chat))
    assert read.choices[0].text == whole["choices"][0]["message"]["content"]
    message = read_message_stream(post("/v1/messages", {"model": MODEL, **streamed}))
    assert message.text == read.choices[0].text
    asked = {"input": MESSAGES[0]["content"], "temperature": 0, "max_output_tokens": 12}
    response = read_response_stream(post("/v1/responses", {**asked, "stream": True}))
    assert response.text == read.choices[0].text
    status = ("-s", "-o", os.devnull, "-w", "%{http_code} %{content_type}")
    url = f"{model_server}/v1/chat/completions"
    said = run(curl, *status, url, *JSON, "-d", json.dumps({**chat, "temperature": 3}))
    assert said.startswith("400 application/json")
    record_property("version", run(curl, "--version").split()[1])


@pytest.mark.clients(
    client="nginx",
    runs="the configuration above: a stream of 24 tokens passes as it is made; whole answers, errors and the chat page "
    "pass unchanged",
)
def test_nginx(run: Run, record_property: Record, model_server: str, tmp_path: Path) -> None:
    nginx, curl, port = program("nginx"), program("curl"), free_port()
    site = snippet("nginx").replace("127.0.0.1:8000", model_server.removeprefix("http://"))
    site = site.replace("listen 8080", f"listen 127.0.0.1:{port}")
    assert str(port) in site
    temporary = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};\n"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    conf = tmp_path / "nginx.conf"
    conf.write_text(
        f"daemon off; pid {tmp_path}/pid; error_log stderr;\nevents {{}}\n"
        f"http {{ access_log off; gzip on; gzip_types *; {temporary}{site} }}\n"
    )
    command = [nginx, "-p", str(tmp_path), "-c", str(conf), "-e", "stderr"]
    url = f"http://127.0.0.1:{port}"
    with running(command, tmp_path / "log", f"{url}/health"):
        body = {"prompt": "The river", "temperature": 0, "max_tokens": 24}
        times_s = arrivals_s(curl, f"{url}/generate_stream", body)
        assert len(times_s) >= 20
        assert len({round(time_s, 3) for time_s in times_s}) >= 15, "tokens were held back"
        words = (*JSON, "-d", json.dumps({"messages": MESSAGES, **GREEDY}))
        answers = [
            json.loads(run(curl, "-s", f"{base}/v1/chat/completions", *words))
            for base in (url, model_server)
        ]
        assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
        refused = json.loads(run(curl, "-s", f"{url}/v1/completions", *JSON, "-d", "{}"))
        assert refused["error"]["param"] == "prompt"
        assert "<title>" in run(curl, "-s", f"{url}/")
    said = subprocess.run([nginx, "-v"], capture_output=True, text=True, check=True).stderr
    record_property("version", said.strip().rpartition("/")[2])


@pytest.mark.clients(client="systemd", runs="`systemd-analyze verify` on the unit above")
def test_the_unit_of_systemd(run: Run, record_property: Record, tmp_path: Path) -> None:
    analyze = program("systemd-analyze")
    unit = tmp_path / "noria.service"
    unit.write_text(
        snippet("ini").replace("/opt/noria/.venv/bin/noria", shutil.which("true") or "")
    )
    done = subprocess.run([analyze, "verify", str(unit)], capture_output=True, text=True)
    about_it = [line for line in done.stderr.splitlines() if "noria.service" in line]
    assert not about_it
    record_property("version", run(analyze, "--version").split()[1])
