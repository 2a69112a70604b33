"""`sweep`, `tune` and `ladder` where they decide something; the search runs over a made-up server."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtest import ladder, sweep, tune
from loadtest.__main__ import build_parser
from loadtest.closed_loop import PlannedRequest
from loadtest.ladder import STAGES
from loadtest.native_routes import body_of
from loadtest.prompts import PromptMaker

FOLDER = str(Path(__file__).parent)
TINY = f"import sys; sys.path.insert(0, {FOLDER!r}); import conftest; conftest.serve(sys.argv)"
TINY_COMMAND = shlex.join([sys.executable, "-c", TINY])


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(list(words))


def trial(batch_size: int, budget: int, meets: bool, rate: float) -> tune.Trial:
    line = {"output_tokens_per_s": rate, "good_share": 1.0 if meets else 0.2}
    return tune.Trial(batch_size, budget, meets, line)


@pytest.mark.parametrize(
    ("text", "key", "values"),
    [
        ("engine.batch_size=1,8", "engine.batch_size", ["1", "8"]),
        ("kv_cache.memory_fraction=0.1", "kv_cache.memory_fraction", ["0.1"]),
        ("server.model_aliases=[[a, b], [c]]", "server.model_aliases", ["[a, b]", "[c]"]),
    ],
)
def test_a_setting_is_split_into_values(text: str, key: str, values: list[str]) -> None:
    assert sweep.setting_of(text) == (key, values)


def test_a_setting_without_values_is_refused() -> None:
    for text in ("batch_size=1", "engine.batch_size", "engine.batch_size="):
        with pytest.raises(SystemExit):
            parse("sweep", text)


def test_sweep_starts_a_server_per_value(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    args = parse(
        *("sweep", "engine.batch_size=1,2", "--command", TINY_COMMAND, "--set", "log.level=error"),
        *("--concurrency", "2", "--requests", "2", "--warm-up", "0", "--log-dir", str(tmp_path)),
    )
    assert sweep.main(args) == 0
    captured = capsys.readouterr()
    lines = [orjson.loads(line) for line in captured.out.splitlines()]
    assert [line["value"] for line in lines] == ["1", "2"]
    assert "--set log.level=error --set engine.batch_size=2" in captured.err


def test_seats_are_doubled_until_the_target_is_missed_and_then_the_budget_varies() -> None:
    asked: list[tuple[int, int]] = []

    def try_setting(size: int, budget: int) -> tune.Trial:
        asked.append((size, budget))
        meets = size < 8 or (size == 8 and budget <= 256)
        return trial(size, budget, meets, size * 100 + budget / 100)

    trials = tune.search(try_setting, (1, 2, 4, 8, 16), 9, stops_early=True)
    assert asked[:4] == [(1, 512), (2, 512), (4, 512), (8, 512)]
    assert asked[4:8] == [(8, 128), (8, 256), (8, 1024), (8, 2048)]
    assert len(asked) == 9  # bounded
    best = tune.best_of(trials)
    assert best is not None
    assert (best.batch_size, best.budget) == (8, 256)


def test_with_a_fixed_number_of_clients_more_seats_are_always_tried() -> None:
    trials = tune.search(
        lambda size, budget: trial(size, budget, size == 4, 1.0), (1, 2, 4), 3, stops_early=False
    )
    assert [t.batch_size for t in trials] == [1, 2, 4]


def test_a_failed_request_misses_every_target() -> None:
    line = {"failed": 1, "good_share": 1.0, "output_tokens_per_s": 1.0}
    assert not tune.judge(1, 512, [line], 0.9).meets
    assert tune.judge(1, 512, [line | {"failed": 0, "good_share": 0.9}], 0.9).meets


def test_tune_says_plainly_when_nothing_meets_the_target(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = ["tune", "--command", TINY_COMMAND, "--max-runs", "1", "--requests", "2"]
    words += ["--warm-up", "0", "--log-dir", str(tmp_path)]
    assert tune.main(parse(*words, "--ttft-ms", "0.0001")) == 1
    assert "Nothing that was measured meets the target" in capsys.readouterr().out
    assert tune.main(parse(*words, "--ttft-ms", "60000")) == 0
    assert "--set engine.batch_size=1" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="needs a target"):
        tune.main(parse(*words))


def test_stages_differ_in_policy_and_route_only() -> None:
    args = parse("ladder", "--command", "noria", "--batch-size", "4")
    commands = {stage.name: ladder.command_of(stage, args) for stage in STAGES}
    assert [stage.route for stage in STAGES] == [
        *("/basic_generate", "/generate", "/generate_stream", "/generate_vllm")
    ]
    changed = {
        word
        for name, command in commands.items()
        for word in command
        if name != "vllm" and word not in commands["single"]
    }
    assert changed == {"engine.policy=static", "engine.policy=continuous"}


def test_vllm_is_skipped_with_a_line_where_it_is_not_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NORIA_VLLM_PYTHON", "/nowhere/python")
    names = [stage.name for stage in ladder.stages_of(parse("ladder"))]
    assert names == ["single", "static", "continuous"]
    assert "vllm: skipped, /nowhere/python has no vLLM" in capsys.readouterr().err


def test_the_python_of_vllm_starts_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORIA_VLLM_PYTHON", "/elsewhere/python")
    command = ladder.command_of(STAGES[3], parse("ladder", "--vllm-set", "vllm.model=x"))
    assert command[:3] == ["/elsewhere/python", "-m", "server"]
    assert {"engine.backend=vllm", "vllm.model=x"} <= set(command)


def test_each_route_gets_its_own_body() -> None:
    planned = PlannedRequest("a b", 3)
    bodies: dict[str, Any] = {s.route: orjson.loads(body_of(s.route, planned)) for s in STAGES}
    assert bodies["/generate"]["prompts"] == bodies["/generate_vllm"]["prompts"] == ["a b"]
    assert bodies["/basic_generate"]["prompt"] == bodies["/generate_stream"]["prompt"] == "a b"
    assert all(body["min_tokens"] == body["max_tokens"] == 3 for body in bodies.values())


def test_every_stage_gets_the_same_requests() -> None:
    maker = PromptMaker(("one", "two", "three"), "words")
    args = parse("ladder", "--requests", "6")
    assert ladder.plan(args, maker) == ladder.plan(args, maker)
    assert len(ladder.plan(args, maker)) == 6
