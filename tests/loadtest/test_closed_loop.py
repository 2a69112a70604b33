"""The client against a tiny server with good and bad manners."""

from __future__ import annotations

from typing import Any

import pytest

from loadtest.closed_loop import PlannedRequest, run_closed_loop, with_model
from loadtest.figures import summarize
from loadtest.target import Endpoint, Target, base_url


async def figures_of(
    target: Target,
    *,
    num_requests: int = 4,
    concurrency: int = 2,
    max_tokens: int = 8,
    timeout_s: float = 5.0,
) -> dict[str, Any]:
    planned = [PlannedRequest(f"prompt {i}", max_tokens) for i in range(num_requests)]
    return summarize(await run_closed_loop(target, planned, concurrency, timeout_s=timeout_s))


@pytest.mark.parametrize("endpoint", ["completions", "chat", "native"])
async def test_each_dialect_is_measured(tiny: Any, endpoint: Endpoint) -> None:
    figures = await figures_of(Target(tiny.url, endpoint, "tiny"))
    assert (figures["succeeded"], figures["failed"], figures["output_tokens"]) == (4, 0, 32)
    assert figures["tokens_counted_by"] == "usage"
    assert figures["tokens_per_chunk"] == 1


@pytest.mark.parametrize("endpoint", ["completions", "chat", "native"])
async def test_prompt_tokens_are_counted_with_the_servers_template(
    tiny: Any, endpoint: Endpoint
) -> None:
    """B155."""
    figures = await figures_of(Target(tiny.url, endpoint, "tiny"))
    assert figures["prompt_tokens"] == 4 * 41


async def test_packed_chunks_and_a_role_chunk_change_no_count(tiny: Any) -> None:
    """B151: 4 tokens a chunk, a role chunk 50 ms before the first text."""
    tiny.tokens_per_chunk, tiny.sends_role_first, tiny.first_token_s = 4, True, 0.05
    figures = await figures_of(Target(tiny.url, "chat", "tiny"))
    assert figures["output_tokens"] == 32
    assert figures["tokens_per_chunk"] == 4
    assert figures["ttft_ms"]["p50"] >= 50


async def test_crlf_comments_and_single_bytes_change_nothing(tiny: Any) -> None:
    """B010, B012."""
    tiny.newline, tiny.sends_comments, tiny.bytes_per_write = b"\r\n", True, 1
    figures = await figures_of(Target(tiny.url, "completions", "tiny"), num_requests=2)
    assert (figures["succeeded"], figures["output_tokens"]) == (2, 16)


async def test_an_error_event_in_mid_stream_is_a_failure(tiny: Any) -> None:
    """B153."""
    tiny.fails_after = 4
    figures = await figures_of(Target(tiny.url, "completions", "tiny"))
    assert (figures["succeeded"], figures["failed"], figures["output_tokens"]) == (0, 4, 0)
    assert "broken" in figures["first_error"]


async def test_a_cut_connection_is_a_failure(tiny: Any) -> None:
    tiny.cuts_after = 4
    figures = await figures_of(Target(tiny.url, "completions", "tiny"))
    assert figures["failed"] == 4


async def test_a_refusal_is_a_failure_with_its_status(tiny: Any) -> None:
    tiny.status = 429
    figures = await figures_of(Target(tiny.url, "completions", "tiny"))
    assert figures["failed"] == 4
    assert figures["first_error"].startswith("HTTP 429")


async def test_a_request_that_never_ends_is_cut_at_its_time_limit(tiny: Any) -> None:
    tiny.first_token_s = 30
    figures = await figures_of(Target(tiny.url, "native"), num_requests=2, timeout_s=0.1)
    assert figures["failed"] == 2


async def test_requests_that_were_never_sent_count_as_failed(tiny: Any) -> None:
    tiny.first_token_s = 30
    planned = [PlannedRequest("a", 4)] * 5
    result = await run_closed_loop(
        Target(tiny.url, "native"), planned, 2, timeout_s=30, time_limit_s=0.1
    )
    figures = summarize(result)
    assert (figures["requests"], figures["failed"], figures["not_sent"]) == (5, 5, 3)


async def test_a_server_that_is_not_there_is_a_failure() -> None:
    figures = await figures_of(Target("http://127.0.0.1:9", "native"), num_requests=1)
    assert figures["failed"] == 1


async def test_the_model_is_asked_for_where_none_is_named(tiny: Any) -> None:
    assert (await with_model(Target(tiny.url))).model == "tiny"
    assert (await with_model(Target(tiny.url, "native"))).model is None


async def test_bodies_are_greedy_exact_in_length_and_merged_with_extras(tiny: Any) -> None:
    target = Target(tiny.url, "chat", "tiny", api_key="k", extra={"top_k": 5, "temperature": 1})
    await figures_of(target, num_requests=1)
    assert tiny.headers[0]["authorization"] == "Bearer k"
    assert tiny.bodies[0] == {
        "messages": [{"role": "user", "content": "prompt 0"}],
        "model": "tiny",
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": 8,
        "min_tokens": 8,
        "ignore_eos": True,
        "temperature": 1,
        "top_k": 5,
    }


@pytest.mark.parametrize("url", ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"])
def test_base_urls_are_taken_as_people_type_them(url: str) -> None:
    assert base_url(url) == "http://h:1"
