"""The detokenizer: joined deltas equal the whole, nothing half, nothing of a stop string, constant work."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.byte_detokenizer import ByteDetokenizer
from core.detokenizer import Decode, Detokenizer
from core.dummy_runner import ByteTokenizer
from core.sampling_params import SamplingParams
from core.stop_matcher import StopMatcher

decode_bytes = ByteTokenizer().decode
WORDS = ["▁Hello", "▁", "▁▁▁▁", "x", "▁world", ".", "\n", "ab", "▁Привет"]


def decode_words(token_ids: list[int]) -> str:
    """Like sentencepiece: the first blank of a text is stripped; ids from 100 on are single bytes (byte fallback,
    where a run of bytes that is no UTF-8 becomes one U+FFFD per byte)."""
    text, run = "", b""
    for token_id in [*token_ids, None]:
        if token_id is not None and token_id >= 100:
            run += bytes((token_id - 100,))
            continue
        if run:
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            run = b""
        if token_id is not None:
            text += WORDS[token_id]
    return text.replace("▁", " ").removeprefix(" ")


def deltas(
    prompt: list[int], output: list[int], decode: Decode = decode_bytes, **params: Any
) -> list[str]:
    detokenizer = Detokenizer(decode, prompt, SamplingParams(max_tokens=1000, **params))
    released = []
    for token_id in output:
        released.append(detokenizer.push(token_id))
        if detokenizer.stop is not None:
            break
    return [*released, detokenizer.finish()]


@given(st.text(max_size=30), st.text(max_size=60))
@settings(deadline=None)
def test_joined_deltas_are_the_whole_text_and_hold_no_half_character(
    prompt: str, text: str
) -> None:
    """B014."""
    pieces = deltas(list(prompt.encode()), list(text.encode()))
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(st.text(max_size=9), st.binary(max_size=80))
@settings(deadline=None)
def test_joined_deltas_of_arbitrary_bytes_equal_the_decode_of_all(prompt: str, data: bytes) -> None:
    """B014, with output that is no UTF-8 at all."""
    assert "".join(deltas(list(prompt.encode()), list(data))) == data.decode("utf-8", "replace")


@given(st.binary(max_size=9), st.binary(max_size=60), st.sampled_from([(), ("a",), ("\ufffd",)]))
@settings(deadline=None)
def test_pieces_of_bytes_give_the_text_that_a_decode_of_all_gives(
    prompt: bytes, data: bytes, stop: tuple[str, ...]
) -> None:
    """One look-up a token instead of the library's decode, also where prompt and output meet in a character."""
    params = SamplingParams(max_tokens=1000, stop=stop)
    piece = ByteTokenizer().piece
    assert piece is not None
    quick = ByteDetokenizer(piece, list(prompt), params)
    texts = []
    for token_id in [300, *data, 300]:  # ids without bytes change nothing
        texts.append(quick.push(token_id))
        if quick.stop is not None:
            break
    text = "".join([*texts, quick.finish()])
    whole = (prompt + data).decode("utf-8", "replace")
    before = prompt.decode("utf-8", "replace")
    kept = before if whole.startswith(before) else before[:-1]
    assert text == whole[len(kept) :].partition(stop[0] if stop else "\0\0")[0]
    assert (quick.stop is not None) == bool(stop and stop[0] in whole[len(kept) :])


def test_a_half_character_is_held_until_its_last_byte() -> None:
    piece = ByteTokenizer().piece
    assert piece is not None
    detokenizer = ByteDetokenizer(piece, list("né".encode()[:2]), SamplingParams(max_tokens=9))
    assert [detokenizer.push(i) for i in [*"é🎼".encode()[1:], 33]] == ["é", "", "", "", "🎼", "!"]


@given(
    st.lists(st.integers(0, len(WORDS) - 1), max_size=20),
    st.lists(
        st.one_of(
            st.integers(0, len(WORDS) - 1).map(lambda i: [i]),
            st.sampled_from("é한🎼").map(lambda c: [100 + b for b in c.encode()]),
        ),
        max_size=30,
    ),
)
@settings(deadline=None)
def test_a_tokenizer_that_strips_leading_blanks_loses_none(
    prompt: list[int], chunks: list[list[int]]
) -> None:
    """B017."""
    output = [token_id for chunk in chunks for token_id in chunk]
    whole, before = decode_words(prompt + output), decode_words(prompt)
    assert "".join(deltas(prompt, output, decode_words)) == whole[len(before) :]


