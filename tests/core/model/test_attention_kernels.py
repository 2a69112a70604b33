"""The C kernels against plain torch, over random ragged steps."""

from __future__ import annotations

import random
import shutil
import sys

import pytest
import torch
from tiny_decoders import make_step

from core.model.attention import choose_kernels
from core.model.attention.cpu import cpu_kernels
from core.model.attention.layout import LayerCache, StepLayout
from core.model.attention.reference import REFERENCE
from core.model.kernels import Kernels, load
from core.model.kv_cache import KVCache

KERNELS = load()
needs_kernels = pytest.mark.skipif(KERNELS is None, reason="the C kernels are not compiled")


def make_cache(
    num_blocks: int, kv_heads: int, block_size: int, head_dim: int, dtype: torch.dtype
) -> LayerCache:
    shape = (num_blocks, kv_heads, block_size, head_dim)
    if dtype == torch.int8:
        scales = torch.rand(2, *shape[:-1]) / 50
        key, value = torch.randint(-127, 128, (2, *shape), dtype=dtype)
        return LayerCache(key, value, scales[0], scales[1])
    return LayerCache(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype))


CACHES = [torch.bfloat16, torch.float32, torch.int8]


def compute_dtype(cache_dtype: torch.dtype) -> torch.dtype:
    """Of the queries beside such a cache."""
    return torch.bfloat16 if cache_dtype == torch.int8 else cache_dtype


@pytest.fixture(params=["", "avx512bf16", "avx512", "avx2", "plain"])
def variant(request: pytest.FixtureRequest):
    """The kernels in one instruction set; the best one again afterwards."""
    if KERNELS is None:
        pytest.skip("the C kernels are not compiled")
    if not KERNELS.select(request.param):
        pytest.skip(f"this processor has no {request.param}")
    yield KERNELS
    KERNELS.select()


CASES = [
    # contexts, rows, block_size, heads, kv_heads, head_dim, options
    ([1, 17, 128, 129, 300], [1, 1, 1, 1, 1], 16, 9, 3, 64, {}),
    ([5, 40, 300], [5, 40, 40], 16, 9, 3, 64, {}),
    ([130, 7, 260], [1, 7, 100], 4, 4, 2, 32, {"window": 20}),
    ([700], [1], 1, 2, 1, 16, {"window": 200}),
    ([33, 64], [3, 1], 32, 8, 1, 128, {"softcap": 5.0}),
    ([50, 600], [50, 1], 16, 2, 2, 80, {"softcap": 20.0, "window": 33}),
    ([50, 200], [30, 1], 24, 4, 2, 256, {"sinks": True}),
    ([19, 150], [4, 150], 16, 40, 1, 18, {}),
    # so many sequences that a thread takes all heads of one
    ([1, 40, 129, 300, 131] * 4, [1, 1, 1, 1, 4] * 4, 16, 9, 3, 64, {"window": 100}),
    ([200, 17] * 10, [1, 2] * 10, 16, 64, 64, 16, {}),
    ([140, 60] * 10, [5, 3] * 10, 24, 14, 2, 128, {"sinks": True}),
]


