"""Packed linear layers against plain ones."""

from __future__ import annotations

import pytest
import torch

from core.model.kernels import load
from core.model.linear import PackedLinear

KERNELS = load()


@pytest.mark.parametrize("compiled", [KERNELS, None], ids=["C", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(96, 64), (40, 30), (7, 2), (64, 2048)])
def test_packed_layers_give_what_plain_ones_give(compiled, dtype, has_bias, shape) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    layer = PackedLinear(weight.clone(), bias if has_bias else None, compiled)
    assert layer.kind == "C" if compiled else layer.kind in ("oneDNN", "torch")
    for rows in (1, 2, 13, 100, 200):
        x = torch.randn(rows, shape[1]).to(dtype)
        want = x.float() @ weight.float().T + (bias.float() if has_bias else 0)
        error = (layer(x).float() - want).abs().max() / want.abs().max()
        assert error < (1e-5 if dtype == torch.float32 else 1e-2), rows


@pytest.mark.skipif(KERNELS is None, reason="the C kernels are not compiled")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(dtype) -> None:
    torch.manual_seed(0)
    layer = PackedLinear(torch.randn(100, 2048).to(dtype), None, KERNELS)
    x = torch.randn(300, 2048).to(dtype)
    whole = layer(x)
    for rows in (1, 2, 5, 11, 12, 13, 97, 250):
        assert torch.equal(layer(x[:rows]), whole[:rows]), rows
