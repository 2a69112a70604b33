"""Embeddings are the library's mean hidden states, and the same bits in any company."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import families
import numpy as np
import pytest
import torch

from core.config import EngineConfig, KVCacheConfig, ModelConfig
from core.engine import Engine
from core.outputs import FinishReason
from core.pooling import MeanPool
from core.sampling_params import SamplingParams
from core.sequence import Sequence

PARAMS = SamplingParams(max_tokens=1, temperature=0)
PROMPTS = [[i * 7 % 250 + 3 for i in range(length)] for length in (1, 40, 100, 100, 17)]


def make_engine(
    folder: Path, kernels: Any = "auto", *, chunk: int = 512, num_blocks: int = 200, **model: Any
) -> Engine:
    return Engine.from_config(
        ModelConfig(name=str(folder), **model),
        EngineConfig(device="cpu", kernels=kernels, max_batched_tokens=chunk),
        KVCacheConfig(num_blocks=num_blocks),
    )


def embed(engine: Engine, prompts: list[list[int]]) -> list[bytes]:
    neighbour = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(Sequence(f"neighbour {index}", list(prompt), neighbour))
        engine.add(Sequence(str(index), list(prompt), PARAMS, pool=MeanPool()))
    found: dict[str, bytes] = {}
    while engine.has_work:
        for output in engine.step():
            if output.sequence_id.isdigit() and output.finish_reason is not None:
                assert output.finish_reason is FinishReason.STOP
                assert output.embedding is not None
                found[output.sequence_id] = output.embedding
    return [found[str(index)] for index in range(len(prompts))]


@pytest.mark.parametrize("kernels", ["auto", "torch"])
@pytest.mark.parametrize("family", ["llama", "qwen3", *list(families.GENERAL)])
def test_an_embedding_is_the_mean_of_the_librarys_last_hidden_states(
    tiny_model: Callable[..., Path], family: str, kernels: str
) -> None:
    from transformers import AutoModel

    if kernels == "torch" and family != "llama":
        pytest.skip("the choice of kernels changes the fast decoder only")
    folder = tiny_model(family)
    reference = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    engine = make_engine(folder, kernels, chunk=16, dtype="float32")
    for raw, prompt in zip(embed(engine, PROMPTS), PROMPTS, strict=True):
        with torch.inference_mode():
            mean = reference(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        expected = (mean / mean.norm()).numpy()
        np.testing.assert_allclose(np.frombuffer(raw, "<f4"), expected, atol=2e-5)


def test_an_embedding_has_the_same_bits_alone_and_in_chunks_beside_others(
    default_model_folder: Path,
) -> None:
    """B056, for embeddings."""
    lonely = make_engine(default_model_folder)
    alone = [embed(lonely, [prompt])[0] for prompt in PROMPTS]
    for chunk, num_blocks in ((512, 200), (16, 200), (40, 20)):
        engine = make_engine(default_model_folder, chunk=chunk, num_blocks=num_blocks)
        for _ in range(2):  # cold, then with whatever the cache holds
            assert embed(engine, PROMPTS) == alone


def test_a_preempted_sum_begins_anew_and_chunks_do_not_change_it() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 7))
    whole, cut = MeanPool(), MeanPool()
    whole.add(0, rows)
    cut.add(0, rows[:9])
    cut.add(0, rows[:20])
    for start, end in ((20, 21), (21, 50)):
        cut.add(start, rows[start:end])
    assert cut.embedding() == whole.embedding()
    with pytest.raises(AssertionError):
        cut.add(51, rows)
    cut.add(0, rows * np.nan)
    assert cut.embedding() is None


def test_a_text_is_nearer_to_its_paraphrase_than_to_another(default_model_folder: Path) -> None:
    """The default model was not trained for this, but its means must not be noise."""
    engine = make_engine(default_model_folder)
    texts = [
        "The cat sleeps on the sofa.",
        "A cat is asleep on the couch.",
        "def f(x): return 2 * x",
    ]
    ids = [engine.tokenizer.encode(text) for text in texts]
    a, b, c = (np.frombuffer(raw, "<f4") for raw in embed(engine, ids))
    assert float(a @ b) > float(a @ c)
