"""Every setting of the server, and how the effect of defaults, file, environment and flags is computed."""

from __future__ import annotations

from typing import Literal

import msgspec

from core.config import EngineConfig, KVCacheConfig, ModelConfig


class VllmConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The engine behind `/generate_vllm`."""

    enabled: bool = False


class HttpConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Section `server`: the listener, keys, limits."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
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
    """The whole configuration, one attribute per section of `config.yaml`."""

    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    kv_cache: KVCacheConfig = KVCacheConfig()
    vllm: VllmConfig = VllmConfig()
    server: HttpConfig = HttpConfig()
    sse: SseConfig = SseConfig()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
