"""Tool calls out of texts: every format, cut at every character, gives what the whole text gives."""

from __future__ import annotations

import json
import random

import pytest

from server.protocol.parsed_chat import Delta
from server.protocol.reasoning import ReasoningSplitter
from server.protocol.tool_parser import Event, ToolParser

NAMES = frozenset({"get_weather", "add", "noop"})
Calls = list[tuple[str, str]]


def parse(kind, pieces: list[str], **options) -> tuple[str, Calls]:
    """Content and calls as (name, arguments). Indices count up, and every call starts before its arguments."""
    parser = ToolParser(kind, NAMES, **options)
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    delta = Delta.of(events + parser.finish())
    assert list(delta.calls) == list(range(len(delta.calls)))
    functions = [call["function"] for call in delta.calls.values()]
    assert all(call["id"].startswith("call_") for call in delta.calls.values())
    return delta.content, [(f["name"], f["arguments"]) for f in functions]


def make_arguments(rng: random.Random) -> dict[str, object]:
    texts = [
        "Seoul",
        'quo"te',
        "back\\slash",
        "a}b{c",
        "서울 ☀️",
        "[x]",
        "</tool_call>",
        "line\nbreak",
        "",
    ]
    values = [*texts, 5, -1.5e3, True, None, [1, [2, {"a": "]"}]], {"b": {"c": "}"}}, {}]
    return {f"k{i}": rng.choice(values) for i in range(rng.randrange(4))}


def write(kind: str, rng: random.Random) -> tuple[str, str, Calls]:
    """What a model writes in this format, and the content and calls that it means."""
    num_calls = rng.choice([0, 1, 1, 1, 2, 3])
    calls = []
    texts = []
    for _ in range(num_calls):
        name = rng.choice(sorted(NAMES))
        arguments = make_arguments(rng)
        indent = rng.choice([None, None, 2])
        written = json.dumps(arguments, indent=indent, ensure_ascii=rng.random() < 0.5)
        calls.append((name, written))
        key = "parameters" if kind == "llama" else "arguments"
        members = [f'"name": "{name}"', f'"{key}": {written}']
        if rng.random() < 0.2:
            members.reverse()
        if rng.random() < 0.2:
            members.append('"type": "function"')
        texts.append("{" + ", ".join(members) + "}")
    content = ""
    if kind in ("hermes", "mistral"):
        content = rng.choice(["", "Let me look: ", "1 < 2, [no] {call} <tool_", "안녕하세요 "])
    if not num_calls:
        answers = [
            "It is {sunny}.",
            '{"answer": 5}',
            '{"name": "nobody", "arguments": {}}',
            "[1, 2]",
            "",
            "a [TOOL_",
            "<tool_cal",
        ]
        answer = rng.choice(answers)
        return answer, answer, []
    blank = rng.choice(["", "\n", " "])
    if kind == "hermes":
        text = blank.join(f"<tool_call>{blank}{call}{blank}</tool_call>" for call in texts) + blank
    elif kind == "llama":
        text = rng.choice(["", "<|python_tag|>"]) + ("; " if blank else ";").join(texts) + blank
    elif kind == "mistral":
        named = [
            f"[TOOL_CALLS]{name}{rng.choice(['', '[ARGS]'])}{written}" for name, written in calls
        ]
        text = rng.choice(["[TOOL_CALLS]" + blank + "[" + ", ".join(texts) + "]", "".join(named)])
    else:
        text = rng.choice(["\n".join(texts), "[" + ", ".join(texts) + "]"]) + blank
    return content + text, content.rstrip(), calls


@pytest.mark.parametrize("kind", ["hermes", "llama", "mistral", "json"])
def test_every_cut_gives_what_the_whole_text_gives(kind) -> None:
    """B095"""
    rng = random.Random(kind)
    num_with_calls = 0
    for _ in range(50):
        text, content, calls = write(kind, rng)
        num_with_calls += bool(calls)
        assert parse(kind, [text]) == (content, calls), text
        assert parse(kind, list(text)) == (content, calls), text
        for cut in range(1, len(text)):
            assert parse(kind, [text[:cut], text[cut:]]) == (content, calls), (text, cut)
    assert num_with_calls > 25


def test_arguments_come_in_pieces_and_the_name_comes_first() -> None:
    parser = ToolParser("hermes", NAMES)
    text = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 22}}</tool_call>'
    events = [event for character in text for event in parser.push(character)]
    assert type(events[0]).__name__ == "CallStart"
    assert len(events) > 10
    assert "".join(event.text for event in events[1:]) == '{"a": 1, "b": 22}'


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("hermes", "<tool_call>not json</tool_call>", "<tool_call>not json</tool_call>", []),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        ("hermes", '<tool_call>{"name": "add", "argum', '<tool_call>{"name": "add", "argum', []),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a"', "", [("add", '{"a"')]),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>',
            "",
            [("add", '{"a": 1}')],
        ),
        (
            "hermes",
            'Hi <tool_call>{"name": "new", "arguments": {}}</tool_call> ok',
            "Hi ok",
            [("new", "{}")],
        ),
        ("mistral", "[TOOL_CALLS] nonsense!", "[TOOL_CALLS] nonsense!", []),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]abc[ARGS]{"a": 1}', "", [("add", '{"a": 1}')]),
        ("json", '```json\n{"name": "add"}```', '```json\n{"name": "add"}```', []),
        ("llama", '<|python_tag|>print("x")', '<|python_tag|>print("x")', []),
    ],
)
def test_what_is_no_call_is_content(kind, text, content, calls) -> None:
    for cut in range(len(text)):
        assert parse(kind, [text[:cut], text[cut:]]) == (content, calls), cut


def test_only_the_first_call_is_told_where_calls_are_not_parallel() -> None:
    text = '{"name": "add", "arguments": {}}\n{"name": "noop", "arguments": {}}'
    assert parse("json", [text], is_parallel=False) == ("", [("add", "{}")])


@pytest.mark.parametrize(
    ("text", "is_open", "thoughts", "answer"),
    [
        ("<think>\nHm. 1 < 2\n</think>\n\nYes.", False, "Hm. 1 < 2", "Yes."),
        ("Hm.\n</think>\n\nYes. <think>", True, "Hm.", "Yes. <think>"),
        ("<think></think>Yes.", False, "", "Yes."),
        ("  <think>only</th", False, "only</th", ""),
        (" Yes. <think>no</think>", False, "", " Yes. <think>no</think>"),
        ("<thi", False, "", "<thi"),
        ("", True, "", ""),
    ],
)
def test_thoughts_are_taken_out_at_every_cut(text, is_open, thoughts, answer) -> None:
    for cut in range(len(text) + 1):
        for pieces in ([text[:cut], text[cut:]], list(text)):
            splitter = ReasoningSplitter(is_open=is_open)
            found = [splitter.push(piece) for piece in pieces if piece]
            found.append(splitter.finish())
            assert "".join(thought for thought, _ in found) == thoughts
            assert "".join(rest for _, rest in found) == answer
