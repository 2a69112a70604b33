"""Nothing of vLLM outlives this server, however it ends.

vLLM's engine processes do not notice that the process which started them was killed. Everything that is started while
`mark` is in the environment inherits it. A small helper process waits at a pipe; when that closes, because the server
has stopped or because it is gone, the helper kills whatever bears the mark, and ends. It runs this file as a script, so
only the standard library is imported here.

Where there is no /proc this does nothing. Called by `vllm_engine.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid

VARIABLE = "NORIA_VLLM_OWNER"
_ROUNDS = 100
_ROUND_S = 0.05


class Reaper:
    """The helper process, from the first start of an engine to the end of the server."""

    def __init__(self) -> None:
        self._mark = uuid.uuid4().hex
        self._helper: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Before an engine is started. Idempotent."""
        if self._helper is not None or not os.path.isdir("/proc/self"):
            return
        os.environ.pop(VARIABLE, None)  # the helper itself bears no mark
        self._helper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, self._mark],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a signal to the server's group is not meant for it
        )
        os.environ[VARIABLE] = self._mark

    def kill_rest(self) -> None:
        """Ends what is left of an engine that has been stopped, or has died."""
        if self._helper is not None:
            kill_marked(self._mark)

    def finish(self) -> None:
        """The server ends: no engine will follow."""
        helper, self._helper = self._helper, None
        if helper is not None:
            assert helper.stdin is not None
            helper.stdin.close()
            helper.wait()


def kill_marked(mark: str) -> None:
    """SIGKILL to every process whose environment bears the mark, until none is left."""
    wanted = f"{VARIABLE}={mark}".encode()
    for _ in range(_ROUNDS):
        found = [pid for pid in _pids() if _is_marked(pid, wanted)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_ROUND_S)


def _pids() -> list[int]:
    return [
        int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()
    ]


def _is_marked(pid: int, wanted: bytes) -> bool:
    """Python's own resource tracker is spared: it ends by itself, and removes shared memory that is left over."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if wanted not in file.read().split(b"\0"):
                return False
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            return b"resource_tracker" not in file.read()
    except OSError:  # it has ended, or is not ours
        return False


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()  # until the other end closes
    kill_marked(sys.argv[1])
