"""Nothing of vLLM outlives this server, however it ends.

vLLM's engine processes do not notice that the process which started them was killed. So a small helper process waits at
a pipe. On `LOOK` it notes all processes below the server; on `KILL`, and when the pipe closes because the server has
stopped or is gone, it kills those of them that still run. It runs this file as a script, so only the standard library
is imported here.

Where there is no /proc this does nothing. Called by `vllm.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

LOOK, KILL = b"l", b"k"


class Reaper:
    """The server's end of the pipe, from the first start of an engine to the end of the server."""

    def __init__(self) -> None:
        self._helper: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Before an engine is started. Idempotent."""
        if self._helper is None and os.path.isdir("/proc/self"):
            self._helper = subprocess.Popen(
                [sys.executable, "-I", "-S", __file__, str(os.getpid())],
                stdin=subprocess.PIPE,
                bufsize=0,
                start_new_session=True,  # a signal to the server's group is not meant for it
            )

    def look(self) -> None:
        """An engine is starting, so that there may be new processes."""
        self._send(LOOK)

    def kill_rest(self) -> None:
        """An engine has been stopped, or has died: nothing of it may remain."""
        self._send(KILL)

    def finish(self) -> None:
        """The server ends: no engine will follow. Blocks for a moment."""
        self.look()
        helper, self._helper = self._helper, None
        if helper is not None and helper.stdin is not None:
            helper.stdin.close()
            helper.wait()

    def _send(self, command: bytes) -> None:
        if self._helper is not None and self._helper.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # somebody has ended the helper
                self._helper.stdin.write(command)


# --- the helper ---

Process = tuple[int, int]  # its id, and when it started: ids are used again


def serve(server_pid: int) -> None:
    noted: set[Process] = set()
    while command := os.read(0, 1):
        if command == LOOK:
            noted |= _below(server_pid)
        else:
            _kill(noted)
            noted.clear()
    _kill(noted)


def _below(server_pid: int) -> set[Process]:
    """All descendants but this one, and but Python's resource tracker, which ends by itself and removes shared memory
    that was left over."""
    children: dict[int, list[Process]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit() and (stat := _stat(int(name))) is not None:
            parent, started = stat
            children.setdefault(parent, []).append((int(name), started))
    found: set[Process] = set()
    unseen = [server_pid]
    while unseen:
        for process in children.get(unseen.pop(), ()):
            if process[0] != os.getpid() and not _is_tracker(process[0]):
                found.add(process)
                unseen.append(process[0])
    return found


def _stat(pid: int) -> tuple[int, int] | None:
    """Parent and start time (in ticks since the machine's), or None where it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return int(fields[1]), int(fields[19])


def _is_tracker(pid: int) -> bool:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return b"resource_tracker" in file.read()
    return False


def _kill(noted: set[Process]) -> None:
    for pid, started in noted:
        stat = _stat(pid)
        if stat is not None and stat[1] == started:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve(int(sys.argv[1]))
