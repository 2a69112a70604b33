"""`ModelRunner`: `Batch` to tensors, one forward, logits of the rows that are ready, and their next tokens.

Owns the KV cache and the device. Knows sequences as the scheduler plans them, no requests. Made by the loader in the
step thread, called by the engine in the same thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from core.batch import Batch
from core.config import CacheConfig, ModelShape
from core.model.attention.layout import CausalModel
from core.model.decoder import FastDecoder
from core.model.drafter import ModelDrafter
from core.model.kernels import Kernels
from core.model.kv_cache import KVCache
from core.model.step_inputs import StepInputs
from core.model.token_chooser import TokenChooser
from core.outputs import SampledToken
from core.pace import give_way, is_beside_steps
from core.sampling_params import SamplingParams
from core.sequence import Sequence
from core.speculation.verify import verify
from core.structured.follow import MaskWorker

WARM_UP_TOKENS = 32


@dataclass(frozen=True, slots=True)
class StepLogits:
    """What `run` hands to `sample`: valid until the next `run`."""

    logits: Tensor  # (len(ready) + number of draft tokens, embedding_rows)
    ready: list[int]  # rows of the batch


class ModelRunner:
    """A `core.interfaces.Runner` over any `CausalModel`."""

    def __init__(self, model: CausalModel, shape: ModelShape, cache_config: CacheConfig) -> None:
        """Reserves the KV cache; on a CPU its memory is taken as it is used."""
        self.shape, self.cache_config = shape, cache_config
        self.model = model
        compiled: Kernels | None = getattr(model, "compiled", None)
        self.has_fixed_bits = compiled is not None
        self.drafter: ModelDrafter | None = None
        self._chooser = TokenChooser(shape.vocab_size, shape.eos_token_ids, compiled)
        self._masks = MaskWorker()
        self._inputs = StepInputs(cache_config, shape.vocab_size, model.device)
        self.kv_cache = KVCache.allocate(
            shape.num_layers,
            cache_config.num_blocks,
            shape.num_kv_heads,
            cache_config.block_size,
            shape.head_dim,
            torch.int8 if cache_config.dtype == "int8" else model.dtype,
            model.device,
        )

    def run(self, batch: Batch) -> StepLogits:
        """One forward; see `Runner.run`."""
        step = self._inputs.build(batch)
        if self.drafter is not None:
            self.drafter.follow(batch)
        if batch.copies:
            self.kv_cache.copy_blocks(batch.copies)
        drafts = batch.drafts
        self._masks.begin(
            [batch.sequences[row] for row in step.ready],
            [drafts[row] for row in step.ready] if drafts else None,
        )
        logits = self.model.forward(
            step.token_ids, step.layout, self.kv_cache.layers, step.logit_rows
        )
        if any(sequence.pool is not None for sequence in batch.sequences):
            self._pool(batch, step.layout.row_starts_list)
        return StepLogits(logits, step.ready)

    def sample(self, batch: Batch, logits: StepLogits) -> list[list[SampledToken]]:
        """See `Runner.sample`. Draws behind every guess at once, each as if the guesses before it were right."""
        tokens: list[list[SampledToken]] = [[] for _ in batch.sequences]
        if not logits.ready:
            return tokens
        sequences: list[Sequence] = []
        guesses: list[tuple[int, ...]] = []
        for row in logits.ready:
            draft = batch.drafts[row] if batch.drafts else ()
            for end in range(len(draft) + 1):
                sequences.append(batch.sequences[row])
                guesses.append(draft[:end])
        self._masks.finish()
        with torch.inference_mode():
            sampled = iter(self._chooser.sample(logits.logits, sequences, guesses))
        for row in logits.ready:
            draft = batch.drafts[row] if batch.drafts else ()
            tokens[row] = verify(draft, list(islice(sampled, len(draft) + 1)))
        return tokens

    def draft_with(
        self,
        decoder: FastDecoder,
        layers: list[int] | None,
        description: str,
        max_context: int | None = None,
    ) -> None:
        """From now on there is a drafter: `decoder`, whose layers are those of the model at these places; None: it is
        another model, with keys and values of its own, for at most `max_context` tokens."""
        caches = None if layers is None else [self.kv_cache.layers[layer] for layer in layers]
        settings = (self.shape, self.cache_config, self._chooser, description, max_context)
        self.drafter = ModelDrafter(decoder, caches, *settings)

    @property
    def block_bytes(self) -> int:
        return self.kv_cache.block_bytes

    def read_blocks(self, block_ids: list[int]) -> memoryview:
        return self.kv_cache.read_blocks(block_ids)

    def write_blocks(self, block_ids: list[int], data: memoryview) -> None:
        self.kv_cache.write_blocks(block_ids, data)
        if self.drafter is not None:
            self.drafter.forget(block_ids)

    def reset(self) -> None:
        """See `Runner.reset`. Keys and values need no clearing: a block is written before it is read."""
        self._inputs.forget()
        if self.drafter is not None:
            self.drafter.reset()

    def warm_up(self) -> None:
        """Computes one small prefill and one decode step, so that the first request does not pay for first touches.
        Only while no sequence exists: it writes into the first blocks. Beside another model's steps it is the least
        that touches everything: a step cannot pause."""
        wanted = 2 if is_beside_steps() else WARM_UP_TOKENS
        room = min(wanted, self.cache_config.num_tokens, self.shape.max_context)
        sequence = Sequence("warm-up", [0] * room, SamplingParams(temperature=0))
        sequence.block_ids = list(range(-(-room // self.cache_config.block_size)))
        for count in (room - 1, 1):
            if count:
                batch = Batch((sequence,), (count,))
                self.sample(batch, self.run(batch))
                sequence.num_computed_tokens += count
                give_way()
        self.reset()

    def _pool(self, batch: Batch, starts: list[int]) -> None:
        """Gives what this step computed to the sequences that want an embedding."""
        hidden = self.model.hidden_states()
        for sequence, start, end in zip(batch.sequences, starts, starts[1:], strict=False):
            if sequence.pool is not None and not sequence.is_finished:
                rows = hidden[start:end].double().cpu().numpy()
                sequence.pool.add(sequence.num_computed_tokens, rows)
