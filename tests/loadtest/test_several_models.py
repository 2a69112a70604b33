"""Three models under a budget for two, with the real weights."""

from __future__ import annotations

import orjson
import pytest

from loadtest import several_models
from loadtest.__main__ import build_parser


@pytest.mark.slow
def test_of_300_requests_at_random_to_three_models_none_is_lost_and_none_is_wrong(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["models", "--rounds", "1", "--warm-requests", "40"]
    assert several_models.main(build_parser().parse_args(words)) == 0
    crowd, warm = [orjson.loads(line) for line in capsys.readouterr().out.splitlines()[:2]]
    assert (crowd["requests"], crowd["lost"], crowd["wrong"]) == (300, 0, 0)
    assert sum(crowd["loads"].values()) > 3
    assert crowd["used_mib"] <= several_models.BUDGET_MIB
    assert warm["loads_beside"] >= 1