def test_the_first_blank_of_the_answer_is_kept() -> None:
    """B017: routes that return prompt and completion join the two."""
    assert "".join(deltas([3, 5], [4, 3], decode_words)) == " worldx"


def test_a_character_that_the_prompt_began_belongs_to_the_output() -> None:
    data = "né".encode()
    assert "".join(deltas(list(data[:2]), [*data[2:], 33])) == "é!"


def test_garbage_is_released_with_constant_work_per_token() -> None:
    sizes: list[int] = []

    def decode(token_ids: list[int]) -> str:
        sizes.append(len(token_ids))
        return decode_bytes(token_ids)

    detokenizer = Detokenizer(decode, list(b"prompt"), SamplingParams(max_tokens=5000))
    text = "".join(detokenizer.push(0xE2) for _ in range(2000)) + detokenizer.finish()
    assert text == "\ufffd" * 2000
    assert max(sizes) <= 48
    assert sum(sizes) / 2000 < 40


def test_a_stop_string_across_tokens_leaks_nothing() -> None:
    """B021."""
    assert "".join(deltas([], list(b"the brown fox"), stop=("wn f",))) == "the bro"


@pytest.mark.parametrize(("includes", "expected"), [(False, "ab"), (True, "abcd")])
def test_the_text_ends_exactly_before_or_behind_the_stop_string(
    includes: bool, expected: str
) -> None:
    """B028: not behind the token it ends in."""

    def decode(token_ids: list[int]) -> str:
        return "".join(["abc", "dxyz"][token_id] for token_id in token_ids)

    pieces = deltas([], [0, 1], decode, stop=("cd",), include_stop_str_in_output=includes)
    assert "".join(pieces) == expected


def test_held_text_comes_at_the_end_if_no_stop_string_follows() -> None:
    """B023."""
    pieces = deltas([], list(b"xabcab"), stop=("abcabd",))
    assert pieces[:-1] == ["x", "", "", "", "", ""]
    assert pieces[-1] == "abcab"


def test_a_stop_string_before_min_tokens_has_no_effect() -> None:
    """B030."""
    assert "".join(deltas([], list(b"ab.cd.ef"), stop=(".",), min_tokens=4)) == "ab.cd"


def test_of_stop_strings_that_end_together_the_longest_counts() -> None:
    assert "".join(deltas([], list(b"xabcdy"), stop=("cd", "abcd"))) == "x"


@given(
    st.text("ab", max_size=40),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 40), max_size=4),
)
@settings(deadline=None)
def test_the_matcher_agrees_with_a_plain_search_however_the_text_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    """B021, B023."""
    matcher = StopMatcher(tuple(stops), includes_stop=False)
    released, begin = "", 0
    for cut in [*sorted(cuts), len(text)]:
        piece = text[begin : max(cut, begin)]
        begin = max(cut, begin)
        released += matcher.push(piece)
        if matcher.matched is None:
            rest = text[: min(begin, len(text))][len(released) :]
            assert not rest or any(stop.startswith(rest) for stop in stops), "held too much"
    released += matcher.finish()
    ends = [(text.find(s) + len(s), -len(s)) for s in stops if s in text]
    expected = text if not ends else text[: min(ends)[0] + min(ends)[1]]
    assert released == expected


def test_matching_sixteen_long_stop_strings_is_linear() -> None:
    """B100: counts automaton moves instead of measuring time."""

    class CountingText(str):
        moves = 0

        def __getitem__(self, index: Any) -> str:
            CountingText.moves += 1
            return str.__getitem__(self, index)

    stops = tuple(CountingText("x" * 999 + chr(97 + i)) for i in range(16))
    matcher = StopMatcher(stops, includes_stop=False)
    CountingText.moves = 0
    for _ in range(2000):
        matcher.push("x")
    assert CountingText.moves <= 16 * 2000 * 4
