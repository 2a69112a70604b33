"""What Prometheus sees is true, complete, monotone, cheap, and never ends a stream."""

from __future__ import annotations

import asyncio
import logging
import re
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.outputs import StepStats
from server.metrics import Metrics
from server.metrics_table import Counter, Histogram, bounds_of


async def finish(server, *requests):
    stream = server.backend.submit(list(requests), request_id="r", route="/x")
    while not stream.is_finished:
        await asyncio.wait_for(stream.get(), 10)
    stream.close()
    await server.idle()


# As features.md lists them, without what belongs to features that do not exist.
NAMES = """
vllm:num_requests_running vllm:num_requests_waiting vllm:num_requests_waiting_by_reason vllm:kv_cache_usage_perc
vllm:gpu_cache_usage_perc vllm:cache_config_info vllm:prompt_tokens_total vllm:prompt_tokens_cached_total
vllm:prompt_tokens_by_source_total vllm:generation_tokens_total vllm:prefix_cache_queries_total
vllm:prefix_cache_hits_total vllm:num_preemptions_total vllm:spec_decode_num_drafts_total
vllm:spec_decode_num_draft_tokens_total vllm:spec_decode_num_accepted_tokens_total
vllm:spec_decode_num_accepted_tokens_per_pos_total vllm:request_success_total vllm:corrupted_requests_total
vllm:admission_rejections_total vllm:time_to_first_token_seconds_bucket vllm:inter_token_latency_seconds_bucket
vllm:time_per_output_token_seconds_bucket vllm:request_time_per_output_token_seconds_bucket
vllm:e2e_request_latency_seconds_bucket vllm:request_queue_time_seconds_bucket
vllm:request_prefill_time_seconds_bucket vllm:request_decode_time_seconds_bucket
vllm:request_inference_time_seconds_bucket vllm:request_prompt_tokens_bucket vllm:request_generation_tokens_bucket
vllm:request_max_num_generation_tokens_bucket vllm:request_params_max_tokens_bucket
vllm:request_prefill_kv_computed_tokens_bucket vllm:request_params_n_bucket vllm:iteration_tokens_total_bucket
noria:kv_blocks noria:kv_blocks_capacity noria:waiting_prompt_tokens noria:step_duration_seconds_bucket
noria:step_part_seconds_total noria:step_sequences_bucket noria:rejections_total noria:failures_total
noria:aborted_tokens_saved_total noria:recomputed_tokens_total noria:streams_open noria:slow_reader_merges_total
noria:slow_reader_cuts_total noria:executor_seconds_bucket noria:event_loop_lag_seconds noria:heartbeat_age_seconds
noria:startup_seconds noria:info
"""
HTTP_NAMES = """http_requests_total http_request_duration_seconds_bucket http_request_size_bytes_bucket
http_response_size_bytes_bucket"""


async def test_every_name_is_there_with_model_and_engine(start_server, generation_request):
    server = await start_server()
    await finish(server, generation_request())
    await server.client.get("/health")
    text = await (await server.client.get("/metrics")).text()
    samples = [
        sample for family in text_string_to_metric_families(text) for sample in family.samples
    ]
    by_name = {sample.name: sample.labels for sample in samples}
    assert set(NAMES.split()) - set(by_name) == set()
    for name in NAMES.split():
        assert by_name[name]["model_name"] == "dummy"
        assert by_name[name]["engine"] == "0"
    assert set(HTTP_NAMES.split()) - set(by_name) == set()
    assert "model_name" not in by_name["http_requests_total"]


async def test_prompt_tokens_are_summed_per_request(start_server, generation_request):
    """B136"""
    server = await start_server({"engine.prefix_caching": False})
    await finish(server, *[generation_request("x" * size, max_tokens=2) for size in (5, 50, 100)])
    samples = await server.scrape()
    assert samples["vllm:prompt_tokens_total"] == 155
    assert samples["vllm:request_prompt_tokens_sum"] == 155
    assert samples["vllm:request_prompt_tokens_count"] == 3
    assert samples["vllm:generation_tokens_total"] == 6


async def test_cached_tokens_are_told_apart(start_server, generation_request):
    server = await start_server()
    for _ in range(2):
        await finish(server, generation_request("y" * 64))
    samples = await server.scrape()
    assert samples["vllm:prompt_tokens_total"] == 128
    assert samples["vllm:prompt_tokens_cached_total"] == 63
    assert samples['vllm:prompt_tokens_by_source_total{source="cached"}'] == 63
    assert samples['vllm:prompt_tokens_by_source_total{source="computed"}'] == 65
    assert samples["vllm:prefix_cache_queries_total"] == 128
    assert samples["vllm:prefix_cache_hits_total"] == 63


