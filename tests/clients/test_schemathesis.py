"""`schemathesis` against `/openapi.json`: thousands of requests made of it, right and wrong ones.

No answer is a 500, has a status, type or shape that the document does not tell, or takes what it forbids. The dummy
model answers, so that the time goes into requests.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIN_CASES = 2000
CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "negative_data_rejection",
)
NOT_TRIED = (
    "/generate_vllm",  # 501 without vLLM, as documented
    "/stats/stream",  # never ends
)


@pytest.fixture
def dummy_server() -> Iterator[str]:
    command = [
        sys.executable,
        str(ROOT / "tests/server/serve_dummy.py"),
        "0",
        "--set",
        "log.level=error",
    ]
    process = subprocess.Popen(
        [*command, "--set", 'server.model_aliases=["*"]'],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://[0-9.:]+", process.stdout.readline())
        assert found
        yield found[0]
    finally:
        process.terminate()
        process.wait(30)
        if process.stdout is not None:
            process.stdout.close()


@pytest.mark.clients
def test_two_thousand_made_up_requests_get_what_the_document_says(
    python_with: Callable[[str], str], dummy_server: str, tmp_path: Path
) -> None:
    tool = Path(python_with("schemathesis")).parent / "schemathesis"
    command = [str(tool), "run", f"{dummy_server}/openapi.json", "--checks", ",".join(CHECKS)]
    command += [part for path in NOT_TRIED for part in ("--exclude-path", path)]
    command += ["--phases", "examples,coverage,fuzzing", "--max-examples", "10", "--seed", "1"]
    command += ["--continue-on-failure", "--request-timeout", "30", "--no-color"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:]
    counted = re.search(r"(\d+) generated, (\d+) passed", done.stdout)
    assert counted, done.stdout[-2000:]
    assert counted[1] == counted[2]
    assert int(counted[1]) >= MIN_CASES
