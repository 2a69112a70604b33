"""Which device and which number type a model runs on, and how much memory is free there.

Reads the machine, decides nothing about models. Called by `loader.py` and by `--plan`.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import torch

from core.config import EngineConfig, ModelConfig
from core.errors import ConfigError

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def choose_device(engine: EngineConfig) -> torch.device:
    """`engine.device`; `auto` is CUDA where there is one. Raises `ConfigError` where the asked device is missing."""
    if engine.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if engine.device == "cuda":
        raise ConfigError(
            "engine.device is cuda, but torch finds no CUDA device here; it accepts auto and cpu."
        )
    return torch.device("cpu")


def choose_dtype(model: ModelConfig, device: torch.device, *, widens: bool = False) -> torch.dtype:
    """`model.dtype`; `auto` is bfloat16, half as much to read, where the processor multiplies it or what computes
    `widens` it; else float32: without either a product in bfloat16 takes torch many times as long."""
    if model.dtype != "auto":
        return _DTYPES[model.dtype]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    return torch.bfloat16 if widens or multiplies_bfloat16() else torch.float32


def multiplies_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether this CPU has bfloat16 products: AVX-512 BF16 or AMX on x86, the BF16 extension on Arm."""
    for name in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        if getattr(torch.cpu, name, lambda: False)():
            return True
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return (
        re.search(r"^(flags|Features)\s*:.*\b(avx512_bf16|amx_bf16|bf16)\b", text, re.MULTILINE)
        is not None
    )


def available_bytes(device: torch.device) -> int:
    """Free memory: of the CUDA device; on a CPU what the kernel calls available, within the limit of the cgroup."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    bounds = [_system_available()]
    if (cgroup := _cgroup_available()) is not None:
        bounds.append(cgroup)
    return max(0, min(bounds))


def resident_bytes() -> int | None:
    """What this process holds of main memory now, its libraries' pages included; None where the system does not say."""
    try:
        pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        pass
    try:
        import resource  # not on Windows
    except ImportError:
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # the peak, which here is what is held
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _system_available(meminfo: Path = Path("/proc/meminfo")) -> int:
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    if hasattr(
        os, "sysconf"
    ):  # macOS knows no available memory: half of what is installed is a careful guess
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    return 4 << 30


def _cgroup_available(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """What the container may still take; page cache that can be dropped counts as free. None without a limit."""
    for limit_name, usage_name, cache_key in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit_text = (root / limit_name).read_text(encoding="ascii").strip()
            if limit_text == "max" or int(limit_text) >= 1 << 60:
                return None
            usage = int((root / usage_name).read_text(encoding="ascii"))
            stat = (root / limit_name).with_name("memory.stat").read_text(encoding="ascii")
        except (OSError, ValueError):
            continue
        dropped = re.search(rf"^{cache_key} (\d+)$", stat, re.MULTILINE)
        return int(limit_text) - usage + (int(dropped[1]) if dropped else 0)
    return None
