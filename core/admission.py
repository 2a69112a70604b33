"""`check_sequence`: what every sequence must be before it is queued. Used by `Engine`."""

from __future__ import annotations

from core.errors import ContextLengthExceeded, InvalidValue
from core.sequence import Sequence


def check_sequence(sequence: Sequence, vocab_size: int, max_model_len: int) -> None:
    """Raises `ContextLengthExceeded` if not even one token fits behind its prompt, and `InvalidValue` for an empty
    prompt or ids outside the vocabulary."""
    params = sequence.params
    if not sequence.token_ids:
        raise InvalidValue("The prompt has no tokens.", param="prompt")
    named = {
        "prompt": sequence.token_ids,
        "stop_token_ids": params.stop_token_ids,
        "logit_bias": params.logit_bias,
    }
    for param, token_ids in named.items():
        if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
            raise InvalidValue(f"Token ids must be from 0 to {vocab_size - 1}.", param=param)
    if sequence.num_prompt_tokens >= max_model_len:
        raise ContextLengthExceeded(
            f"The prompt has {sequence.num_prompt_tokens} tokens; at most {max_model_len} fit, "
            "and one must be left for the answer.",
            param="prompt",
        )
