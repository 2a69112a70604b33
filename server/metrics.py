"""`Metrics`: what Prometheus sees. Observed on the event loop from step statistics and outputs; gauges are read from
the backend's state when scraped, never kept by increments.

No function here raises into its caller: metrics code can never end a stream. Names are in `metrics_table.py`;
the registry is the object's own.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import ParamSpec

from prometheus_client import CollectorRegistry, Metric, generate_latest

from core.outputs import RequestTimings, StepStats
from server.backends.base import Backend, Residence, ServedModel
from server.metrics_exposition import (
    Labels,
    constant_gauges,
    counter_family,
    gauge,
    histogram_family,
    residence_gauges,
    state_gauges,
)
from server.metrics_table import (
    ALIASES,
    COUNTERS,
    HISTOGRAMS,
    HTTP_COUNTERS,
    HTTP_HISTOGRAMS,
    KNOWN_LABELS,
    LENGTHS,
    Counter,
    Histogram,
    bounds_of,
)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_log = logging.getLogger("noria.metrics")
_P = ParamSpec("_P")

# Totals that an engine counts from 0 when it is loaded.
_FOLLOWED = {
    "vllm:num_preemptions": "total_preemptions",
    "noria:recomputed_tokens": "total_recomputed_tokens",
    "vllm:prefix_cache_queries": "total_prefix_queries",
    "vllm:prefix_cache_hits": "total_prefix_hits",
    "vllm:spec_decode_num_drafts": "total_drafts",
    "vllm:spec_decode_num_draft_tokens": "total_draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "total_accepted_tokens",
}
_PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"
# Causes of an error output that mean: never ran.
_REFUSALS = {"queue_timeout": "queue_timeout", "refused": "too_long"}


def _never_raises(function: Callable[_P, None]) -> Callable[_P, None]:
    """Logs instead of raising; logs the traceback once per function, so that a fault per token cannot flood."""
    has_failed = False

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> None:
        nonlocal has_failed
        try:
            function(*args, **kwargs)
        except Exception:
            if not has_failed:
                has_failed = True
                _log.exception("a metric could not be observed; this is logged once")

    return guarded


class Metrics:
    """All counters and histograms of one process, and the collector that shows them.

    `watch(backend)` gives it the state that gauges are read from; before that gauges are absent. `engine` is a label.
    """

    def __init__(self, model_name: str, version: str = "", engine: str = "0") -> None:
        self.engine = engine
        self._beside: list[Metrics] = []
        self.model_name = model_name
        self.version = version
        self.registry = CollectorRegistry(auto_describe=False)
        self.streams_open = 0
        self.loop_lag_s = 0.0
        self.startup_s: dict[str, float] = {}
        self.info: dict[str, str] = {}
        self.residence: Callable[[], Residence] | None = None  # with several models only
        self._backend: Backend | None = None
        self._model: ServedModel | None = None
        self._counters: dict[str, dict[Labels, Counter]] = {}
        self._histograms: dict[str, dict[Labels, Histogram]] = {}
        for name, (_, labels) in {**COUNTERS, **HTTP_COUNTERS}.items():
            self._counters[name] = {} if labels else {(): Counter()}
        for name, (_, labels, _buckets) in {**HISTOGRAMS, **HTTP_HISTOGRAMS}.items():
            self._histograms[name] = {}
            if not labels:
                self.histogram(name)
        for name, values in KNOWN_LABELS.items():
            for value in values.split():
                (self.counter if name in COUNTERS else self.histogram)(name, value)
        self._hold_hot_ones()
        self.registry.register(self)

    def _hold_hot_ones(self) -> None:
        """Direct references for what is observed per token or per step: no lookups there."""
        self._inter_token = self.histogram("vllm:inter_token_latency_seconds")
        self._generation_tokens = self.counter("vllm:generation_tokens")
        self._step_tokens = self.histogram("vllm:iteration_tokens_total")
        self._step_rows = self.histogram("noria:step_sequences")

    def counter(self, name: str, *labels: str) -> Counter:
        children = self._counters[name]
        if labels not in children:
            children[labels] = Counter()
        return children[labels]

    def histogram(self, name: str, *labels: str) -> Histogram:
        children = self._histograms[name]
        if labels not in children:
            buckets = (HISTOGRAMS.get(name) or HTTP_HISTOGRAMS[name])[2]
            max_context = self._model.max_model_len if self._model else 131072
            children[labels] = Histogram(bounds_of(buckets, max_context))
        return children[labels]

    def beside(self, engine: str, model_name: str | None = None) -> Metrics:
        """Metrics of another engine in this process, shown in the same families under its own labels."""
        other = Metrics(model_name or self.model_name, self.version, engine)
        self._beside.append(other)
        return other

    def watch(self, backend: Backend | None) -> None:
        """None: the model is not loaded, and has no state to show."""
        self._backend = backend
        for name in (*_FOLLOWED, _PER_POSITION):
            for counter in self._counters[name].values():
                counter.rebase()

    def set_model(self, model: ServedModel) -> None:
        """The model is loaded: its name becomes the label, its context the end of the length buckets."""
        is_known = self._model is not None  # one that is loaded again goes on counting
        self.model_name, self._model = model.name, model
        if is_known:
            return
        for name, (_, _labels, buckets) in HISTOGRAMS.items():
            if buckets == LENGTHS:
                self._histograms[name] = {}
                self.histogram(name)

    # --- observations, all on the event loop ---

    @_never_raises
    def observe_step(self, stats: StepStats, num_new_tokens: int, delivered_s: float) -> None:
        """Once per hand-over of the step thread. `delivered_s`: when the step thread let go of it (monotonic)."""
        self.loop_lag_s = max(self.loop_lag_s, time.monotonic() - delivered_s)
        self._generation_tokens.add(num_new_tokens)
        follow = self.counter
        for name, total in _FOLLOWED.items():
            follow(name).raise_to(getattr(stats, total))
        for position, count in enumerate(stats.total_accepted_per_position):
            follow(_PER_POSITION, str(position)).raise_to(count)
        if stats.step_kind == "idle":
            return
        self.histogram("noria:step_duration_seconds", stats.step_kind).observe(stats.duration_s)
        self._step_tokens.observe(stats.num_prefill_tokens + stats.num_decode_tokens)
        self._step_rows.observe(stats.num_sequences)
        for part, seconds in stats.parts_s.items():
            follow("noria:step_part_seconds", part).add(seconds)

    @_never_raises
    def observe_gaps(self, gaps: Mapping[float, int], now_s: float) -> None:
        """New tokens of one step: how many follow a token of which moment."""
        for previous_s, number in gaps.items():
            self._inter_token.observe(now_s - previous_s, number)

    @_never_raises
    def observe_first_token(self, since_arrival_s: float, num_prompt: int, num_cached: int) -> None:
        """The prefill of a sequence is complete."""
        self.histogram("vllm:time_to_first_token_seconds").observe(since_arrival_s)
        num_cached = min(num_cached, num_prompt)
        self.counter("vllm:prompt_tokens").add(num_prompt)
        self.counter("vllm:prompt_tokens_cached").add(num_cached)
        self.counter("vllm:prompt_tokens_by_source", "cached").add(num_cached)
        self.counter("vllm:prompt_tokens_by_source", "computed").add(num_prompt - num_cached)
        self.histogram("vllm:request_prompt_tokens").observe(num_prompt)
        self.histogram("vllm:request_prefill_kv_computed_tokens").observe(num_prompt - num_cached)

    @_never_raises
    def observe_end(
        self,
        reason: str,
        cause: str | None,
        num_tokens: int,
        since_arrival_s: float,
        timings: RequestTimings | None,
    ) -> None:
        """A sequence has ended. `cause`: the label of `noria:failures_total`, None after a full answer."""
        self.counter("vllm:request_success", reason).add()
        if cause is not None:
            if cause in _REFUSALS:
                self.observe_rejection(_REFUSALS[cause])
            else:
                self.counter("noria:failures", cause).add()
            if cause == "non_finite":
                self.counter("vllm:corrupted_requests").add()
        if num_tokens == 0:
            return
        self.histogram("vllm:request_generation_tokens").observe(num_tokens)
        self.histogram("vllm:e2e_request_latency_seconds").observe(since_arrival_s)
        if timings is None or not timings.first_token_s:
            return
        decode_s = timings.last_token_s - timings.first_token_s
        for name, seconds in (
            ("queue", timings.scheduled_s - timings.queued_s),
            ("prefill", timings.first_token_s - timings.scheduled_s),
            ("decode", decode_s),
            ("inference", timings.last_token_s - timings.scheduled_s),
        ):
            self.histogram(f"vllm:request_{name}_time_seconds").observe(seconds)
        if num_tokens > 1:
            per_token_s = decode_s / (num_tokens - 1)
            self.histogram("vllm:request_time_per_output_token_seconds").observe(per_token_s)

    @_never_raises
    def observe_submit(self, max_tokens: Iterable[int], num_choices: int) -> None:
        for limit in max_tokens:
            self.histogram("vllm:request_params_max_tokens").observe(limit)
        self.histogram("vllm:request_params_n").observe(num_choices)

    @_never_raises
    def observe_longest_choice(self, num_tokens: int) -> None:
        self.histogram("vllm:request_max_num_generation_tokens").observe(num_tokens)

    @_never_raises
    def observe_rejection(self, reason: str, amount: int = 1) -> None:
        """`reason` as in `noria:rejections_total`; `amount` in sequences."""
        self.counter("noria:rejections", reason).add(amount)
        self.counter("vllm:admission_rejections", reason).add(amount)

    @_never_raises
    def observe_failure(self, cause: str) -> None:
        """A failure outside the step thread, such as `template`."""
        self.counter("noria:failures", cause).add()

    @_never_raises
    def observe_saved(self, num_tokens: int) -> None:
        self.counter("noria:aborted_tokens_saved").add(num_tokens)

    @_never_raises
    def observe_executor(self, work: str, seconds: float) -> None:
        """`work`: `template` or `tokenize`."""
        self.histogram("noria:executor_seconds", work).observe(seconds)

    @_never_raises
    def observe_merge(self, num_outputs: int) -> None:
        self.counter("noria:slow_reader_merges").add(num_outputs)

    @_never_raises
    def observe_load(self, result: str) -> None:
        """`result`: `loaded` or `failed`."""
        self.counter("noria:model_loads", result).add()

    @_never_raises
    def observe_unload(self, reason: str) -> None:
        """`reason`: `pressure`, `idle`, `asked` or `failed`."""
        self.counter("noria:model_unloads", reason).add()

    @_never_raises
    def observe_cut(self) -> None:
        self.counter("noria:slow_reader_cuts").add()

    @_never_raises
    def observe_http(
        self, handler: str, method: str, status: int, seconds: float, received: int, sent: int
    ) -> None:
        self.counter("http_requests", handler, method, str(status)).add()
        self.histogram("http_request_duration_seconds", handler, method).observe(seconds)
        self.histogram("http_request_size_bytes", handler).observe(received)
        self.histogram("http_response_size_bytes", handler).observe(sent)

    def total(self, name: str, *labels: str) -> float:
        """The value of one counter, for log lines."""
        return self.counter(name, *labels).value

    def sum_of(self, name: str) -> float:
        """The sum of a counter over its labels, for log lines."""
        return sum(child.value for child in self._counters[name].values())

    def of_all_models(self) -> list[Metrics]:
        """Its own and those of the models beside it; another kind of engine does not count."""
        return [self, *(each for each in self._beside if each.engine == self.engine)]

    # --- exposition ---

    def render(self) -> bytes:
        """The Prometheus text."""
        return generate_latest(self.registry)

    def collect(self) -> Iterator[Metric]:
        """Called by the registry on every scrape."""
        families = {family.name: family for family in self._families()}
        for other in self._beside:
            for family in other._families():
                known = families.setdefault(family.name, family)
                if known is not family:
                    known.samples.extend(family.samples)
        yield from families.values()

    def _families(self) -> Iterator[Metric]:
        base = {"model_name": self.model_name, "engine": self.engine}
        for table, common in ((COUNTERS, base), (HTTP_COUNTERS, {})):
            for name, (text, labels) in table.items():
                yield counter_family(name, text, common, labels, self._counters[name])
        for histograms, common in ((HISTOGRAMS, base), (HTTP_HISTOGRAMS, {})):
            for name, (text, labels, _) in histograms.items():
                yield histogram_family(name, text, common, labels, self._histograms[name])
        for alias, name in ALIASES.items():
            text, labels, _ = HISTOGRAMS[name]
            yield histogram_family(alias, text, base, labels, self._histograms[name])
        yield from self._gauges(base)

    def _gauges(self, base: Mapping[str, str]) -> Iterator[Metric]:
        yield gauge("noria:streams_open", "Open streams", base, self.streams_open)
        lag_s, self.loop_lag_s = self.loop_lag_s, 0.0
        text = "Longest wait of the step thread's outputs for the event loop since the last scrape"
        yield gauge("noria:event_loop_lag_seconds", text, base, lag_s)
        if self.startup_s:
            text = "Seconds per phase of the start"
            yield gauge("noria:startup_seconds", text, base, self.startup_s, "phase")
        if self.residence is not None:
            yield from residence_gauges(self.residence(), base)
        if self._backend is None:
            return
        age_s = self._backend.status().heartbeat_age_s
        if age_s is not None:
            text = "Age of the step thread's last sign of life"
            yield gauge("noria:heartbeat_age_seconds", text, base, age_s)
        yield from state_gauges(self._backend.stats(), base)
        if self._model is not None:
            info = {"version": self.version, **self.info}
            yield from constant_gauges(self._model, base, info)
