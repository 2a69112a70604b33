"""`--plan` against a real server: what it says the process takes is what the process takes."""

from __future__ import annotations

import asyncio
import random
import re
import sys
from pathlib import Path

import aiohttp
import pytest

from core.config import MIB
from server.config import build_config
from server.plan import plan_lines, process_line

ROOT = Path(__file__).parents[2]
BLOCKS = ("--set", "kv_cache.num_blocks=256")


async def planned_mib() -> int:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "server", "--plan", *BLOCKS, cwd=ROOT, stdout=-1
    )
    out, _ = await asyncio.wait_for(process.communicate(), 60)
    found = re.search(
        r"with the above ([\d,]+) MiB once every KV block has been used", out.decode()
    )
    assert found is not None, out
    return int(found[1].replace(",", ""))


def peak_mib(pid: int) -> float:
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / MIB


async def fill_the_pool(url: str) -> None:
    """Eight prompts at once that share nothing, together over twice what the pool holds."""
    generator = random.Random(7)
    prompts = [" ".join(generator.choices("abcdefghijklmn", k=1100)) for _ in range(8)]
    async with aiohttp.ClientSession() as session:
        for prompt_pair in (prompts[:4], prompts[4:]):
            body = {"prompts": prompt_pair, "max_tokens": 4, "ignore_eos": True}
            async with session.post(f"{url}/generate", json=body) as response:
                assert response.status == 200, await response.text()


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
async def test_a_server_that_used_every_block_has_taken_no_more_than_the_plan_said():
    planned = await planned_mib()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "server", "--host", "127.0.0.1", "--port", "0", *BLOCKS),
        cwd=ROOT,
        stdout=-1,
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 90)).decode()
        found = re.search(r"http://\S+", line)
        assert found is not None, line
        await asyncio.wait_for(fill_the_pool(found[0]), 90)
        assert 0.8 * planned < peak_mib(process.pid) <= planned
    finally:
        process.kill()
        await process.wait()


def test_the_plan_says_nothing_of_the_process_where_the_system_does_not(monkeypatch):
    monkeypatch.setattr("core.model.device.resident_bytes", lambda: None)
    lines = plan_lines(build_config({"kv_cache.num_blocks": 64, "engine.device": "cpu"}))
    assert not any(line.startswith("process:") for line in lines)


def test_memory_of_a_gpu_and_of_the_process_are_not_added():
    (line,) = process_line(8 * MIB, on_cpu=False, resident=300 * MIB)
    assert "300 MiB of Python" in line
    assert "with the above" not in line
