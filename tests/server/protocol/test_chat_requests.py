"""Messages, template fields and whatever else only chats have."""

from __future__ import annotations

import pytest
from request_parsers import (
    USER,
    chat_with,
)

from core.dummy_runner import ByteTokenizer
from core.errors import (
    InvalidValue,
    UnsupportedValue,
)
from core.sampling_params import MAX_TOKENS


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("modalities", ["text", "audio"]),
        ("audio", {}),
        ("chat_template", "{% for i in range(99999) %}x{% endfor %}"),
        ("chat_template_kwargs", {"chat_template": "x"}),
        ("chat_template_kwargs", {"tokenize": False}),
    ],
)
def test_chat_refuses_what_it_cannot_do(field: str, value: object) -> None:
    """B005, B084, B094, B095"""
    with pytest.raises(UnsupportedValue) as caught:
        chat_with({field: value})
    assert caught.value.param == field


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
