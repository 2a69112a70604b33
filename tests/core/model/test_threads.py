"""How many compute threads a team has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.model.threads import available_cores, set_threads


def test_the_quota_of_the_container_bounds_the_cores(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert available_cores(cgroup=tmp_path) == 1


def test_no_quota_leaves_every_core(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_cores(cgroup=tmp_path) == available_cores(cgroup=tmp_path / "absent")


def test_a_set_omp_num_threads_wins_over_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert set_threads("auto") == torch.get_num_threads()
