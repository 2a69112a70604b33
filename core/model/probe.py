"""The probe at the end of loading a model on the general path: does it really compute ragged batches right?

Two short sequences are computed in one row on the paged cache, in chunks and then token by token, and compared with the
library's own plain forward of each alone. Windows are narrowed for the probe, on both sides, so that the sequences are
longer than any of them whatever the model's real ones are. State kept between tokens (recurrent, convolutional)
flows from one sequence into the next and shows at once; so do masks, biases and positions the paged path misses.

The comparison runs in float32, also for weights of 16 bits, whose rounding would hide what is looked for: for the time
of the probe every weight is widened, as long as memory allows that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from core.config import ModelShape
from core.errors import ModelRefused
from core.model.attention.layout import LayerCache, StepLayout
from core.model.general import GeneralModel
from core.model.kv_cache import KVCache

_LENGTHS = (41, 27)
_CUTS = (
    (25, 10),
    (40, 26),
    (41, 27),
)  # tokens known of each after the first, second and third step
_WINDOW = 8  # what windows and chunks are narrowed to, well below both lengths
_LAYER_TYPES = {
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    "attention",
    "global",
    "local",
}
_WINDOW_NAMES = ("sliding_window", "attention_chunk_size")

MAX_DIFFERENCE = 1e-3  # of logits in float32
# Without room to widen: rounding to 16 bits moves logits by one or two percent of their spread (a token more where it
# turns the choice of an expert), a wrong mask, position or state by half of it. Root mean square over spread, averaged:
MAX_MEAN_RMS = 0.1


def probe(model: GeneralModel, shape: ModelShape, block_size: int, available_bytes: int) -> None:
    """Raises `ModelRefused` with the reason. `available_bytes` is free memory now, with the model loaded."""
    _refuse_known_states(model)
    generator = torch.Generator().manual_seed(20)
    rows = min(shape.vocab_size, model.module.config.get_text_config().vocab_size)
    prompts = [torch.randint(0, rows, (n,), generator=generator).to(model.device) for n in _LENGTHS]
    name = type(model.module).__name__
    try:
        with _narrow_windows(model.module), _widened(model.module, available_bytes) as dtype:
            caches = KVCache.allocate(
                num_layers=shape.num_layers,
                num_blocks=num_probe_blocks(block_size),
                num_kv_heads=shape.num_kv_heads,
                block_size=block_size,
                head_dim=shape.head_dim,
                dtype=dtype,
                device=model.device,
            )
            expected = _library_logits(model, prompts)
            actual = _paged_logits(model, caches.layers, prompts)
    except ModelRefused:
        raise
    except Exception as error:  # whatever a model's code does not bear
        raise ModelRefused(
            f"{name} cannot be run on the paged KV cache ({type(error).__name__}: {str(error)[:200]})."
        ) from error
    for want, got in zip(expected, actual, strict=True):
        _compare(name, want.float(), got.float(), dtype)


def _refuse_known_states(model: GeneralModel) -> None:
    """What the library itself says: the probe would find these, too, but less clearly in 16 bits."""
    types = set(getattr(model.module.config.get_text_config(), "layer_types", None) or ())
    strange = sorted(types - _LAYER_TYPES)
    if getattr(model.module, "_is_stateful", False) or strange:
        kind = f" ({strange[0]} layers)" if strange else ""
        raise ModelRefused(
            f"{type(model.module).__name__} keeps a state between tokens beside the KV cache{kind}, which this server "
            "does not manage."
        )


@contextmanager
def _widened(module: Any, available_bytes: int) -> Iterator[torch.dtype]:
    """Give every 16-bit weight a float32 copy for a while; yields the type that is computed in."""
    narrow: torch.dtype = module.dtype
    held = [t for t in (*module.parameters(), *module.buffers()) if t.dtype == narrow]
    if narrow == torch.float32 or 2 * sum(tensor.nbytes for tensor in held) > 0.8 * available_bytes:
        yield narrow
        return
    originals = [tensor.data for tensor in held]
    try:
        for tensor in held:
            tensor.data = tensor.data.float()
        yield torch.float32
    finally:
        for tensor, original in zip(held, originals, strict=True):
            tensor.data = original


def num_probe_blocks(block_size: int) -> int:
    """Blocks the probe needs: those of both sequences, and block 0, which no sequence uses."""
    return sum(-(-n // block_size) for n in _LENGTHS) + 1


def _compare(name: str, want: Tensor, got: Tensor, dtype: torch.dtype) -> None:
    """want, got: (num_tokens, embedding_rows)."""
    if not bool(torch.isfinite(want).all()):
        raise ModelRefused(
            f"{name} gives NaN or infinity in {str(dtype).removeprefix('torch.')}: "
            "set model.dtype to bfloat16 or float32."
        )
    best = want.argmax(-1, keepdim=True)  # (num_tokens, 1)
    loss = (want.gather(-1, best) - want.gather(-1, got.argmax(-1, keepdim=True))).max()
    if dtype == torch.float32:
        difference, limit = float((want - got).abs().max()), MAX_DIFFERENCE
        limit *= max(1.0, float(want.abs().max()) / 20)
        is_same = difference <= limit and float(loss) <= 4 * limit
    else:
        rms = (want - got).pow(2).mean(-1).sqrt() / want.std(-1).clamp_min(1e-6)  # (num_tokens,)
        difference, limit = float(rms.mean()), MAX_MEAN_RMS
        is_same = difference <= limit
    if not is_same:  # also where the difference is NaN
        raise ModelRefused(
            f"{name} gives other text on the paged KV cache than alone (difference {difference:.3g}; up to {limit:.3g} "
            "would be rounding): it keeps a state, or uses a mask or positions that this server does not know."
        )


def _library_logits(model: GeneralModel, prompts: list[Tensor]) -> list[Tensor]:
    model.use_library_attention()
    try:
        with torch.inference_mode():
            return [
                model.module(input_ids=prompt[None], use_cache=False).logits[0]
                for prompt in prompts
            ]
    finally:
        model.use_paged_attention()


def _paged_logits(
    model: GeneralModel, caches: list[LayerCache], prompts: list[Tensor]
) -> list[Tensor]:
    """Logits of all tokens of each prompt, (num_tokens, embedding_rows), computed in three ragged steps."""
    pieces: list[list[Tensor]] = [[] for _ in prompts]
    known = [0 for _ in prompts]
    block_size = caches[0].key.shape[2]
    for ends in _CUTS:
        spans = list(zip(known, ends, strict=True))
        tokens = torch.cat([prompt[a:b] for prompt, (a, b) in zip(prompts, spans, strict=True)])
        rows = torch.arange(len(tokens), device=model.device)
        logits = model.forward(tokens, _layout(spans, block_size, model.device), caches, rows)
        for piece, part in zip(pieces, torch.split(logits, [b - a for a, b in spans]), strict=True):
            piece.append(part)
        known = list(ends)
    return [torch.cat(piece) for piece in pieces]


def _layout(spans: list[tuple[int, int]], block_size: int, device: torch.device) -> StepLayout:
    """Rows `[start, end)` of each sequence; blocks are dealt out in turn, so that neighbours lie apart."""
    num_blocks = [-(-n // block_size) for n in _LENGTHS]
    tables = torch.zeros(len(spans), max(num_blocks), dtype=torch.int32)
    free = iter(range(1, num_probe_blocks(block_size)))
    for j in range(max(num_blocks)):
        for i, count in enumerate(num_blocks):
            if j < count:
                tables[i, j] = next(free)
    positions = torch.cat([torch.arange(a, b) for a, b in spans])
    owners = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(spans)])
    slots = tables[owners, positions // block_size].long() * block_size + positions % block_size
    starts = [0]
    for a, b in spans:
        starts.append(starts[-1] + b - a)
    lengths = [b for _, b in spans]
    return StepLayout(
        positions=positions.to(device),
        slots=slots.to(device),
        row_starts=torch.tensor(starts, dtype=torch.int32, device=device),
        context_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_tables=tables.to(device),
        row_starts_list=starts,
        context_lens_list=lengths,
        block_size=block_size,
    )


@contextmanager
def _narrow_windows(module: Any) -> Iterator[None]:
    """Narrow every window of the model, in its config and in its layers, and put the real ones back."""
    config = module.config.get_text_config()
    changed: list[tuple[Any, str, int]] = []
    for owner in (config, *module.modules()):
        for name in _WINDOW_NAMES:
            value = getattr(owner, name, None)
            if isinstance(value, int) and value > _WINDOW:
                changed.append((owner, name, value))
    try:
        for owner, name, _ in changed:
            setattr(owner, name, _WINDOW)
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)
