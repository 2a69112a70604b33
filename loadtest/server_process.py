"""Starts a server on a free port, waits until it is ready, and ends it. For loads that compare several servers."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

DEFAULT_COMMAND = (sys.executable, "-m", "server")
STOP_TIMEOUT_S = 40.0


@dataclass(frozen=True, slots=True)
class RunningServer:
    url: str
    pid: int
    log_path: Path
    start_s: float  # from the start of the process to its first "ready"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def running_server(
    command: Sequence[str], log_path: Path, *, ready_path: str, start_timeout_s: float
) -> Iterator[RunningServer]:
    """Runs `command` with `{port}` replaced by a free port, until the block is left. Its output goes to a file.

    Raises `SystemExit` with the end of that file if the server does not become ready in time.
    """
    port = free_port()
    words = [word.replace("{port}", str(port)) for word in command]
    url = f"http://127.0.0.1:{port}"
    with log_path.open("wb") as log:
        start_s = time.perf_counter()
        process = subprocess.Popen(
            words,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    try:
        _wait_until_ready(process, url + ready_path, log_path, start_timeout_s)
        yield RunningServer(url, process.pid, log_path, time.perf_counter() - start_s)
    finally:
        _stop(process)


def _wait_until_ready(
    process: subprocess.Popen[bytes], url: str, log_path: Path, timeout_s: float
) -> None:
    deadline_s = time.perf_counter() + timeout_s
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while time.perf_counter() < deadline_s:
        if process.poll() is not None:
            raise SystemExit(f"the server ended with {process.returncode}:\n{_tail(log_path)}")
        try:
            with opener.open(url, timeout=5):
                return
        except urllib.error.HTTPError as error:
            error.close()
            if error.code in (404, 405):
                return  # it has no such route, but it answers
            # 503 while it loads
        except OSError:  # it does not listen yet
            pass
        time.sleep(0.1)
    raise SystemExit(f"the server was not ready within {timeout_s:g} s:\n{_tail(log_path)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then, after a while, the end of its whole process group (which is its own session's)."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_TIMEOUT_S)
    if hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    elif process.poll() is None:
        process.kill()
    process.wait()


def _tail(path: Path, num_lines: int = 20) -> str:
    return "\n".join(path.read_text(errors="replace").splitlines()[-num_lines:])
