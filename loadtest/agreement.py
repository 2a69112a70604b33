"""`python -m loadtest agreement`: does a client measure what the server says? Locust against the server's histograms.

Starts a server, lets locust read streams from it for a while, and compares percentiles of time to first token, gaps and
end-to-end latency with those of `/metrics` over the same time. A histogram knows its mean exactly, but a percentile
only as well as its buckets are narrow: the two agree if locust's is at most `--tolerance` away from the bucket.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.figures import PERCENTILES, print_table
from loadtest.points import emit, held_lock, positive_float, positive_int
from loadtest.server_process import running_server
from loadtest.sweep import add_server_arguments, server_options_of

LOCUSTFILE = Path(__file__).with_name("locustfile.py")
# Locust's entry, and the server's histogram of the same thing.
PAIRS = {
    "ttft /generate_stream": "vllm:time_to_first_token_seconds",
    "itl /generate_stream": "vllm:inter_token_latency_seconds",
    "/generate_stream": "vllm:e2e_request_latency_seconds",
}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A percentile out of a histogram: interpolated, and the bounds of the bucket it lies in; seconds."""

    value: float
    low: float
    high: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_server_arguments(parser)
    parser.add_argument("--users", type=positive_int, default=8)
    parser.add_argument("--seconds", type=positive_int, default=60)
    parser.add_argument("--max-tokens", type=positive_int, default=64)
    parser.add_argument("--tolerance", type=positive_float, default=0.1)
    parser.add_argument("--lock", help="a lock file held while measuring")


def main(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory(prefix="noria-agreement-") as temporary:
        folder = Path(temporary)
        servers = server_options_of(args, Path(args.log_dir or temporary))
        with (
            held_lock(args.lock),
            running_server(
                servers.command_with([]),
                servers.log_dir / "server.log",
                ready_path="/health",
                start_timeout_s=servers.start_timeout_s,
            ) as server,
        ):
            before = _get(server.url + "/metrics")
            exit_code = _run_locust(server.url, folder, args)
            after = _get(server.url + "/metrics")
        stats = read_stats((folder / "locust_stats.csv").read_text(encoding="utf-8"))
    lines = [line for name in PAIRS for line in compare(name, stats, before, after, args.tolerance)]
    for line in lines:
        emit({"kind": "agreement", "label": args.label, **line}, args.out)
    num_failed = int(stats.get("Aggregated", {}).get("Failure Count", 0))
    columns = ["measure", "percentile", "locust ms", "server ms", "bucket ms", "apart", "agree"]
    rows = [
        [
            *(line["measure"], line["percentile"], f"{line['locust_ms']:.1f}"),
            *(f"{line['server_ms']:.1f}", f"{line['low_ms']:g} to {line['high_ms']:g}"),
            *(f"{line['apart']:.1%}", "yes" if line["agrees"] else "no"),
        ]
        for line in lines
    ]
    num_requests = stats.get("/generate_stream", {}).get("Request Count", "0")
    print_table(f"{num_requests} streams, {num_failed} failures", columns, rows)
    return 1 if exit_code or num_failed or not all(line["agrees"] for line in lines) else 0


def _run_locust(url: str, folder: Path, args: argparse.Namespace) -> int:
    command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless"]
    command += ["-u", str(args.users), "-r", str(args.users), "-t", f"{args.seconds}s", "-H", url]
    command += ["--max-tokens", str(args.max_tokens), "--csv", str(folder / "locust")]
    command += ["--only-summary", "--stop-timeout", "30", "NativeStreamUser"]
    print(shlex.join(command), file=sys.stderr)
    return subprocess.run(command, stdout=sys.stderr, check=False).returncode


def _get(url: str) -> str:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=30) as response:
        text: str = response.read().decode()
    return text


def read_stats(text: str) -> dict[str, dict[str, str]]:
    """The rows of locust's `_stats.csv` by name."""
    return {row["Name"]: row for row in csv.DictReader(text.splitlines())}


def read_histograms(text: str) -> dict[str, dict[float, float]]:
    """Cumulative counts by upper bound, of each histogram in Prometheus text; label sets are summed."""
    histograms: dict[str, dict[float, float]] = {}
    for line in text.splitlines():
        name, _, rest = line.partition("_bucket{")
        if not rest or line.startswith("#"):
            continue
        labels, _, count = rest.rpartition("} ")
        bound = float(labels.partition('le="')[2].partition('"')[0].replace("+Inf", "inf"))
        buckets = histograms.setdefault(name, {})
        buckets[bound] = buckets.get(bound, 0.0) + float(count)
    return histograms


def estimate(buckets: Mapping[float, float], percent: float) -> Estimate | None:
    """Linear within the bucket, as Prometheus does it; None of an empty histogram."""
    bounds = sorted(buckets)
    total = buckets[bounds[-1]] if bounds else 0.0
    if not total:
        return None
    rank = total * percent / 100
    low, below = 0.0, 0.0
    for bound in bounds:
        if buckets[bound] >= rank and buckets[bound] > below:
            if bound == float("inf"):
                return Estimate(low, low, bound)
            share = (rank - below) / (buckets[bound] - below)
            return Estimate(low + (bound - low) * share, low, bound)
        low, below = bound, buckets[bound]
    return None


def compare(
    name: str,
    stats: Mapping[str, Mapping[str, str]],
    before: str,
    after: str,
    tolerance: float,
) -> list[dict[str, Any]]:
    """The mean and the percentiles of one measure, from locust's table and two texts of `/metrics`."""
    metric = PAIRS[name]
    earlier = read_histograms(before).get(metric, {})
    buckets = {
        b: n - earlier.get(b, 0.0) for b, n in read_histograms(after).get(metric, {}).items()
    }
    found: dict[str, tuple[str, Estimate | None]] = {
        f"p{percent}": (f"{percent}%", estimate(buckets, percent)) for percent in PERCENTILES
    }
    found["mean"] = ("Average Response Time", mean_between(before, after, metric))
    return [
        _line(name, label, float(stats[name][column]), known, tolerance)
        for label, (column, known) in found.items()
        if known is not None and name in stats
    ]


def mean_between(before: str, after: str, metric: str) -> Estimate | None:
    """Exact: the sum over the count of what came between."""
    sums = [_total(text, f"{metric}_sum") for text in (before, after)]
    counts = [_total(text, f"{metric}_count") for text in (before, after)]
    if counts[1] <= counts[0]:
        return None
    mean = (sums[1] - sums[0]) / (counts[1] - counts[0])
    return Estimate(mean, mean, mean)


def _total(text: str, name: str) -> float:
    lines = (line for line in text.splitlines() if line.partition("{")[0] == name)
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _line(
    name: str, label: str, locust_ms: float, known: Estimate, tolerance: float
) -> dict[str, Any]:
    low_ms, high_ms = known.low * 1000, known.high * 1000
    return {
        "measure": name,
        "percentile": label,
        "locust_ms": round(locust_ms, 3),
        "server_ms": round(known.value * 1000, 3),
        "low_ms": round(low_ms, 3),
        "high_ms": round(high_ms, 3),
        "apart": round(abs(locust_ms / 1000 - known.value) / known.value, 4),
        "agrees": low_ms * (1 - tolerance) <= locust_ms <= high_ms * (1 + tolerance),
    }
