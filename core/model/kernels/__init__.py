"""The one Python face of the C kernels: structs of pointers, and thin calls through ctypes.

Knows addresses and sizes, not models. `load()` opens the library once torch is imported, so that both share one OpenMP
runtime, and with it one team of threads. Every call takes contiguous CPU tensors that the caller keeps alive.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from core.model.quantization import GROUP_INPUTS, SHIFT_INPUTS, Int4Weight, Int8Weight
from core.model.weights_memory import LargePages
from core.pace import give_way

if TYPE_CHECKING:
    from core.model.attention.layout import LayerCache, StepLayout

COLUMNS = 32  # outputs in one packed block of a linear layer
_AT_ONCE = 1 << 18  # numbers that are moved between two pauses: a millisecond or less
DTYPES = {torch.bfloat16: 0, torch.float32: 1}
PARTS = ("norms", "linear", "rope", "attention", "head")  # of a forward, as `Scratch.seconds` times
INT8, INT4 = 2, 3  # kinds of linear layers beside the dtypes

_pointer, _whole, _real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


class Linear(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("weight", "bias", "scale", "groups")),
        *((name, _whole) for name in ("outputs", "inputs", "kind")),
    ]


class Attention(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("key", "value", "key_scale", "value_scale", "sinks")),
        *((name, _whole) for name in ("num_heads", "num_kv_heads", "head_dim")),
        *((name, _whole) for name in ("dtype", "kept", "window")),
        ("scale", _real),
        ("softcap", _real),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("token_ids", "positions", "slots", "logit_rows")),
        *((name, _pointer) for name in ("row_starts", "context_lens", "block_tables")),
        *((name, _whole) for name in ("num_tokens", "num_sequences", "num_logit_rows")),
        *((name, _whole) for name in ("max_blocks", "block_size")),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        *((name, _pointer) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
        ("attention", Attention),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.POINTER(Layer)),
        *((name, _pointer) for name in ("final_norm", "cos", "sin", "embedding")),
        ("head", Linear),
        *((name, _whole) for name in ("num_layers", "hidden", "inner", "rotary_dim", "dtype")),
        ("epsilon", _real),
    ]


class Scratch(ctypes.Structure):
    _fields_ = [
        (name, _pointer)
        for name in (
            "residual",
            "logits",
            "hidden",
            "qkv",
            "mixed",
            "inner",
            "quantized",
            "seconds",
        )
    ]


def step_of(layout: StepLayout) -> Step:
    """The layout as a struct; the layout must outlive it. Ids and logit rows are the caller's to fill in."""
    return Step(
        positions=layout.positions.data_ptr(),
        slots=layout.slots.data_ptr(),
        row_starts=layout.row_starts.data_ptr(),
        context_lens=layout.context_lens.data_ptr(),
        block_tables=layout.block_tables.data_ptr(),
        num_tokens=layout.positions.shape[0],
        num_sequences=len(layout.context_lens_list),
        max_blocks=layout.block_tables.shape[1],
        block_size=layout.block_size,
    )


