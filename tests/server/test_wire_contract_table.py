"""The field table of the wire contract, row by row: inside, at the edge, outside, wrong type, null, on every route.

One row of `ROWS` is one row of the table. A field that a parser knows and no row names fails the last test.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from request_parsers import MODEL, USER, VOCAB, basic, chat_with, complete, listed

from core.errors import NoriaError
from core.sampling_params import MAX_SEED, MAX_TOKENS
from server.protocol import chat, completions, native
from server.protocol.fields import UnknownFields


def post_stream(body: dict[str, Any]) -> Any:
    body = {"prompt": "a", **body}
    return native.parse_one(body, MODEL, native.STREAM_DEFAULTS, UnknownFields(), streams=True)


def get_stream(body: dict[str, Any]) -> Any:
    """As `EventSource` sends it: texts as they are, the rest as JSON."""
    texts = ("prompt", "model", "stop", "request_id")
    query: list[tuple[str, str]] = []
    for name, value in {"prompt": "a", **body}.items():
        if name == "stop" and isinstance(value, list):
            query += [(name, text) for text in value]
        elif value is None and name in texts:
            continue  # absent: a query has no null for a text
        else:
            is_text = name in texts and isinstance(value, str)
            query.append((name, value if is_text else json.dumps(value)))
    return post_stream(native.body_of_query(query))


Parser = Callable[[dict[str, Any]], Any]
NATIVE: dict[str, Parser] = {
    "basic_generate": basic,
    "generate": listed,
    "generate_stream": post_stream,
    "GET generate_stream": get_stream,
}
BODIES = {name: parse for name, parse in NATIVE.items() if not name.startswith("GET")}
COMPLETIONS: dict[str, Parser] = {"completions": complete}
CHAT: dict[str, Parser] = {"chat": chat_with}
OPENAI = COMPLETIONS | CHAT
ALL = NATIVE | OPENAI
ALL_BODIES = BODIES | OPENAI  # what is no scalar cannot stand in a query

NO_INTEGERS = [True, "1", 1.5, 2.0, [1], {"a": 1}]
NO_NUMBERS = [True, "0.5", [1], {}]
NO_BOOLS = [0, 1, "true", [True], {}]
NO_TEXTS = [5, True, ["a"], {}]
TOO_LARGE = [2**31, 2**63, 2**64, 2**70]
INVALID, UNSUPPORTED = "invalid_value", "unsupported_value"
TOOL_CALLS = [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]


@dataclass(frozen=True)
class Row:
    """`inside` are accepted, and null too unless `is_needed`; `outside` are refused with `code`."""

    field: str
    routes: dict[str, Parser]
    inside: list[Any]
    outside: list[Any]
    code: str = INVALID
    is_needed: bool = False


def refused(field: str, routes: dict[str, Parser], outside: list[Any], *neutral: Any) -> Row:
    return Row(field, routes, list(neutral), outside, UNSUPPORTED)


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


ROWS = [
    Row("prompt", {"basic_generate": basic, "generate_stream": post_stream}, ["a", " ", "\x00"],
        [None, "", 5, True, ["a"], {}], is_needed=True),
    Row("prompt", {"GET generate_stream": get_stream}, ["a", "[1]"], [""], is_needed=True),
    Row("prompt", COMPLETIONS,
        ["a", ["a"] * 1024, [0, VOCAB - 1], [[1], [2, 3]]],
        [None, "", [], ["a"] * 1025, ["a", ""], [[]], [[1], []], ["a", 5], [5, "a"], [["a"]], [[1], 5], [VOCAB], [-1],
         [3.0], [True], [2**70], [[1], [2**40]], 5, {}], is_needed=True),
    Row("prompts", {"generate": listed}, [[], ["a"], ["a"] * 1024],
        [None, "a", 5, {}, [""], ["a", ""], ["a", 5], [None], [["a"]], ["a"] * 1025], is_needed=True),
    Row("messages", CHAT,
        [USER, USER * 4096, user([{"type": "text", "text": "a"}] * 2), [{"role": "developer", "content": "a"}, *USER],
         [{"role": "user", "content": "a", "name": ""}], [*USER, {"role": "assistant", "tool_calls": TOOL_CALLS}],
         [*USER, {"role": "assistant", "content": None, "tool_calls": TOOL_CALLS}, {"role": "tool", "content": "a"}]],
        [None, [], "a", 5, {}, [5], USER * 4097, [{"content": "a"}], [{"role": "user"}], user(None), user(5),
         [{"role": "robot", "content": "a"}], [{"role": 5, "content": "a"}], user(["a"]), user([{"type": "text"}]),
         user([{"text": "a"}]), [{"role": "assistant", "content": None}],
         [{"role": "user", "content": "a", "name": 5}]], is_needed=True),
    Row("messages", CHAT, [],
        [user([{"type": kind, kind: {"url": "http://127.0.0.1/"}}]) for kind in ("image_url", "input_audio", "file")],
        UNSUPPORTED, is_needed=True),
    Row("model", ALL_BODIES, ["dummy"], NO_TEXTS),
    Row("max_tokens", ALL, [1, MAX_TOKENS], [0, -1, *TOO_LARGE, *NO_INTEGERS]),
    Row("max_completion_tokens", CHAT, [1, MAX_TOKENS], [0, -1, *TOO_LARGE, *NO_INTEGERS]),
    Row("min_tokens", ALL, [0, 1], [-1, *TOO_LARGE, *NO_INTEGERS]),
    Row("ignore_eos", ALL, [True, False], NO_BOOLS),
    Row("temperature", ALL, [0, 0.0, 1e-38, 2, 2.0], [-0.01, 2.01, 1e300, *NO_NUMBERS]),
    Row("top_p", ALL, [0, 0.5, 1, 1.0], [-0.01, 1.01, *NO_NUMBERS]),
    Row("top_k", ALL, [-1, 0, 1, 10**9, MAX_TOKENS], [-2, *TOO_LARGE, *NO_INTEGERS]),
    Row("min_p", ALL, [0, 0.5, 1], [-0.01, 1.01, *NO_NUMBERS]),
    Row("presence_penalty", ALL, [-2, 0, 2], [-2.01, 2.01, *NO_NUMBERS]),
    Row("frequency_penalty", ALL, [-2, 0, 2], [-2.01, 2.01, *NO_NUMBERS]),
    Row("repetition_penalty", ALL, [0.01, 1, 10], [0, -1, 10.01, *NO_NUMBERS]),
    Row("seed", ALL, [-1, 0, MAX_SEED], [-2, 2**63, 2**70, *NO_INTEGERS]),
    Row("stop", ALL, ["a", ["a"] * 16, ["a" * 1024]], ["", ["a", ""], ["a"] * 17, "a" * 1025]),
    Row("stop", ALL_BODIES, [[]], [5, True, [5], [None], {"a": 1}]),
    Row("stop_token_ids", ALL_BODIES, [[], [0], [VOCAB - 1] * 128],
        [[VOCAB], [-1], [1] * 129, ["1"], [True], [1.0], 5, "1", {"a": 1}]),
    Row("stop_token_ids", {"GET generate_stream": get_stream}, [], [[1], 5, None], is_needed=True),
    Row("include_stop_str_in_output", ALL, [True, False], NO_BOOLS),
    Row("logit_bias", ALL_BODIES, [{}, {"0": -100, str(VOCAB - 1): 100}, {"5": 0.5}],
        [{"5": 100.5}, {"5": -101}, {"a": 1}, {"-1": 1}, {"1.0": 1}, {" 1": 1}, {"": 1}, {str(VOCAB): 1},
         {str(2**40): 1}, {"5": True}, {"5": "1"}, {"5": None}, {str(i): 1 for i in range(1025)}, [], 5, "a"]),
    Row("logit_bias", {"GET generate_stream": get_stream}, [], [{}, 5, None], is_needed=True),
    Row("n", NATIVE, [1], [0, 2, -1, 5000, *NO_INTEGERS]),
    Row("n", OPENAI, [1, 128], [0, -1, 129, 5000, *NO_INTEGERS]),
    Row("logprobs", COMPLETIONS, [0, 20], [-1, 21, 50_000, *NO_INTEGERS, False]),
    Row("logprobs", CHAT, [True, False], [*NO_BOOLS, 5]),
    Row("top_logprobs", CHAT, [], [0, 1, 21, -1, *NO_INTEGERS]),  # inside only with logprobs: true
    refused("logprobs", NATIVE, [0, 5, True], False),
    refused("top_logprobs", NATIVE, [1, True], 0),
    Row("stream", {name: NATIVE[name] for name in ("basic_generate", "generate")}, [False], [True, 0, "false"]),
    Row("stream", {name: NATIVE[name] for name in ("generate_stream", "GET generate_stream")}, [True],
        [False, 1, "true"]),
    Row("stream", OPENAI, [True, False], NO_BOOLS),
    Row("stream_options", OPENAI,
        [{}, {"include_usage": True, "continuous_usage_stats": False}, {"include_usage": None}, {"new": 1}],
        ["a", [], 5, True, {"include_usage": 1}, {"continuous_usage_stats": "true"}]),
    Row("continue_final_message", CHAT, [False], [True, *NO_BOOLS]),  # inside only behind an assistant's turn
    Row("add_generation_prompt", CHAT, [True, False], NO_BOOLS),
    Row("response_format", OPENAI,
        [{"type": "text"}, {"type": "json_object"},
         {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": {"type": "object"}}}],
        ["a", 5, [], {}, {"type": 5}, {"type": "xml"}, {"type": "json_schema"},
         {"type": "json_schema", "json_schema": {}}, {"type": "json_schema", "json_schema": {"name": "a"}},
         {"type": "json_schema", "json_schema": {"schema": 5}},
         {"type": "json_schema", "json_schema": {"strict": 1, "schema": {}}}]),
    Row("response_format", BODIES, [{"type": "text"}, {"type": "json_object"}], ["a", {"type": "xml"}]),
    refused("tools", CHAT, [[{"type": "function", "function": {"name": "f"}}], [{"type": "retrieval"}]], []),
    Row("tools", CHAT, [],
        [5, "a", {}, [5], [{}], [{"type": "function"}], [{"type": "function", "function": {"name": "a b"}}],
         [{"type": "function", "function": {"name": "f", "parameters": 5}}],
         [{"type": "function", "function": {"name": "f", "strict": 1}}],
         [{"type": "function", "function": {"name": "f"}}] * 129]),
    Row("tool_choice", CHAT, ["none", "auto"],
        ["required", "any", 5, [], {"type": "function"}, {"type": "function", "function": {"name": "f"}}]),
    refused("tool_choice", CHAT, [{"type": "allowed_tools", "allowed_tools": {}}]),
    Row("parallel_tool_calls", CHAT, [True, False], NO_BOOLS),
    Row("parallel_tool_calls", COMPLETIONS, ["a", 5, True], []),
    Row("echo", COMPLETIONS, [True, False], [1, "a", "true"]),
    refused("best_of", COMPLETIONS, [2, 0, True, "1"], 1),
    refused("add_special_tokens", COMPLETIONS, [False, 1, "true"], True),
    refused("add_special_tokens", CHAT, [True, 0, "false"], False),
    Row("suffix", COMPLETIONS, ["a", ""], [5, True, ["a"]]),
    refused("skip_special_tokens", ALL, [False, 1], True),
    refused("prompt_logprobs", ALL, [0, 1], False),
    refused("return_token_ids", ALL, [True], False),
    refused("use_beam_search", ALL, [True], False),
    refused("allowed_token_ids", ALL_BODIES, [[1], 5], []),
    refused("bad_words", ALL_BODIES, [["a"], "a"], []),
    refused("truncate_prompt_tokens", ALL, [5, -1]),
    Row("structured_outputs", ALL_BODIES,
        [{"json": {}}, {"json": "{}"}, {"regex": "a+"}, {"choice": ["a"]}, {"grammar": "start: /a/"},
         {"json_object": True}, {"json": {}, "regex": None, "json_object": False}],
        [{}, "a", 5, {"json": 5}, {"json": "{"}, {"regex": ""}, {"regex": 5}, {"choice": "a"}, {"choice": [5]},
         {"json": {}, "regex": "a"}]),
    refused("structured_outputs", ALL_BODIES, [{"structural_tag": "a"}, {"new": 1}]),
    Row("guided_json", ALL_BODIES, [{"type": "object"}, "{}", True], ["{", 5, [1]]),
    Row("guided_regex", ALL_BODIES, ["a+"], [""]),
    Row("guided_grammar", ALL_BODIES, ["start: /a/"], [""]),
    Row("guided_choice", ALL_BODIES, [["a"], [], ["a"] * 1024], ["a", 5, [""], [5], ["a"] * 1025]),
    refused("guided_by_what_comes_next", ALL_BODIES, ["a"]),
    Row("grammar", ALL_BODIES, ["root ::= a"], [""]),
    Row("regex", ALL_BODIES, ["(a|a)*b"], [""]),
    refused("typical_p", ALL, [0.5], 1, 1.0),
    refused("mirostat", ALL, [1, 2], 0),
    refused("dry_multiplier", ALL, [0.8], 0, 0.0),
    refused("xtc_probability", ALL, [0.1], 0),
    refused("functions", CHAT, [[{"name": "f"}]], []),
    refused("function_call", CHAT, ["auto", {"name": "f"}]),
    refused("modalities", CHAT, [["text", "audio"], ["audio"]], ["text"]),
    refused("audio", CHAT, [{}, {"voice": "a"}]),
    refused("web_search_options", CHAT, [{}]),
    refused("chat_template", CHAT, ["", "{% for i in range(99999) %}{% endfor %}"]),
    Row("chat_template_kwargs", CHAT, [{}, {"a": 1, "b": None}, {f"k{i}": "v" for i in range(32)}],
        [{f"k{i}": "v" for i in range(33)}, {"a": [1]}, {"a": {}}, 5, "a", []]),
    refused("chat_template_kwargs", CHAT, [{"chat_template": "a"}, {"tokenize": False}, {"tools": 1}]),
    refused("timeout", ALL, [0, 5]),
    refused("cache_salt", ALL, ["a"]),
    Row("priority", ALL, [0, -3, 5], []),
    Row("request_id", ALL, ["a", "a" * 128], ["a" * 129]),
    Row("request_id", ALL_BODIES, [], NO_TEXTS),
    Row("anything_else", ALL_BODIES, [1, "a", {"a": [None]}], []),
    *(Row(field, OPENAI, ["a", 5, True, {"a": [1]}], []) for field in (
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "reasoning_effort", "verbosity")),
]  # fmt: skip

CASES = [
    pytest.param(row, parse, id=f"{row.field} {route} {row.code}")
    for row in ROWS
    for route, parse in row.routes.items()
]


@pytest.mark.parametrize(("row", "parse"), CASES)
def test_values_inside_are_accepted_and_null_is_absent(row: Row, parse: Parser) -> None:
    """B027, B084"""
    for value in row.inside:
        parse({row.field: value})
    if not row.is_needed:
        assert parse({row.field: None}) == parse({})


@pytest.mark.parametrize(("row", "parse"), CASES)
def test_values_outside_are_refused_with_the_fields_path(row: Row, parse: Parser) -> None:
    """B004, B042, B046, B058, B070, B084, B095, B097"""
    for value in row.outside:
        with pytest.raises(NoriaError) as caught:
            parse({row.field: value})
        error = caught.value
        assert (error.status, error.code) == (400, row.code), value
        assert (error.param or "").startswith(row.field), value
        assert len(error.message) < 300


def test_what_needs_a_second_field_is_accepted_with_it() -> None:
    """B072, B092"""
    for best in (0, 20):
        assert chat_with({"logprobs": True, "top_logprobs": best}).params.logprobs == best
    with pytest.raises(NoriaError):
        chat_with({"logprobs": True, "top_logprobs": 21})
    turn = {"role": "assistant", "content": "a"}
    begun = {"messages": [*USER, turn], "continue_final_message": True}
    assert not chat_with(begun).prompt.adds_generation_prompt
    with pytest.raises(NoriaError):
        chat_with({**begun, "add_generation_prompt": True})
    assert chat_with({"max_tokens": 9, "max_completion_tokens": 3}).params.max_tokens == 3
    for parse in ALL.values():
        assert parse({"min_tokens": 7, "max_tokens": 7, "ignore_eos": True}).params.min_tokens == 7
        with pytest.raises(NoriaError):
            parse({"min_tokens": 8, "max_tokens": 7})


def test_no_known_field_is_missing_from_the_table() -> None:
    known = native._KNOWN | completions._KNOWN | chat._KNOWN
    assert not known - {row.field for row in ROWS}
