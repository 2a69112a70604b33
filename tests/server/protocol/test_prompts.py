"""Prompts in all their forms, and what becomes of them once they are tokens."""

from __future__ import annotations

import pytest
from request_parsers import (
    MODEL,
    USER,
    VOCAB,
    complete,
    listed,
    make_model,
)

from core.dummy_runner import ByteTokenizer
from core.errors import (
    ContextLengthExceeded,
    InvalidValue,
)
from server.protocol.prompts import resolve, tokenize
from server.protocol.tokenize import parse_detokenize, parse_tokenize


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


def test_a_text_that_cannot_fit_is_refused_without_being_encoded() -> None:
    """B072, B079"""

    class Reluctant(ByteTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
            raise AssertionError("encoded")

    model = make_model(tokenizer=Reluctant())
    with pytest.raises(ContextLengthExceeded, match=r"at least 1250 input tokens") as caught:
        tokenize(model, ["a", "x" * 10_000], ["prompt[0]", "prompt[1]"])
    assert caught.value.param == "prompt[1]"
