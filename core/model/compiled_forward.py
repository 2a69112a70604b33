"""`CompiledForward`: a step of the fast decoder as one call into the C kernels.

One call, because ctypes gives the interpreter lock back for its whole length: with hundreds of calls a step, the event
loop's thread would make it wait as often. Knows structs and addresses. Made and called by `decoder.py`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from core.model.attention.cpu import MAX_GROUP, MAX_HEAD_DIM
from core.model.attention.layout import AttentionKernels, LayerCache, StepLayout
from core.model.decoder_shape import DecoderShape, shape_of, unsupported
from core.model.decoder_weights import GATE_LANES, DecoderWeights, LayerWeights
from core.model.kernels import (
    DTYPES,
    PARTS,
    Kernels,
    Layer,
    Model,
    Scratch,
    attention_of,
    row_bytes,
    step_of,
)
from core.model.rope import RopeTables


def not_compiled(shape: DecoderShape, dtype: torch.dtype, kernels: AttentionKernels) -> str | None:
    """Why the C forward cannot compute this decoder, or None where it can."""
    if kernels.compiled is None:
        return kernels.name
    if dtype not in DTYPES:
        return f"no C kernels for {dtype}"
    if shape.inner % GATE_LANES or shape.hidden % 2 or shape.head_dim % 2:
        return "sizes that the C kernels cannot pack"
    if shape.head_dim > MAX_HEAD_DIM or shape.num_heads // shape.num_kv_heads > MAX_GROUP:
        return "heads larger than the C kernels take"
    return None


def widens_bfloat16(config: Any, kernels: AttentionKernels) -> bool:
    """Whether the C forward will compute this model, and with vectors: it widens bfloat16 about as fast as it reads
    float32, which is twice as much."""
    if kernels.compiled is None or kernels.compiled.name == "plain" or unsupported(config):
        return False
    return not_compiled(shape_of(config), torch.bfloat16, kernels) is None


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class CompiledForward:
    """Structs that describe the model once, and the scratch memory of its steps, which grows with the largest step."""

    __slots__ = (
        "_buffers",
        "_caches",
        "_dtype",
        "_kernels",
        "_layers",
        "_model",
        "_num_logit_rows",
        "_num_rows",
        "_rope",
        "_scratch",
        "_seconds",
        "_shape",
        "_weights",
    )

    def __init__(
        self,
        shape: DecoderShape,
        weights: DecoderWeights,
        rope: RopeTables,
        dtype: torch.dtype,
        kernels: Kernels,
    ) -> None:
        self._shape, self._weights, self._rope, self._kernels = shape, weights, rope, kernels
        self._dtype = dtype
        self._caches: list[LayerCache] | None = None
        self._layers = (Layer * shape.num_layers)(*map(_layer_of, weights.layers))
        self._model = Model(
            layers=self._layers,
            final_norm=weights.final_norm.data_ptr(),
            embedding=_address(weights.embedding),
            head=weights.head.struct,
            num_layers=shape.num_layers,
            hidden=shape.hidden,
            inner=shape.inner,
            rotary_dim=shape.head_dim,
            dtype=DTYPES[dtype],
            epsilon=shape.epsilon,
        )
        self._scratch = Scratch()
        self._seconds: Tensor | None = None
        self._buffers: dict[str, Tensor] = {}
        self._num_rows = self._num_logit_rows = 0

    def __call__(
        self, token_ids: Tensor, layout: StepLayout, caches: list[LayerCache], logit_rows: Tensor
    ) -> Tensor:
        """Returns float32 logits (num_rows, embedding_rows) in memory that the next step uses again."""
        if caches is not self._caches:
            self._bind(caches)
        num_logit_rows = logit_rows.shape[0]
        self._reserve(token_ids.shape[0], num_logit_rows)
        step = step_of(layout)
        step.token_ids, step.logit_rows = token_ids.data_ptr(), logit_rows.data_ptr()
        step.num_logit_rows = num_logit_rows
        self._model.cos, self._model.sin = self._rope.cos.data_ptr(), self._rope.sin.data_ptr()
        self._kernels.forward(
            ctypes.addressof(self._model), ctypes.addressof(step), ctypes.addressof(self._scratch)
        )
        return self._buffers["logits"][:num_logit_rows]

    def residual(self, num_tokens: int) -> Tensor:
        """What the last layer left of the last step's tokens, (num_tokens, hidden) float32, before the final norm."""
        return self._buffers["residual"][:num_tokens]

    def time_parts(self) -> Tensor:
        """From now on every forward adds the seconds of its `PARTS` to the tensor returned, (len(PARTS),) float64."""
        self._seconds = torch.zeros(len(PARTS), dtype=torch.float64)
        self._scratch.seconds = self._seconds.data_ptr()
        return self._seconds

    def _bind(self, caches: list[LayerCache]) -> None:
        """Points every layer at its keys and values."""
        self._caches = caches
        shape = self._shape
        for layer, cache, window in zip(self._layers, caches, shape.windows, strict=True):
            assert cache.key.dtype in (self._dtype, torch.int8)
            scale = shape.head_dim**-0.5
            layer.attention = attention_of(cache, self._dtype, shape.num_heads, scale, window)

    def _reserve(self, num_rows: int, num_logit_rows: int) -> None:
        """Makes the scratch memory large enough; it is never made smaller."""
        if num_rows > self._num_rows:
            self._num_rows = num_rows
            shape, layer = self._shape, self._weights.layers[0]
            self._allocate("residual", num_rows, shape.hidden, torch.float32)
            # rows on their way to 8 bits are float32
            self._allocate("hidden", num_rows, shape.hidden, torch.float32)
            self._allocate("qkv", num_rows, layer.qkv.outputs, self._dtype)
            self._allocate("mixed", num_rows, layer.output.inputs, self._dtype)
            self._allocate("inner", num_rows, shape.inner, self._dtype)
            widest = max(shape.hidden, layer.output.inputs, shape.inner)
            self._allocate("quantized", num_rows, row_bytes(widest), torch.uint8)
        if num_logit_rows > self._num_logit_rows or "logits" not in self._buffers:
            self._num_logit_rows = num_logit_rows
            self._allocate("logits", num_logit_rows, self._weights.head.outputs, torch.float32)

    def _allocate(self, name: str, rows: int, columns: int, dtype: torch.dtype) -> None:
        self._buffers[name] = torch.empty(rows, columns, dtype=dtype)
        setattr(self._scratch, name, self._buffers[name].data_ptr())


def _layer_of(weights: LayerWeights) -> Layer:
    return Layer(
        input_norm=weights.input_norm.data_ptr(),
        post_norm=weights.post_norm.data_ptr(),
        query_norm=_address(weights.query_norm),
        key_norm=_address(weights.key_norm),
        qkv=weights.qkv.struct,
        output=weights.output.struct,
        gate_up=weights.gate_up.struct,
        down=weights.down.struct,
    )
