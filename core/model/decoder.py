"""`FastDecoder`: the decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3, SmolLM), described by its config.

Fused projections, packed weights, and two ways to compute them: the C kernels' one call per step on a CPU, and plain
torch on any device. Knows weights and tensors, no sequences. Built by the loader, called by the runner.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from core.model.attention.layout import AttentionKernels, LayerCache, StepLayout
from core.model.compiled_forward import CompiledForward, not_compiled
from core.model.decoder_shape import DecoderShape, shape_of
from core.model.decoder_weights import DecoderWeights, LayerWeights, Weights, take_weights
from core.model.linear import PackedLinear
from core.model.quantization import Quantization
from core.model.rope import RopeTables


class FastDecoder:
    """A `CausalModel`. `description` says for the log how it is computed; `compiled` are the C kernels it uses, or
    None; `weights_bytes` counts what it holds."""

    def __init__(
        self,
        config: Any,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        kernels: AttentionKernels,
        quantization: Quantization = "none",
    ) -> None:
        """`config` must pass `decoder_shape.unsupported`. A mutable mapping loses its tensors as they are packed.
        Raises `ModelRefused` where they do not fit the config."""
        self.dtype, self.device = dtype, device
        self.shape: DecoderShape = shape_of(config)
        reason = not_compiled(self.shape, dtype, kernels)
        compiled = None if reason else kernels.compiled
        with torch.inference_mode():
            self._weights: DecoderWeights = take_weights(
                self.shape, weights, dtype, device, compiled, quantization
            )
            self._rope = RopeTables(config, self.shape.head_dim, device)
        self._kernels = kernels
        self.compiled = compiled
        self._forward_compiled: CompiledForward | None = None
        if compiled is not None:
            self._forward_compiled = CompiledForward(
                self.shape, self._weights, self._rope, dtype, compiled
            )
        self._num_tokens = 0
        self._last: Tensor | None = (
            None  # where torch computes: (num_tokens, hidden), before the final norm
        )
        self.weights_bytes = self._weights.size_bytes
        how = f"one C call a step ({kernels.name})" if compiled else f"torch ({reason})"
        self.description = f"fast decoder: {how}, {self._weights.head.kind} linear layers"
        if quantization != "none":
            self.description += f" in {quantization}"

    def with_layers(self, layers: Sequence[int]) -> FastDecoder:
        """A decoder of these layers alone, in this order, and of the same weights; it takes their caches. The memory
        of its steps is its own."""
        part = copy.copy(self)
        windows = tuple(self.shape.windows[layer] for layer in layers)
        part.shape = replace(self.shape, num_layers=len(layers), windows=windows)
        part._weights = replace(
            self._weights, layers=[self._weights.layers[layer] for layer in layers]
        )
        part.weights_bytes = part._weights.size_bytes
        if self.compiled is not None:
            part._forward_compiled = CompiledForward(
                part.shape, part._weights, self._rope, self.dtype, self.compiled
            )
        return part

    def forward(
        self, token_ids: Tensor, layout: StepLayout, caches: list[LayerCache], logit_rows: Tensor
    ) -> Tensor:
        """See `layout.CausalModel`. The C kernels give float32 logits, torch those of the model's dtype."""
        with torch.inference_mode():
            self._rope.cover(max(layout.context_lens_list))
            self._num_tokens = token_ids.shape[0]
            if self._forward_compiled is not None:
                return self._forward_compiled(token_ids, layout, caches, logit_rows)
            return self._forward(token_ids, layout, caches, logit_rows)

    def hidden_states(self) -> Tensor:
        """See `layout.CausalModel`."""
        last = self._last
        if self._forward_compiled is not None:
            last = self._forward_compiled.residual(self._num_tokens)
        assert last is not None
        with torch.inference_mode():
            x = last.double()
            scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.shape.epsilon)
            return x * scale * self._weights.final_norm.double()

    def time_parts(self) -> Tensor | None:
        """See `CompiledForward.time_parts`; None where plain torch computes."""
        return self._forward_compiled.time_parts() if self._forward_compiled is not None else None

    @property
    def linear_layers(self) -> list[PackedLinear]:
        """All that a step multiplies with, in its order; the output head is the last."""
        layers = [
            linear
            for layer in self._weights.layers
            for linear in (layer.qkv, layer.output, layer.gate_up, layer.down)
        ]
        return [*layers, self._weights.head]

    def _forward(
        self, token_ids: Tensor, layout: StepLayout, caches: list[LayerCache], logit_rows: Tensor
    ) -> Tensor:
        weights = self._weights
        assert weights.embedding is not None
        x = functional.embedding(token_ids, weights.embedding)  # (num_tokens, hidden)
        cos = self._rope.cos[layout.positions][:, None].to(self.dtype)  # (num_tokens, 1, half)
        sin = self._rope.sin[layout.positions][:, None].to(self.dtype)
        for layer, cache, window in zip(weights.layers, caches, self.shape.windows, strict=True):
            x = x + self._attend(layer, x, cos, sin, cache, layout, window)
            gate, up = layer.gate_up(self._norm(x, layer.post_norm)).chunk(2, dim=-1)
            x = x + layer.down(functional.silu(gate) * up)
        self._last = x
        return weights.head(self._norm(x[logit_rows], weights.final_norm))

    def _attend(
        self,
        layer: LayerWeights,
        x: Tensor,  # (num_tokens, hidden)
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        layout: StepLayout,
        window: int | None,
    ) -> Tensor:
        shape = self.shape
        projected = layer.qkv(self._norm(x, layer.input_norm))
        heads = projected.view(x.shape[0], -1, shape.head_dim)
        query, key, value = torch.split(
            heads, [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1
        )
        if layer.query_norm is not None and layer.key_norm is not None:
            query, key = self._norm(query, layer.query_norm), self._norm(key, layer.key_norm)
        self._kernels.write_kv(_rotate(key, cos, sin), value, cache, layout)
        mixed = self._kernels.attend(
            _rotate(query, cos, sin), cache, layout, scale=shape.head_dim**-0.5, window=window
        )
        return layer.output(mixed.flatten(1))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self.shape.epsilon)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: (num_tokens, heads, head_dim), rotated in halves (Su et al., RoFormer, in GPT-NeoX's layout)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
