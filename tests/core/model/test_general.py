"""The general path: every family computes ragged, chunked batches as the library computes each sequence alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import families
import pytest
import torch

from core.config import EngineConfig, KVCacheConfig, ModelConfig, ModelShape
from core.errors import ModelRefused
from core.model.attention.layout import AttentionKernels, StepLayout
from core.model.attention.reference import REFERENCE
from core.model.general import GeneralModel
from core.model.kv_cache import KVCache
from core.model.loader import load_general, prepare
from core.model.probe import probe

BLOCK_SIZE = 4
PROMPT_LENGTHS = (37, 5, 12)
NUM_NEW = 10


def load(folder: Path, dtype: str = "float32", kernels: AttentionKernels = REFERENCE):
    model = ModelConfig(name=str(folder), dtype=dtype)
    planned = prepare(model, EngineConfig(device="cpu"), KVCacheConfig(), lambda m, f: None)
    return load_general(planned, kernels), planned.shape


def make_layout(spans: list[tuple[int, int]], num_blocks: int) -> StepLayout:
    """Rows [start, end) of each sequence; sequence i owns every `len(spans)`-th block."""
    tables = torch.arange(num_blocks * len(spans)).view(num_blocks, len(spans)).T.int()
    positions = torch.cat([torch.arange(a, b) for a, b in spans])
    owners = torch.cat([torch.full((b - a,), i) for i, (a, b) in enumerate(spans)])
    slots = tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    starts = [0]
    for a, b in spans:
        starts.append(starts[-1] + b - a)
    lengths = [b for _, b in spans]
    return StepLayout(
        positions=positions,
        slots=slots,
        row_starts=torch.tensor(starts, dtype=torch.int32),
        context_lens=torch.tensor(lengths, dtype=torch.int32),
        block_tables=tables.contiguous(),
        row_starts_list=starts,
        context_lens_list=lengths,
        block_size=BLOCK_SIZE,
    )


def decode_together(
    model: GeneralModel, shape: ModelShape, prompts: list[list[int]], num_new: int, chunk: int
) -> list[list[int]]:
    """Greedy decoding of all prompts in one ragged batch; prompts enter in chunks beside decoding neighbours."""
    num_blocks = -(-(max(map(len, prompts)) + num_new) // BLOCK_SIZE)
    cache = KVCache.allocate(
        shape.num_layers,
        num_blocks * len(prompts),
        shape.num_kv_heads,
        BLOCK_SIZE,
        shape.head_dim,
        model.dtype,
    )
    known = [list(prompt) for prompt in prompts]
    computed = [0] * len(prompts)
    while any(len(k) < len(p) + num_new for k, p in zip(known, prompts, strict=True)):
        spans = [(c, min(len(k), c + chunk)) for c, k in zip(computed, known, strict=True)]
        tokens = torch.tensor([t for k, (a, b) in zip(known, spans, strict=True) for t in k[a:b]])
        layout = make_layout(spans, num_blocks)
        logits = model.forward(tokens, layout, cache.layers, layout.row_starts[1:].long() - 1)
        assert logits.shape[0] == len(prompts)
        for i, (_, end) in enumerate(spans):
            computed[i] = end
            if end == len(known[i]):
                if len(known[i]) == len(prompts[i]) + num_new:
                    computed[i] -= (
                        1  # done: its last token is computed again, as under policy `static`
                    )
                else:
                    known[i].append(int(logits[i].argmax()))
    return [k[len(p) :] for k, p in zip(known, prompts, strict=True)]


@pytest.mark.parametrize("family", [*families.FAST, *families.GENERAL])
def test_a_ragged_chunked_batch_gives_the_greedy_tokens_of_the_library(
    tiny_model: Callable[..., Path], family: str
) -> None:
    """B143, B144 (OPT's offset), B150: each sequence as alone, past every window, chunked and decoded together."""
    folder = tiny_model(family)
    reference = families.load_reference(folder)
    generator = torch.Generator().manual_seed(3)
    prompts = [
        torch.randint(3, families.NUM_TOKENS, (n,), generator=generator).tolist()
        for n in PROMPT_LENGTHS
    ]
    expected = [families.greedy(reference, prompt, NUM_NEW) for prompt in prompts]
    model, shape = load(folder)
    assert decode_together(model, shape, prompts, NUM_NEW, chunk=16) == expected


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*families.FAST, *families.GENERAL])
def test_the_probe_lets_families_pass_that_are_computed_right(
    tiny_model: Callable[..., Path], family: str, dtype: str
) -> None:
    """Also where experts are chosen in 16 bits: the probe compares in float32."""
    model, shape = load(tiny_model(family), dtype)
    before = {name: tensor.data_ptr() for name, tensor in model.module.named_parameters()}
    probe(model, shape, 16, available_bytes=1 << 30)
    assert {name: tensor.data_ptr() for name, tensor in model.module.named_parameters()} == before
    assert model.module.dtype == getattr(torch, dtype)


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("falcon", "in its own code"),
        ("bloom", "in its own code"),
        ("mamba", "keeps a state"),
        ("lfm2", "conv layers"),
        ("llama4_text", "other text"),
    ],
)
def test_a_model_that_cannot_be_computed_right_is_refused_with_the_reason(
    tiny_model: Callable[..., Path], family: str, reason: str
) -> None:
    folder = tiny_model(family)

    def load_and_probe() -> None:
        model, shape = load(folder)
        probe(model, shape, 16, available_bytes=1 << 30)

    with pytest.raises(ModelRefused, match=reason):
        load_and_probe()


