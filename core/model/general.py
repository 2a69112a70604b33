"""The general path: any causal LM of transformers, run unmodified on the paged KV cache.

transformers lets an attention function be registered by name; every layer of a model that follows its interface then
calls it with q, k, v of `(1, heads, num_tokens, head_dim)`. All tokens of a step are fed as one row with explicit
positions, so the unmodified model computes a ragged batch. Whether that is true of a given model is not believed but
tried: `probe.py`. Knows modules and tensors, no sequences. Built by `loader.py`, called by the runner.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.errors import ModelRefused
from core.model.attention.layout import AttentionKernels, LayerCache, StepLayout

ATTENTION_NAME = "noria_paged"
_CONTEXT = (
    "noria_context"  # attribute of every module of a model: where its layers find the current step
)


@dataclass(slots=True)
class StepContext:
    """What the attention layers of one model need to know of the step under way. Set before each forward."""

    kernels: AttentionKernels
    layout: StepLayout | None = None
    caches: list[LayerCache] | None = None


class GeneralModel:
    """A `CausalModel` around a transformers module."""

    def __init__(self, module: Any, kernels: AttentionKernels) -> None:
        """`module` is an AutoModelForCausalLM in evaluation mode. Raises `ModelRefused` where its attention cannot be
        replaced."""
        _register()
        self.module = module
        self.dtype: torch.dtype = module.dtype
        self.device: torch.device = module.device
        self._context = StepContext(kernels)
        self.use_paged_attention()
        for part in module.modules():
            setattr(part, _CONTEXT, self._context)
        self._hidden: Tensor | None = None
        module.get_decoder().register_forward_hook(self._keep_hidden)

    def use_paged_attention(self) -> None:
        """Route the layers through the paged cache (again, after `use_library_attention`)."""
        self._set_attention(ATTENTION_NAME)

    def use_library_attention(self) -> None:
        """Route the layers through the library's own plain attention: the truth of the probe."""
        self._set_attention("eager")

    def forward(
        self, token_ids: Tensor, layout: StepLayout, caches: list[LayerCache], logit_rows: Tensor
    ) -> Tensor:
        """See `layout.CausalModel`. token_ids (num_tokens,), logit_rows (num_rows,) -> (num_rows, embedding_rows)."""
        self._context.layout, self._context.caches = layout, caches
        try:
            with torch.inference_mode():
                output = self.module(
                    input_ids=token_ids[None],
                    position_ids=layout.positions[None],
                    use_cache=False,
                    logits_to_keep=logit_rows,
                )
        finally:
            self._context.layout = self._context.caches = None
        logits: Tensor = output.logits[0]
        return logits

    def hidden_states(self) -> Tensor:
        """See `layout.CausalModel`."""
        assert self._hidden is not None
        return self._hidden

    def _keep_hidden(self, module: Any, inputs: Any, output: Any) -> None:
        self._hidden = output[0][0]

    def _set_attention(self, name: str) -> None:
        self.module.set_attn_implementation(name)
        if self.module.config.get_text_config()._attn_implementation != name:
            raise ModelRefused(
                f"{type(self.module).__name__} computes attention in its own code and not through the library's "
                "interface, so it cannot use the paged KV cache."
            )


def _register() -> None:
    """Make the attention known to transformers, whose registry is global. Registering again changes nothing."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(ATTENTION_NAME, _attend)
    AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)


def _no_mask(*_: Any, **__: Any) -> None:
    """Masks are made of positions by the kernels."""


def _attend(
    module: Any,
    query: Tensor,  # (1, num_heads, num_tokens, head_dim)
    key: Tensor,  # (1, num_kv_heads, num_tokens, head_dim)
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """One layer's attention; returns (1, num_tokens, num_heads, head_dim)."""
    context: StepContext | None = getattr(module, _CONTEXT, None)
    if context is None or context.layout is None or context.caches is None:
        raise ModelRefused(f"{type(module).__name__} attends outside of a step.")
    if attention_mask is not None or position_bias is not None:
        raise ModelRefused(
            f"{type(module).__name__} adds a mask or a bias of its own to the scores."
        )
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int) or not 0 <= layer < len(context.caches):
        raise ModelRefused(f"{type(module).__name__} does not say which layer it is.")
    cache = context.caches[layer]
    if (
        key.shape[1] != cache.key.shape[1]
        or key.shape[3] != cache.key.shape[3]
        or value.shape != key.shape
    ):
        raise ModelRefused(
            f"{type(module).__name__} has keys of {key.shape[1]} x {key.shape[3]} and values of {value.shape[1]} x "
            f"{value.shape[3]}; the KV cache of this model holds {cache.key.shape[1]} x {cache.key.shape[3]}."
        )
    # The library hands over transposed views; the kernels read rows.
    rows = query[0].transpose(0, 1).contiguous()  # (num_tokens, num_heads, head_dim)
    context.kernels.write_kv(
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        cache,
        context.layout,
    )
    mixed = context.kernels.attend(
        rows,
        cache,
        context.layout,
        scale=rows.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return mixed[None], None
