"""Environments of third-party clients, one per package, kept in pytest's cache; and a server for them to talk with."""

from __future__ import annotations

import subprocess
import sys
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
END_TIMEOUT_S = 30


@pytest.fixture(scope="session")
def python_with(request: pytest.FixtureRequest) -> Callable[[str], str]:
    """`python_with("anthropic")`: an interpreter that has this package; installed at first use."""

    def make(package: str) -> str:
        folder = Path(str(request.config.cache.mkdir("clients"))) / package
        python = folder / ("Scripts" if sys.platform == "win32" else "bin") / "python"
        if not (folder / "ready").exists():
            venv.create(folder, with_pip=True, clear=True)
            subprocess.run([python, "-m", "pip", "install", "-qq", package], check=True)
            (folder / "ready").touch()
        return str(python)

    return make


@pytest.fixture(scope="module")
def model_server() -> Iterator[str]:
    """The URL of `noria` with the default model, in a process of its own."""
    process = subprocess.Popen(
        [sys.executable, "-m", "server", "--port", "0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = next(
            word for line in process.stdout for word in line.split() if word.startswith("http://")
        )
        yield url.rstrip("/.,")
    finally:
        process.terminate()
        process.wait(END_TIMEOUT_S)
        if process.stdout is not None:
            process.stdout.close()
