"""What each key of the configuration accepts: a check, and the words for it. Data; called by `server/config.py` only.

Types are strict: `true` is not 1, `"10"` is not 10, a whole number stands where a fraction is asked. A test compares
the table with the structs, so a new setting without a rule fails.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from core.speculation import self_draft as draft_model

LARGE = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Rule:
    """`accepts(value)` says whether a value may stand under a key; `words` completes "the key must be ..."."""

    accepts: Callable[[object], bool]
    words: str

    def or_word(self, word: str | None) -> Rule:
        """The same rule, which takes one more value: a word such as `auto`, or null."""
        return Rule(
            lambda value: value == word or self.accepts(value),
            f"{self.words}, or {'null' if word is None else word}",
        )


def whole(low: int, high: int = LARGE) -> Rule:
    return Rule(
        lambda value: type(value) is int and low <= value <= high,
        f"an integer from {low} to {high}",
    )


def number(low: float, high: float = 86400 * 365, *, is_low_open: bool = False) -> Rule:
    """A finite number in [low, high], or in (low, high]."""

    def accepts(value: object) -> bool:
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not math.isfinite(value)
        ):
            return False
        return (low < value if is_low_open else low <= value) and value <= high

    span = f"above {low:g} and at most {high:g}" if is_low_open else f"from {low:g} to {high:g}"
    return Rule(accepts, f"a number {span}")


def one_of(*words: str) -> Rule:
    return Rule(
        lambda value: isinstance(value, str) and value in words, "one of " + ", ".join(words)
    )


def switch() -> Rule:
    return Rule(lambda value: isinstance(value, bool), "true or false")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and value.strip() != "" and "\0" not in value


def text() -> Rule:
    return Rule(_is_text, "a non-empty string (in quotes if it looks like a number)")


def texts(what: str = "non-empty strings") -> Rule:
    return Rule(
        lambda value: isinstance(value, list | tuple) and all(map(_is_text, value)),
        f"a list of {what}, such as [a, b]",
    )


def _is_origin(value: object) -> bool:
    return isinstance(value, str) and (
        value in ("*", "null") or re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/?#@]+", value) is not None
    )


def _is_key(value: object) -> bool:
    """A key must survive a header: visible ASCII without blanks."""
    return isinstance(value, str) and re.fullmatch(r"[\x21-\x7e]+", value) is not None


def _is_block_size(value: object) -> bool:
    return type(value) is int and 1 <= value <= 256 and value & (value - 1) == 0


# What Noria itself says to vLLM, and where that is set: the model (vllm.model), its public name.
NORIAS_OWN_ARGS = frozenset({"model", "served_model_name", "tokenizer"})


def _are_engine_args(value: object) -> bool:
    return (
        isinstance(value, dict)
        and all(isinstance(name, str) and name.isidentifier() for name in value)
        and not NORIAS_OWN_ARGS & value.keys()
    )


def _is_draft_model(value: object) -> bool:
    if not isinstance(value, str) or not value.strip():
        return False
    is_self = draft_model.is_self_draft(value)
    return not is_self or draft_model.read_self_draft(value) is not None


SECONDS = number(0)
RULES: dict[str, Rule] = {
    "models": Rule(
        lambda value: isinstance(value, list | tuple),
        "a list of models, such as [{name: owner/model, pinned: true}]",  # config_models.py looks closer
    ),
    "models_memory_mib": whole(1).or_word("auto"),
    "models_load_share": number(0, 1, is_low_open=True),
    "keep_alive_s": SECONDS,
    "price_per_hour": number(0, 1e9).or_word(None),
    "model.name": text(),
    "model.revision": text().or_word(None),
    "model.dtype": one_of("auto", "bfloat16", "float16", "float32"),
    "model.quantization": one_of("none", "int8", "int4"),
    "model.max_model_len": whole(2).or_word("auto"),
    "model.chat_template": text().or_word(None),
    "model.generation_defaults": switch(),
    "model.cache_dir": text(),
    "engine.backend": one_of("native", "vllm"),
    "engine.device": one_of("auto", "cpu", "cuda"),
    "engine.kernels": one_of("auto", "c", "torch"),
    "engine.threads": whole(1, 1024).or_word("auto"),
    "engine.batch_size": whole(1, 4096),
    "engine.max_batched_tokens": whole(1, 1048576),
    "engine.target_step_ms": number(0),
    "engine.policy": one_of("continuous", "static", "single"),
    "engine.order": one_of("fcfs", "longest_prefix"),
    "engine.prefix_caching": switch(),
    "engine.max_waiting": whole(0),
    "engine.max_waiting_tokens": whole(0),
    "engine.queue_timeout_s": SECONDS,
    "engine.watchdog_s": number(0, 86400, is_low_open=True),
    "kv_cache.block_size": Rule(_is_block_size, "a power of two from 1 to 256"),
    "kv_cache.num_blocks": whole(1).or_word("auto"),
    "kv_cache.memory_fraction": number(0, 1, is_low_open=True).or_word("auto"),
    "kv_cache.max_memory_mib": whole(1).or_word("auto"),
    "kv_cache.dtype": one_of("auto", "int8"),
    "kv_cache.snapshot_file": text().or_word(None),
    "kv_cache.snapshot_max_mib": whole(1, 1048576),
    "speculative.method": one_of("off", "lookup", "draft"),
    "speculative.max_tokens": whole(1, 64),
    "speculative.draft_model": Rule(_is_draft_model, draft_model.ACCEPTED).or_word(None),
    "vllm.enabled": switch(),
    "vllm.model": text().or_word(None),
    "vllm.engine_args": Rule(
        _are_engine_args,
        "a mapping of vLLM's engine arguments without "
        + ", ".join(sorted(NORIAS_OWN_ARGS))
        + ", such as {tensor_parallel_size: 2}",
    ),
    "server.host": text(),
    "server.port": whole(0, 65535),
    "server.api_keys": Rule(
        lambda value: isinstance(value, list | tuple) and all(map(_is_key, value)),
        "a list of strings of visible ASCII characters, such as [key-1, key-2]",
    ),
    "server.api_key_file": text().or_word(None),
    "server.admin_key": Rule(_is_key, "a string of visible ASCII characters").or_word(None),
    "server.key_in_query": switch(),
    "server.model_aliases": texts(),
    "server.cors_origins": Rule(
        lambda value: isinstance(value, list | tuple) and all(map(_is_origin, value)),
        "a list of origins, such as ['https://example.org'], or ['*']",
    ),
    "server.max_body_bytes": whole(1024),
    "server.early_headers_s": SECONDS,
    "server.template_timeout_s": number(0, 3600, is_low_open=True),
    "server.slow_reader_kib": whole(1, 1048576),
    "server.slow_reader_timeout_s": number(0, 86400, is_low_open=True),
    "server.shutdown_timeout_s": SECONDS,
    "sse.keepalive_s": SECONDS,
    "metrics.open": switch(),
    "log.level": one_of("debug", "info", "warning", "error"),
    "log.format": one_of("text", "json"),
    "log.stats_interval_s": number(0, 86400, is_low_open=True),
}
