"""Percentiles of a histogram beside those of a client."""

from __future__ import annotations

import pytest

from loadtest.agreement import compare, estimate, read_histograms, read_stats

METRICS = """
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="m"} 50.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.02",model_name="m"} 100.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 100.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 1.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 100.0
"""
NAME = "itl /generate_stream"


def test_a_percentile_is_interpolated_within_its_bucket() -> None:
    buckets = read_histograms(METRICS)["vllm:inter_token_latency_seconds"]
    found = estimate(buckets, 90)
    assert found is not None
    assert (found.value, found.low, found.high) == (pytest.approx(0.018), 0.01, 0.02)
    assert estimate({}, 50) is None
    assert estimate({0.1: 0.0, float("inf"): 0.0}, 50) is None


def test_what_was_counted_before_is_taken_off() -> None:
    table = f"Type,Name,Average Response Time,50%,90%,99%\nitl,{NAME},10.5,11,18,40\n"
    stats = read_stats(table)
    lines = compare(NAME, stats, "", METRICS, 0.1)
    assert [line["agrees"] for line in lines] == [True, True, False, True]
    mean = lines[-1]
    assert (mean["percentile"], mean["server_ms"], mean["apart"]) == ("mean", 10, 0.05)
    before = METRICS.replace("100.0", "50.0").replace("_sum{engine", "_other{engine")
    assert compare(NAME, stats, before, METRICS, 0.1)[0]["server_ms"] == 15
