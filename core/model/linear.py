"""Linear layers whose weights are packed once, at load, for the machine that will read them at every step.

Three kinds, best first: our own C loops (the same bits for a row alone and in any batch), oneDNN's packed layers, and
torch's plain linear. Knows weights and rows, no models. Used by the decoders; anyone may replace an `nn.Linear` by it.
"""

from __future__ import annotations

import ctypes
from typing import Any, Literal

import torch
from torch import Tensor

from core.model.kernels import DTYPES, Kernels, Linear, pack_weight

Kind = Literal["C", "oneDNN", "torch"]

PAD_FROM_INPUTS = (
    2048  # from here on oneDNN gives a lone row other bits than the same row in a batch
)


class PackedLinear:
    """y = x W^T + bias for x (rows, inputs). `kind` says how it is computed; `struct` is what the C kernels read."""

    __slots__ = ("_bias", "_compiled", "_weight", "dtype", "inputs", "kind", "outputs", "struct")

    def __init__(self, weight: Tensor, bias: Tensor | None, compiled: Kernels | None) -> None:
        """weight: (outputs, inputs), released by the caller; bias: (outputs,)."""
        self.outputs, self.inputs = weight.shape
        self.dtype = weight.dtype
        self.kind: Kind = _kind_for(weight, compiled)
        self._compiled = compiled
        self._weight = _pack(weight, self.kind)
        self._bias = bias
        self.struct = Linear()
        if self.kind == "C":
            self._bias = None if bias is None else bias.float().contiguous()
            pointer = None if self._bias is None else self._bias.data_ptr()
            self.struct = Linear(self._weight.data_ptr(), pointer, self.outputs, self.inputs)

    @property
    def size_bytes(self) -> int:
        return self.outputs * self.inputs * self.dtype.itemsize

    def __call__(self, x: Tensor) -> Tensor:
        """x: (rows, inputs) -> (rows, outputs), in the dtype of the weights."""
        if self.kind == "C":
            return self._call_compiled(x)
        if self.kind == "torch":
            return torch.nn.functional.linear(x, self._weight, self._bias)
        is_lone = x.shape[0] == 1 and self.inputs >= PAD_FROM_INPUTS
        rows = x.expand(2, -1).contiguous() if is_lone else x
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._weight, self._bias, "none", [], ""
        )
        return result[:1] if is_lone else result

    def _call_compiled(self, x: Tensor) -> Tensor:
        assert self._compiled is not None
        x = x.contiguous()
        output = torch.empty(x.shape[0], self.outputs, dtype=self.dtype)
        address = ctypes.addressof(self.struct)
        self._compiled.linear(
            address, x.data_ptr(), x.shape[0], DTYPES[self.dtype], output.data_ptr()
        )
        return output


def _kind_for(weight: Tensor, compiled: Kernels | None) -> Kind:
    if weight.device.type != "cpu":
        return "torch"
    if compiled is not None and weight.dtype in DTYPES and weight.shape[1] % 2 == 0:
        return "C"
    return "oneDNN" if _has_onednn(weight.dtype) else "torch"


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
    if kind == "C":
        return pack_weight(weight)
    if kind == "torch":
        return weight.contiguous()
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed
