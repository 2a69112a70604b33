"""Paged attention in plain torch: the truth in tests, and what serves where no faster kernels exist.

Works on any device and dtype. It gathers the blocks of one sequence after the other, so it is simple rather than fast.
Knows the layout of `layout.py` and nothing of models. Anyone below `core/model/` may call it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from core.model.attention.layout import AttentionKernels, LayerCache, StepLayout

MAX_SCORES = (
    1 << 24
)  # scores held at once, 64 MiB in float32: long prompts are attended in slices of rows


def write_kv(key: Tensor, value: Tensor, cache: LayerCache, layout: StepLayout) -> None:
    """Scatters key and value, (num_tokens, num_kv_heads, head_dim), into their slots."""
    block_ids = layout.slots // layout.block_size  # (num_tokens,)
    offsets = layout.slots % layout.block_size  # (num_tokens,)
    for rows, kept, scales in (
        (key, cache.key, cache.key_scale),
        (value, cache.value, cache.value_scale),
    ):
        if scales is None:
            kept[block_ids, :, offsets] = rows.to(kept.dtype)
        else:
            scale = rows.float().abs().amax(-1) / 127  # (num_tokens, num_kv_heads)
            whole = (rows.float() / scale.clamp_min(1e-30)[..., None]).round().clamp(-127, 127)
            kept[block_ids, :, offsets] = whole.to(kept.dtype)
            scales[block_ids, :, offsets] = scale


def attend(
    query: Tensor,
    cache: LayerCache,
    layout: StepLayout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """See `layout.Attend`. Returns (num_tokens, num_heads, value_head_dim) in the dtype of `query`."""
    num_tokens, num_heads, _ = query.shape
    output = query.new_empty(num_tokens, num_heads, cache.value.shape[-1])
    for i, context_len in enumerate(layout.context_lens_list):
        start, end = layout.row_starts_list[i], layout.row_starts_list[i + 1]
        num_blocks = -(-context_len // layout.block_size)
        table = layout.block_tables[i, :num_blocks]
        key = _gather(cache.key, cache.key_scale, table, context_len)
        value = _gather(cache.value, cache.value_scale, table, context_len)
        step = max(1, MAX_SCORES // (num_heads * context_len))
        for first in range(start, end, step):
            rows = slice(first, min(first + step, end))
            output[rows] = _attend_rows(
                query[rows], key, value, layout.positions[rows], scale, window, softcap, sinks
            ).to(query.dtype)
    return output


def _gather(blocks: Tensor, scales: Tensor | None, table: Tensor, context_len: int) -> Tensor:
    """Blocks of one sequence as (num_kv_heads, context_len, head_dim) in float32."""
    gathered = blocks[table.long()].float()  # (num_blocks, num_kv_heads, block_size, head_dim)
    if scales is not None:
        gathered *= scales[table.long()][..., None]
    return gathered.transpose(0, 1).flatten(1, 2)[:, :context_len]


def _attend_rows(
    query: Tensor,  # (rows, num_heads, head_dim)
    key: Tensor,  # (num_kv_heads, keys, head_dim) float32
    value: Tensor,
    positions: Tensor,  # (rows,)
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    rows, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, _ = key.shape
    grouped = query.float().view(rows, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("rhgd,hkd->hgrk", grouped, key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    key_positions = torch.arange(num_keys, device=query.device)
    is_hidden = key_positions > positions[:, None]  # (rows, keys)
    if window is not None:
        is_hidden |= key_positions <= positions[:, None] - window
    scores = scores.masked_fill(is_hidden, float("-inf"))
    if sinks is not None:
        logits = sinks.float().view(num_kv_heads, -1, 1, 1).expand(-1, -1, rows, 1)
        weights = torch.cat([scores, logits], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    mixed = torch.einsum("hgrk,hkd->rhgd", weights, value)
    return mixed.reshape(rows, num_heads, -1)


REFERENCE = AttentionKernels("reference", write_kv, attend)
