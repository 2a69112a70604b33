"""Request mixes, arrivals, goals and costs: the pure parts of a load."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtest import bench
from loadtest.__main__ import build_parser
from loadtest.closed_loop import LoopResult, PlannedRequest
from loadtest.figures import Goals, summarize
from loadtest.open_loop import arrivals_s, run_open_loop
from loadtest.prompts import PromptMaker
from loadtest.scenarios import Span, load_scenarios
from loadtest.sse_client import RequestRecord
from loadtest.target import Target

MAKER = PromptMaker(tuple(f"w{i}" for i in range(500)), "words")


def record(ttft_s: float, tpot_s: float, num_tokens: int = 11) -> RequestRecord:
    times = [100 + ttft_s + i * tpot_s for i in range(num_tokens)]
    return RequestRecord(100.0, times[-1], 200, times, has_end_mark=True)


def test_the_mixes_of_the_survey_and_the_rivals_exist() -> None:
    names = {"S", "L", "P", "short-short", "long-long", "short-long", "chat", "shared-prefix"}
    assert names | {"copy-heavy"} <= set(load_scenarios())


def test_a_copy_heavy_prompt_begins_to_repeat_its_passage() -> None:
    words = MAKER.plan(load_scenarios()["copy-heavy"], 1, "0")[0].prompt.split()
    assert len(words) == 320
    assert words[256:] == words[:64]


def test_lengths_of_a_chat_differ_and_stay_in_their_bounds() -> None:
    shape = load_scenarios()["chat"]
    planned = MAKER.plan(shape, 50, "0")
    lengths = {len(request.prompt.split()) for request in planned}
    assert len(lengths) > 20
    assert 160 <= min(lengths) <= max(lengths) <= 512
    assert len({" ".join(request.prompt.split()[:128]) for request in planned}) == 1


def test_a_fixed_length_draws_no_random_number() -> None:
    rng = random.Random(0)
    state = rng.getstate()
    assert Span(7, 7).draw(rng) == 7
    assert rng.getstate() == state


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[1]", "must map names"),
        ("x: {prompt_tokens: 1}", "x needs prompt_tokens and output_tokens"),
        ("x: {prompt_tokens: 1, output_tokens: 1, size: 2}", "unknown keys: size"),
        ("x: {prompt_tokens: true, output_tokens: 1}", "prompt_tokens of the mix x"),
        ("x: {prompt_tokens: [9, 8], output_tokens: 1}", "must not fall"),
        ("x: {prompt_tokens: [1, 2, 3], output_tokens: 1}", r"a number or \[low, high\]"),
        ("x: {prompt_tokens: 8, output_tokens: 1, shared_tokens: 9}", "shares or copies more"),
    ],
)
def test_a_bad_mix_is_refused_by_name(text: str, named: str, tmp_path: Path) -> None:
    path = tmp_path / "mixes.yaml"
    path.write_text(text)
    with pytest.raises(SystemExit, match=named):
        load_scenarios(path)


def test_arrivals_are_poisson_and_the_same_every_time() -> None:
    moments = arrivals_s(4000, 5.0, "0")
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    assert moments == arrivals_s(4000, 5.0, "0") != arrivals_s(4000, 5.0, "1")
    assert statistics.mean(gaps) == pytest.approx(0.2, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(0.2, rel=0.05)


async def test_an_open_loop_does_not_wait_for_answers(tiny: Any) -> None:
    tiny.first_token_s = 0.3
    planned = [PlannedRequest("a", 1) for _ in range(10)]
    result = await run_open_loop(Target(tiny.url, model="tiny"), planned, 200.0, "0", timeout_s=10)
    assert result.wall_s < 1.5
    assert len([record for record in result.records if record.is_ok]) == 10


async def test_what_was_not_due_before_the_limit_is_not_sent(tiny: Any) -> None:
    planned = [PlannedRequest("a", 1) for _ in range(5)]
    target = Target(tiny.url, model="tiny")
    result = await run_open_loop(target, planned, 1.0, "0", timeout_s=10, time_limit_s=0.2)
    assert result.num_not_sent == 5 - len(result.records) > 0


def test_goodput_counts_requests_that_met_every_goal() -> None:
    records = (record(0.1, 0.01), record(0.1, 0.05), record(0.9, 0.01), record(0.1, 0.01, 1))
    figures = summarize(LoopResult(records, 2.0), Goals(ttft_ms=200, tpot_ms=20))
    assert (figures["goodput_per_s"], figures["good_share"]) == (1, 0.5)
    assert "goodput_per_s" not in summarize(LoopResult(records, 2.0))


def test_cost_is_of_the_hour_over_its_tokens() -> None:
    figures = summarize(LoopResult((record(0.1, 0.01, 10),), 1.0), price_per_hour=0.36)
    assert figures["cost_per_million_tokens"] == 10


async def test_bench_sends_at_a_rate_and_prices_it(
    tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["bench", "--url", tiny.url, "--rate", "50", "--requests", "5", "--warm-up", "0"]
    words += ["--ttft-ms", "5000", "--price-per-hour", "1"]
    assert await bench._bench(build_parser().parse_args(words)) == 0
    captured = capsys.readouterr()
    line = orjson.loads(captured.out)
    assert (line["rate"], line["concurrency"], line["good_share"]) == (50, None, 1)
    assert line["cost_per_million_tokens"] > 0
    assert "goodput/s" in captured.err
    assert "50/s" in captured.err
    with pytest.raises(SystemExit, match="no request mix nothing"):
        await bench._bench(build_parser().parse_args(["bench", "--scenario", "nothing"]))
