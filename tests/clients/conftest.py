"""The real server with the default model, environments with clients for it, and the plugin that writes their table."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import client_table
import pytest
from environments import Client, Install, Record, Run, make_node, make_python

from loadtest.server_process import DEFAULT_COMMAND, running_server

FOLDER = Path(__file__).parent
START_TIMEOUT_S = 180
RUN_TIMEOUT_S = 600  # for a machine that does other things as well


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--write-client-table"):
        config.pluginmanager.register(client_table.Writer(), "client-table")


@pytest.fixture(scope="session")
def python_with(request: pytest.FixtureRequest) -> Install:
    """`python_with("anthropic")`: an interpreter that has this package. Kept in pytest's cache."""
    root = Path(str(request.config.cache.mkdir("clients")))
    return lambda *packages, beside=False: make_python(root, packages, beside=beside)


@pytest.fixture(scope="session")
def node_with(request: pytest.FixtureRequest) -> Install:
    """`node_with("openai")`: a Node that finds this package of npm."""
    root = Path(str(request.config.cache.mkdir("clients")))
    return lambda *packages: make_node(root, packages)


@pytest.fixture(scope="session")
def serve(
    tmp_path_factory: pytest.TempPathFactory, default_model_folder: Path
) -> Callable[..., Iterator[str]]:
    def start(*settings: str) -> Iterator[str]:
        log = tmp_path_factory.mktemp("server") / "log"
        words = [word for setting in settings for word in ("--set", setting)]
        command = [*DEFAULT_COMMAND, "--port", "{port}", *words]
        with running_server(
            command, log, ready_path="/health", start_timeout_s=START_TIMEOUT_S
        ) as server:
            yield server.url

    return start


@pytest.fixture(scope="session")
def model_server(serve: Callable[..., Iterator[str]]) -> Iterator[str]:
    """The URL of `noria` with the default model, in a process of its own."""
    yield from serve()


@pytest.fixture
def pinging_server(serve: Callable[..., Iterator[str]]) -> Iterator[str]:
    """One that tells of every silence of 10 ms, also before the first token."""
    yield from serve("sse.keepalive_s=0.01", "server.early_headers_s=0.01")


@pytest.fixture
def run() -> Run:
    """Runs a command and gives what it wrote to standard output; fails with all that it wrote if it failed."""

    def run_command(*command: str, env: dict[str, str] | None = None, **options: object) -> str:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=RUN_TIMEOUT_S,
            env={**os.environ, **(env or {})},
            **options,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
        return done.stdout

    return run_command


@pytest.fixture
def drive(run: Run, record_property: Record, model_server: str) -> Callable[..., None]:
    """Runs a script of this folder, whose only line of output is the version of the client."""

    def drive_script(client: Client, script: str, url: str = "") -> None:
        path = FOLDER / script
        if path.suffix == ".mjs":  # Node looks for packages beside the script
            copy = client.folder / path.name
            copy.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
            path = copy
        (version,) = run(client.command, str(path), url or model_server).splitlines()
        record_property("version", version)

    return drive_script
