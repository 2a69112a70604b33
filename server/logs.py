"""Log lines: one event per line, key and value, as text or as JSON. Prompts, outputs and keys never appear.

`event` writes a line; `log_request` the one of each request; `StatsReporter` the figures while there is work.
Logger names begin with `noria.`. Called from the event loop, `configure_logging` from `server/__main__.py`.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

import orjson

from core.outputs import StepStats
from server.api_keys import asks_for_key
from server.backends.base import RequestRecord
from server.config import LogConfig, ServerConfig, idle_settings
from server.metrics import Metrics

PREFIX_WINDOW = 1000  # sequences over which the prefix hit rate is told
_requests_log = logging.getLogger("noria.requests")
_start_log = logging.getLogger("noria.start")
_stats_log = logging.getLogger("noria.stats")


def event(logger: logging.Logger, level: int, name: str, **fields: object) -> None:
    """One line: the name of the event, then `key=value` (text) or keys (JSON). None is left out."""
    if logger.isEnabledFor(level):
        shown = {key: value for key, value in fields.items() if value is not None}
        logger.log(level, name, extra={"fields": shown})


class TextFormatter(logging.Formatter):
    """`12:00:01.123 INFO requests: request id=… status=200`."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s.%(msecs)03d %(levelname)s %(name)s: %(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        text = super().formatMessage(record)
        for key, value in _fields(record).items():
            text += f" {key}={_shown(value)}"
        return text


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": record.created,
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(entry, default=str).decode()


def _fields(record: logging.LogRecord) -> Mapping[str, object]:
    fields: Mapping[str, object] = getattr(record, "fields", {})
    return fields


def _shown(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}"
    text = str(value)
    is_plain = text.isprintable() and not any(char in text for char in ' "=')
    return text if is_plain and text else orjson.dumps(text).decode()


def configure_logging(config: LogConfig, stream: TextIO | None = None) -> None:
    """Sends `noria.*` to `stream` (standard error) at the level asked for, and what libraries warn of as well."""
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if config.format == "json" else TextFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("noria").setLevel(config.level.upper())
    # Malformed HTTP and clients that leave are the clients' business, not errors of this server.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)


def log_start(
    config: ServerConfig, lines: Iterable[str], startup_s: Mapping[str, float], url: str
) -> None:
    """The block at start: what was loaded and where each number comes from (`lines`), the limits, and ready."""
    engine = config.engine
    for line in lines:
        _start_log.info("%s", line)
    for sentence in idle_settings(config):
        _start_log.warning("%s", sentence)
    event(
        _start_log,
        logging.INFO,
        "limits",
        batch_size=engine.batch_size,
        tokens_per_step=engine.max_batched_tokens,
        policy=engine.policy,
        queue_requests=engine.max_waiting,
        queue_tokens=engine.max_waiting_tokens or "unbounded",
    )
    event(
        _start_log,
        logging.INFO,
        "ready",
        url=url,
        keys="on" if asks_for_key(config.server) else "off",
        **{f"{phase}_s": f"{seconds:.2f}" for phase, seconds in startup_s.items()},
    )


