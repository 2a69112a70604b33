"""Outputs to bytes, read back by strict clients."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from strict_clients import (
    read_event_source,
    read_events,
    read_like_guidellm,
    read_like_sglang,
    read_native_stream,
    read_openai_stream,
)

from core.dummy_runner import ByteTokenizer
from core.errors import InternalError, QueueTimeout
from core.outputs import FinishReason, RequestTimings, StepOutput, TokenLogprobs
from server.protocol.native_renderer import EventSourceRenderer, NativeRenderer
from server.protocol.openai_fields import StreamOptions
from server.protocol.openai_renderer import ChatShape, CompletionShape, OpenAIRenderer
from server.protocol.tally import Tally

TIMINGS = RequestTimings(1.0, 1.1, 1.2, 1.4, 1)
TOKENIZER = ByteTokenizer()
CHUNKS = {"chat": "chat.completion.chunk", "completion": "text_completion"}


def make_outputs(
    texts: list[str],
    reason: FinishReason = FinishReason.LENGTH,
    *,
    index: int = 0,
    logprobs: bool = False,
    stop_reason: int | str | None = None,
) -> list[tuple[int, StepOutput]]:
    """One output per text; the last one is final."""
    outputs = []
    for place, text in enumerate(texts):
        token_id = ord(text[0]) % 256 if text else 65
        is_last = place == len(texts) - 1
        output = StepOutput(
            "s",
            token_id,
            text,
            num_prompt_tokens=5,
            num_cached_tokens=2,
            num_output_tokens=place + 1,
            logprobs=TokenLogprobs(token_id, -0.5, ((token_id, -0.5), (66, -1.0)))
            if logprobs
            else None,
            finish_reason=reason if is_last else None,
            stop_reason=stop_reason if is_last else None,
            timings=TIMINGS if is_last else None,
        )
        outputs.append((index, output))
    return outputs


def make_renderer(
    kind: str,
    *,
    num_prompts: int = 1,
    num_choices: int = 1,
    has_logprobs: bool = False,
    **options: bool,
) -> OpenAIRenderer:
    shape = ChatShape(TOKENIZER) if kind == "chat" else CompletionShape(TOKENIZER)
    return OpenAIRenderer(
        shape,
        "org/mödel\u2028",
        Tally([5] * num_prompts, num_choices, arrival_s=0.9),
        num_sequences=num_prompts * num_choices,
        has_logprobs=has_logprobs,
        stream_options=StreamOptions(**options),
        request_id="req-1",
    )


def stream(renderer: Any, outputs: list[tuple[int, StepOutput]], *, at_once: int = 1) -> bytes:
    parts = [
        renderer.write(outputs[start : start + at_once])
        for start in range(0, len(outputs), at_once)
    ]
    return b"".join([*parts, renderer.end()])


TEXTS = ["Hé", "", "ll\u2028o", "\x85 \U0001f600", '"\\\n\r']


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_one_token_is_one_chunk_however_many_come_at_once(kind: str, at_once: int) -> None:
    """B001, B012"""
    body = stream(make_renderer(kind), make_outputs(TEXTS), at_once=at_once)
    read = read_openai_stream(body, object_name=CHUNKS[kind], step=1)
    assert read.choices[0].texts == [text for text in TEXTS if text]
    assert read.choices[0].finish_reason == "length"
    assert len(read_like_guidellm(body)) == 4
    if kind == "completion":
        assert read_like_sglang(body) == "".join(TEXTS)


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_usage_comes_last_and_only_if_asked_for(kind: str) -> None:
    """B035"""
    for options in ({}, {"include_usage": False}, {"continuous_usage_stats": True}):
        read_openai_stream(
            stream(make_renderer(kind, **options), make_outputs(TEXTS)), object_name=CHUNKS[kind]
        )
    body = stream(make_renderer(kind, include_usage=True), make_outputs(TEXTS))
    read = read_openai_stream(body, object_name=CHUNKS[kind], has_usage=True)
    assert read.usage == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    last = read_events(body)[-2].data
    assert last["timings"] == {
        "queue_ms": 100.0,
        "prefill_ms": 100.0,
        "first_token_ms": 300.0,
        "decode_ms": 200.0,
        "tokens_per_second": pytest.approx(16.67),
        "cached_tokens": 2,
        "preemptions": 1,
        "draft_tokens": 0,
        "accepted_draft_tokens": 0,
    }
    body = stream(
        make_renderer(kind, include_usage=True, continuous_usage_stats=True), make_outputs(TEXTS)
    )
    read = read_openai_stream(body, object_name=CHUNKS[kind], has_usage=True, is_continuous=True)
    assert [chunk["usage"]["completion_tokens"] for chunk in read.chunks] == [1, 3, 4, 5]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_every_choice_ends_once_and_prompts_count_once(kind: str) -> None:
    """B007, B037"""
    lists = [make_outputs(["a", "b", "c", "d"], index=i) for i in range(4)]
    mixed = [output for step in zip(*lists, strict=True) for output in step]
    renderer = make_renderer(kind, num_prompts=2, num_choices=2, include_usage=True)
    body = stream(renderer, mixed, at_once=4)
    read = read_openai_stream(body, object_name=CHUNKS[kind], num_choices=4, has_usage=True)
    assert {choice.text for choice in read.choices.values()} == {"abcd"}
    assert read.usage is not None
    assert (read.usage["prompt_tokens"], read.usage["completion_tokens"]) == (10, 16)
    assert read.usage["prompt_tokens_details"] == {"cached_tokens": 4}


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_an_answer_without_text_says_so_in_its_final_chunk(kind: str) -> None:
    body = stream(make_renderer(kind), make_outputs([""], FinishReason.STOP))
    read = read_openai_stream(body, object_name=CHUNKS[kind])
    assert read.choices[0].texts == [""]
    assert read.choices[0].finish_reason == "stop"
    if kind == "chat":
        assert read.chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}


def test_the_end_after_some_text_has_an_empty_delta() -> None:
    read = read_openai_stream(
        stream(make_renderer("chat"), make_outputs(["a", ""], FinishReason.STOP)),
        object_name=CHUNKS["chat"],
    )
    assert [chunk["choices"][0]["delta"] for chunk in read.chunks] == [
        {"role": "assistant", "content": "a"},
        {},
    ]


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_a_failure_is_an_error_event_and_the_end_mark(kind: str) -> None:
    """B002, B142"""
    renderer = make_renderer(kind, include_usage=True)
    body = renderer.write(make_outputs(TEXTS)[:2]) + renderer.fail(InternalError("/secret/path.py"))
    read = read_openai_stream(body, object_name=CHUNKS[kind], may_fail=True)
    assert read.error is not None
    assert read.error["code"] == "internal_error"
    assert "secret" not in read.error["message"]
    assert read.choices[0].finish_reason is None
    body = make_renderer(kind).fail(QueueTimeout("waited too long"))
    read = read_openai_stream(body, object_name=CHUNKS[kind], may_fail=True)
    assert read.error is not None
    assert read.error["code"] == "queue_timeout"


@pytest.mark.parametrize("kind", ["chat", "completion"])
@pytest.mark.parametrize("has_logprobs", [False, True])
def test_the_whole_answer_is_the_join_of_the_stream(kind: str, has_logprobs: bool) -> None:
    """B014, B059, B061"""
    outputs = make_outputs(TEXTS, logprobs=True)
    body = stream(make_renderer(kind, has_logprobs=has_logprobs), outputs)
    read = read_openai_stream(body, object_name=CHUNKS[kind]).choices[0]
    renderer = make_renderer(kind, has_logprobs=has_logprobs)
    renderer.add(outputs)
    answer = orjson.loads(renderer.body())
    assert answer["object"] == CHUNKS[kind].removesuffix(".chunk")
    (choice,) = answer["choices"]
    text = choice["message"]["content"] if kind == "chat" else choice["text"]
    assert (text, choice["finish_reason"]) == (read.text, read.finish_reason)
    assert answer["usage"]["completion_tokens"] == 5
    assert {"queue_ms", "preemptions"} <= set(answer["timings"])
    if not has_logprobs:
        assert choice["logprobs"] is None
        return
    joined: dict[str, list[Any]] = {}
    for part in read.logprobs:
        for name, values in part.items():
            joined.setdefault(name, []).extend(values or [])
    whole = {name: values or [] for name, values in choice["logprobs"].items()}
    assert joined == whole
    assert {len(values) for name, values in whole.items() if name != "refusal"} == {5}


def test_logprobs_of_held_tokens_come_with_the_next_chunk() -> None:
    body = stream(
        make_renderer("completion", has_logprobs=True), make_outputs(["", "", "ab"], logprobs=True)
    )
    read = read_openai_stream(body, object_name="text_completion")
    assert [len(part["tokens"]) for part in read.choices[0].logprobs] == [3]


def test_logprobs_have_the_shapes_of_the_two_routes() -> None:
    """B061"""
    renderer = make_renderer("completion", has_logprobs=True)
    renderer.add(make_outputs(["a", "\u00e9"], logprobs=True))
    logprobs = orjson.loads(renderer.body())["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "bytes:\\xe9"]
    assert logprobs["top_logprobs"][0] == {"a": -0.5, "B": -1.0}
    assert logprobs["text_offset"] == [0, 1]
    renderer = make_renderer("chat", has_logprobs=True)
    renderer.add(make_outputs(["a"], logprobs=True))
    content = orjson.loads(renderer.body())["choices"][0]["logprobs"]["content"]
    assert content == [
        {
            "token": "a",
            "logprob": -0.5,
            "bytes": [97],
            "top_logprobs": [
                {"token": "a", "logprob": -0.5, "bytes": [97]},
                {"token": "B", "logprob": -1.0, "bytes": [66]},
            ],
        }
    ]


def test_end_tokens_are_counted_but_not_listed() -> None:
    outputs = make_outputs(["a", ""], FinishReason.STOP, logprobs=True)
    renderer = make_renderer("chat", has_logprobs=True)
    renderer.add(outputs)
    answer = orjson.loads(renderer.body())
    assert [t["token"] for t in answer["choices"][0]["logprobs"]["content"]] == ["a"]
    assert answer["usage"]["completion_tokens"] == 2
    renderer = make_renderer("chat", has_logprobs=True)
    renderer.add(make_outputs(["a", "b"], FinishReason.STOP, logprobs=True, stop_reason="c"))
    answer = orjson.loads(renderer.body())
    assert len(answer["choices"][0]["logprobs"]["content"]) == 2


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_merging_keeps_every_character_and_logprob(kind: str) -> None:
    """B127"""
    first, second = make_outputs(TEXTS, logprobs=True), make_outputs(TEXTS, index=1, logprobs=True)
    mixed = [output for step in zip(first, second, strict=True) for output in step]
    renderer = make_renderer(kind, num_choices=2, has_logprobs=True)
    body = renderer.write(mixed[:2]) + renderer.write(mixed[2:], merges=True) + renderer.end()
    read = read_openai_stream(body, object_name=CHUNKS[kind], num_choices=2)
    for choice in read.choices.values():
        assert choice.text == "".join(TEXTS)
        assert len(choice.texts) == 2


def test_streams_have_ids_of_their_own() -> None:
    ids = {
        read_openai_stream(
            stream(make_renderer("chat"), make_outputs(["a"])), object_name=CHUNKS["chat"]
        ).id
        for _ in range(3)
    }
    assert len(ids) == 3


READERS = {NativeRenderer: read_native_stream, EventSourceRenderer: read_event_source}


@pytest.mark.parametrize("kind", [NativeRenderer, EventSourceRenderer])
def test_native_streams_have_an_event_per_token_and_a_final_one(kind: Any) -> None:
    body = stream(kind("u-1", Tally([5], 1, 0.0)), make_outputs(TEXTS), at_once=2)
    read = READERS[kind](body)
    assert read.tokens == [text for text in TEXTS if text]
    assert read.final is not None
    assert read.final["token"] == ""
    assert read.final["finish_reason"] == "length"
    assert read.final["usage"]["total_tokens"] == 10
    assert read.final["sequence_id"] == "u-1"


@pytest.mark.parametrize("kind", [NativeRenderer, EventSourceRenderer])
def test_text_that_was_held_until_the_end_comes_with_the_final_event(kind: Any) -> None:
    body = stream(kind("u-1", Tally([5], 1, 0.0)), make_outputs(["a", "held"], FinishReason.STOP))
    read = READERS[kind](body)
    assert read.tokens == ["a"]
    assert read.final is not None
    assert read.final["token"] == "held"


@pytest.mark.parametrize("kind", [NativeRenderer, EventSourceRenderer])
def test_native_failures_invent_no_reason(kind: Any) -> None:
    """B002"""
    renderer = kind("u-1", Tally([5], 1, 0.0), "req-1")
    body = renderer.write(make_outputs(TEXTS)[:1]) + renderer.fail(InternalError("x"))
    read = READERS[kind](body, may_fail=True)
    assert read.error is not None
    assert "req-1" in read.error["message"]


@pytest.mark.parametrize("kind", [NativeRenderer, EventSourceRenderer])
def test_native_merging_keeps_every_character(kind: Any) -> None:
    """B127"""
    for size in range(1, len(TEXTS) + 1):
        renderer = kind("u-1", Tally([5], 1, 0.0))
        outputs = make_outputs(TEXTS)
        body = b"".join(
            renderer.write(outputs[start : start + size], merges=True)
            for start in range(0, len(outputs), size)
        )
        read = READERS[kind](body + renderer.end())
        assert read.text == "".join(TEXTS)


def test_event_ids_count_tokens_and_skip_held_ones() -> None:
    body = stream(EventSourceRenderer("u-1", Tally([5], 1, 0.0)), make_outputs(["a", "", "b", "c"]))
    assert [e.id for e in read_events(body, allows_names=True)] == ["1", "3", "4", "4"]
