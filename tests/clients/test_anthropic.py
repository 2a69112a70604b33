"""The real `anthropic` package against the real server with the default model."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "anthropic_client.py"


@pytest.mark.clients
def test_the_anthropic_client_finds_all_it_expects(
    python_with: Callable[[str], str], model_server: str
) -> None:
    command = [python_with("anthropic"), str(SCRIPT), model_server]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("anthropic ")
