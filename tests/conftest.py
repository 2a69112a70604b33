"""Fixtures for every room: quiet and small thread pools, the real default model, tiny random models of any family."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Before anything imports torch or the hub client: two cores, many tests, and no network but the one pip download.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--kernels",
        choices=["auto", "torch"],
        default="auto",
        help="what engine.kernels: auto means in every model that a test loads",
    )
    parser.addoption(
        "--write-client-table",
        action="store_true",
        help="write what became of the tests of clients into the table of server/README.md",
    )


@pytest.fixture(scope="session", autouse=True)
def _kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.config.getoption("--kernels") == "auto":
        yield
        return
    from core.model import loader

    def choose(device: Any, setting: str = "auto") -> Any:
        return choose_kernels(device, "torch" if setting == "auto" else setting)

    choose_kernels = loader.choose_kernels
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "choose_kernels", choose)
        yield


@pytest.fixture(scope="session")
def default_model_folder() -> Path:
    """The built-in model, fetched once per machine into the user's cache. Missing weights fail, they do not skip."""
    from core.config import ModelConfig
    from core.model.source import resolve

    return resolve(ModelConfig(), lambda message, fraction: None).folder


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """`tiny_model("gemma2")`: the folder of a tiny random model with a tiny tokenizer; built once per session."""
    import families

    built: dict[str, Path] = {}

    def build(family: str, **changes: object) -> Path:
        key = f"{family} {sorted(changes.items())}"
        if key not in built:
            built[key] = families.build(family, tmp_path_factory.mktemp(family), **changes)
        return built[key]

    return build
