"""Every setting of the server, and how the effect of defaults, file, environment and flags is computed."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import orjson

from core.config import EngineConfig, KVCacheConfig, ModelConfig, SpeculativeConfig
from core.errors import ConfigError
from server.config_file import first_key, parse_yaml, read_text
from server.config_models import ModelEntry, read_entries
from server.config_rules import RULES

ENVIRONMENT_PREFIX = "NORIA__"


class VllmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The vLLM engine: behind `/generate_vllm` (`enabled`), or behind everything (`engine.backend: vllm`).

    `model` None means `model.name`. `engine_args` go to vLLM's `AsyncEngineArgs` as they are and win over what Noria
    derives from its own settings.
    """

    enabled: bool = False
    model: str | None = None
    engine_args: dict[str, Any] = {}


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `server`: the listener, keys, limits."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    admin_key: str | None = None
    key_in_query: bool = False
    model_aliases: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ("*",)
    max_body_bytes: int = 33554432
    early_headers_s: float = 5.0
    template_timeout_s: float = 10.0
    slow_reader_kib: int = 256
    slow_reader_timeout_s: float = 60.0
    shutdown_timeout_s: float = 30.0


class SseConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `sse`."""

    keepalive_s: float = 0.0


class MetricsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `metrics`."""

    open: bool = True


class LogConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `log`."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["text", "json"] = "text"
    stats_interval_s: float = 10.0


class ServerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole configuration, one attribute per section of `config.yaml`, and the keys that stand alone.

    `models`, if not empty, replaces `model`. `models_memory_mib` bounds what loaded models take together; one that
    nobody has used for `keep_alive_s` is unloaded (0: only to make room). Loading takes at most `models_load_share` of
    the time while another model has work. `price_per_hour` is the machine's.
    """

    models: tuple[ModelEntry, ...] = ()
    models_memory_mib: int | Literal["auto"] = "auto"
    models_load_share: float = 0.1
    keep_alive_s: float = 0.0
    price_per_hour: float | None = None
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    vllm: VllmConfig = VllmConfig()
    server: HttpConfig = HttpConfig()
    sse: SseConfig = SseConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()


SECTIONS: dict[str, Any] = {
    "model": ModelConfig,
    "engine": EngineConfig,
    "kv_cache": KVCacheConfig,
    "speculative": SpeculativeConfig,
    "vllm": VllmConfig,
    "server": HttpConfig,
    "sse": SseConfig,
    "metrics": MetricsConfig,
    "log": LogConfig,
}

_OF_SEVERAL = (
    "models_memory_mib",
    "models_load_share",
    "keep_alive_s",
)  # mean nothing without `models`
STANDALONE = ("models", *_OF_SEVERAL, "price_per_hour")


@dataclass(frozen=True, slots=True)
class Override:
    """One value given on the command line: `source` is the flag, as `--port`."""

    source: str
    key: str
    value: object


def load_config(
    path: str | None,
    environment: Mapping[str, str],
    overrides: Sequence[str | Override] = (),
    *,
    default_path: str = "config.yaml",
) -> tuple[ServerConfig, dict[str, str]]:
    """The effective configuration, and for each dotted key where its value came from.

    Precedence: defaults, then the file `path` (else `default_path` if it exists and its first key is one of our
    sections), then `NORIA__SECTION__KEY`, then `overrides`: strings `section.key=value` (value in YAML) and flags.
    Raises `ConfigError`, one line that names the key and what it accepts.
    """
    values: dict[str, object] = {}
    sources: dict[str, str] = {}
    for key, value, source in _layers(path, environment, overrides, default_path):
        _check(key, value, source)
        values[key] = tuple(value) if isinstance(value, list) else value
        sources[key] = source
    config = build_config(values)
    return config, {key: sources.get(key, "default") for key in keys()}


def build_config(values: Mapping[str, object] = MappingProxyType({})) -> ServerConfig:
    """A configuration from dotted keys, everything else at its default. Raises `ConfigError`."""
    by_section: dict[str, dict[str, object]] = {section: {} for section in SECTIONS}
    alone: dict[str, Any] = {}
    for key, value in values.items():
        _check(key, value, "configuration")
        section, _, name = key.partition(".")
        if key in STANDALONE:
            alone[key] = read_entries(value) if key == "models" else value
        else:
            by_section[section][name] = tuple(value) if isinstance(value, list) else value
    parts = {name: struct(**by_section[name]) for name, struct in SECTIONS.items()}
    config = ServerConfig(**parts, **alone)
    _check_together(config)
    return config


def _check_together(config: ServerConfig) -> None:
    if not config.engine.prefix_caching:
        if config.kv_cache.snapshot_file is not None:
            raise ConfigError(
                "kv_cache.snapshot_file needs engine.prefix_caching: true; else there is nothing to write."
            )
        if config.engine.order == "longest_prefix":
            raise ConfigError("engine.order: longest_prefix needs engine.prefix_caching: true.")
    if config.speculative.method == "draft" and config.speculative.draft_model is None:
        raise ConfigError(
            "speculative.method: draft needs speculative.draft_model, such as self:int4."
        )
    if not config.models:
        return
    if config.model != ModelConfig():
        raise ConfigError("models replaces model; set the keys of model in the entries of models.")
    if config.engine.backend != "native":
        raise ConfigError("models needs engine.backend: native; vLLM serves one model.")


def idle_settings(config: ServerConfig) -> list[str]:
    """A sentence for each setting that was changed and does nothing beside the others."""
    speculative, default = config.speculative, ServerConfig()
    told: list[str] = []
    if speculative.draft_model is not None and speculative.method != "draft":
        told.append(
            f"speculative.draft_model does nothing: speculative.method is {speculative.method}, not draft"
        )
    if config.models:
        return told
    changed = [key for key in _OF_SEVERAL if getattr(config, key) != getattr(default, key)]
    return told + [
        f"{key} does nothing: it is for several models, and models is empty" for key in changed
    ]


def keys() -> list[str]:
    """Every dotted key, in the order of the structs."""
    in_sections = [
        f"{name}.{key}" for name, struct in SECTIONS.items() for key in struct.__struct_fields__
    ]
    return [*STANDALONE, *in_sections]


def value_of(config: ServerConfig, key: str) -> object:
    section, _, name = key.partition(".")
    value = getattr(config, section)
    return getattr(value, name) if name else value


def describe(config: ServerConfig, sources: Mapping[str, str]) -> str:
    """The effective configuration as YAML, each line with its source as a comment. Keys of the API stay hidden."""
    lines: list[str] = []
    for key in STANDALONE:
        shown = orjson.dumps(msgspec.to_builtins(value_of(config, key))).decode()
        lines.append(f"{key}: {shown}  # {sources.get(key, 'default')}")
    for section, struct in SECTIONS.items():
        lines.append(f"{section}:")
        for name in struct.__struct_fields__:
            key = f"{section}.{name}"
            value = value_of(config, key)
            if key == "server.api_keys" and value:
                value = ["***"] * len(config.server.api_keys)
            if key == "server.admin_key" and value:
                value = "***"
            shown = orjson.dumps(value).decode()
            lines.append(f"  {name}: {shown}  # {sources.get(key, 'default')}")
    return "\n".join(lines)


def _layers(
    path: str | None,
    environment: Mapping[str, str],
    overrides: Sequence[str | Override],
    default_path: str,
) -> Iterator[tuple[str, object, str]]:
    """(key, value, source), weakest first."""
    if path is not None:
        yield from _of_file(read_text(path), path)
    elif os.path.isfile(default_path):
        text = read_text(default_path)
        if first_key(text) in {*SECTIONS, *STANDALONE}:
            yield from _of_file(text, default_path)
    for name in sorted(environment):
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("__", ".")
            yield key, parse_yaml(environment[name], name), name
    for override in overrides:
        if isinstance(override, Override):
            yield override.key, override.value, override.source
            continue
        key, equals, text = override.partition("=")
        if not equals:
            raise ConfigError(f"--set takes section.key=value, not {bounded(override)}.")
        yield key.strip(), parse_yaml(text, f"--set {key.strip()}"), "--set"


def _of_file(text: str, path: str) -> Iterator[tuple[str, object, str]]:
    tree = parse_yaml(text, path)
    if tree is None:
        return
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} must hold sections: {', '.join(SECTIONS)}.")
    for section, entries in tree.items():
        if section in STANDALONE:
            yield section, entries, path
            continue
        if section not in SECTIONS:
            raise _unknown(str(section), path)
        if entries is None:  # a section whose keys are all commented out
            continue
        if not isinstance(entries, dict):
            raise ConfigError(f"{path}: {section} must hold keys, such as {_keys_of(section)}.")
        for name, value in entries.items():
            yield f"{section}.{name}", value, path


def _check(key: str, value: object, source: str) -> None:
    rule = RULES.get(key)
    if rule is None:
        raise _unknown(key, source)
    if not rule.accepts(value):
        shown = "a value" if key in ("server.api_keys", "server.admin_key") else bounded(value)
        raise ConfigError(f"{key} must be {rule.words}, not {shown} (from {source}).")


def _unknown(key: str, source: str) -> ConfigError:
    section, _, name = key.partition(".")
    # Only the part that is wrong is compared: a known section would make all its keys look near.
    if section in SECTIONS:
        near = difflib.get_close_matches(name, SECTIONS[section].__struct_fields__, n=1)
        close = [f"{section}.{found}" for found in near]
    else:
        close = difflib.get_close_matches(key, [*keys(), *SECTIONS], n=1)
    if close:
        hint = f"did you mean {close[0]}?"
    elif section in SECTIONS:
        hint = f"{section} has: {_keys_of(section)}."
    else:
        hint = (
            f"sections are: {', '.join(SECTIONS)}; keys outside of them: {', '.join(STANDALONE)}."
        )
    return ConfigError(f"{bounded(key)} is not a setting (from {source}); {hint}")


def _keys_of(section: str) -> str:
    return ", ".join(SECTIONS[section].__struct_fields__)


def bounded(value: object) -> str:
    """A value as it may stand in a one-line message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
