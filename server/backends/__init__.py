"""How a request becomes a stream of outputs: which backend serves what."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from core.errors import ConfigError
from server.backends import vllm_install

if TYPE_CHECKING:
    from server.backends.base import Backend
    from server.config import ServerConfig
    from server.metrics import Metrics


def make_backend(config: ServerConfig, metrics: Metrics) -> Backend:
    """The backend behind all routes. Raises `ConfigError` where it is vLLM and that is not installed."""
    if config.engine.backend == "vllm":
        if not vllm_install.is_installed():
            raise ConfigError(
                f"engine.backend is vllm, but vLLM is not installed: {vllm_install.install_command()}"
            )
        return _make_vllm(config, metrics)
    from server.backends.loading import loading_steps, make_load
    from server.backends.native import NativeBackend

    if config.models:
        from server.models.pool import ModelPool

        return ModelPool(config, metrics, loading_steps())
    return NativeBackend(config.engine, make_load(config), metrics, config.log.stats_interval_s)


def make_beside(config: ServerConfig, metrics: Metrics) -> Backend | None:
    """The vLLM engine behind `/generate_vllm`, beside the native one; None unless it is enabled and installed.

    Its figures stand beside the others', as those of engine 1.
    """
    is_wanted = config.vllm.enabled and config.engine.backend == "native"
    if not is_wanted or not vllm_install.is_installed():
        return None
    if config.models:
        config = msgspec.structs.replace(config, model=config.models[0])
    return _make_vllm(config, metrics.beside("1"), announces=True)


def _make_vllm(config: ServerConfig, metrics: Metrics, *, announces: bool = False) -> Backend:
    from server.backends.vllm import VllmBackend
    from server.backends.vllm_engine import StepCounter
    from server.backends.vllm_start import make_start

    counter = StepCounter()
    start = make_start(config, counter)
    return VllmBackend(
        config.engine,
        start,
        counter,
        metrics,
        config.log.stats_interval_s,
        announces=announces,
    )
