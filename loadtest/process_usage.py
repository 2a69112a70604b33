"""CPU seconds and memory of a process and its children: psutil where installed, `/proc` of Linux otherwise."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class ProcessUsage:
    """CPU seconds since the process began; resident memory now and, where the system tells it, at its peak.

    Some servers compute in children: theirs is added. The sum of peaks is then an upper bound of the peak.
    """

    cpu_s: float
    rss_bytes: int
    peak_rss_bytes: int | None = None


def usage_of(pid: int) -> ProcessUsage | None:
    """None where there is no such process or no way to ask."""
    try:
        import psutil
    except ImportError:
        return _usage_from_proc(pid)
    try:
        process = psutil.Process(pid)
        family = [process, *process.children(recursive=True)]
        cpu_s = 0.0
        rss_bytes = 0
        for member in family:
            times = member.cpu_times()
            cpu_s += times.user + times.system
            rss_bytes += member.memory_info().rss
    except psutil.Error:
        return None
    peaks = [_status_bytes(member.pid, "VmHWM") for member in family]
    return ProcessUsage(cpu_s, rss_bytes, sum(filter(None, peaks)) or None)


def _usage_from_proc(pid: int) -> ProcessUsage | None:
    try:
        # The command in parentheses may hold spaces; the fields behind it do not. utime and stime are 14 and 15.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])
    cpu_s = ticks / os.sysconf("SC_CLK_TCK")
    return ProcessUsage(cpu_s, _status_bytes(pid, "VmRSS") or 0, _status_bytes(pid, "VmHWM"))


def _status_bytes(pid: int, key: str) -> int | None:
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(f"{key}:"):
                return int(line.split()[1]) * 1024
    except OSError:
        return None
    return None


def usage_figures(before: ProcessUsage | None, after: ProcessUsage | None) -> dict[str, Any]:
    """What a run cost the server, as fields of a JSON line; empty where it is not known."""
    if before is None or after is None:
        return {}
    figures: dict[str, Any] = {
        "server_cpu_s": round(after.cpu_s - before.cpu_s, 3),
        "server_rss_mib": round(after.rss_bytes / 2**20, 1),
    }
    if after.peak_rss_bytes is not None:
        figures["server_peak_rss_mib"] = round(after.peak_rss_bytes / 2**20, 1)
    return figures