@needs_kernels
@pytest.mark.parametrize("dtype", CACHES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernels_give_what_the_reference_gives(variant: Kernels, case, dtype) -> None:
    contexts, rows, block_size, heads, kv_heads, head_dim, options = case
    torch.manual_seed(0)
    layout, num_blocks = make_step(contexts, rows, block_size)
    cache = make_cache(num_blocks, kv_heads, block_size, head_dim, dtype)
    query = torch.randn(sum(rows), heads, head_dim).to(compute_dtype(dtype))
    options = dict(options, scale=head_dim**-0.5)
    if options.pop("sinks", False):
        options["sinks"] = torch.randn(heads)
    want = REFERENCE.attend(query, cache, layout, **options)
    got = cpu_kernels(variant).attend(query, cache, layout, **options)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert got.dtype == query.dtype
    torch.testing.assert_close(got.float(), want.float(), atol=tolerance, rtol=tolerance)


@needs_kernels
def test_keys_and_values_land_in_their_slots() -> None:
    layout, num_blocks = make_step([5, 40, 300], [5, 40, 40], 16)
    key, value = torch.randn(85, 3, 64), torch.randn(85, 3, 64)
    cache = make_cache(num_blocks, 3, 16, 64, torch.float32)
    copy = LayerCache(cache.key.clone(), cache.value.clone())
    REFERENCE.write_kv(key, value, cache, layout)
    cpu_kernels(KERNELS).write_kv(key, value, copy, layout)
    assert torch.equal(cache.key, copy.key)
    assert torch.equal(cache.value, copy.value)


@needs_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_keys_and_values_are_kept_in_8_bits_as_the_reference_does(variant, dtype) -> None:
    layout, num_blocks = make_step([5, 40, 300], [5, 40, 40], 16)
    key, value = torch.randn(85, 3, 64).to(dtype), torch.randn(85, 3, 64).to(dtype) * 9
    key[3, 1] = 0
    want, got = (KVCache.allocate(1, num_blocks, 3, 16, 64, torch.int8).layers[0] for _ in "ab")
    for cache in (want, got):
        for tensor in (cache.key, cache.value, cache.key_scale, cache.value_scale):
            tensor.zero_()
    REFERENCE.write_kv(key, value, want, layout)
    cpu_kernels(variant).write_kv(key, value, got, layout)
    torch.testing.assert_close(got.key_scale, want.key_scale)
    torch.testing.assert_close(got.value_scale, want.value_scale)
    assert (got.key.int() - want.key.int()).abs().max() <= 1  # ties
    assert (got.key != want.key).float().mean() < 0.01
    assert (got.value != want.value).float().mean() < 0.01


@needs_kernels
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("dtype", CACHES, ids=str)
@pytest.mark.parametrize("threads", [1, 2, 7])
def test_bits_depend_on_neither_batch_nor_chunks_nor_threads(
    variant, dtype, window, threads
) -> None:
    """Rows computed alone, in chunks, all at once or beside others are the same, split over threads or not."""
    torch.manual_seed(1)
    context, other = 700, 90
    whole, num_blocks = make_step([context, other], [context, 1], 16)
    cache = make_cache(num_blocks, 3, 16, 64, dtype)
    query = torch.randn(context + 1, 9, 64).to(compute_dtype(dtype))
    kernels = cpu_kernels(variant)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = kernels.attend(query, cache, whole, scale=0.125, window=window)
        torch.set_num_threads(threads)
        for first, last in [
            (0, 1),
            (0, 33),
            (33, 160),
            (128, 129),
            (511, 512),
            (650, 700),
            (699, 700),
        ]:
            part, _ = make_step([last], [last - first], 16)
            part.block_tables[:] = whole.block_tables[:1, : part.block_tables.shape[1]]
            got = kernels.attend(query[first:last], cache, part, scale=0.125, window=window)
            assert torch.equal(got, want[first:last]), (first, last)
    finally:
        torch.set_num_threads(before)


def share_blocks(layout: StepLayout, generator: random.Random) -> None:
    """Lets sequences begin with the blocks of an earlier one, as the prefix cache does: never with those they write."""
    for i in range(1, len(layout.context_lens_list)):
        like = generator.randrange(i)
        rows = layout.row_starts_list[i + 1] - layout.row_starts_list[i]
        like_rows = layout.row_starts_list[like + 1] - layout.row_starts_list[like]
        room = min(layout.context_lens_list[i] - rows, layout.context_lens_list[like] - like_rows)
        count = generator.choice([room, room // 2, generator.randint(0, room)]) // layout.block_size
        layout.block_tables[i, :count] = layout.block_tables[like, :count]


@needs_kernels
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize("dtype", CACHES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_blocks_shared_by_sequences_are_read_together_with_the_same_bits(
    variant, dtype, window, seed
) -> None:
    """Random trees of prefixes, decode rows beside chunks; each sequence alone shares nothing."""
    generator = random.Random(seed)
    torch.manual_seed(seed)
    contexts = [generator.choice([130, 300, 512, 700, 1000]) for _ in range(13)]
    rows = [generator.choice([1, 1, 1, 3, 40]) for _ in contexts]
    block_size = generator.choice([1, 16, 24, 256])
    layout, num_blocks = make_step(contexts, rows, block_size)
    share_blocks(layout, generator)
    cache = make_cache(num_blocks, 3, block_size, 64, dtype)
    query = torch.randn(sum(rows), 9, 64).to(compute_dtype(dtype))
    kernels = cpu_kernels(variant)
    got = kernels.attend(query, cache, layout, scale=0.125, window=window)
    start = 0
    for i, (context, new) in enumerate(zip(contexts, rows, strict=True)):
        alone, _ = make_step([context], [new], block_size)
        alone.block_tables[:] = layout.block_tables[i : i + 1, : alone.block_tables.shape[1]]
        part = query[start : start + new]
        want = kernels.attend(part, cache, alone, scale=0.125, window=window)
        assert torch.equal(got[start : start + new], want), i
        start += new


@needs_kernels
@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (64, 64), (14, 2), (5, 1)])
@pytest.mark.parametrize("dtype", CACHES, ids=str)
def test_a_thread_that_takes_all_heads_of_a_sequence_gives_the_bits_of_one_head_at_a_time(
    variant, dtype, heads, kv_heads
) -> None:
    """Which it does where there are many sequences, of few rows each."""
    torch.manual_seed(2)
    contexts, rows = [1, 500, 130, 258] * 6, [1, 1, 5, 2] * 6
    layout, num_blocks = make_step(contexts, rows, 16)
    cache = make_cache(num_blocks, kv_heads, 16, 64, dtype)
    query = torch.randn(sum(rows), heads, 64).to(compute_dtype(dtype))
    kernels = cpu_kernels(variant)
    got = kernels.attend(query, cache, layout, scale=0.125)
    start = 0
    for i, (context, new) in enumerate(zip(contexts, rows, strict=True)):
        alone, _ = make_step([context], [new], 16)
        alone.block_tables[:] = layout.block_tables[i : i + 1, : alone.block_tables.shape[1]]
        part = query[start : start + new]
        assert torch.equal(
            got[start : start + new], kernels.attend(part, cache, alone, scale=0.125)
        )
        start += new


@needs_kernels
def test_unsupported_shapes_are_served_by_the_reference(caplog: pytest.LogCaptureFixture) -> None:
    layout, num_blocks = make_step([20], [3], 16)
    cache = make_cache(num_blocks, 1, 16, 32, torch.float16)
    query = torch.randn(3, 2, 32).half()
    got = cpu_kernels(KERNELS).attend(query, cache, layout, scale=0.2)
    assert torch.equal(got, REFERENCE.attend(query, cache, layout, scale=0.2))
    assert "reference serves" in caplog.text


def test_compiled_kernels_are_in_use_where_a_compiler_is_present() -> None:
    if sys.platform == "win32" or not (shutil.which("cc") or shutil.which("gcc")):
        pytest.skip("no C compiler")
    kernels, reason = choose_kernels(torch.device("cpu"))
    assert kernels.compiled is not None, f"a compiler is present but: {reason}"


def test_the_setting_torch_forces_the_reference() -> None:
    kernels, reason = choose_kernels(torch.device("cpu"), "torch")
    assert kernels is REFERENCE
    assert "engine.kernels: torch" in reason
