"""The pictures, drawn into files without a screen. matplotlib is in the extra `loadtest` and imported here only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.timeline import RequestTimes

WAITING, PREFILL, DECODE, KEPT = "#d9d9d9", "#f28e2b", "#4e79a7", "#e15759"
SERIES = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#76b7b2", "#b07aa1")


def _pyplot() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("Plots need matplotlib: pip install 'noria[loadtest]'.") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    _pyplot().close(figure)


def plot_stages(lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Tokens and requests per second of each stage."""
    figure, axes = _pyplot().subplots(1, 2, figsize=(9, 3.4))
    names = [line["stage"] for line in lines]
    for axis, key, title in (
        (axes[0], "output_tokens_per_s", "tokens/s"),
        (axes[1], "requests_per_s", "requests/s"),
    ):
        bars = axis.bar(names, [line[key] for line in lines], color=SERIES[: len(names)])
        axis.bar_label(bars, fmt="%.1f")
        axis.set_title(title)
        axis.margins(y=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def plot_timeline(stages: Mapping[str, Sequence[RequestTimes]], path: Path) -> None:
    """One row per request, in the order in which they began, and one panel per stage, on one time axis."""
    plt = _pyplot()
    shown = {name: requests for name, requests in stages.items() if requests}
    if not shown:
        return
    num_rows = max(len(requests) for requests in shown.values())
    figure, axes = plt.subplots(
        len(shown),
        1,
        figsize=(9, len(shown) * (0.8 + 0.055 * num_rows)),
        sharex=True,
        squeeze=False,
    )
    for axis, (name, requests) in zip(axes[:, 0], shown.items(), strict=True):
        _draw_requests(axis, requests)
        axis.set_ylabel(name)
        axis.invert_yaxis()
        axis.set_yticks([])
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1, 0].set_xlabel("seconds since the first request")
    handles = [
        plt.Rectangle((0, 0), 1, 1, color=color) for color in (WAITING, PREFILL, DECODE, KEPT)
    ]
    names = ["queued", "prefill to first token", "decode", "ended, seat kept"]
    axes[0, 0].legend(
        handles, names, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False
    )
    _save(figure, path)


def _draw_requests(axis: Any, requests: Sequence[RequestTimes]) -> None:
    in_order = sorted(requests, key=lambda r: r.end_s if r.scheduled_s is None else r.scheduled_s)
    for row, request in enumerate(in_order):
        first_s = request.first_token_s if request.first_token_s is not None else request.end_s
        begin_s = request.scheduled_s if request.scheduled_s is not None else first_s
        _bar(axis, row, request.arrival_s, begin_s, WAITING)
        _bar(axis, row, begin_s, first_s, PREFILL)
        _bar(axis, row, first_s, request.end_s, DECODE)
        if request.seat_end_s is not None:
            _bar(axis, row, request.end_s, request.seat_end_s, KEPT)


def _bar(axis: Any, row: int, begin_s: float, end_s: float, color: str) -> None:
    axis.barh(row, max(0.0, end_s - begin_s), left=begin_s, height=0.8, color=color)