def attention_of(
    cache: LayerCache,
    dtype: torch.dtype,
    num_heads: int,
    scale: float = 1.0,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Attention:
    """One layer's attention as a struct, for queries of `dtype`; `cache` and `sinks` (float32) must outlive it."""
    scales = (cache.key_scale, cache.value_scale)
    key_scale, value_scale = (None if scale is None else scale.data_ptr() for scale in scales)
    _, num_kv_heads, _, head_dim = cache.key.shape
    return Attention(
        key=cache.key.data_ptr(),
        value=cache.value.data_ptr(),
        key_scale=key_scale,
        value_scale=value_scale,
        sinks=None if sinks is None else sinks.data_ptr(),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=DTYPES[dtype],
        kept=INT8 if cache.key.dtype == torch.int8 else DTYPES[cache.key.dtype],
        window=window or 0,
        scale=scale,
        softcap=softcap or 0.0,
    )


def _whole_blocks(rows: Tensor) -> Tensor:
    """Zero rows below, up to whole blocks of outputs."""
    missing = -rows.shape[0] % COLUMNS
    if not missing:
        return rows
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def _pack(
    weight: Tensor,
    inputs_together: int,
    room: LargePages | None,
    change: Callable[[Tensor], Tensor] = lambda rows: rows,
) -> Tensor:
    """Into `room`, else the heap. `change` is done to the rows of `weight`, some at a time."""
    assert inputs_together * weight.itemsize == 4
    count = max(1, _AT_ONCE // max(1, COLUMNS * weight.shape[1])) * COLUMNS
    packed = torch.empty(0, dtype=torch.int32)
    for start in range(0, weight.shape[0], count):
        rows = _whole_blocks(change(weight[start : start + count]))
        groups = rows.view(torch.int32)  # what stays together is moved as one number
        width = groups.shape[1]
        if not start:
            shape = (-(-weight.shape[0] // COLUMNS), width, COLUMNS)
            make = torch.empty if room is None else room.empty
            packed = make(shape, dtype=torch.int32)
        blocks = groups.view(-1, COLUMNS, width).transpose(1, 2)
        packed[start // COLUMNS : start // COLUMNS + len(blocks)] = blocks
        give_way()
    return packed.view(weight.dtype).view(-1, packed.shape[1], COLUMNS, inputs_together)


def pack_weight(weight: Tensor, room: LargePages | None = None) -> Tensor:
    """(outputs, inputs) in blocks of 32 outputs: (blocks, inputs / 2, 32, 2) in bfloat16, else (blocks, inputs, 32, 1).

    Missing outputs of the last block are zero. `inputs` must be even in bfloat16.
    """
    return _pack(weight, 2 if weight.dtype == torch.bfloat16 else 1, room)


@dataclass(frozen=True, slots=True)
class PackedIntegers:
    """A quantized weight as C reads it. `groups` is None for int8."""

    kind: int
    weight: Tensor
    scale: Tensor
    groups: Tensor | None = None

    @property
    def size_bytes(self) -> int:
        groups = 0 if self.groups is None else self.groups.nbytes
        return self.weight.nbytes + self.scale.nbytes + groups


def row_bytes(inputs: int) -> int:
    """At most what a row of activations takes in 8 bits, whatever the instruction set: two bytes an input, or one and a
    shift for each group, and then a scale and a correction."""
    groups = -(-inputs // SHIFT_INPUTS)
    return groups * 2 * SHIFT_INPUTS + 64


def pack_int8(weight: Int8Weight, room: LargePages | None = None) -> PackedIntegers:
    """(blocks, inputs / 4, 32, 4) bytes, each 128 more than the integer; inputs are padded to whole groups of 64."""
    missing = -weight.values.shape[1] % SHIFT_INPUTS

    def change(rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows ^ 128, (0, missing))

    packed = _pack(weight.values.view(torch.uint8), 4, room, change)
    return PackedIntegers(INT8, packed, _whole_blocks(weight.scale))


def pack_int4(weight: Int4Weight, room: LargePages | None = None) -> PackedIntegers:
    """(blocks, inputs / 8, 32, 4) bytes of two halves, and (blocks, inputs / 32, 32, 2) bytes of step and minimum, 128
    more than the minimum is; inputs are padded to whole groups of 64."""
    pad, missing = torch.nn.functional.pad, -weight.halves.shape[1] % SHIFT_INPUTS
    halves = pad(weight.halves, (0, missing))
    outputs, inputs = halves.shape
    low, high = halves.view(outputs, inputs // 8, 2, 4).unbind(2)
    both = _pack((low | high << 4).reshape(outputs, inputs // 2), 4, room)
    groups = torch.stack([weight.step, weight.minimum.view(torch.uint8) ^ 128], dim=2)
    groups = pad(groups, (0, 0, 0, missing // GROUP_INPUTS))
    packed_groups = _whole_blocks(groups).view(-1, COLUMNS, *groups.shape[1:]).transpose(1, 2)
    return PackedIntegers(INT4, both, _whole_blocks(weight.scale), packed_groups.contiguous())


class Kernels:
    """The opened library. `name` is the instruction set in use: amx, avx512bf16, avx512vnni, avx512, avx2 or plain."""

    __slots__ = ("_library", "attend", "forward", "greedy", "linear", "name", "write_kv")

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.noria_select.argtypes = [ctypes.c_char_p]
        library.noria_select.restype = ctypes.c_char_p
        self.attend = library.noria_attend
        self.write_kv = library.noria_write_kv
        self.forward = library.noria_forward
        self.linear = library.noria_linear
        self.greedy = library.noria_greedy
        self.attend.argtypes = [_pointer, _pointer, _pointer, _whole, _pointer]
        self.write_kv.argtypes = [_pointer] * 4
        self.forward.argtypes = [_pointer] * 3
        self.linear.argtypes = [_pointer, _pointer, _whole, _whole, _pointer]
        self.greedy.argtypes = [_pointer, _whole, _whole, _whole, _pointer]
        for call in (self.attend, self.write_kv, self.forward, self.linear, self.greedy):
            call.restype = None
        self.name = ""
        self.select()

    def select(self, name: str = "") -> bool:
        """Takes the named instruction set, or the best one. False where this processor lacks it. For tests: the choice
        holds for the whole process."""
        chosen = self._library.noria_select(name.encode())
        if chosen is None:
            return False
        self.name = chosen.decode()
        return True


def library_path() -> Path | None:
    """Where the compiled extension lies, if it was built."""
    here = Path(__file__).parent
    for suffix in EXTENSION_SUFFIXES:
        path = here / f"_kernels{suffix}"
        if path.exists():
            return path
    return None


def load() -> Kernels | None:
    """The kernels, or None where they were not built or do not open."""
    path = library_path()
    if path is None:
        return None
    try:
        return Kernels(ctypes.CDLL(str(path)))
    except (OSError, AttributeError):  # built for another system, or by another version
        return None