def log_request(record: RequestRecord, total_s: float) -> None:
    """The one line of a request. Probes, scrapes and other requests that compute nothing stay at level debug."""
    is_worth_a_line = record.num_sequences > 0 or record.status >= 400
    is_probe = record.route.startswith(("/health", "/metrics", "/stats"))
    level = logging.INFO if is_worth_a_line and not is_probe else logging.DEBUG
    has_tokens = record.num_sequences > 0
    event(
        _requests_log,
        level,
        "request",
        id=record.request_id,
        route=record.route,
        model=record.model,
        status=record.status,
        finish=",".join(sorted(set(record.finish_reasons))) or None,
        sequences=record.num_sequences if record.num_sequences > 1 else None,
        prompt=record.num_prompt_tokens if has_tokens else None,
        cached=record.num_cached_tokens if has_tokens else None,
        generated=record.num_output_tokens if has_tokens else None,
        queue_ms=_ms(record.queue_s),
        prefill_ms=_ms(record.prefill_s),
        ttft_ms=_ms(record.first_token_s),
        decode_ms=_ms(record.decode_s),
        tpot_ms=_ms(record.per_token_s),
        total_ms=total_s * 1000,
        tokens_per_s=record.num_output_tokens / total_s if has_tokens and total_s > 0 else None,
        preemptions=record.num_preemptions if has_tokens else None,
        saved=record.num_tokens_saved or None,
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000


@dataclass(slots=True)
class StatsReporter:
    """The line of figures, every `interval_s` while there is work and once more after it ended. Without work there
    is no timer, so an idle server sleeps. Lives on the event loop."""

    interval_s: float
    metrics: Metrics
    model: str | None = None  # with several models only
    _timer: asyncio.TimerHandle | None = None
    _since_s: float = 0.0
    _num_computed: int = 0
    _num_generated: int = 0
    _num_steps: int = 0
    _steps_s: float = 0.0
    _last: StepStats | None = None
    _events: dict[str, float] = field(default_factory=dict)
    _prefixes: deque[tuple[int, int]] = field(default_factory=lambda: deque(maxlen=PREFIX_WINDOW))

    def wake(self) -> None:
        """There is work: starts the timer unless it runs."""
        if self._timer is None:
            self._since_s = time.monotonic()
            self._events = self._count_events()
            self._arm()

    def observe_step(self, stats: StepStats, num_new_tokens: int) -> None:
        self._last = stats
        self._num_generated += num_new_tokens
        if stats.step_kind != "idle":
            self._num_computed += stats.num_prefill_tokens
            self._num_steps += 1
            self._steps_s += stats.duration_s

    def observe_prefix(self, num_prompt: int, num_cached: int) -> None:
        self._prefixes.append((num_prompt, num_cached))

    def close(self) -> None:
        """Writes what is left and stops the timer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._report()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self.interval_s, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._report()
        last = self._last
        if last is None or last.num_running or last.num_waiting:
            self._arm()

    def _count_events(self) -> dict[str, float]:
        metrics = self.metrics
        return {
            "preemptions": metrics.total("vllm:num_preemptions"),
            "recomputed_tokens": metrics.total("noria:recomputed_tokens"),
            "draft_tokens": metrics.total("vllm:spec_decode_num_draft_tokens"),
            "accepted_draft_tokens": metrics.total("vllm:spec_decode_num_accepted_tokens"),
            "rejections": metrics.sum_of("noria:rejections"),
            "aborts": metrics.total("vllm:request_success", "abort"),
            "failures": metrics.total("vllm:request_success", "error"),
        }

    def _report(self) -> None:
        now_s = time.monotonic()
        elapsed_s = max(now_s - self._since_s, 1e-9)
        events = self._count_events()
        news = {name: int(events[name] - self._events.get(name, 0)) for name in events}
        stats = self._last
        queried = sum(pair[0] for pair in self._prefixes)
        hits = sum(pair[1] for pair in self._prefixes)
        had_work = self._num_steps > 0 or (stats is not None and stats.num_running > 0)
        event(
            _stats_log,
            logging.INFO if had_work or any(news.values()) else logging.DEBUG,
            "stats",
            model=self.model,
            prompt_tokens_per_s=self._num_computed / elapsed_s,
            generated_tokens_per_s=self._num_generated / elapsed_s,
            running=stats.num_running if stats else 0,
            waiting=stats.num_waiting if stats else 0,
            kv_usage_pct=_usage_pct(stats),
            prefix_hit_pct=100 * hits / queried if queried else 0.0,
            step_ms=1000 * self._steps_s / self._num_steps if self._num_steps else None,
            **{name: count for name, count in news.items() if count},
        )
        if news["preemptions"]:
            event(
                _stats_log,
                logging.WARNING,
                "preempted",
                cause="the KV cache ran out of blocks",
                preemptions=news["preemptions"],
                recomputed_tokens=news["recomputed_tokens"],
            )
        self._since_s, self._events = now_s, events
        self._num_computed = self._num_generated = self._num_steps = 0
        self._steps_s = 0.0


def _usage_pct(stats: StepStats | None) -> float:
    if stats is None:
        return 0.0
    capacity = stats.num_blocks_used + stats.num_blocks_cached + stats.num_blocks_free
    return 100 * stats.num_blocks_used / capacity if capacity else 0.0