def plot_sweep(key: str, points: Sequence[tuple[str, float, float, float]], path: Path) -> None:
    """Throughput against latency: (value, tokens/s, TTFT p50 ms, TPOT p50 ms), joined in the order of values."""
    figure, axes = _pyplot().subplots(1, 2, figsize=(9, 3.6), sharey=True)
    rates = [point[1] for point in points]
    for axis, column, title in ((axes[0], 2, "TTFT p50 (ms)"), (axes[1], 3, "TPOT p50 (ms)")):
        xs = [point[column] for point in points]
        axis.plot(xs, rates, "o-", color=SERIES[0])
        for x, rate, point in zip(xs, rates, points, strict=True):
            axis.annotate(point[0], (x, rate), textcoords="offset points", xytext=(5, 5))
        axis.set_xlabel(title)
        axis.margins(0.12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("tokens/s")
    figure.suptitle(key)
    _save(figure, path)


def plot_lines(
    series: Mapping[str, Sequence[tuple[float, float]]],
    path: Path,
    *,
    x_label: str,
    y_label: str,
    is_log: bool = False,
) -> None:
    """Named lines over one pair of axes."""
    figure, axis = _pyplot().subplots(figsize=(7, 3.6))
    for color, (name, points) in zip(SERIES, series.items(), strict=False):
        marker = "o-" if len(points) < 40 else "-"
        axis.plot([x for x, _ in points], [y for _, y in points], marker, color=color, label=name)
    if is_log:
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        ticks = sorted({x for points in series.values() for x, _ in points})
        axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axis.set_xlabel(x_label)
    axis.set_ylabel(y_label)
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def plot_pairs(
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    path: Path,
    *,
    x_label: str,
    is_log: bool = True,
) -> None:
    """Panels side by side, each with named lines, over doubling sizes or (not `is_log`) over plain ones."""
    figure, axes = _pyplot().subplots(1, len(panels), figsize=(9, 3.6), squeeze=False)
    for axis, (title, series) in zip(axes[0], panels.items(), strict=True):
        for color, (name, points) in zip(SERIES, series.items(), strict=False):
            style = "o-" if is_log else "-"
            axis.plot(
                [x for x, _ in points], [y for _, y in points], style, color=color, label=name
            )
        if is_log:
            ticks = sorted({x for points in series.values() for x, _ in points})
            axis.set_xscale("log", base=2)
            axis.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axis.set_yscale("log")
        axis.set_xlabel(x_label)
        axis.set_title(title)
        axis.legend(frameon=False)
        axis.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def plot_parts(bars: Mapping[str, Mapping[str, float]], path: Path) -> None:
    """One bar per step, divided into the shares of its parts; behind each its milliseconds."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(9, 0.9 + 0.4 * len(bars)))
    names = list(bars)
    wholes = [sum(bar.values()) or 1.0 for bar in bars.values()]
    begins = [0.0] * len(names)
    parts = dict.fromkeys(part for bar in bars.values() for part in bar)
    for part, color in zip(parts, plt.get_cmap("tab10").colors, strict=False):
        sizes = [
            max(0.0, bar.get(part, 0.0)) / whole * 100
            for bar, whole in zip(bars.values(), wholes, strict=True)
        ]
        axis.barh(names, sizes, left=begins, color=color, label=part)
        begins = [begin + size for begin, size in zip(begins, sizes, strict=True)]
    for place, whole in enumerate(wholes):
        axis.text(101, place, f"{whole:.1f} ms", va="center")
    axis.set_xlim(0, 115)
    axis.set_xticks(range(0, 101, 20))
    axis.invert_yaxis()
    axis.set_xlabel("% of the step")
    axis.legend(frameon=False, ncols=5, loc="lower center", bbox_to_anchor=(0.45, 1.0))
    axis.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def plot_ratios(
    panels: Mapping[str, Mapping[str, tuple[float, float, float]]], path: Path, *, title: str
) -> None:
    """A panel per measure, a bar per point: the ratio of medians, and the lowest and highest ratio of one round."""
    plt = _pyplot()
    width = max(3.2, 0.55 * max(len(bars) for bars in panels.values()))
    figure, axes = plt.subplots(1, len(panels), figsize=(width * len(panels), 3.4), squeeze=False)
    for axis, (name, bars) in zip(axes[0], panels.items(), strict=True):
        ratios = [ratio for ratio, _, _ in bars.values()]
        below = [max(0.0, ratio - lowest) for ratio, lowest, _ in bars.values()]
        above = [max(0.0, highest - ratio) for ratio, _, highest in bars.values()]
        axis.bar(list(bars), ratios, yerr=(below, above), capsize=3, color=SERIES[0])
        axis.axhline(1.0, color=WAITING, zorder=0)
        axis.set_title(name)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title)
    _save(figure, path)
