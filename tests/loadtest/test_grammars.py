"""What `loadtest grammars` makes of gaps, and that its hostile grammars are ones that the server reads."""

from __future__ import annotations

import pytest

from loadtest.grammars import compare, hostile_fields
from loadtest.sse_client import RequestRecord
from server.protocol.structured import parse_grammar


def stream(*times_s: float) -> RequestRecord:
    return RequestRecord(0.0, text_times_s=list(times_s))


def test_gaps_of_the_attack_stand_beside_those_before_it() -> None:
    figures = compare([stream(1.0, 1.01, 1.02, 1.05, 1.06), stream(1.0, 1.01, 1.1)], 1.03, 1.055)
    assert figures["quiet_max_ms"] == 10
    assert figures["attacked_gaps"] == 3
    assert figures["attacked_max_ms"] == 90


def test_streams_must_outlive_the_attack() -> None:
    with pytest.raises(SystemExit, match="--stream-tokens"):
        compare([stream(1.0, 1.1)], 1.05, 1.2)


def test_every_hostile_field_is_a_grammar() -> None:
    for fields in hostile_fields():
        assert parse_grammar(fields) is not None
