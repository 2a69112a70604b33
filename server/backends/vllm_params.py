"""Between our words and vLLM's: sampling parameters there, log-probabilities back.

vLLM is imported inside the functions only. Called by `vllm_engine.py`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from typing import Any

from core.outputs import TokenLogprobs
from core.sampling_params import SamplingParams

LOWEST_LOGPROB = -9999.0  # JSON has no infinity


def to_vllm(
    params: SamplingParams, seed: int, choice_index: int, eos_token_ids: Collection[int]
) -> Any:
    """vLLM's parameters for one sequence.

    vLLM chooses tokens and stops at end tokens and at lengths. Text and stop strings are ours (`core/update.py`), so
    that both engines hold back, cut and end a text in the same way: it is not asked to detokenize. The model's end
    tokens are given as stop tokens, so that vLLM stops where Noria does, whatever it reads from the model's files.
    """
    from vllm.sampling_params import RequestOutputKind
    from vllm.sampling_params import SamplingParams as VllmParams

    ends = set(params.stop_token_ids)
    if not params.ignore_eos:
        ends.update(eos_token_ids)
    keeps_best_only = params.top_p == 0
    return VllmParams(
        n=1,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=True,
        stop_token_ids=sorted(ends),
        temperature=params.temperature,
        top_p=1.0 if keeps_best_only else params.top_p,
        top_k=1 if keeps_best_only else max(0, params.top_k),
        min_p=params.min_p,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        seed=_seed_of(params, seed, choice_index),
        logit_bias=dict(params.logit_bias) or None,
        logprobs=params.logprobs,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _seed_of(params: SamplingParams, seed: int, choice_index: int) -> int | None:
    """None where the request gave none: vLLM then draws for the whole batch at once, which is faster.

    Each choice has its own stream of numbers, and not that of a neighbouring seed.
    """
    if params.seed is None or params.is_greedy:
        return None
    if choice_index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}/{choice_index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def to_logprobs(token_id: int, found: Mapping[int, Any], num_top: int) -> TokenLogprobs:
    """One position. vLLM gives the chosen token and the `num_top` best, which may or may not include it."""
    best = sorted((entry.rank, i, entry.logprob) for i, entry in found.items())
    top = tuple((i, _finite(logprob)) for rank, i, logprob in best if rank <= num_top)
    return TokenLogprobs(token_id, _finite(found[token_id].logprob), top[:num_top])


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB) if not math.isnan(logprob) else LOWEST_LOGPROB
