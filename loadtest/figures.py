"""From records to figures, and figures to a table. Pure apart from printing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import orjson

from loadtest.closed_loop import LoopResult
from loadtest.sse_client import RequestRecord

PERCENTILES = (50, 90, 99)


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear interpolation between the two nearest ranks; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def spread_ms(values_s: Iterable[float | None]) -> dict[str, float | None]:
    """`{"p50": ms, "p90": ms, "p99": ms}` of durations in seconds; those that do not exist are left out."""
    known = [value * 1000 for value in values_s if value is not None]
    return {f"p{percent}": _round(percentile(known, percent)) for percent in PERCENTILES}


@dataclass(frozen=True, slots=True)
class Goals:
    """Latency targets of one request, in milliseconds; None asks nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @property
    def is_empty(self) -> bool:
        return self.ttft_ms is None and self.tpot_ms is None and self.e2e_ms is None

    def are_met_by(self, record: RequestRecord) -> bool:
        """An answer too short to have a time per token meets any."""
        pairs = (
            (self.ttft_ms, record.ttft_s),
            (self.tpot_ms, record.tpot_s),
            (self.e2e_ms, record.e2e_s),
        )
        return record.is_ok and all(
            goal_ms is None or value_s is None or value_s * 1000 <= goal_ms
            for goal_ms, value_s in pairs
        )


NO_GOALS = Goals()


def summarize(
    result: LoopResult, goals: Goals = NO_GOALS, price_per_hour: float | None = None
) -> dict[str, Any]:
    """The figures of one load. Rates and latencies are of successful requests; failures are counted apart.

    With goals: `goodput_per_s`, requests per second that met them all. With a price: cost per million output tokens.
    """
    ok = [record for record in result.records if record.is_ok]
    failed = [record for record in result.records if not record.is_ok]
    num_tokens = sum(record.num_output_tokens for record in ok)
    num_chunks = sum(len(record.text_times_s) for record in ok)
    figures: dict[str, Any] = {
        "requests": len(result.records) + result.num_not_sent,
        "succeeded": len(ok),
        "failed": len(failed) + result.num_not_sent,
        "wall_s": _round(result.wall_s),
        "output_tokens": num_tokens,
        "output_tokens_per_s": _round(num_tokens / result.wall_s),
        "requests_per_s": _round(len(ok) / result.wall_s),
        "ttft_ms": spread_ms(record.ttft_s for record in ok),
        "tpot_ms": spread_ms(record.tpot_s for record in ok),
        "itl_ms": spread_ms(gap for record in ok for gap in record.gaps_s),
        "e2e_ms": spread_ms(record.e2e_s for record in ok),
        "tokens_counted_by": _counted_by(ok),
        "tokens_per_chunk": _round(num_tokens / num_chunks) if num_chunks else None,
        "min_output_tokens": min((record.num_output_tokens for record in ok), default=0),
        "prompt_tokens": sum(record.num_prompt_tokens or 0 for record in ok),
        "cached_tokens": sum(record.num_cached_tokens for record in ok),
    }
    if not goals.is_empty:
        num_good = sum(goals.are_met_by(record) for record in ok)
        figures["goodput_per_s"] = _round(num_good / result.wall_s)
        figures["good_share"] = _round(num_good / max(1, figures["requests"]))
    if price_per_hour is not None and num_tokens:
        figures["cost_per_million_tokens"] = _round(
            price_per_hour / 3600 * result.wall_s / num_tokens * 1e6
        )
    if late := max((record.late_s for record in result.records), default=0.0):
        figures["client_late_ms_max"] = _round(late * 1000)
    if result.num_not_sent:
        figures["not_sent"] = result.num_not_sent
    if failed:
        figures["first_error"] = failed[0].error
    return figures


def _counted_by(records: Sequence[RequestRecord]) -> str:
    sources = {"usage" if record.is_counted_by_server else "chunks" for record in records}
    return "mixed" if len(sources) > 1 else next(iter(sources), "none")


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def json_line(figures: dict[str, Any]) -> str:
    return orjson.dumps(figures).decode()


def figure_row(figures: dict[str, Any]) -> list[str]:
    """The cells under `FIGURE_COLUMNS`."""
    spreads = (figures[name] for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"))
    return [
        str(figures["requests"]),
        str(figures["failed"]),
        f"{figures['output_tokens_per_s']:.1f}",
        f"{figures['requests_per_s']:.2f}",
        *(
            " / ".join(_short(spread[f"p{percent}"]) for percent in PERCENTILES)
            for spread in spreads
        ),
    ]


FIGURE_COLUMNS = [
    "requests",
    "failed",
    "tokens/s",
    "requests/s",
    "TTFT ms p50/p90/p99",
    "TPOT ms p50/p90/p99",
    "ITL ms p50/p90/p99",
    "E2E ms p50/p90/p99",
]


def _short(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1f}" if abs(value) < 100 else f"{value:.0f}"


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO | None = None
) -> None:
    """A table for people, on standard error so that standard output holds JSON lines only."""
    stream = stream or sys.stderr
    if stream.isatty() and importlib.util.find_spec("rich") is not None:
        _print_rich(title, columns, rows, stream)
        return
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    print(title, file=stream)
    for cells in (columns, ["-" * width for width in widths], *rows):
        padded = (cell.rjust(width) for cell, width in zip(cells, widths, strict=True))
        print("  ".join(padded), file=stream)


def _print_rich(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], stream: TextIO
) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    Console(file=stream).print(table)
