"""The ladder over the real server with a model that is none: what each policy does to seats shows in its log."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

import orjson
import pytest

from loadtest import ladder
from loadtest.__main__ import build_parser

ROOT = Path(__file__).parents[2]
DUMMY = shlex.join([sys.executable, str(ROOT / "tests/server/serve_dummy.py"), "0.003"])


def test_the_log_shows_who_waited_for_whom(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["ladder", "--stage", "single", "static", "continuous", "--command", DUMMY]
    words += ["--requests", "9", "--batch-size", "3", "--max-output", "32"]
    words += ["--prompt-tokens", "8", "--log-dir", str(tmp_path)]
    has_matplotlib = importlib.util.find_spec("matplotlib") is not None
    if has_matplotlib:
        words += ["--plots", str(tmp_path)]
    assert ladder.main(build_parser().parse_args(words)) == 0
    lines = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]
    single, static, continuous = lines[:3]
    assert single["output_tokens"] == static["output_tokens"] == continuous["output_tokens"] > 0
    assert single["wasted_seat_share"] == continuous["wasted_seat_share"] == 0
    assert static["wasted_seat_share"] > 0.1
    assert single["refilled_at_next_step"] == continuous["refilled_at_next_step"] == 1
    assert static["refilled_at_next_step"] < 1
    assert static["output_tokens_per_s"] > single["output_tokens_per_s"]
    if has_matplotlib:
        for name in ("ladder.png", "timeline.png"):
            assert 0 < (tmp_path / name).stat().st_size < 100_000
