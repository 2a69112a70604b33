"""The fused weights of a Llama-family decoder, taken tensor by tensor so that source and result never lie side by side.

Knows the names of a checkpoint. Used by `decoder.py` only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.errors import ModelRefused
from core.model.decoder_shape import DecoderShape
from core.model.kernels import Kernels
from core.model.linear import PackedLinear
from core.model.quantization import Quantization
from core.model.weights_memory import LargePages

Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
GATE_LANES = 16  # the C kernels gate 16 outputs at a time: 16 gates, then their 16 ups


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer. Norms are float32 where C reads them, else in the model's dtype."""

    input_norm: Tensor  # (hidden,)
    post_norm: Tensor  # (hidden,)
    query_norm: Tensor | None  # (head_dim,)
    key_norm: Tensor | None  # (head_dim,)
    qkv: PackedLinear
    output: PackedLinear
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    embedding: Tensor | None  # (rows, hidden); None where C reads it out of the head's weights
    layers: list[LayerWeights]
    final_norm: Tensor  # (hidden,)
    head: PackedLinear

    @property
    def size_bytes(self) -> int:
        """Embedding, linear layers and norms, as they are held."""
        linears = [self.head]
        norms = [self.final_norm]
        for layer in self.layers:
            linears += [layer.qkv, layer.output, layer.gate_up, layer.down]
            norms += [layer.input_norm, layer.post_norm]
        return (
            (0 if self.embedding is None else self.embedding.nbytes)
            + sum(part.size_bytes for part in linears)
            + sum(norm.nbytes for norm in norms)
        )


class _Source:
    """Hands out each tensor once, in the dtype and on the device of the model."""

    __slots__ = ("_device", "_dtype", "_prefix", "_weights")

    def __init__(self, weights: Weights, dtype: torch.dtype, device: torch.device) -> None:
        self._weights = weights if isinstance(weights, Mapping) else dict(weights)
        self._dtype, self._device = dtype, device
        self._prefix = "model." if "model.embed_tokens.weight" in self._weights else ""

    def take(self, name: str, *, is_below_prefix: bool = True) -> Tensor:
        """Raises `ModelRefused` where the checkpoint lacks the tensor."""
        tensor = self.take_if_present(name, is_below_prefix=is_below_prefix)
        if tensor is None:
            raise ModelRefused(f"The model's weights lack the tensor {self._prefix}{name}.")
        return tensor

    def take_if_present(self, name: str, *, is_below_prefix: bool = True) -> Tensor | None:
        full = (self._prefix if is_below_prefix else "") + name
        if full not in self._weights:
            return None
        weights = self._weights
        tensor = weights.pop(full) if isinstance(weights, MutableMapping) else weights[full]
        return tensor.detach().to(device=self._device, dtype=self._dtype)

    def take_rows(self, names: list[str], suffix: str) -> Tensor | None:
        """Several projections as one, row below row; None where the checkpoint has none of them."""
        parts = [self.take_if_present(f"{name}.{suffix}") for name in names]
        present = [part for part in parts if part is not None]
        if not present:
            return None
        if len(present) != len(parts):
            raise ModelRefused(
                f"The model's weights hold only some of {', '.join(names)}.{suffix}."
            )
        return present[0] if len(present) == 1 else torch.cat(present)


def take_weights(
    shape: DecoderShape,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    compiled: Kernels | None,
    quantization: Quantization = "none",
) -> DecoderWeights:
    """Packs everything; tensors are removed from a mutable mapping as they are used. `compiled`: lay out for C.

    The head is never below 8 bits: it decides between neighbours. An embedding tied to it is held once, as the head.

    Raises `ModelRefused` where a tensor is missing or has another shape than the config says.
    """
    source = _Source(weights, dtype, device)
    embedding: Tensor | None = source.take("embed_tokens.weight")
    assert embedding is not None
    head_weight = source.take_if_present("lm_head.weight", is_below_prefix=False)
    if shape.is_tied:
        head_weight = embedding
    elif head_weight is None:
        raise ModelRefused("The model's weights lack the tensor lm_head.weight.")
    _expect("embed_tokens", embedding, (embedding.shape[0], shape.hidden))
    _expect("lm_head", head_weight, (embedding.shape[0], shape.hidden))
    room, of_head = LargePages(), quantization if quantization == "none" else "int8"
    head = PackedLinear(head_weight, None, compiled, of_head, room)
    if shape.is_tied and head.kind == "C":
        embedding = None
    elif shape.is_tied and quantization != "none":
        embedding = head.dequantized()
    norm_dtype = torch.float32 if compiled is not None else dtype
    return DecoderWeights(
        embedding=None if embedding is None else embedding.contiguous(),
        layers=[
            _take_layer(source, f"layers.{i}.", shape, norm_dtype, compiled, quantization, room)
            for i in range(shape.num_layers)
        ],
        final_norm=source.take("norm.weight").to(norm_dtype).contiguous(),
        head=head,
    )


def _take_layer(
    source: _Source,
    at: str,
    shape: DecoderShape,
    norm_dtype: torch.dtype,
    compiled: Kernels | None,
    quantization: Quantization,
    room: LargePages,
) -> LayerWeights:
    def norm(name: str) -> Tensor:
        return source.take(f"{at}{name}.weight").to(norm_dtype).contiguous()

    def linear(names: list[str], outputs: int, inputs: int) -> PackedLinear:
        full = [at + name for name in names]
        weight = source.take_rows(full, "weight")
        if weight is None:
            raise ModelRefused(f"The model's weights lack the tensor {full[0]}.weight.")
        _expect(full[0], weight, (outputs, inputs))
        bias = source.take_rows(full, "bias")
        if compiled is not None and len(names) == 2:
            weight = _interleave(weight)
            bias = None if bias is None else _interleave(bias)
        return PackedLinear(weight, bias, compiled, quantization, room)

    attention, mlp = "self_attn.", "mlp."
    mixed = shape.num_heads * shape.head_dim
    return LayerWeights(
        input_norm=norm("input_layernorm"),
        post_norm=norm("post_attention_layernorm"),
        query_norm=norm(attention + "q_norm") if shape.has_head_norms else None,
        key_norm=norm(attention + "k_norm") if shape.has_head_norms else None,
        qkv=linear(
            [attention + name for name in ("q_proj", "k_proj", "v_proj")],
            mixed + 2 * shape.num_kv_heads * shape.head_dim,
            shape.hidden,
        ),
        output=linear([attention + "o_proj"], shape.hidden, mixed),
        gate_up=linear([mlp + "gate_proj", mlp + "up_proj"], 2 * shape.inner, shape.hidden),
        down=linear([mlp + "down_proj"], shape.hidden, shape.inner),
    )


def _interleave(stacked: Tensor) -> Tensor:
    """Gates above ups, (2 * inner, ...), as 16 gates, 16 ups, 16 gates, ..."""
    halves = stacked.view(2, -1, GATE_LANES, *stacked.shape[1:])
    return halves.transpose(0, 1).reshape(stacked.shape)


def _expect(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise ModelRefused(
            f"The model's weights do not fit its config: {name} is {tuple(tensor.shape)}, not {shape}."
        )
