"""Weights in 8 and 4 bits: their definition, and the C kernels of every instruction set against it, bit by bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tiny_decoders import CONFIGS, CPU, build, make_step

from core.config import EngineConfig, KVCacheConfig, ModelConfig
from core.errors import ConfigError
from core.model.attention import choose_kernels
from core.model.attention.reference import REFERENCE
from core.model.decoder import FastDecoder
from core.model.kernels import load
from core.model.kv_cache import KVCache
from core.model.linear import PackedLinear
from core.model.loader import load_model
from core.model.preview import plan_only
from core.model.quantization import quantize_int4, quantize_int8

KERNELS = load()
VARIANTS = ["amx", "avx512bf16", "avx512vnni", "avx512", "avx2", "plain"]


@pytest.fixture(params=VARIANTS)
def kernels(request: pytest.FixtureRequest) -> Iterator[object]:
    if KERNELS is None or not KERNELS.select(request.param):
        pytest.skip(f"no {request.param} here")
    yield KERNELS
    KERNELS.select()


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    """The definition, group by group and with sums in float64, which holds every one of them."""
    inputs = x.shape[1]
    quantized = quantize_int8(weight) if kind == "int8" else quantize_int4(weight).as_int8(inputs)
    top = min(8, math.floor(math.log2(2**31 / (127 * 127 * inputs))))
    wide = x.float()
    most = wide.abs().amax(dim=1, keepdim=True)
    inverse = torch.where(most > 0, torch.full_like(most, 127) / most, torch.zeros_like(most))
    sums = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64)
    for start in range(0, inputs, 64):
        group, part = wide[:, start : start + 64], quantized.values[:, start : start + 64]
        largest = group.abs().amax(dim=1, keepdim=True)
        powers = [2**e for e in range(top + 1)]
        power = torch.stack([(largest * p <= most) * p for p in powers]).amax(dim=0)
        integers = (group * inverse * power).round()
        assert integers.abs().amax() <= 127
        sums += (integers.double() @ part.double().T) * (2**top / power)
    assert sums.abs().amax() < 2**31
    return sums.float() * (most / 127 / 2**top) * quantized.scale + bias.float()


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(96, 64), (40, 30), (7, 3), (33, 1000), (64, 2048), (33, 20000)])
def test_quantized_layers_give_the_bits_of_their_definition(kernels, kind, dtype, shape) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(shape).to(dtype), torch.randn(shape[0]).to(dtype)
    weight[0] = 0  # an output without weights
    layer = PackedLinear(weight.clone(), bias, kernels, kind)
    assert layer.kind == "C"
    for rows in (1, 2, 13, 100):
        x = torch.randn(rows, shape[1]) * 2.0 ** torch.randint(-12, 3, (rows, 1))
        x[:, : shape[1] // 3] /= torch.rand(rows, 1) * 1000 + 1  # groups of other exponents
        x[0] = 0
        x[-1, 64:128] = 0
        x = x.to(dtype)
        assert torch.equal(layer(x), exact(x, weight, bias, kind).to(dtype)), rows


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_torch_serves_the_same_numbers_without_kernels(kind) -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(40, 100), torch.randn(40), torch.randn(9, 100)
    layer = PackedLinear(weight.clone(), bias, None, kind)
    assert layer.kind == "torch"
    assert torch.equal(layer(x), exact(x, weight, bias, kind))


@pytest.mark.parametrize("compiled", [KERNELS, None], ids=["C", "torch"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_is_seen_in_every_output_of_it_alone(compiled, bad) -> None:
    layer = PackedLinear(torch.randn(40, 64), None, compiled, "int8")
    x = torch.randn(3, 64)
    x[1, 5] = bad
    assert torch.isfinite(layer(x)).all(dim=1).tolist() == [True, False, True]
    assert not torch.isfinite(layer(x)[1]).any()


@pytest.mark.parametrize("compiled", [KERNELS, None], ids=["C", "torch"])
def test_a_large_input_costs_precision_in_its_own_group_alone(compiled) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(32, 256), torch.randn(8, 256)
    x[:, 70] = 500
    weight[:, 64:128] = 0
    layer = PackedLinear(weight.clone(), None, compiled, "int8")
    error = (layer(x) - x @ weight.T).norm() / (x @ weight.T).norm()
    assert error < 0.03


@pytest.mark.parametrize("compiled", [KERNELS, None], ids=["C", "torch"])
def test_the_largest_sums_fit_their_integers(compiled) -> None:
    for inputs in (64, 576, 1040, 4160, 20000):
        weight, x = torch.ones(3, inputs), torch.ones(2, inputs)
        x[1] = -1
        layer = PackedLinear(weight, None, compiled, "int8")
        expected = torch.tensor([[inputs], [-inputs]], dtype=torch.float32).expand(2, 3)
        assert torch.allclose(layer(x), expected, rtol=1e-6)


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.016), ("int4", 0.09)])
def test_quantized_weights_stay_near_the_weights(kind, most) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 320)
    weight[:, 7] *= 6  # outliers widen the scale of an output, and hurt their own group alone
    quantized = quantize_int8(weight) if kind == "int8" else quantize_int4(weight).as_int8(320)
    back = quantized.values * quantized.scale[:, None]
    assert quantized.values.abs().amax() <= 127
    assert (back - weight).norm() / weight.norm() < most


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "llama with biases", "qwen3", "odd sizes"])
def test_the_c_forward_gives_what_torch_gives_in_quantized_layers(name: str, kind: str) -> None:
    compiled, _ = choose_kernels(CPU)
    if compiled.compiled is None:
        pytest.skip("the C kernels are not compiled")
    config = CONFIGS[name]
    theirs, _ = build(config, REFERENCE)
    logits = []
    for kernels in (compiled, REFERENCE):
        weights = {key: value.clone() for key, value in theirs.state_dict().items()}
        decoder = FastDecoder(config, weights, torch.float32, CPU, kernels, kind)  # type: ignore[arg-type]
        assert kind in decoder.description
        layout, num_blocks = make_step([20, 33], [20, 33], 16)
        shape = decoder.shape
        cache = KVCache.allocate(
            shape.num_layers,
            num_blocks,
            shape.num_kv_heads,
            16,
            shape.head_dim,
            torch.float32,
            CPU,
        )
        ids = torch.randint(0, 160, (53,), generator=torch.Generator().manual_seed(1))
        logits.append(decoder.forward(ids, layout, cache.layers, torch.arange(53)).clone())
    ours, truth = (torch.log_softmax(x.float(), dim=-1) for x in logits)
    divergence = (truth.exp() * (truth - ours)).sum(dim=-1)
    assert divergence.mean() < 0.02  # a rounding that falls otherwise moves a whole integer


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_the_memory_plan_knows_the_size_of_quantized_weights(
    default_model_folder: Path, kind: str
) -> None:
    settings = (
        ModelConfig(name=str(default_model_folder), quantization=kind),  # type: ignore[arg-type]
        EngineConfig(device="cpu"),
        KVCacheConfig(num_blocks=64),
    )
    (line,) = (text for text in plan_only(*settings)[0] if text.startswith("memory:"))
    planned = float(line.partition("weights ")[2].split()[0])
    held = load_model(*settings, lambda message, fraction: None).weights_bytes / 2**20
    assert planned == pytest.approx(held, rel=0.02)
    assert held < (135 if kind == "int8" else 90)


def test_a_model_of_the_general_path_is_refused_with_the_setting_named(
    tiny_model: Callable[..., Path],
) -> None:
    config = ModelConfig(name=str(tiny_model("gpt2")), quantization="int8")
    with pytest.raises(ConfigError, match=r"model\.quantization: int8 .*gpt2"):
        plan_only(config, EngineConfig(device="cpu"), KVCacheConfig())
