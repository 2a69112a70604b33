"""The fields of all routes: types, ranges, defaults, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
from request_parsers import (
    MODEL,
    ROUTES,
    VOCAB,
    basic,
    chat_with,
    complete,
    listed,
    make_model,
)

from core.errors import (
    InvalidValue,
    ModelNotFound,
    UnsupportedValue,
)
from core.sampling_params import MAX_TOKENS
from server.protocol import completions, native
from server.protocol.fields import UnknownFields


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
        ("guided_decoding_backend", "x"),
        ("guided_by_something_new", "x"),
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
        ("best_of", 2),
    ],
)
def test_completions_refuse_what_they_cannot_do(field: str, value: object) -> None:
    """B084, B097"""
    with pytest.raises(UnsupportedValue):
        complete({field: value})


def test_neutral_values_are_accepted() -> None:
    complete(
        {
            "echo": False,
            "best_of": 1,
            "suffix": None,
            "skip_special_tokens": True,
            "typical_p": 1,
            "guided_choice": [],
            "guided_by_something_new": None,
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


@pytest.mark.parametrize(
    ("bias", "param", "word"),
    [
        ({"5": 1, "7": 101}, "logit_bias.7", "-100"),
        ({"5": 1, "7": "a"}, "logit_bias.7", "a number"),
        ({"5": 1, "7": None}, "logit_bias.7", "a number"),
        ({"5": 1, "x`y": 1}, "logit_bias", "x?y"),
        ({"5": 1, "99999": 1}, "logit_bias", "99999"),
    ],
)
def test_a_wrong_bias_is_named_by_its_id(bias: object, param: str, word: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        basic({"logit_bias": bias})
    assert caught.value.param == param
    assert word in caught.value.message


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
