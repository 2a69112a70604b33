"""What keys and values of a prefix depend on, as one digest: only under an equal one may they be used again.

Most of it is measured instead of listed: a few tokens are computed, and the bits of their keys and values go into the
digest, so whatever changes the weights of a layer, the arithmetic or the instruction set shows. Called by `loader.py`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import torch

from core import __version__
from core.batch import Batch
from core.config import CacheConfig, ModelShape
from core.interfaces import Runner
from core.model.kernels import library_path
from core.sampling_params import SamplingParams
from core.sequence import Sequence

PROBE_TOKENS = 48
_SAMPLES = (
    256  # of a file, evenly spread: no weights of a layer and few of an embedding can change unseen
)
_SAMPLE_BYTES = 4096


def fingerprint(runner: Runner, folder: Path, kernels: str) -> str:
    """64 hexadecimal digits. Computes a few tokens: only while no sequence exists."""
    digest = hashlib.sha256()
    cache = runner.cache_config
    told = (__version__, torch.__version__, kernels, cache.block_size, cache.dtype, runner.shape)
    digest.update(repr(told).encode())
    for path in sorted(folder.iterdir()):
        if path.is_file():
            digest.update(f"{path.name} {path.stat().st_size}".encode())
            _sample(path, digest.update)
    if (compiled := library_path()) is not None:
        digest.update(compiled.read_bytes())
    digest.update(_probe(runner, runner.shape, cache))
    return digest.hexdigest()


def _sample(path: Path, take: Callable[[bytes], None]) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        for start in range(0, size, max(_SAMPLE_BYTES, size // _SAMPLES)):
            file.seek(start)
            take(file.read(_SAMPLE_BYTES))


def _probe(runner: Runner, shape: ModelShape, cache: CacheConfig) -> memoryview:
    """Keys and values of tokens from all over the vocabulary, in full blocks; none in a tiny pool."""
    room = min(PROBE_TOKENS, cache.num_tokens, shape.max_context - 1)
    blocks = list(range(room // cache.block_size))
    ids = [(7919 * (i + 1)) % shape.vocab_size for i in range(len(blocks) * cache.block_size)]
    if not ids:
        return memoryview(b"")
    sequence = Sequence("probe", ids, SamplingParams(temperature=0))
    sequence.block_ids = blocks
    batch = Batch((sequence,), (len(ids),))
    runner.sample(batch, runner.run(batch))
    bits = runner.read_blocks(blocks)
    runner.reset()
    return bits
