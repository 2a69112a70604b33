"""Linear layers whose weights are packed once, at load, for the machine that will read them at every step.

Three kinds, best first: our own C loops (the same bits for a row alone and in any batch), oneDNN's packed layers, and
torch's plain linear. Weights may be quantized on the way in; then it is C, or torch with the same integers. Knows
weights and rows, no models. Used by the decoders; anyone may replace an `nn.Linear` by it.
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import torch
from torch import Tensor

from core.model.kernels import DTYPES, Kernels, Linear, pack_int4, pack_int8, pack_weight
from core.model.quantization import (
    Int8Weight,
    Quantization,
    multiply,
    quantize_int4,
    quantize_int8,
)
from core.model.weights_memory import LargePages

Kind = Literal["C", "oneDNN", "torch"]

PAD_FROM_INPUTS = (
    2048  # from here on oneDNN gives a lone row other bits than the same row in a batch
)


class PackedLinear:
    """y = x W^T + bias for x (rows, inputs). `kind` says how it is computed; `struct` is what the C kernels read;
    `size_bytes` is what the weights take."""

    __slots__ = (
        "_bias",
        "_compiled",
        "_packed",
        "_weight",
        "dtype",
        "inputs",
        "kind",
        "outputs",
        "size_bytes",
        "struct",
    )

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        compiled: Kernels | None,
        quantization: Quantization = "none",
        room: LargePages | None = None,
    ) -> None:
        """weight: (outputs, inputs), released by the caller; bias: (outputs,). `room` for them, else the heap."""
        self.outputs, self.inputs = weight.shape
        self.dtype = weight.dtype
        self.kind: Kind = _kind_for(weight, compiled, quantization)
        self._compiled = compiled
        self._weight: Tensor | Int8Weight | None = None
        self._bias = bias
        self.struct = Linear()
        self.size_bytes = 0
        if self.kind == "C":
            self._bias = None if bias is None else bias.float().contiguous()
            self._pack_for_c(weight, quantization, room)
        elif quantization == "none":
            self._weight = _pack(weight, self.kind)
            self.size_bytes = weight.nbytes
        else:
            is_int8 = quantization == "int8"
            quantized = (
                quantize_int8(weight) if is_int8 else quantize_int4(weight).as_int8(self.inputs)
            )
            self._weight = quantized
            self.size_bytes = quantized.values.nbytes + quantized.scale.nbytes

    def _pack_for_c(
        self, weight: Tensor, quantization: Quantization, room: LargePages | None
    ) -> None:
        bias = None if self._bias is None else self._bias.data_ptr()
        self.struct = Linear(bias=bias, outputs=self.outputs, inputs=self.inputs)
        if quantization == "none":
            self._packed: Any = pack_weight(weight, room)
            self.struct.weight = self._packed.data_ptr()
            self.struct.kind = DTYPES[self.dtype]
            self.size_bytes = self._packed.nbytes
            return
        is_int8 = quantization == "int8"
        packed = (
            pack_int8(quantize_int8(weight), room)
            if is_int8
            else pack_int4(quantize_int4(weight), room)
        )
        self._packed = packed
        self.struct.weight, self.struct.kind = packed.weight.data_ptr(), packed.kind
        self.struct.scale = packed.scale.data_ptr()
        self.struct.groups = None if packed.groups is None else packed.groups.data_ptr()
        self.size_bytes = packed.size_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, inputs) -> (rows, outputs), in the dtype of the weights as they came."""
        if self.kind == "C":
            return self._call_compiled(x)
        if isinstance(self._weight, Int8Weight):
            product = multiply(x, self._weight)
            return (product if self._bias is None else product + self._bias.float()).to(self.dtype)
        if self.kind == "torch":
            assert self._weight is not None
            return torch.nn.functional.linear(x, self._weight, self._bias)
        is_lone = x.shape[0] == 1 and self.inputs >= PAD_FROM_INPUTS
        rows = x.expand(2, -1).contiguous() if is_lone else x
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return result[:1] if is_lone else result

    def dequantized(self) -> Tensor:
        """(outputs, inputs): what a quantized layer of kind torch multiplies with."""
        assert isinstance(self._weight, Int8Weight)
        return (self._weight.values * self._weight.scale[:, None]).to(self.dtype)

    def _call_compiled(self, x: Tensor) -> Tensor:
        assert self._compiled is not None
        x = x.contiguous()
        output = torch.empty(x.shape[0], self.outputs, dtype=self.dtype)
        address = ctypes.addressof(self.struct)
        self._compiled.linear(
            address, x.data_ptr(), x.shape[0], DTYPES[self.dtype], output.data_ptr()
        )
        return output


def _kind_for(weight: Tensor, compiled: Kernels | None, quantization: Quantization) -> Kind:
    if weight.device.type != "cpu":
        return "torch"
    is_packable = weight.shape[1] % 2 == 0 or quantization != "none"
    if compiled is not None and weight.dtype in DTYPES and is_packable:
        return "C"
    return "oneDNN" if quantization == "none" and _has_onednn(weight.dtype) else "torch"


def _has_onednn(dtype: torch.dtype) -> bool:
    """Private operators: another torch may lack them, and then plain linear layers serve."""
    try:
        operators: Any = torch.ops.mkldnn
        if not hasattr(operators, "_reorder_linear_weight"):
            return False
        if dtype == torch.bfloat16:
            return bool(operators._is_mkldnn_bf16_supported())
        return dtype == torch.float32 and hasattr(operators, "_linear_pointwise")
    except (AttributeError, RuntimeError):
        return False


def _pack(weight: Tensor, kind: Kind) -> Tensor:
    if kind == "torch":
        return weight.contiguous()
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed
