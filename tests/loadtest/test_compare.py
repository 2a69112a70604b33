"""Two servers in turn, from arguments to ratios."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtest import compare
from loadtest.__main__ import build_parser


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(["compare", *words])


def line(side: str, repetition: int, tokens_per_s: float, ttft_ms: float) -> dict[str, Any]:
    return {
        "side": side,
        "repetition": repetition,
        "scenario": "S",
        "concurrency": 8,
        "rate": None,
        "output_tokens_per_s": tokens_per_s,
        "ttft_ms": {"p50": ttft_ms, "p99": None},
    }


def test_ratios_are_of_medians_and_tell_the_spread_of_rounds() -> None:
    lines = [line("A", i, rate, 10.0) for i, rate in enumerate((100.0, 300.0, 110.0))]
    lines += [line("B", i, rate, 5.0) for i, rate in enumerate((50.0, 100.0, 60.0))]
    throughput, ttft = compare.ratios_of(lines, "A", "B")
    assert (throughput["a"], throughput["b"], throughput["ratio"]) == (110, 60, 1.833)
    assert (throughput["lowest"], throughput["highest"]) == (1.833, 3)
    assert throughput["better"] == "A"
    assert (ttft["measure"], ttft["ratio"], ttft["better"]) == ("TTFT p50 ms", 2, "B")


def test_a_side_is_a_url_or_a_command() -> None:
    args = parse("--a", "http://host:1/v1/", "--b", "env X=1 noria --model 'a b'")
    a, b = compare.side_of(args, "a"), compare.side_of(args, "b")
    assert (a.target.url, a.command) == ("http://host:1", ())
    assert b.command == (
        "env",
        "X=1",
        "noria",
        "--model",
        "a b",
        *["--host", "127.0.0.1", "--port", "{port}"],
    )
    own_port = compare.side_of(parse("--a", "x -p {port}", "--b", "y"), "a")
    assert own_port.command == ("x", "-p", "{port}")


async def test_both_sides_of_a_round_get_the_same_requests(
    tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parse(
        "--a", tiny.url, "--b", tiny.url, "--concurrency", "2", "--requests", "2", "--warm-up", "0"
    )
    options = compare.load_options_of(args)
    prompts = compare.SharedPrompts(None)
    for turn in range(2):
        for name in ("a", "b"):
            side = compare.side_of(args, name)
            tiny.has_tokenize = (
                name == "a"
            )  # the other cannot tell tokens: it gets the first one's words
            await compare._measure_all(side.target, options, turn, None, prompts)
    prompts = [body["prompt"] for body in tiny.bodies]
    assert set(prompts[:2]) == set(prompts[2:4])
    assert set(prompts[4:6]) == set(prompts[6:])
    assert len(set(prompts)) == 4


def test_the_report_fails_when_a_request_failed(capsys: pytest.CaptureFixture[str]) -> None:
    spread = {"p50": 1.0, "p90": 1.0, "p99": 1.0}
    full = dict.fromkeys(("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"), spread)
    counts = {"requests": 1, "failed": 1, "requests_per_s": 1.0}
    lines = [{**line(side, 0, 10.0, 1.0), **counts, **full} for side in "AB"]
    assert compare.report(lines, "A", "B", None) == 1
    ratios = orjson.loads(capsys.readouterr().out)
    assert ratios["kind"] == "compare-ratios"
    assert {r["ratio"] for r in ratios["ratios"]} == {1}


def test_ratios_are_drawn_with_their_spread(tmp_path: Path) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        pytest.skip("plots need matplotlib")
    lines = [line("A", i, rate, 10.0) for i, rate in enumerate((100.0, 300.0, 110.0))]
    lines += [line("B", i, rate, 5.0) for i, rate in enumerate((50.0, 100.0, 60.0))]
    compare.draw(compare.ratios_of(lines, "A", "B"), "A", "B", tmp_path / "plots")
    assert 0 < (tmp_path / "plots/compare.png").stat().st_size < 100_000