async def test_intervals_are_counted_per_request_and_per_token(start_server, generation_request):
    server = await start_server(step_time_s=0.005)
    await finish(server, generation_request(max_tokens=9), generation_request(max_tokens=1))
    samples = await server.scrape()
    for name in (
        "time_to_first_token",
        "e2e_request_latency",
        "request_queue_time",
        "request_prefill_time",
    ):
        assert samples[f"vllm:{name}_seconds_count"] == 2
    assert samples["vllm:inter_token_latency_seconds_count"] == 8
    assert samples["vllm:time_per_output_token_seconds_count"] == 8
    assert samples["vllm:inter_token_latency_seconds_sum"] > 8 * 0.005
    assert samples["vllm:request_time_per_output_token_seconds_count"] == 1
    assert samples["vllm:request_max_num_generation_tokens_sum"] == 9
    assert samples["vllm:request_generation_tokens_sum"] == 10
    assert (
        samples['noria:step_duration_seconds_count{kind="decode"}'] >= 7
    )  # and one beside the other's prompt
    assert samples['noria:step_part_seconds_total{part="run"}'] > 8 * 0.005
    assert samples["noria:kv_blocks_capacity"] == 256


async def test_counters_are_monotone_through_preemption_and_aborts(
    start_server, generation_request
):
    """B104"""
    server = await start_server({"engine.batch_size": 8}, num_blocks=12, step_time_s=0.001)
    last: dict[str, float] = {}
    streams = []
    for number in range(24):
        request = generation_request(f"{number} " * 9, max_tokens=60)
        streams.append(server.backend.submit([request], request_id="same-id", route="/x"))
    for number, stream in enumerate(streams):
        if number % 3 == 0:
            stream.close()
        while not stream.is_closed and not stream.is_finished:
            await asyncio.wait_for(stream.get(), 10)
        stream.close()
        samples = await server.scrape()
        for name, value in samples.items():
            if re.search(r"_(total|count|bucket|sum)\b", name):
                assert value >= last.get(name, 0), name
        last = samples
    await server.idle()
    samples = await server.scrape()
    assert samples["vllm:num_preemptions_total"] > 0
    ends = [value for name, value in samples.items() if "request_success_total" in name]
    assert sum(ends) == 24


async def test_a_fault_in_metrics_ends_no_stream(
    start_server, generation_request, monkeypatch, caplog
):
    """B104"""
    caplog.set_level(logging.CRITICAL)
    server = await start_server()

    def fail(*_, **__):
        raise ValueError("counters cannot decrease")

    for name in ("observe", "add", "raise_to"):
        for kind in (Counter, Histogram):
            if hasattr(kind, name):
                monkeypatch.setattr(kind, name, fail)
    await finish(server, generation_request(max_tokens=5))


def test_a_counter_never_falls():
    counter = Counter()
    counter.add(3)
    counter.add(-2)
    counter.raise_to(1)
    assert counter.value == 3


def test_a_value_on_a_bound_counts_below_it():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]


def test_length_buckets_end_at_the_context():
    assert bounds_of("lengths", 300) == (1, 2, 5, 10, 20, 50, 100, 200, 500)


def test_observing_a_token_is_cheap():
    """Not a timing of the machine: ten times the cost that was measured."""
    histogram = Metrics("m")._inter_token
    start_s = time.perf_counter()
    for _ in range(10000):
        histogram.observe(0.008)
    assert (time.perf_counter() - start_s) / 10000 < 3e-6


def test_steps_without_work_are_not_counted():
    metrics = Metrics("m")
    metrics.observe_step(StepStats(0, 0, 0, 0, 0, 8), 0, time.monotonic())
    assert b'noria:step_sequences_count{engine="0",model_name="m"} 0.0' in metrics.render()


async def test_http_requests_are_counted_by_route_and_status(start_server):
    server = await start_server()
    for path in ("/health", "/health", "/nope/1", "/nope/2"):
        await server.client.get(path)
    samples = await server.scrape()
    assert samples['http_requests_total{handler="/health",method="GET",status="200"}'] == 2
    assert samples['http_requests_total{handler="unmatched",method="GET",status="404"}'] == 2


@pytest.mark.parametrize("interval_s", [0.05])
async def test_figures_are_logged_while_there_is_work_and_once_after(
    start_server, generation_request, caplog, interval_s
):
    caplog.set_level(logging.INFO, "noria.stats")
    server = await start_server({"log.stats_interval_s": interval_s}, step_time_s=0.005)
    await finish(server, generation_request(max_tokens=40))
    await asyncio.sleep(interval_s * 4)
    lines = [record.fields for record in caplog.records if record.name == "noria.stats"]
    assert len(lines) >= 3
    assert lines[0]["running"] == 1
    assert lines[0]["generated_tokens_per_s"] > 0
    assert lines[0]["kv_usage_pct"] > 0
    assert (lines[-1]["running"], lines[-1]["kv_usage_pct"]) == (0, 0)
    count = len(lines)
    await asyncio.sleep(interval_s * 3)
    assert len([r for r in caplog.records if r.name == "noria.stats"]) == count


async def test_preemptions_are_warned_of_once_per_interval(
    start_server, generation_request, caplog
):
    caplog.set_level(logging.WARNING, "noria.stats")
    server = await start_server({"log.stats_interval_s": 0.05}, num_blocks=12, step_time_s=0.001)
    requests = [generation_request(f"{number} " * 9, max_tokens=60) for number in range(8)]
    await finish(server, *requests)
    await asyncio.sleep(0.1)
    warnings = [r.fields for r in caplog.records if r.getMessage() == "preempted"]
    total = (await server.scrape())["vllm:num_preemptions_total"]
    assert sum(fields["preemptions"] for fields in warnings) == total > 0
