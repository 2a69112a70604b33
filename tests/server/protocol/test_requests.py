"""What the routes accept and refuse, field by field; and that nothing but our errors ever comes out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.config import MemoryPlan, ModelShape
from core.dummy_runner import ByteTokenizer
from core.errors import (
    ContextLengthExceeded,
    InvalidValue,
    ModelNotFound,
    NoriaError,
    UnsupportedValue,
)
from core.sampling_params import MAX_TOKENS
from server.backends.base import ServedModel
from server.protocol import chat, completions, native
from server.protocol.body import parse_object
from server.protocol.fields import UnknownFields
from server.protocol.prompts import resolve, tokenize
from server.protocol.tokenize import parse_detokenize, parse_tokenize

VOCAB = 257


def make_model(**changes: Any) -> ServedModel:
    shape = ModelShape(1, 1, 1, VOCAB, 100, 8, 0, (256,))
    plan = MemoryPlan(0, 0.3, None, 0, 0, 8, 16, 10, 100, "kv_cache.num_blocks")
    values: dict[str, Any] = {
        "name": "dummy",
        "root": "org/dummy",
        "created": 1,
        "max_model_len": 100,
        "shape": shape,
        "plan": plan,
        "tokenizer": ByteTokenizer(),
    }
    return ServedModel(**{**values, **changes})


MODEL = make_model()
USER = [{"role": "user", "content": "hi"}]


def complete(body: dict[str, Any], model: ServedModel = MODEL, max_waiting: int = 4096) -> Any:
    body = {"prompt": "a", **body}
    return completions.parse_completion(body, model, UnknownFields(), max_waiting=max_waiting)


def chat_with(body: dict[str, Any], model: ServedModel = MODEL) -> Any:
    body = {"messages": USER, **body}
    return chat.parse_chat(body, model, UnknownFields(), max_waiting=4096)


def basic(body: dict[str, Any]) -> Any:
    return native.parse_one(
        {"prompt": "a", **body}, MODEL, native.GENERATE_DEFAULTS, UnknownFields(), streams=False
    )


def listed(body: dict[str, Any]) -> Any:
    return native.parse_list(
        {"prompts": ["a"], **body}, MODEL, native.VLLM_DEFAULTS, UnknownFields(), max_waiting=4096
    )


ROUTES = [complete, chat_with, basic, listed]


@pytest.mark.parametrize("parse", ROUTES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("max_tokens", True),
        ("max_tokens", "10"),
        ("max_tokens", 1.5),
        ("max_tokens", 3.0),
        ("max_tokens", 2**31),
        ("min_tokens", -1),
        ("min_tokens", 2**31),
        ("ignore_eos", 1),
        ("ignore_eos", "true"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "0.5"),
        ("temperature", True),
        ("top_p", 1.01),
        ("top_p", -0.01),
        ("top_k", -2),
        ("top_k", 2**63),
        ("top_k", 2**64),
        ("top_k", 1.5),
        ("top_k", "many"),
        ("min_p", 1.5),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("repetition_penalty", 0),
        ("repetition_penalty", 10.5),
        ("seed", -2),
        ("seed", 2**63),
        ("seed", 1.0),
        ("stop", ""),
        ("stop", ["a", ""]),
        ("stop", ["a"] * 17),
        ("stop", "x" * 1025),
        ("stop", {"a": 1}),
        ("stop_token_ids", [VOCAB]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 129),
        ("stop_token_ids", 5),
        ("include_stop_str_in_output", "yes"),
        ("logit_bias", {"5": 101}),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"٣": 1}),
        ("logit_bias", {str(VOCAB): 1}),
        ("logit_bias", {str(2**40): 1}),
        ("logit_bias", {"5": True}),
        ("logit_bias", {str(i): 1 for i in range(100_000)}),
        ("logit_bias", []),
        ("n", 0),
        ("n", 5000),
        ("n", True),
        ("stream", "yes"),
        ("model", 5),
        ("request_id", "x" * 129),
        ("request_id", 7),
    ],
)
def test_values_of_the_wrong_type_or_range_are_refused_with_their_path(
    parse: Any, field: str, value: object
) -> None:
    """B004, B042, B046, B058"""
    with pytest.raises(InvalidValue) as caught:
        parse({field: value})
    assert (caught.value.param or "").startswith(field)
    assert field in caught.value.message
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("parse", ROUTES)
def test_null_is_absent_everywhere(parse: Any) -> None:
    """B027"""
    names = [name for name in native._KNOWN if name not in ("prompt", "prompts", "messages")]
    nothing = dict.fromkeys(names)
    assert parse(nothing) == parse({})
    assert parse({"stop": []}) == parse({"stop": None}) == parse({})


@pytest.mark.parametrize("parse", ROUTES)
def test_borders_are_inside(parse: Any) -> None:
    """B046"""
    body = {
        "max_tokens": MAX_TOKENS,
        "min_tokens": 0,
        "temperature": 2,
        "top_p": 0,
        "top_k": 2**31 - 1,
        "min_p": 1,
        "presence_penalty": -2,
        "frequency_penalty": 2,
        "repetition_penalty": 10,
        "seed": 2**63 - 1,
        "stop": ["x" * 1024] * 16,
        "stop_token_ids": [VOCAB - 1] * 128,
        "logit_bias": {"0": -100, str(VOCAB - 1): 100.0},
        "request_id": "x" * 128,
        "n": 1,
        "model": "dummy",
    }
    params = parse(body).params
    assert params.top_k == 2**31 - 1
    assert params.logit_bias == {0: -100.0, VOCAB - 1: 100.0}
    assert parse({"seed": -1}).params.seed is None
    assert parse({"stop": "x"}).params.stop == ("x",)


@pytest.mark.parametrize("parse", ROUTES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", 1),
        ("prompt_logprobs", 0),
        ("return_token_ids", True),
        ("use_beam_search", True),
        ("allowed_token_ids", [1]),
        ("bad_words", ["a"]),
        ("skip_special_tokens", False),
        ("truncate_prompt_tokens", 5),
        ("structured_outputs", {"json": {}}),
        ("guided_json", {"required": "name"}),
        ("guided_regex", "("),
        ("grammar", "root ::="),
        ("typical_p", 0.5),
        ("mirostat", 2),
        ("dry_multiplier", 0.8),
        ("xtc_probability", 0.1),
        ("timeout", 5),
        ("cache_salt", "x"),
    ],
)
def test_known_fields_that_would_change_the_answer_are_refused(
    parse: Any, field: str, value: object
) -> None:
    """B084, B097"""
    with pytest.raises(UnsupportedValue) as caught:
        parse({field: value})
    assert caught.value.param == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("echo", True),
        ("best_of", 2),
        ("suffix", "x"),
        ("suffix", ""),
        ("response_format", {"type": "json_object"}),
        ("response_format", {"type": "json_schema", "json_schema": {"type": ["object", 7]}}),
    ],
)
def test_completions_refuse_what_they_cannot_do(field: str, value: object) -> None:
    """B084, B097"""
    with pytest.raises(UnsupportedValue):
        complete({field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "function": {"name": "f"}}),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {}),
        ("chat_template", "{% for i in range(99999) %}x{% endfor %}"),
        ("response_format", {"type": "json_object"}),
        ("chat_template_kwargs", {"chat_template": "x"}),
        ("chat_template_kwargs", {"tokenize": False}),
    ],
)
def test_chat_refuses_what_it_cannot_do(field: str, value: object) -> None:
    """B005, B084, B094, B095"""
    with pytest.raises(UnsupportedValue) as caught:
        chat_with({field: value})
    assert caught.value.param == field


def test_neutral_values_are_accepted() -> None:
    complete(
        {
            "echo": False,
            "best_of": 1,
            "suffix": None,
            "skip_special_tokens": True,
            "typical_p": 1,
            "response_format": {"type": "text"},
            "user": "u",
            "metadata": {"a": [1, {"b": None}]},
            "priority": 3,
            "something_new": object,
        }
    )
    chat_with(
        {
            "tools": [],
            "tool_choice": "none",
            "modalities": ["text"],
            "service_tier": "auto",
            "reasoning_effort": "low",
            "chat_template_kwargs": {"enable_thinking": False},
        }
    )


def test_unknown_fields_are_logged_once_per_name(caplog: pytest.LogCaptureFixture) -> None:
    unknown = UnknownFields()
    for _ in range(3):
        completions.parse_completion(
            {"prompt": "a", "new\nfield": 1}, MODEL, unknown, max_waiting=9
        )
    assert len(caplog.records) == 1
    assert "\n" not in caplog.records[0].getMessage()
    unknown.note(f"name{i}" for i in range(10_000))
    assert len(caplog.records) <= 256


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ([5, VOCAB], "prompt[1]"),
        ([-3], "prompt[0]"),
        ([3.0], "prompt[0]"),
        (["a", 12], "prompt[1]"),
        ([12, "a"], "prompt[1]"),
        ([False], "prompt[0]"),
        ([[4], [9, 2**40]], "prompt[1][1]"),
        ([[4], []], "prompt[1]"),
        ([[4], "a"], "prompt[1]"),
        (["hello", ""], "prompt[1]"),
        ("", "prompt"),
        ([], "prompt"),
        ({}, "prompt"),
        (5, "prompt"),
        (None, "prompt"),
        ([None], "prompt[0]"),
        (["a"] * 1025, "prompt"),
    ],
)
def test_prompts_that_cannot_be_computed_are_refused_with_their_path(
    prompt: object, param: str
) -> None:
    """B069, B070, B081"""
    with pytest.raises(InvalidValue) as caught:
        complete({"prompt": prompt})
    assert caught.value.param == param


def test_the_four_forms_of_a_prompt() -> None:
    assert complete({"prompt": "ab"}).prompts == ["ab"]
    assert complete({"prompt": ["ab", "c"]}).prompts == ["ab", "c"]
    assert complete({"prompt": [1, 2]}).prompts == [[1, 2]]
    assert complete({"prompt": [[1], [2, 3]]}).prompts == [[1], [2, 3]]


def test_prompts_times_choices_fit_the_queue() -> None:
    """B058"""
    assert complete({"prompt": ["a"] * 4, "n": 2}, max_waiting=8).num_choices == 2
    with pytest.raises(InvalidValue, match="queue"):
        complete({"prompt": ["a"] * 5, "n": 2}, max_waiting=8)


@pytest.mark.parametrize(
    ("prompts", "param"),
    [
        ("a", "prompts"),
        (None, "prompts"),
        (["x", ""], "prompts[1]"),
        ([1], "prompts[0]"),
        (["a"] * 20_000, "prompts"),
    ],
)
def test_lists_of_prompts_are_checked_as_a_whole(prompts: object, param: str) -> None:
    """B058, B069, B081"""
    with pytest.raises(InvalidValue) as caught:
        listed({"prompts": prompts})
    assert caught.value.param == param
    assert listed({"prompts": []}).prompts == []


def test_native_routes_refuse_a_stream_that_contradicts_the_path() -> None:
    assert basic({"stream": False}).prompts == ["a"]
    with pytest.raises(InvalidValue):
        basic({"stream": True})
    with pytest.raises(InvalidValue):
        basic({"n": 2})
    with pytest.raises(UnsupportedValue):
        basic({"logprobs": 3})


@pytest.mark.parametrize("value", [True, False, 21, -1, 1.5, "2", 50_000])
def test_logprobs_of_completions_are_a_small_integer(value: object) -> None:
    """B058, B061"""
    with pytest.raises(InvalidValue):
        complete({"logprobs": value})


def test_logprobs_of_chat() -> None:
    """B061"""
    assert chat_with({"logprobs": True}).params.logprobs == 0
    assert chat_with({"logprobs": True, "top_logprobs": 20}).params.logprobs == 20
    assert chat_with({"logprobs": False}).params.logprobs is None
    for body in ({"logprobs": 1}, {"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}):
        with pytest.raises(InvalidValue) as caught:
            chat_with(body)
        assert caught.value.param in ("logprobs", "top_logprobs")


def test_max_completion_tokens_wins() -> None:
    """B072"""
    assert chat_with({"max_tokens": 5, "max_completion_tokens": 3}).params.max_tokens == 3
    assert chat_with({}).params.max_tokens == MAX_TOKENS
    for body in ({"max_completion_tokens": 0}, {"max_completion_tokens": 2**31}):
        with pytest.raises(InvalidValue) as caught:
            chat_with(body)
        assert caught.value.param == "max_completion_tokens"
        assert caught.value.message.startswith("max_completion_tokens")
    with pytest.raises(InvalidValue):
        chat_with({"max_tokens": 0, "max_completion_tokens": 3})


def test_stream_options_are_typed_and_null_means_no() -> None:
    assert not complete({"stream_options": None}).stream_options.include_usage
    assert not complete({"stream_options": {}}).stream_options.include_usage
    assert complete({"stream_options": {"include_usage": True}}).stream_options.include_usage
    options = complete({"stream_options": {"continuous_usage_stats": True}}).stream_options
    assert not options.is_continuous
    for value in ("x", [], {"include_usage": 1}):
        with pytest.raises(InvalidValue):
            complete({"stream_options": value})


def test_defaults_differ_between_routes() -> None:
    params = native.parse_one(
        {"prompt": "a"}, MODEL, native.STREAM_DEFAULTS, UnknownFields(), streams=True
    ).params
    assert (params.max_tokens, params.temperature, params.top_p) == (50, 0.7, 1)
    params = basic({}).params
    assert (params.max_tokens, params.temperature) == (50, 0)
    params = listed({}).params
    assert (params.max_tokens, params.temperature, params.top_p) == (20, 0.7, 0.95)
    params = complete({}).params
    assert (params.max_tokens, params.temperature) == (16, 1)


def test_openai_routes_take_the_models_generation_config() -> None:
    model = make_model(
        generation_defaults={"temperature": 0.6, "top_k": 20, "do_sample": True, "top_p": None}
    )
    params = complete({"top_k": 3}, model).params
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 3, 1)


def test_models_are_known_by_name_alias_or_star() -> None:
    """B005"""
    complete({"model": "other"}, make_model(aliases=("other",)))
    complete({"model": "any"}, make_model(aliases=("*",)))
    with pytest.raises(ModelNotFound):
        complete({"model": "no-such-model"})


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ([{"content": "hi"}], "messages[0].role"),
        ([{"role": "robot", "content": "hi"}], "messages[0].role"),
        (["hi"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([*USER, {"role": "user", "content": 5}], "messages[1].content"),
        ([{"role": "user", "content": ["a"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "a", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
        (USER * 4097, "messages"),
    ],
)
def test_messages_are_checked_with_their_path(messages: object, param: str) -> None:
    """B004, B079, B088"""
    with pytest.raises(InvalidValue) as caught:
        chat_with({"messages": messages})
    assert caught.value.param == param


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x"}},
        {"type": "image_url", "image_url": {"url": "file:///etc/hostname"}},
        {"type": "input_audio", "input_audio": {}},
        {"type": "file", "file": {}},
    ],
)
def test_parts_that_would_have_to_be_fetched_are_refused(part: object) -> None:
    """B141"""
    with pytest.raises(UnsupportedValue) as caught:
        chat_with(
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]}
        )
    assert caught.value.param == "messages[0].content[1]"


def test_parts_are_joined_and_absent_content_is_never_the_word_none() -> None:
    """B088"""
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "", "name": ""},
        {
            "role": "assistant",
            "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "content": [{"type": "text", "text": "c"}], "tool_call_id": "1"},
    ]
    prompt = chat_with({"messages": messages}).prompt
    assert [m["content"] for m in prompt.messages] == ["ab", "", "", "c"]
    assert prompt.messages[0]["role"] == "system"
    assert b"None" not in bytes(prompt.tokenize(ByteTokenizer()))


def test_continuing_the_last_message() -> None:
    """B092"""
    messages = [*USER, {"role": "assistant", "content": "Once upon a"}]
    body = {"messages": messages, "continue_final_message": True}
    prompt = chat_with(body).prompt
    assert prompt.continues_final_message
    assert not prompt.adds_generation_prompt
    assert bytes(prompt.tokenize(ByteTokenizer())).endswith(b"Once upon a")
    assert chat_with({"messages": messages}).prompt.adds_generation_prompt
    assert not chat_with({"add_generation_prompt": False}).prompt.adds_generation_prompt
    for wrong in ({**body, "add_generation_prompt": True}, {"continue_final_message": True}):
        with pytest.raises(InvalidValue):
            chat_with(wrong)


@pytest.mark.parametrize("value", [{"a": []}, {"a": {}}, {str(i): 1 for i in range(33)}, 5])
def test_template_fields_are_few_scalars(value: object) -> None:
    """B094"""
    with pytest.raises(InvalidValue):
        chat_with({"chat_template_kwargs": value})


def test_max_tokens_is_clamped_to_the_room_and_the_prompt_is_never_cut() -> None:
    """B072, B073"""
    params = complete({"max_tokens": 1000, "min_tokens": 500}).params
    for length, room in ((1, 99), (98, 2), (99, 1)):
        (request,) = resolve([[7] * length], params, MODEL)
        assert len(request.token_ids) == length
        assert request.params.max_tokens == room
        assert request.params.min_tokens == min(500, room)
    for length in (100, 101, 300):
        with pytest.raises(ContextLengthExceeded) as caught:
            resolve([[7], [7] * length], params, MODEL, names=["prompt[0]", "prompt[1]"])
        assert caught.value.param == "prompt[1]"
        assert (
            f"maximum context length is 100 tokens. However, your request has {length}"
            in caught.value.message
        )
        assert "-" not in caught.value.message
    with pytest.raises(InvalidValue):
        resolve([[]], params, MODEL)


def test_choices_follow_their_prompt_and_share_its_seed() -> None:
    params = complete({"seed": 5}).params
    requests = resolve([[1], [2]], params, MODEL, num_choices=2)
    assert [(r.token_ids, r.choice_index, r.seed) for r in requests] == [
        ([1], 0, 5),
        ([1], 1, 5),
        ([2], 0, 5),
        ([2], 1, 5),
    ]
    fresh = resolve([[1], [1]], complete({}).params, MODEL)
    assert fresh[0].seed != fresh[1].seed


def test_query_parameters_are_read_as_json_scalars() -> None:
    query = [
        ("prompt", "1e3"),
        ("temperature", "0.5"),
        ("ignore_eos", "true"),
        ("seed", "null"),
        ("stop", "a"),
        ("stop", "b"),
        ("other", "["),
    ]
    assert native.body_of_query(query) == {
        "prompt": "1e3",
        "temperature": 0.5,
        "ignore_eos": True,
        "seed": None,
        "stop": ["a", "b"],
        "other": "[",
    }


@pytest.mark.parametrize(
    "query",
    [
        [("temperature", "warm")],
        [("temperature", "")],
        [("temperature", "NaN")],
        [("top_k", "[1]")],
        [("top_k", "1"), ("top_k", "1")],
        [("logit_bias", "{}")],
    ],
)
def test_query_parameters_that_are_no_scalars_are_refused(query: list[tuple[str, str]]) -> None:
    with pytest.raises(InvalidValue):
        native.body_of_query([("prompt", "a"), *query])


def test_tokenize_takes_a_prompt_or_messages() -> None:
    assert parse_tokenize({"prompt": ""}, MODEL).tokenize(ByteTokenizer()) == []
    assert parse_tokenize({"messages": USER}, MODEL).tokenize(ByteTokenizer())
    for wrong in (
        {},
        {"prompt": "a", "messages": USER},
        {"prompt": 5},
        {"prompt": "a", "add_special_tokens": 1},
    ):
        with pytest.raises(InvalidValue):
            parse_tokenize(wrong, MODEL)
    assert parse_detokenize({"tokens": []}, MODEL) == []
    for wrong_ids in ({"tokens": [VOCAB]}, {"tokens": [True]}, {"tokens": "a"}, {}):
        with pytest.raises(InvalidValue):
            parse_detokenize(wrong_ids, MODEL)


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4)
    ),
    max_leaves=10,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": st.sampled_from(["user", "assistant", "tool", "system"]) | VALUES,
            "content": st.text(max_size=5) | VALUES,
            "tool_calls": VALUES,
            "name": VALUES,
        },
    )
    | VALUES,
    max_size=4,
)
NAMES = sorted(chat._KNOWN | completions._KNOWN | native._KNOWN | {"tokens", "add_special_tokens"})
BODIES = st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), VALUES, max_size=6)


@settings(max_examples=400, deadline=None)
@given(BODIES, MESSAGES | VALUES, st.sampled_from(["good", "wild"]))
def test_no_json_raises_anything_but_our_errors(
    body: dict[str, Any], messages: object, kind: str
) -> None:
    """B004, B142"""
    if kind == "good":
        body = {**body, "prompt": "a", "prompts": ["a"], "messages": messages}
    try:
        body = parse_object(orjson.dumps(body, option=orjson.OPT_PASSTHROUGH_SUBCLASS))
    except TypeError:
        return  # integers that orjson cannot write
    parsers = [
        lambda: completions.parse_completion(body, MODEL, UnknownFields(), max_waiting=100),
        lambda: chat.parse_chat(body, MODEL, UnknownFields(), max_waiting=100),
        lambda: native.parse_one(
            body, MODEL, native.STREAM_DEFAULTS, UnknownFields(), streams=True
        ),
        lambda: native.parse_list(
            body, None, native.VLLM_DEFAULTS, UnknownFields(), max_waiting=100
        ),
        lambda: parse_tokenize(body, MODEL),
        lambda: parse_detokenize(body, MODEL),
    ]
    for parse in parsers:
        error = error_of(parse)
        assert error is None or error.status in (400, 404)
        assert error is None or len(error.message) < 500
        assert error is None or not {"msgspec", "Struct"} & set(error.message.split())


def error_of(parse: Callable[[], object]) -> NoriaError | None:
    try:
        parse()
    except NoriaError as error:
        return error
    return None


def test_a_text_that_cannot_fit_is_refused_without_being_encoded() -> None:
    """B072, B079"""

    class Reluctant(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError("encoded")

    model = make_model(tokenizer=Reluctant())
    with pytest.raises(ContextLengthExceeded, match=r"at least 1250 input tokens") as caught:
        tokenize(model, ["a", "x" * 10_000], ["prompt[0]", "prompt[1]"])
    assert caught.value.param == "prompt[1]"
