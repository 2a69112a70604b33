"""The reader's tour: both languages agree, what it names exists, and (slow) every command of it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "loadtest"
TOURS = [FOLDER / "tour.md", FOLDER / "tour.ko.md"]
MAX_PLOT_BYTES = 100_000


def commands_of(path: Path) -> list[str]:
    """The lines of all blocks marked `sh`."""
    blocks = re.findall(r"^```sh\n(.*?)^```", path.read_text(encoding="utf-8"), re.M | re.S)
    return [line for block in blocks for line in block.splitlines() if line.strip()]


def headings_of(path: Path) -> list[str]:
    return re.findall(r"^## (\d+)\.", path.read_text(encoding="utf-8"), re.M)


def figures_of(path: Path) -> list[list[str]]:
    """The cells of all tables that are numbers: measured figures are not translated."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    return [re.findall(r"(?<=\| )[\d.,]+(?: %)?(?= \|)", line) for line in lines]


def test_both_languages_show_the_same_commands_chapters_and_figures() -> None:
    english, korean = TOURS
    assert commands_of(english) == commands_of(korean)
    assert len(commands_of(english)) >= 10
    assert headings_of(english) == headings_of(korean)
    assert figures_of(english) == figures_of(korean)


@pytest.mark.parametrize("path", TOURS, ids=lambda path: path.name)
def test_every_file_and_plot_that_is_named_exists(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert "@" not in re.sub(r"`[^`]*`", "", text), "a figure was never filled in"
    targets = re.findall(r"\]\(([^)#:]+)\)", text)
    assert len(targets) > 15
    for target in targets:
        assert (FOLDER / target).is_file(), target
        if target.endswith(".png"):
            assert (FOLDER / target).stat().st_size < MAX_PLOT_BYTES, target


@pytest.mark.slow
@pytest.mark.parametrize("command", commands_of(TOURS[0]))
def test_every_command_of_the_tour_runs(command: str, tmp_path: Path) -> None:
    """As a reader would type it; only plots go elsewhere. A target of `tune` may be out of reach of a slow machine."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    finished = subprocess.run(
        command.replace("loadtest/plots", str(tmp_path)),
        shell=True,
        cwd=ROOT,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    is_out_of_reach = "Nothing that was measured meets the target" in finished.stdout
    assert finished.returncode == 0 or is_out_of_reach, finished.stderr[-3000:]
    assert finished.stdout.strip()
    if "loadtest/plots" in command:
        assert list(tmp_path.glob("*.png"))
