"""`SnapshotFile`: the prefix cache on disk, so that a restart does not make everybody's first request cold.

A file is one line of JSON (format, fingerprint of all that keys and values depend on, pinned prefixes), then frames of
blocks with their token ids, the most valuable first and every block behind the one before it in its prefix, then a
SHA-256 of all that. It is written beside the steps, takes its place in one rename, and is believed only if fingerprint
and checksum are right. Knows blocks, digests and bytes, no tensors. Used by `Engine`; made by whoever loads a model.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from core.block_pool import BlockPool
from core.errand import Bits
from core.errors import Busy, PinnedFull, SnapshotRefused
from core.interfaces import Runner
from core.prefixes.cache import Entry, PrefixCache
from core.prefixes.pinned import PinnedPrefixes
from core.prefixes.snapshot_writer import SnapshotWriter, check_place

_log = logging.getLogger("noria.engine")

FORMAT = 2
FRAME_BYTES = 4 << 20  # copied at once, between two steps: about 2 ms
MAX_HEADER_BYTES = 16 << 20
PAUSE_S = 0.001  # while there is nothing to do but wait for the disk
FAREWELL_S = 10.0  # for copying at a shutdown
_COUNT = struct.Struct("<I")
_HEAD = struct.Struct("<iI")  # the block before it, and how many tokens it has; behind it their ids


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """What was written or restored."""

    num_blocks: int
    num_tokens: int
    size_bytes: int
    seconds: float

    def in_words(self, done: str) -> str:
        size_mib = self.size_bytes / (1 << 20)
        return f"{self.num_tokens:,} tokens ({size_mib:,.0f} MiB) {done} in {self.seconds:.1f} s"


class SnapshotFile:
    """`fingerprint` stands for weights, dtypes, block size and kernels: blocks of another are never restored. At most
    `max_bytes` of keys and values are written, those used last."""

    def __init__(
        self,
        path: Path,
        fingerprint: str,
        max_bytes: int,
        pool: BlockPool,
        cache: PrefixCache,
        pins: PinnedPrefixes,
        runner: Runner,
    ) -> None:
        self.path = path
        self._fingerprint = fingerprint
        self._max_bytes = max_bytes
        self._pool, self._cache, self._pins, self._runner = pool, cache, pins, runner
        self._block_size = runner.cache_config.block_size
        self._is_saving = False

    # --- writing ---

    @property
    def has_anything(self) -> bool:
        """Whether there is a block to write."""
        return bool(self._cache.latest(1))

    def save(self, limit_s: float | None = None) -> Bits:
        """Returns a `SnapshotReport`. A bit is one frame copied: nobody's step waits longer; hashing and writing
        have a thread of their own. After `limit_s` seconds no more blocks are taken. Raises `Busy` while another save
        goes on, and `OSError`."""
        if self._is_saving:
            raise Busy("A snapshot is being written already.")
        self._is_saving = True
        writer = SnapshotWriter(self.path)
        try:
            return (yield from self._save(writer, limit_s))
        finally:
            self._is_saving = False
            writer.abandon()

    def _save(self, writer: SnapshotWriter, limit_s: float | None) -> Bits:
        started_s = time.monotonic()
        pins = [
            {"label": pin.label, "tokens": self._tokens_of(pin.block_ids)} for pin in self._pins
        ]
        header = {"format": FORMAT, "fingerprint": self._fingerprint, "pins": pins}
        writer.put(json.dumps(header).encode() + b"\n")
        block_bytes = self._runner.block_bytes
        wanted = self._cache.latest(self._max_bytes // block_bytes)
        places: dict[bytes, int] = {}
        num_tokens = 0
        for frame in _batches(wanted, max(1, FRAME_BYTES // block_bytes)):
            if limit_s is not None and time.monotonic() - started_s > limit_s:
                break
            entries = self._take(frame, places)
            if entries:
                heads = b"".join(self._head(entry, places) for entry in entries)
                writer.put(_COUNT.pack(len(entries)) + heads)
                writer.put(self._runner.read_blocks([entry.block_id for entry in entries]))
                num_tokens += sum(len(entry.tokens) // 8 for entry in entries)
            yield
            while writer.is_full:
                time.sleep(PAUSE_S)
                yield
            if writer.is_done:
                break  # it could not write
        writer.put(_COUNT.pack(0))
        writer.finish()
        while not writer.is_done:
            time.sleep(PAUSE_S)
            yield
        writer.check()
        seconds = time.monotonic() - started_s
        return SnapshotReport(len(places), num_tokens, writer.size_bytes, seconds)

    def _take(self, digests: list[bytes], places: dict[bytes, int]) -> list[Entry]:
        """Those blocks that are still there, and whose predecessors are in the file."""
        entries = []
        for digest in digests:
            entry = self._cache.get(digest)
            if entry is None or (entry.depth and entry.parent not in places):
                continue
            entries.append(entry)
            places[digest] = len(places)
        return entries

    def _head(self, entry: Entry, places: dict[bytes, int]) -> bytes:
        place = places[entry.parent] if entry.depth else -1
        tokens = entry.tokens.ljust(8 * self._block_size, b"\0")
        return _HEAD.pack(place, len(entry.tokens) // 8) + tokens

    def _tokens_of(self, block_ids: list[int]) -> list[int]:
        return [token for block_id in block_ids for token in self._cache.tokens_of(block_id)]

    # --- reading ---

    def restore(self) -> SnapshotReport | None:
        """Fills the cache, before anything else uses the pool. None if there is no file. Raises `SnapshotRefused` with
        the reason; then nothing has changed."""
        started_s = time.monotonic()
        try:
            with self.path.open("rb") as file:
                pins, heads, block_ids = self._read(file)
                size_bytes = file.tell()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise SnapshotRefused(f"it cannot be read ({error.strerror})") from None
        self._cache.adopt(heads, block_ids)
        num_blocks = len(block_ids)
        for pin in pins:
            with contextlib.suppress(PinnedFull):  # the pool is smaller than it was
                self._pins.pin(pin["tokens"], pin["label"])
        self._pool.release(block_ids)  # the most valuable last, so that it is evicted last
        num_tokens = sum(len(tokens) // 8 for _, tokens in heads)
        seconds = time.monotonic() - started_s
        return SnapshotReport(num_blocks, num_tokens, size_bytes, seconds)

    def _read(self, file: BinaryIO) -> tuple[list[Any], list[tuple[int, bytes]], list[int]]:
        """Pins, heads and the blocks that now hold the contents. The pool is left as it was if anything is wrong."""
        checksum = hashlib.sha256()
        block_ids: list[int] = []
        try:
            pins = self._read_header(file, checksum)
            heads = [head for frame in self._frames(file, checksum, block_ids) for head in frame]
            if file.read() != checksum.digest():
                raise SnapshotRefused("it is damaged")
            full = 8 * self._block_size
            for index, (place, _) in enumerate(heads):
                if not (-1 <= place < index and (place < 0 or len(heads[place][1]) == full)):
                    raise SnapshotRefused("it is damaged")
            return pins, heads[: len(block_ids)], block_ids
        except BaseException:
            self._pool.release(block_ids)
            raise

    def _read_header(self, file: BinaryIO, checksum: Any) -> list[Any]:
        line = file.readline(MAX_HEADER_BYTES)
        checksum.update(line)
        try:
            header = json.loads(line)
            found, fingerprint, pins = header["format"], header["fingerprint"], header["pins"]
        except (ValueError, KeyError, TypeError):
            raise SnapshotRefused("it is damaged") from None
        if found != FORMAT:
            raise SnapshotRefused("it has another format")
        if fingerprint != self._fingerprint:
            raise SnapshotRefused("it was made with another model, dtype, block size or kernels")
        assert isinstance(pins, list)
        return pins

    def _frames(
        self, file: BinaryIO, checksum: Any, block_ids: list[int]
    ) -> Iterator[list[tuple[int, bytes]]]:
        """The heads of one frame after the other. Contents go into blocks as long as the pool has any."""
        block_bytes = self._runner.block_bytes
        head_bytes = _HEAD.size + 8 * self._block_size
        most, is_room = max(1, FRAME_BYTES // block_bytes), True
        while count := _COUNT.unpack(_exactly(file, _COUNT.size, checksum))[0]:
            if count > most:
                raise SnapshotRefused("it is damaged")
            heads = _exactly(file, count * head_bytes, checksum)
            data = _exactly(file, count * block_bytes, checksum)
            if is_room := is_room and count <= self._pool.num_available:
                taken = self._pool.allocate(count)
                block_ids += taken
                self._runner.write_blocks(taken, memoryview(data))
            yield [
                self._parse_head(heads[start : start + head_bytes])
                for start in range(0, len(heads), head_bytes)
            ]

    def _parse_head(self, head: bytes | bytearray) -> tuple[int, bytes]:
        place, count = _HEAD.unpack_from(head)
        if not 0 < count <= self._block_size:
            raise SnapshotRefused("it is damaged")
        return place, bytes(head[_HEAD.size : _HEAD.size + 8 * count])


def _exactly(file: BinaryIO, count: int, checksum: Any) -> bytearray:
    data = bytearray(count)
    if file.readinto(data) != count:  # type: ignore[attr-defined]
        raise SnapshotRefused("it is damaged")
    checksum.update(data)
    return data


def _batches(items: list[bytes], size: int) -> Iterator[list[bytes]]:
    rest = iter(items)
    while batch := list(itertools.islice(rest, size)):
        yield batch


def save_at_the_end(snapshots: SnapshotFile | None) -> Bits:
    """What is done with the prefix cache before an engine ends: it is written, and the log says so or why not."""
    if (
        snapshots is None or not snapshots.has_anything
    ):  # a file of another model's, say, stays as it is
        return
    try:
        report = yield from snapshots.save(FAREWELL_S)
    except OSError as error:
        _log.error("the prefix snapshot could not be written: %s", error.strerror)
    except Busy:
        _log.error("the prefix snapshot was being written when the engine ended")
    else:
        _log.info("prefix snapshot: %s", report.in_words("written"))


def restore_at_the_start(snapshots: SnapshotFile | None) -> list[str]:
    """Fills the prefix cache of a new engine. Returns a line for the log, or none where there is no file. Warns now of
    a file that could not be written at the end."""
    if snapshots is None:
        return []
    try:
        check_place(snapshots.path)
    except OSError as error:
        _log.warning(
            "kv_cache.snapshot_file cannot be written (%s): the prefix cache will not survive a restart",
            error.strerror,
        )
    try:
        report = snapshots.restore()
    except SnapshotRefused as refusal:
        return [f"prefix snapshot: ignored, {refusal}"]
    return [] if report is None else [f"prefix snapshot: {report.in_words('restored')}"]
