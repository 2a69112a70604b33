"""`SnapshotWriter`: a file that is written and hashed by a thread of its own, and appears whole or not at all.

Knows bytes only. Used by `SnapshotFile`, whose thread must not wait for a disk.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import queue
import threading
from pathlib import Path

MAX_QUEUED = 4  # pieces that wait for the disk


def check_place(path: Path) -> None:
    """Raises `OSError` where no file can be written. What was there stays as it is."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    beside = _beside(path)
    os.close(os.open(beside, os.O_WRONLY | os.O_CREAT, 0o600))
    beside.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + ".part")


class SnapshotWriter:
    """`put` pieces, then `finish`, then wait for `is_done` and `check`. `abandon` is for every way out; after a
    finished file it does nothing."""

    def __init__(self, path: Path) -> None:
        self.size_bytes = 0
        self._path = path
        self._beside = _beside(path)
        self._pieces: queue.SimpleQueue[bytes | memoryview | None] = queue.SimpleQueue()
        self._is_abandoned = False
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._main, name="noria-snapshot", daemon=True)
        self._thread.start()

    @property
    def is_full(self) -> bool:
        return self._pieces.qsize() >= MAX_QUEUED and self._thread.is_alive()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def put(self, piece: bytes | memoryview) -> None:
        self._pieces.put(piece)

    def finish(self) -> None:
        self._pieces.put(None)

    def check(self) -> None:
        """Raises the `OSError` that kept the file from being written."""
        if self._error is not None:
            raise self._error

    def abandon(self) -> None:
        self._is_abandoned = True
        self._pieces.put(None)

    def _main(self) -> None:
        try:
            self._write()
        except OSError as error:
            self._error = error
        finally:
            with contextlib.suppress(OSError):
                self._beside.unlink(missing_ok=True)

    def _write(self) -> None:
        checksum = hashlib.sha256()
        # Prompts can be read out of it: it is its owner's alone.
        descriptor = os.open(self._beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "wb", buffering=0) as file:
            while (piece := self._pieces.get()) is not None:
                checksum.update(piece)
                _write_all(file.fileno(), piece)
                self.size_bytes += len(piece)
            if self._is_abandoned:
                return
            _write_all(file.fileno(), checksum.digest())
            self.size_bytes += checksum.digest_size
            os.fsync(file.fileno())
        os.replace(self._beside, self._path)


def _write_all(descriptor: int, piece: bytes | memoryview) -> None:
    rest = memoryview(piece).cast("B")
    while rest:
        rest = rest[os.write(descriptor, rest) :]
