"""How many compute threads the step thread's team has.

Reads the machine. Called once, in the step thread, before anything is computed: a team belongs to its calling thread.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

import torch


def set_threads(setting: int | Literal["auto"]) -> int:
    """Sets and returns the threads of torch and of the C kernels, which share one OpenMP runtime. `auto`: one per
    physical core that this process may use, within the quota of its cgroup; OMP_NUM_THREADS, if set, wins over that."""
    if setting == "auto" and "OMP_NUM_THREADS" in os.environ:
        return torch.get_num_threads()
    count = available_cores() if setting == "auto" else setting
    torch.set_num_threads(count)
    return count


def available_cores(
    system: Path = Path("/sys/devices/system/cpu"), cgroup: Path = Path("/sys/fs/cgroup")
) -> int:
    """Physical cores: two hyperthreads of one core share its vector units, and waiting for each other costs more."""
    allowed = getattr(os, "sched_getaffinity", lambda _: range(os.cpu_count() or 1))
    cpus: set[int] = set(allowed(0))
    cores = len({_core_of(system, cpu) for cpu in cpus})
    quota = _quota(cgroup)
    return max(1, cores if quota is None else min(cores, math.ceil(quota)))


def _core_of(system: Path, cpu: int) -> str:
    try:
        return (system / f"cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
    except OSError:
        return str(cpu)


def _quota(cgroup: Path) -> float | None:
    """Processors that the container may keep busy, None without a limit."""
    try:
        limit, period = (cgroup / "cpu.max").read_text(encoding="ascii").split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None
