"""`make_speculator`: who drafts, as `speculative` says; `describe_drafts`: the same in words, for the start log."""

from __future__ import annotations

from core.config import SpeculativeConfig
from core.interfaces import Runner
from core.scheduler import Scheduler
from core.speculation.draft_speculator import DraftSpeculator
from core.speculation.speculator import Speculator


def make_speculator(
    config: SpeculativeConfig,
    batch_size: int,
    scheduler: Scheduler,
    max_model_len: int,
    runner: Runner,
) -> Speculator | None:
    """None where drafts are off, where they could change a token, and where nobody can make them."""
    if why_no_drafts(config, runner) is not None:
        return None
    common = (config.max_tokens, batch_size, scheduler, max_model_len, runner.shape)
    if config.method == "draft":
        assert runner.drafter is not None
        return DraftSpeculator(runner.drafter, *common)
    return Speculator(*common)


def why_no_drafts(config: SpeculativeConfig, runner: Runner) -> str | None:
    if config.method == "off":
        return "speculative.method: off"
    if not runner.has_fixed_bits:
        return "a row's bits depend on its batch without the C kernels, and drafts must change no token"
    if config.method == "draft" and runner.drafter is None:
        return "there is no draft model"
    return None


def describe_drafts(config: SpeculativeConfig, runner: Runner) -> str:
    """One line."""
    if (reason := why_no_drafts(config, runner)) is not None:
        return f"drafts: none ({reason})"
    by = "what stands in prompt and output"
    if config.method == "draft" and runner.drafter is not None:
        by = runner.drafter.description
    return f"drafts: up to {config.max_tokens} tokens by {by}, where that pays"
