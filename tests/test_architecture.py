"""The rules of the architecture, checked on the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MAX_FILE_LINES = 350
MAX_FUNCTION_LINES = 60


def modules(*folders: str) -> list[Path]:
    found = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    assert found
    return found


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """(module, name) of every import in the file, those inside functions included; name is '' for plain imports."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from ((node.module or "", alias.name) for alias in node.names)


def roots(path: Path) -> set[str]:
    return {module.partition(".")[0] for module, _ in imports(path)}


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


EVERYTHING = modules("core", "server", "loadtest")


@pytest.mark.parametrize("path", modules("core"), ids=named)
def test_core_is_synchronous_and_knows_no_server(path: Path) -> None:
    assert not roots(path) & {"asyncio", "aiohttp", "uvloop", "server", "loadtest"}


@pytest.mark.parametrize("path", modules("core", "server"), ids=named)
def test_torch_and_transformers_are_imported_below_core_model_only(path: Path) -> None:
    if not path.is_relative_to(ROOT / "core" / "model"):
        assert not roots(path) & {"torch", "transformers", "tokenizers", "safetensors", "gguf"}


@pytest.mark.parametrize("path", modules("core/model"), ids=named)
def test_of_scheduling_the_model_side_knows_the_batch_only(path: Path) -> None:
    private = {"engine", "step_loop", "update", "block_pool", "prefixes.cache", "waiting_queue"}
    for module, name in imports(path):
        assert module.removeprefix("core.") not in private, module
        if module == "core.scheduler":
            assert name == "Batch"


SCHEDULING = [*sorted((ROOT / "core").glob("*.py")), *modules("core/prefixes", "core/speculation")]


@pytest.mark.parametrize("path", SCHEDULING, ids=named)
def test_scheduling_does_not_know_the_model_side(path: Path) -> None:
    used = {module for module, _ in imports(path) if module.startswith("core.model")}
    assert used <= ({"core.model.loader"} if path.name == "engine.py" else set())


@pytest.mark.parametrize("path", modules("server/protocol"), ids=named)
def test_protocol_knows_no_http_library(path: Path) -> None:
    assert not roots(path) & {"aiohttp", "asyncio"}


@pytest.mark.parametrize("path", EVERYTHING, ids=named)
def test_files_and_functions_stay_small(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MAX_FILE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1
            assert length <= MAX_FUNCTION_LINES, f"{node.name} has {length} lines"


@pytest.mark.parametrize("path", EVERYTHING, ids=named)
def test_every_module_says_what_it_is_for(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not text.strip() or ast.get_docstring(ast.parse(text))


def test_no_module_is_a_drawer_for_everything() -> None:
    names = {path.name for path in EVERYTHING}
    assert not names & {"utils.py", "util.py", "helpers.py", "common.py", "misc.py"}


def test_the_two_worlds_meet_in_one_file() -> None:
    calls = [
        named(path)
        for path in modules("server")
        if "run_coroutine_threadsafe(" in path.read_text(encoding="utf-8")
    ]
    assert set(calls) <= {"server/backends/native.py"}
