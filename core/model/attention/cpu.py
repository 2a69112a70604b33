"""Paged attention on a CPU over the C kernels, with the reference where they do not reach.

Knows dtypes and head sizes, nothing of models. Made by `choose_kernels`; used by decoders through `AttentionKernels`.
"""

from __future__ import annotations

import ctypes
import logging

import torch
from torch import Tensor

from core.model.attention import reference
from core.model.attention.layout import AttentionKernels, LayerCache, StepLayout
from core.model.kernels import DTYPES, Kernels, Step, attention_of, step_of

_log = logging.getLogger(__name__)

MAX_GROUP = 64  # query heads of one KV head
MAX_HEAD_DIM = 1024


def unsupported(num_heads: int, cache: LayerCache) -> str | None:
    """Why the C kernels cannot serve this shape, or None."""
    _, num_kv_heads, _, head_dim = cache.key.shape
    if cache.key.dtype == torch.int8:
        if head_dim % 16:
            return f"no C kernel for int8 caches and head size {head_dim}"
    elif cache.key.dtype not in DTYPES:
        return f"no C kernel for {cache.key.dtype} caches"
    if cache.value.shape[-1] != head_dim:
        return "no C kernel for values of another size than keys"
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        return f"no C kernel for head size {head_dim}"
    if num_heads // num_kv_heads > MAX_GROUP:
        return f"no C kernel for {num_heads // num_kv_heads} query heads per KV head"
    return None


class CpuAttention:
    """The two calls of `AttentionKernels`. Remembers the last step's struct, which all layers share."""

    __slots__ = ("_kernels", "_layout", "_step", "_warned")

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._layout: StepLayout | None = None
        self._step = Step()
        self._warned: set[str] = set()

    def write_kv(self, key: Tensor, value: Tensor, cache: LayerCache, layout: StepLayout) -> None:
        """See `layout.WriteKV`."""
        if not self._is_served(cache.key.shape[1], cache):
            reference.write_kv(key, value, cache, layout)
            return
        dtype = _computed_in(key, cache)
        key, value = key.to(dtype).contiguous(), value.to(dtype).contiguous()
        self._kernels.write_kv(
            ctypes.addressof(attention := attention_of(cache, dtype, cache.key.shape[1])),
            ctypes.addressof(self._step_of(layout)),
            key.data_ptr(),
            value.data_ptr(),
        )
        del attention

    def attend(
        self,
        query: Tensor,
        cache: LayerCache,
        layout: StepLayout,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """See `layout.Attend`."""
        _, num_heads, head_dim = query.shape
        if not self._is_served(num_heads, cache):
            return reference.attend(
                query, cache, layout, scale=scale, window=window, softcap=softcap, sinks=sinks
            )
        rows = query.to(_computed_in(query, cache)).contiguous()
        output = torch.empty_like(rows)
        sinks = None if sinks is None else sinks.float().contiguous()
        attention = attention_of(cache, rows.dtype, num_heads, scale, window, softcap, sinks)
        self._kernels.attend(
            ctypes.addressof(attention),
            ctypes.addressof(self._step_of(layout)),
            rows.data_ptr(),
            num_heads * head_dim,
            output.data_ptr(),
        )
        return output.to(query.dtype)

    def _is_served(self, num_heads: int, cache: LayerCache) -> bool:
        reason = unsupported(num_heads, cache)
        if reason is not None and reason not in self._warned:
            self._warned.add(reason)
            _log.warning("attention: %s; the reference serves instead", reason)
        return reason is None

    def _step_of(self, layout: StepLayout) -> Step:
        if layout is not self._layout:
            self._layout = layout  # kept: a new layout cannot then have its address
            self._step = step_of(layout)
        return self._step


def _computed_in(rows: Tensor, cache: LayerCache) -> torch.dtype:
    """What the kernels read beside the cache: its dtype, or beside an int8 one that of the rows."""
    if cache.key.dtype in DTYPES:
        return cache.key.dtype
    return rows.dtype if rows.dtype in DTYPES else torch.float32


def cpu_kernels(kernels: Kernels) -> AttentionKernels:
    """The C kernels as `AttentionKernels`."""
    attention = CpuAttention(kernels)
    return AttentionKernels(
        f"C kernels ({kernels.name})", attention.write_kv, attention.attend, kernels
    )
