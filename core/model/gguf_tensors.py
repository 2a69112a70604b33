"""The tensors of a `.gguf` file, read and widened a few rows at a time, and written as one safetensors file.

The whole file is never in memory, let alone widened: a conversion holds a few MiB whatever the size of the model. For
the fast decoder's families, whose names and conventions are few: the others go through transformers. The layouts of
quantized blocks are the `gguf` package's. Called by `gguf_import.py`.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from core.errors import ModelRefused

# Every layout that `gguf` can widen and that files of language models use. Files called Q4_K_M or Q5_K_S mix several.
READABLE = (
    *("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"),
    *("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"),
)
_CHUNK_WEIGHTS = 1 << 20
_FIXED_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9
_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_SAFE_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file: `kind` is ggml's number of its layout, `shape` in torch's order, `start` in bytes."""

    kind: int
    shape: tuple[int, ...]
    start: int


def read_tensor_table(path: Path) -> dict[str, GgufTensor]:
    """Names to tensors. Raises `EOFError` for a file that ends too early, and what foreign files raise: `ValueError`,
    `UnicodeDecodeError`, ..."""
    size = path.stat().st_size
    try:
        table = _tensor_table(path)
    except (struct.error, IndexError):
        raise EOFError(f"it ends within its head, after {size} bytes") from None
    end = max((entry.start + num_bytes(entry) for entry in table.values()), default=0)
    if end > size:
        raise EOFError(f"its tensors end at byte {end}, it has {size}")
    return table


def num_bytes(entry: GgufTensor) -> int:
    """Of a tensor in the file; 0 for a layout that `gguf` does not know."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    if entry.kind not in set(GGMLQuantizationType):
        return 0
    block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(entry.kind)]
    return prod(entry.shape) // int(block) * int(block_bytes)


def _tensor_table(path: Path) -> dict[str, GgufTensor]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
        magic, version, num_tensors, num_values = struct.unpack_from("<4sIQQ", blob)
        if magic != b"GGUF" or version not in (2, 3):
            raise ValueError("it is no GGUF file of version 2 or 3")
        at, alignment = 24, 32
        for _ in range(num_values):
            key, at = _string(blob, at)
            (kind,) = struct.unpack_from("<I", blob, at)
            if key == b"general.alignment":
                (alignment,) = struct.unpack_from("<I", blob, at + 4)
            at = _skip_value(blob, at + 4, kind)
        table: dict[str, GgufTensor] = {}
        for _ in range(num_tensors):
            name, at = _string(blob, at)
            (num_dims,) = struct.unpack_from("<I", blob, at)
            *dims, kind, offset = struct.unpack_from(f"<{num_dims}QIQ", blob, at + 4)
            at += 4 + 8 * num_dims + 12
            table[name.decode("utf-8")] = GgufTensor(kind, tuple(reversed(dims)), offset)
        first = -(-at // alignment) * alignment
        return {
            name: GgufTensor(entry.kind, entry.shape, first + entry.start)
            for name, entry in table.items()
        }


def _string(blob: mmap.mmap, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", blob, at)
    end = at + 8 + length
    if end > len(blob):
        raise EOFError(f"it ends within its head, after {len(blob)} bytes")
    return blob[at + 8 : end], end


def _skip_value(blob: mmap.mmap, at: int, kind: int) -> int:
    if kind in _FIXED_BYTES:
        return at + _FIXED_BYTES[kind]
    if kind == _STRING:
        return _string(blob, at)[1]
    if kind != _ARRAY:
        raise ValueError(f"it has a value of the unknown kind {kind}")
    item_kind, count = struct.unpack_from("<IQ", blob, at)
    at += 12
    if item_kind in _FIXED_BYTES:
        return at + int(count) * _FIXED_BYTES[item_kind]
    for _ in range(count):
        at = _skip_value(blob, at, item_kind)
    return at


def kind_name(kind: int) -> str:
    """ggml's name of a layout, or its number where `gguf` does not know it."""
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(kind).name if kind in set(GGMLQuantizationType) else f"type {kind}"


def library_name(name: str) -> str | None:
    """The name transformers gives a tensor of the Llama family; None for a tensor that is not known."""
    parts = name.split(".")
    layer = f"model.layers.{parts[1]}." if parts[0] == "blk" and len(parts) == 4 else ""
    if not layer and len(parts) != 2:
        return None
    translated = _NAMES.get(parts[-2])
    is_known = translated is not None and parts[-1] in ("weight", "bias")
    return f"{layer}{translated}.{parts[-1]}" if is_known else None


def write_safetensors(
    source: Path,
    target: Path,
    tensors: dict[str, GgufTensor],
    dtype: torch.dtype,
    heads_of: Callable[[str], int],
    on_progress: Callable[[float], None],
) -> None:
    """Writes `tensors` (by the names they get) of the file `source`, as `dtype`.

    `heads_of(name)`: of how many heads the rows are to be put back into transformers' order, 0 for none. Raises
    `ModelRefused` for layouts that cannot be read.
    """
    for name, entry in tensors.items():
        if kind_name(entry.kind) not in READABLE:
            raise ModelRefused(
                f"Tensor {name} of the .gguf file is stored as {kind_name(entry.kind)}, which cannot be read here. "
                f"Quantize the model as one of {', '.join(READABLE)}, or use its safetensors."
            )
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, entry in tensors.items():
        size = prod(entry.shape) * dtype.itemsize
        offsets = [end, end + size]
        head[name] = {"dtype": _SAFE_NAMES[dtype], "shape": entry.shape, "data_offsets": offsets}
        end += size
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    with source.open("rb") as read, target.open("wb") as write:
        write.write(struct.pack("<Q", len(text)) + text)
        written = 0
        for name, entry in tensors.items():
            for rows in _rows(read, entry, heads_of(name)):
                piece = rows.to(dtype).contiguous()
                write.write(piece.view(torch.uint8).numpy().data)
                written += piece.nbytes
                on_progress(written / max(1, end))


def _rows(file: BinaryIO, entry: GgufTensor, heads: int) -> Iterator[Tensor]:
    """The tensor in float32, a group of rows at a time: (rows, columns), or (rows,) for vectors at once."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    kind = GGMLQuantizationType(entry.kind)
    block, block_bytes = GGML_QUANT_SIZES[kind]
    columns = entry.shape[-1]
    num_rows = prod(entry.shape[:-1])
    if columns % block:
        raise ModelRefused(f"The .gguf file is damaged: rows of {columns} in blocks of {block}.")
    row_bytes = columns // block * block_bytes
    group = max(1, _CHUNK_WEIGHTS // columns)
    head_dim = entry.shape[0] // heads if heads else 0
    if heads and len(entry.shape) == 2:  # whole heads, whose rows change places
        group = max(1, group // head_dim) * head_dim
    file.seek(entry.start)
    for first in range(0, num_rows, group):
        count = min(group, num_rows - first)
        data = np.frombuffer(bytearray(file.read(count * row_bytes)), dtype=np.uint8)
        if data.size != count * row_bytes:
            raise ModelRefused("model.name is a .gguf file that is incomplete. Fetch it again.")
        values = quants.dequantize(data.reshape(count, row_bytes), kind)
        rows = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        rows = rows.view(count, columns) if len(entry.shape) > 1 else rows.view(columns)
        yield _halves(rows, rows.shape[0] // head_dim) if heads else rows


def _halves(rows: Tensor, heads: int) -> Tensor:
    """llama.cpp lays the two halves that are rotated together side by side in each head; here back to halves."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
