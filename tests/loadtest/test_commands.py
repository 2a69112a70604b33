"""The subcommands from their arguments to their lines and exit codes."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import orjson
import pytest

from loadtest import bench, beside, mixed, policies
from loadtest.__main__ import build_parser
from loadtest.figures import percentile, print_table
from loadtest.policies import output_lengths, plan, ratios_of, rungs_of
from loadtest.prompts import (
    PromptMaker,
    default_num_requests,
    one_token_words,
    prompt_maker_for,
)
from loadtest.scenarios import load_scenarios
from loadtest.server_process import running_server
from loadtest.sse_client import RequestRecord
from loadtest.target import Target

ROOT = Path(__file__).parents[2]


def parse(*words: str) -> argparse.Namespace:
    return build_parser().parse_args(list(words))


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in capsys.readouterr().out.splitlines()]


async def test_bench_prints_one_json_line_per_point(
    tiny: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "results.jsonl"
    args = parse(
        *("bench", "--url", tiny.url + "/v1", "--scenario", "S", "P", "--concurrency", "1", "2"),
        *("--requests", "3", "--pid", str(os.getpid()), "--label", "x", "--out", str(out)),
    )
    assert await bench._bench(args) == 0
    points = lines(capsys)
    assert [(p["scenario"], p["concurrency"]) for p in points] == [
        ("S", 1),
        ("S", 2),
        ("P", 1),
        ("P", 2),
    ]
    for point in points:
        assert point["succeeded"] == 3
        assert point["prompt_source"] == "server"
        assert point["client_cpu_s"] >= 0
        assert point["server_rss_mib"] > 1
        for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
            assert list(point[name]) == ["p50", "p90", "p99"]
    assert points[0]["output_tokens"] == 3 * 128
    assert len(out.read_text().splitlines()) == 4


async def test_bench_fails_when_any_request_failed(
    tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """B153: also through the exit code."""
    tiny.fails_after = 2
    args = parse(
        "bench", "--url", tiny.url, "--concurrency", "1", "--requests", "1", "--warm-up", "0"
    )
    assert await bench._bench(args) == 1
    assert lines(capsys)[0]["failed"] == 1


async def test_mixed_sends_short_and_long_prompts_at_once(
    tiny: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    args = parse("mixed", "--url", tiny.url, "--sample-interval", "0.05")
    assert await mixed._mixed(args) == 0
    figures = lines(capsys)[0]
    assert (figures["requests"], figures["output_tokens"]) == (25, 2500)
    assert [body["prompt"] for body in tiny.bodies].count("Hi") == 20
    assert figures["samples"][0][1:] == [3, 1, 0.25]


def stream(sent_s: float, *times_s: float) -> RequestRecord:
    return RequestRecord(sent_s, text_times_s=list(times_s))


def test_beside_compares_the_gaps_before_a_long_prompt_with_those_until_its_first_token() -> None:
    streams = [stream(0, 1.0, 1.01, 1.02, 1.12, 1.24, 1.25, 2.0)] * 2
    figures = beside.compare_gaps(streams, stream(1.021, 1.245))
    assert (figures["disturbed_gaps"], figures["undisturbed_p50_ms"]) == (4, 10.0)
    assert (figures["disturbed_max_ms"], figures["ttft_ms"]) == (120.0, 224.0)
    assert figures["p99_over_p50"] == pytest.approx(12, rel=0.02)


@pytest.mark.parametrize(
    ("times_s", "hint"), [((1.0, 1.1), "--stream-tokens"), ((1.9, 3), "--after")]
)
def test_beside_says_which_option_to_raise(times_s: tuple[float, ...], hint: str) -> None:
    with pytest.raises(SystemExit, match=hint):
        beside.compare_gaps([stream(0, *times_s)], stream(1.5, 2.0))


def test_unusable_arguments_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["bench", "--concurrency", "0"],
        ["bench", "--extra", "[1]"],
        ["policies", "--policy", "x"],
        [],
    ):
        with pytest.raises(SystemExit) as error:
            parse(*words)
        assert error.value.code == 2
    with pytest.raises(SystemExit, match="min-output"):
        policies.main(parse("policies", "--min-output", "9", "--max-output", "8"))


def test_a_rung_per_policy_differs_in_nothing_else() -> None:
    args = parse("policies", "--command", "noria --config 'a b.yaml'", "--set", "log.level=warning")
    rungs = rungs_of(args)
    assert [rung.name for rung in rungs] == ["single", "static", "continuous"]
    assert list(rungs[1].command) == [
        *("noria", "--config", "a b.yaml", "--host", "127.0.0.1", "--port", "{port}"),
        *("--set", "engine.policy=static", "--set", "engine.batch_size=32"),
        *("--set", "log.level=warning"),
    ]


def test_every_rung_gets_the_same_requests() -> None:
    args = parse("policies")
    maker = PromptMaker(("one", "two", "three"), "words")
    assert plan(args, maker) == plan(args, maker)
    assert len(plan(args, maker)) == 256
    assert plan(args, maker) != plan(parse("policies", "--seed", "1"), maker)


def test_output_lengths_are_log_uniform() -> None:
    lengths = output_lengths(4000, 8, 256, seed=0)
    assert (min(lengths), max(lengths)) == (8, 256)
    below_the_geometric_mean = sum(length < 45 for length in lengths) / len(lengths)
    assert 0.45 < below_the_geometric_mean < 0.55


def test_ratios_compare_each_rung_with_those_before_it() -> None:
    points = [
        {"rung": "a", "output_tokens_per_s": 10.0},
        {"rung": "b", "output_tokens_per_s": 25.0},
    ]
    assert ratios_of(points) == {"b/a": 2.5}


STUB = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response({"/": 200, "/slow": 503 if Handler.asked < 3 else 200}.get(self.path, 404))
        self.end_headers()
    def log_message(self, *args):
        pass
print("listening", flush=True)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_started_on_a_free_port_and_ended(tmp_path: Path) -> None:
    command = (sys.executable, "-c", STUB, "{port}")
    with running_server(command, tmp_path / "log", ready_path="/", start_timeout_s=10) as server:
        assert server.start_s < 10
        os.kill(server.pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


@pytest.mark.parametrize("path", ["/slow", "/no-such-route"])
def test_a_server_that_loads_is_waited_for_and_one_without_a_health_route_is_not(
    path: str, tmp_path: Path
) -> None:
    command = (sys.executable, "-c", STUB, "{port}")
    with running_server(command, tmp_path / "log", ready_path=path, start_timeout_s=10) as server:
        assert server.start_s > 0.2 or path != "/slow"  # asked three times, 0.1 s apart


def test_a_server_that_ends_at_once_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = (sys.executable, "-c", "print('no such model'); raise SystemExit(3)")
    with (
        pytest.raises(SystemExit, match="ended with 3:\nno such model"),
        running_server(command, tmp_path / "log", ready_path="/", start_timeout_s=10),
    ):
        pass


def test_policies_climb_from_server_to_server(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = str(ROOT / "tests/loadtest")
    code = f"import sys; sys.path.insert(0, {folder!r}); import conftest; conftest.serve(sys.argv)"
    args = parse(
        *(
            "policies",
            "--command",
            shlex.join([sys.executable, "-c", code]),
            "--log-dir",
            str(tmp_path),
        ),
        *(
            "--policy",
            "static",
            "continuous",
            "--requests",
            "6",
            "--concurrency",
            "3",
            "--max-output",
            "16",
        ),
    )
    assert policies.main(args) == 0
    static, continuous, ratios = lines(capsys)
    assert (static["rung"], continuous["rung"]) == ("static", "continuous")
    assert (
        static["output_tokens"] == continuous["output_tokens"] == sum(output_lengths(6, 8, 16, 0))
    )
    assert list(ratios["output_tokens_per_s"]) == ["continuous/static"]
    assert (tmp_path / "static.log").exists()


async def test_words_are_checked_with_the_servers_tokenizer(tiny: Any) -> None:
    maker = await prompt_maker_for(Target(tiny.url), None)
    assert maker.source == "server"
    assert "about" in maker.words
    assert not any(word.startswith("y") for word in maker.words)


async def test_words_are_taken_for_tokens_where_nobody_can_be_asked(tiny: Any) -> None:
    tiny.has_tokenize = False
    assert (await prompt_maker_for(Target(tiny.url), None)).source == "words"


def test_words_are_halved_until_only_single_tokens_remain() -> None:
    async def count_tokens(text: str) -> int:
        return sum(2 if word == "bad" else 1 for word in text.split())

    words = asyncio.run(one_token_words(["a", "b", "bad", "c", "bad"], count_tokens))
    assert words == ["a", "b", "c"]


def test_prompts_are_unique_and_of_the_scenarios_length() -> None:
    maker = PromptMaker(tuple("abcdefgh"), "words")
    shapes = load_scenarios()
    for scenario in ("S", "L", "P"):
        shape = shapes[scenario]
        prompts = [planned.prompt for planned in maker.plan(shape, 8, "0")]
        assert {len(prompt.split()) for prompt in prompts} == {shape.prompt_tokens.low}
        assert len(set(prompts)) == 8
        assert len({" ".join(p.split()[: shape.shared_tokens]) for p in prompts}) == 1
    assert maker.plan(shapes["P"], 1, "0") != maker.plan(shapes["P"], 1, "1")


def test_scenarios_send_as_many_requests_as_the_rivals_figures_used() -> None:
    shapes = load_scenarios()
    counts = {s: [default_num_requests(shapes[s], c) for c in (1, 8, 32)] for s in "SLP"}
    assert counts == {"S": [8, 16, 64], "L": [8, 16, 32], "P": [32, 32, 32]}


def test_percentiles_interpolate() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([], 50) is None


def test_the_table_is_plain_text_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    print_table("t", ["a", "bb"], [["1", "2"]])
    assert capsys.readouterr().err == "t\na  bb\n-  --\n1   2\n"


@pytest.mark.skipif(importlib.util.find_spec("locust") is None, reason="locust is not installed")
async def test_locust_reports_ttft_gaps_and_tokens(tiny: Any) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest/locustfile.py"), "--headless"),
        *("-u", "2", "-r", "2", "-t", "2s", "-H", tiny.url, "--max-tokens", "4"),
        *("--only-summary", "NativeStreamUser", "ChatStreamUser"),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    text = output.decode()
    assert process.returncode == 0, text
    for name in ("ttft /generate_stream", "itl /generate_stream", "tokens /v1/chat/completions"):
        assert name in text


def test_overhead_counts_the_server_s_own_time(capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/proc/self/task").is_dir():
        pytest.skip("the time of threads is read from /proc")
    words = ("overhead", "--streams", "2", "--tokens", "64", "--step-ms", "2", "--repeat", "1")
    args = parse(*words)
    assert args.run(args) == 0
    (line,) = lines(capsys)
    assert (line["output_tokens"], line["tokens_per_chunk"]) == (128, 1)
    assert 1 < line["loop_us_per_token"] < line["server_us_per_token"] < 20_000
    assert line["client_us_per_token"] > 0
