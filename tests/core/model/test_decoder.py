"""The fast decoder against the library's own models, and the same bits whatever the batch."""

from __future__ import annotations

import time

import pytest
import torch
from tiny_decoders import CONFIGS, CPU, SIZES, build, make_step, prompts, rope
from transformers import AutoModelForCausalLM, LlamaConfig

from core.errors import ModelRefused
from core.model.attention import choose_kernels
from core.model.attention.layout import AttentionKernels
from core.model.attention.reference import REFERENCE
from core.model.decoder import FastDecoder
from core.model.decoder_shape import unsupported
from core.model.kv_cache import KVCache


class Cached:
    """A decoder with its cache; `run` computes rows [done, total) of each sequence."""

    def __init__(self, decoder: FastDecoder, block_size: int, num_blocks: int) -> None:
        shape = decoder.shape
        self.decoder, self.block_size, self.blocks = decoder, block_size, iter(range(num_blocks))
        self.cache = KVCache.allocate(
            shape.num_layers,
            num_blocks,
            shape.num_kv_heads,
            block_size,
            shape.head_dim,
            decoder.dtype,
        )
        self.tables: dict[int, list[int]] = {}

    def run(self, spans: list[tuple[int, list[int], int]]) -> list[torch.Tensor]:
        """spans: (key, all token ids, rows to skip) per sequence -> logits of every computed row, per sequence."""
        contexts = [len(ids) for _, ids, _ in spans]
        rows = [len(ids) - done for _, ids, done in spans]
        layout, _ = make_step(contexts, rows, self.block_size)
        ids = torch.tensor([token for _, ids, done in spans for token in ids[done:]])
        for i, (key, tokens, done) in enumerate(spans):
            table = self.tables.setdefault(key, [])
            while len(table) * self.block_size < len(tokens):
                table.append(next(self.blocks))
            layout.block_tables[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
            for row, place in enumerate(range(done, len(tokens)), layout.row_starts_list[i]):
                block, offset = divmod(place, self.block_size)
                layout.slots[row] = table[block] * self.block_size + offset
        logits = self.decoder.forward(ids, layout, self.cache.layers, torch.arange(len(ids)))
        return list(logits.clone().split(rows))


@pytest.fixture(params=["auto", "torch"])
def kernels(request: pytest.FixtureRequest) -> AttentionKernels:
    return choose_kernels(CPU, request.param)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_mixed_steps_give_the_logits_of_the_library(name: str, kernels: AttentionKernels) -> None:
    """One sequence in chunks, one whole and then decoding, beside each other in one step."""
    theirs, decoder = build(CONFIGS[name], kernels)
    first, second = prompts(150, 40)
    cached = Cached(decoder, 16, 20)
    got = [[], []]
    for step in [
        [(0, first[:70], 0)],
        [(0, first[:71], 70), (1, second[:39], 0)],
        [(1, second, 39), (0, first, 71)],
    ]:
        for (key, _, _), logits in zip(step, cached.run(step), strict=True):
            got[key].append(logits)
    with torch.inference_mode():
        for ids, parts in zip((first, second), got, strict=True):
            want = theirs(torch.tensor([ids])).logits[0]
            torch.testing.assert_close(torch.cat(parts).float(), want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_bits_depend_on_neither_batch_nor_chunks(name: str, dtype: torch.dtype) -> None:
    """The same request gives the same logits whole, token by token, in chunks, and beside 40 others."""
    chosen, _ = choose_kernels(CPU)
    if chosen.compiled is None:
        pytest.skip("only the C kernels promise it")
    _, decoder = build(CONFIGS[name], chosen, dtype)
    ids, *others = prompts(180, *range(1, 41))
    want = torch.cat(Cached(decoder, 16, 300).run([(0, ids, 0)]))
    for cuts in [range(1, 181), [13, 45, 46, 144, 180], [180]]:
        cached, done, parts = Cached(decoder, 16, 300), 0, []
        for cut in cuts:
            beside = [(9 + i, other, 0) for i, other in enumerate(others)] if len(cuts) < 9 else []
            step = [*beside[:20], (0, ids[:cut], done), *beside[20:]]
            parts.append(cached.run(step)[len(beside[:20])])
            cached.tables = {0: cached.tables[0]}
            cached.blocks = iter([b for b in range(300) if b not in cached.tables[0]])
            done = cut
        assert torch.equal(torch.cat(parts), want), cuts


def test_bfloat16_stays_near_the_library(kernels: AttentionKernels) -> None:
    theirs, decoder = build(CONFIGS["qwen2"], kernels, torch.bfloat16)
    (ids,) = prompts(60)
    got = Cached(decoder, 16, 20).run([(0, ids, 0)])[0].float()
    with torch.inference_mode():
        want = theirs(torch.tensor([ids])).logits[0].float()
    assert (got - want).abs().mean() < 0.03 * want.abs().mean() + 0.02


def test_weights_are_let_go_as_they_are_packed() -> None:
    theirs = AutoModelForCausalLM.from_config(CONFIGS["llama"])
    weights = dict(theirs.state_dict())
    FastDecoder(CONFIGS["llama"], weights, torch.float32, CPU, REFERENCE)
    assert not [name for name in weights if "rotary" not in name]


def test_a_missing_tensor_refuses_the_model() -> None:
    weights = dict(AutoModelForCausalLM.from_config(CONFIGS["llama"]).state_dict())
    del weights["model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ModelRefused, match=r"k_proj|only some"):
        FastDecoder(CONFIGS["llama"], weights, torch.float32, CPU, REFERENCE)


def test_configs_the_fast_decoder_cannot_compute_are_named() -> None:
    long = rope(
        "longrope",
        short_factor=[1.0] * 8,
        long_factor=[2.0] * 8,
        original_max_position_embeddings=64,
        factor=4.0,
    )
    assert "longrope" in (unsupported(LlamaConfig(**SIZES, rope_parameters=long)) or "")
    assert "silu" in (unsupported(LlamaConfig(**SIZES, hidden_act="gelu")) or "")
    assert "gemma" in (unsupported(type("Config", (), {"model_type": "gemma2"})()) or "")


def test_the_parts_of_a_forward_are_timed_where_asked_and_change_nothing() -> None:
    chosen, _ = choose_kernels(CPU)
    if chosen.compiled is None:
        pytest.skip("only the one C call times its parts")
    _, decoder = build(CONFIGS["llama"], chosen)
    (ids,) = prompts(60)
    before = Cached(decoder, 16, 20).run([(0, ids, 0)])[0]
    seconds = decoder.time_parts()
    assert seconds is not None
    start_s = time.perf_counter()
    after = Cached(decoder, 16, 20).run([(0, ids, 0)])[0]
    elapsed_s = time.perf_counter() - start_s
    assert torch.equal(before, after)
    assert (seconds > 0).all()
    assert seconds.sum() < elapsed_s
    assert len(decoder.linear_layers) == 4 * SIZES["num_hidden_layers"] + 1
