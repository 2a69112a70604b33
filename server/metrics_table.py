"""Names, types and buckets of every metric, and how their state becomes Prometheus families. Data and plain state.

The state is held in plain numbers instead of the client library's metric objects: an observation is then one bisection
(0.3 µs against 2 µs), which matters where it happens for every token on the event loop. Used by `server/metrics.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

# vLLM's bounds and some between them: at most a third apart where small models live, so that an interpolated percentile
# is a few percent off rather than twenty. A superset keeps dashboards right.
_A = (
    ".0005 .001 .002 .003 .005 .0075 .01 .0125 .015 .02 .025 .03 .04 .05 .06 .08 .1 .125 .15 .175 .2 .25 .3 .35 .4"
    " .5 .6 .75 1 1.25 1.5 2 2.5 3 4 5 7.5 10 20 40 80 160 640 2560"
)
_B = (
    ".0005 .001 .002 .003 .004 .005 .006 .007 .008 .009 .01 .011 .0125 .015 .0175 .02 .025 .03 .035 .04 .05 .06 .075"
    " .1 .125 .15 .2 .25 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
)
_C = (
    ".001 .002 .005 .01 .02 .03 .04 .05 .075 .1 .125 .15 .2 .25 .3 .4 .5 .6 .7 .8 1 1.25 1.5 1.75 2 2.5 3 4 5 7.5 10"
    " 15 20 30 40 50 60 120 240 480 960 1920 7680"
)
_STEP = ".0005 .001 .002 .003 .004 .005 .006 .008 .01 .015 .02 .03 .05 .075 .1 .2 .5 1 2.5 5"
_ROWS = "1 2 4 8 16 24 32 48 64 96 128 256"
_STEP_TOKENS = "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"
_BYTES = "100 1000 10000 100000 1000000 10000000 100000000"
LENGTHS = "lengths"  # 1-2-5 decades up to the context length, known once the model is loaded

# name as scraped without a counter's `_total` -> (help, labels)
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "vllm:prompt_tokens": ("Prompt tokens whose prefill is complete, cached ones included", ()),
    "vllm:prompt_tokens_cached": ("Prompt tokens taken from the prefix cache", ()),
    "vllm:prompt_tokens_by_source": ("Prompt tokens, computed or cached", ("source",)),
    "vllm:generation_tokens": ("Generated tokens", ()),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache", ()),
    "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache", ()),
    "vllm:num_preemptions": ("Preemptions", ()),
    "vllm:spec_decode_num_drafts": ("Drafts that were verified", ()),
    "vllm:spec_decode_num_draft_tokens": ("Tokens of drafts that were verified", ()),
    "vllm:spec_decode_num_accepted_tokens": ("Tokens of drafts that were right", ()),
    "vllm:spec_decode_num_accepted_tokens_per_pos": (
        "Tokens of drafts that were right, by their place in the draft",
        ("position",),
    ),
    "vllm:request_success": ("Finished requests, each counted once", ("finished_reason",)),
    "vllm:corrupted_requests": ("Requests that ended with non-finite logits", ()),
    "vllm:admission_rejections": ("Requests refused before running", ("reason",)),
    "noria:rejections": ("Requests refused before running", ("reason",)),
    "noria:failures": (
        "Requests that ended after admission without an answer, by cause",
        ("cause",),
    ),
    "noria:step_part_seconds": ("Where step time goes", ("part",)),
    "noria:aborted_tokens_saved": ("Tokens not computed because the client left", ()),
    "noria:recomputed_tokens": ("Tokens computed again after a preemption", ()),
    "noria:slow_reader_merges": ("Outputs merged for clients that read slowly", ()),
    "noria:slow_reader_cuts": ("Clients cut because they did not read", ()),
    # with several models only
    "noria:model_loads": ("Loads of a model, by how they ended", ("result",)),
    "noria:model_unloads": ("Unloads of a model, by what for", ("reason",)),
}
HTTP_COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "http_requests": ("HTTP requests", ("handler", "method", "status")),
}
# name -> (help, labels, buckets). The same state may show under two names (`ALIASES`).
HISTOGRAMS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token", (), _A),
    "vllm:inter_token_latency_seconds": ("From token to token", (), _B),
    "vllm:request_time_per_output_token_seconds": ("Decode time per token, per request", (), _B),
    "vllm:e2e_request_latency_seconds": ("From arrival to the last token", (), _C),
    "vllm:request_queue_time_seconds": ("Time waiting", (), _C),
    "vllm:request_prefill_time_seconds": ("Time from scheduling to the first token", (), _C),
    "vllm:request_decode_time_seconds": ("Time from the first to the last token", (), _C),
    "vllm:request_inference_time_seconds": ("Time from scheduling to the last token", (), _C),
    "vllm:request_prompt_tokens": ("Prompt tokens per request", (), LENGTHS),
    "vllm:request_generation_tokens": ("Generated tokens per request", (), LENGTHS),
    "vllm:request_max_num_generation_tokens": ("The longest choice of a request", (), LENGTHS),
    "vllm:request_params_max_tokens": ("max_tokens of requests", (), LENGTHS),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens computed per request", (), LENGTHS),
    "vllm:request_params_n": ("Choices per request", (), "1 2 5 10 20"),
    "vllm:iteration_tokens_total": ("Tokens per step", (), _STEP_TOKENS),
    "noria:step_duration_seconds": ("Duration of a whole step", ("kind",), _STEP),
    "noria:step_sequences": ("Sequences per step", (), _ROWS),
    "noria:executor_seconds": ("Work off the event loop", ("work",), _C),
}
ALIASES = {"vllm:time_per_output_token_seconds": "vllm:inter_token_latency_seconds"}
HTTP_HISTOGRAMS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "http_request_duration_seconds": ("Duration of HTTP requests", ("handler", "method"), _C),
    "http_request_size_bytes": ("Size of request bodies", ("handler",), _BYTES),
    "http_response_size_bytes": ("Size of answers", ("handler",), _BYTES),
}


def bounds_of(buckets: str, max_context: int = 4096) -> tuple[float, ...]:
    """The upper bounds of a bucket list, in order."""
    if buckets != LENGTHS:
        return tuple(map(float, buckets.split()))
    bounds: list[float] = []
    step = 1
    while True:
        for factor in (1, 2, 5):
            bounds.append(float(factor * step))
            if factor * step >= max_context:
                return tuple(bounds)
        step *= 10


# Label values that are there from the start at 0, so that the first event already shows in a rate.
KNOWN_LABELS: dict[str, str] = {
    "vllm:prompt_tokens_by_source": "computed cached",
    "vllm:request_success": "stop length abort error",
    "noria:rejections": "queue_full queue_tokens queue_timeout too_long draining loading engine_dead",
    "vllm:admission_rejections": (
        "queue_full queue_tokens queue_timeout too_long draining loading engine_dead"
    ),
    "noria:failures": (
        "step sampling detokenize non_finite template client_gone slow_reader shutdown engine_dead"
    ),
    "vllm:spec_decode_num_accepted_tokens_per_pos": "0",
    "noria:step_part_seconds": "schedule draft run sample update deliver",
    "noria:step_duration_seconds": "prefill decode mixed",
    "noria:executor_seconds": "template tokenize",
}


@dataclass(slots=True)
class Histogram:
    """Counts per bucket; the last one is for values above all bounds."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float, number: int = 1) -> None:
        """`number` observations of the same value."""
        self.counts[bisect_left(self.bounds, value)] += number
        self.total += value * number

    def cumulative(self) -> Sequence[tuple[str, float]]:
        """(upper bound, observations up to it), as the exposition wants it."""
        running, rows = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            rows.append(("+Inf" if bound == float("inf") else repr(bound), float(running)))
        return rows


@dataclass(slots=True)
class Counter:
    """A number that only grows: a negative step is dropped, never raised (metrics may not end a stream)."""

    value: float = 0.0
    base: float = 0.0

    def add(self, amount: float = 1.0) -> None:
        if amount > 0:
            self.value += amount

    def raise_to(self, total: float) -> None:
        """Follows a monotone total kept elsewhere, counted from the last `rebase`."""
        self.value = max(self.value, self.base + total)

    def rebase(self) -> None:
        """The total kept elsewhere begins again at 0, as that of a model that is loaded once more."""
        self.base = self.value
