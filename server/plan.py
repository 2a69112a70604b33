"""The lines of `--plan`: what the configured models would take, from their files' heads; no weight is loaded."""

from __future__ import annotations

import sys

from core.config import MIB
from core.errors import ConfigError, ModelRefused
from server.config import ServerConfig, idle_settings
from server.config_models import in_terms_of_entries, public_name
from server.models.residents import budget_of

REQUESTS_BYTES = (
    64 * MIB
)  # measured: half of it, with 32 streams of a thousand tokens; a body of MiBs takes its own


def plan_lines(config: ServerConfig) -> list[str]:
    """Each model's memory sum; of several also whether they fit together. Imports torch, and may fetch a model's files.

    Raises `ModelRefused` and `ConfigError`, as loading would."""
    from core.model.device import available_bytes, choose_device, resident_bytes
    from core.model.preview import plan_only

    settings, device = (config.engine, config.kv_cache), choose_device(config.engine)
    on_cpu = device.type == "cpu"
    warnings = [f"warning: {sentence}" for sentence in idle_settings(config)]
    if not config.models:
        lines, total = plan_only(config.model, *settings, _report, speculative=config.speculative)
        return lines + process_line(total, on_cpu, resident_bytes()) + warnings
    budget = budget_of(config.models_memory_mib, available_bytes(device))
    lines, taken = [], {}
    for place, entry in enumerate(config.models):
        name = public_name(entry)
        try:
            told, taken[name] = plan_only(entry, *settings, _report, budget, config.speculative)
        except (ConfigError, ModelRefused) as error:
            said = in_terms_of_entries(error.message, place)
            raise type(error)(f"{name} (models[{place}]): {said}") from None
        lines += [f"{name}{' (pinned)' if entry.pinned else ''}:", *(f"  {line}" for line in told)]
    each = ", ".join(f"{name} {size / MIB:,.0f}" for name, size in taken.items())
    together = sum(taken.values())
    fit = "all fit" if together <= budget else "they take turns"
    lines.append(
        f"models: {each}; together {together / MIB:,.0f} of {budget / MIB:,.0f} MiB: {fit}"
    )
    lines += process_line(min(budget, together), on_cpu, resident_bytes())
    pinned = {public_name(entry) for entry in config.models if entry.pinned}
    for name in taken:
        if sum(taken[each] for each in pinned | {name}) > budget:
            lines.append(
                f"warning: {name} does not fit beside what is pinned, and cannot be loaded"
            )
    return lines + warnings


def process_line(planned_bytes: int, on_cpu: bool, resident: int | None) -> list[str]:
    """What the process takes beside the models, and all of it together. `resident`: what this one holds now, which has
    loaded what a server loads, tokenizers included, but no weight."""
    if resident is None:
        return []
    line = (
        f"process: {resident / MIB:,.0f} MiB of Python, torch and tokenizers, and {REQUESTS_BYTES / MIB:,.0f} MiB for "
        "requests"
    )
    if on_cpu:
        together = planned_bytes + resident + REQUESTS_BYTES
        line += f"; with the above {together / MIB:,.0f} MiB once every KV block has been used"
    return [line]


def _report(message: str, progress: float | None = None) -> None:
    if progress is None:
        print(message, file=sys.stderr)
