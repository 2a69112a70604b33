"""Memory for weights: as good as any other, and given back."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from core.model import weights_memory
from core.model.weights_memory import CHUNK_BYTES, LargePages


def is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(part, 16) for part in line.split()[0].split("-"))
        if start <= address < end:
            return True
    return False


def test_tensors_lie_beside_each_other_and_none_in_another():
    room = LargePages()
    sizes = [(3, 5), (1, 64), (7, 1000), (2, 3)]
    tensors = [room.empty(size, torch.int32).fill_(i) for i, size in enumerate(sizes)]
    for i, (tensor, size) in enumerate(zip(tensors, sizes, strict=True)):
        assert tensor.shape == size
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0
        assert bool((tensor == i).all())


def test_what_is_larger_than_a_chunk_has_one_of_its_own():
    room = LargePages()
    small, large = room.empty((8,), torch.int8), room.empty((CHUNK_BYTES + 1,), torch.int8)
    small.fill_(1)
    large[-1] = 2
    assert large.nbytes == CHUNK_BYTES + 1
    assert bool((small == 1).all())


def test_an_empty_tensor_needs_no_room():
    assert LargePages().empty((0, 4), torch.float32).shape == (0, 4)


def test_where_the_system_has_none_the_heap_serves(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert LargePages().empty((4,), torch.int64).fill_(3).tolist() == [3, 3, 3, 3]


def test_a_kernel_that_refuses_gives_ordinary_pages(monkeypatch):
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("there are no large pages to refuse")
    monkeypatch.setattr(weights_memory.mmap, "MADV_HUGEPAGE", 9999)
    assert LargePages().empty((4,), torch.int64).fill_(3).tolist() == [3, 3, 3, 3]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_memory_goes_back_with_the_last_tensor_in_it():
    room = LargePages()
    first, second = room.empty((1000,), torch.int32), room.empty((1000,), torch.int32)
    address = first.fill_(1).data_ptr()
    del room, first
    assert bool((second.fill_(2) == 2).all())
    assert is_mapped(address)
    del second
    assert not is_mapped(address)