def test_the_probe_itself_finds_a_state_that_flows_between_neighbours(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were the library's own label missing, the packed row would still show it."""
    monkeypatch.setattr("core.model.probe._refuse_known_states", lambda model: None)
    model, shape = load(tiny_model("lfm2"))
    with pytest.raises(ModelRefused, match="other text"):
        probe(model, shape, 16, available_bytes=1 << 30)


def test_the_probe_finds_attention_that_ignores_windows(tiny_model: Callable[..., Path]) -> None:
    """B150: windows of the real model are far longer than the probe; they are narrowed on both sides."""

    def attend_to_all(query, cache, layout, *, scale, window=None, softcap=None, sinks=None):
        return REFERENCE.attend(query, cache, layout, scale=scale, softcap=softcap, sinks=sinks)

    careless = AttentionKernels("careless", REFERENCE.write_kv, attend_to_all)
    model, shape = load(tiny_model("gemma2", sliding_window=400), kernels=careless)
    with pytest.raises(ModelRefused, match="other text"):
        probe(model, shape, 16, available_bytes=1 << 30)
    assert model.module.config.sliding_window == 400


def test_the_probe_finds_sinks_and_soft_caps_that_are_ignored(
    tiny_model: Callable[..., Path],
) -> None:
    def attend_plainly(query, cache, layout, *, scale, window=None, softcap=None, sinks=None):
        return REFERENCE.attend(query, cache, layout, scale=scale, window=window)

    careless = AttentionKernels("careless", REFERENCE.write_kv, attend_plainly)
    model, shape = load(tiny_model("gpt_oss"), kernels=careless)
    with pytest.raises(ModelRefused, match="other text"):
        probe(model, shape, 16, available_bytes=1 << 30)


def test_half_precision_that_overflows_is_refused(tiny_model: Callable[..., Path]) -> None:
    """B149: weights whose products leave float16 give NaN; the start says so instead of endless `!`."""
    model, shape = load(tiny_model("gpt2"), "float16")
    for parameter in model.module.parameters():
        parameter.data.mul_(3000)
    with pytest.raises(ModelRefused, match="float32"):
        probe(model, shape, 16, available_bytes=0)


def test_two_models_in_one_process_do_not_share_their_steps(
    tiny_model: Callable[..., Path],
) -> None:
    first, shape = load(tiny_model("gpt2"))
    second, other = load(tiny_model("phi"))
    prompts = [[5, 6, 7, 8], [9, 10]]
    alone = decode_together(first, shape, prompts, 4, 16)
    decode_together(second, other, prompts, 4, 16)
    assert decode_together(first, shape, prompts, 4, 16) == alone
