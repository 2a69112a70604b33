"""`DummyRunner` and `ByteTokenizer`: a model without a model, for tests and for measuring everything but the model.

The runner keeps a memory of slots like the real one. Each slot holds a chained hash of its sequence's tokens up to that
position, and the next token is a function of the last slot alone. So a wrong block table, a block freed too early or a
stale prefix hit changes the text, as it would with real keys and values, at constant work per token.

No torch. Knows nothing of scheduling. Used by the step thread only, except for `step_time_s` and the failure hooks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from core.batch import Batch
from core.config import CacheConfig, ModelShape
from core.errors import InvalidValue
from core.interfaces import Drafter, ToolFormat
from core.outputs import SampledToken, TokenLogprobs
from core.sequence import Sequence
from core.speculation.verify import verify
from core.structured.follow import MaskWorker

_MASK = 2**64 - 1
_PRINTABLE = range(32, 127)
_HIDDEN = 8  # of the made-up hidden states: counts of ids modulo 8
_STRONG_BIAS = 20.0  # a logit_bias from here on decides the token, as it does with real logits

Script = Callable[[Sequence], int] | list[int]


@dataclass(slots=True)
class DummyRunner:
    """Implements `core.interfaces.Runner` with known tokens.

    By default the next token is a deterministic printable byte computed from all tokens so far (and from seed and
    choice where `temperature` > 0), and no end token ever comes. `script` forces tokens: a list is the output of
    every sequence, followed by the end token; a callable is asked for the token of each row. Forced ids are not
    checked, so that a script can play a broken sampler. `step_time_s` is slept in each `run`.

    Failures: `run` raises at the steps (counted from 0) in `failing_steps` and whenever `on_run(step, batch)` does;
    a row fails with the cause that `row_failure(sequence)` returns. With `checks_context` every row asserts that
    its slots hold exactly its own tokens.
    """

    shape: ModelShape
    cache_config: CacheConfig
    script: Script | None = None
    step_time_s: float = 0.0
    failing_steps: set[int] = field(default_factory=set)
    on_run: Callable[[int, Batch], None] | None = None
    row_failure: Callable[[Sequence], str | None] | None = None
    checks_context: bool = False
    num_steps: int = 0
    num_resets: int = 0
    has_fixed_bits: bool = True
    drafter: Drafter | None = None
    _slots: list[int] = field(init=False)
    _masks: MaskWorker = field(default_factory=MaskWorker)

    def __post_init__(self) -> None:
        self._slots = [0] * self.cache_config.num_tokens

    def run(self, batch: Batch) -> list[list[int]]:
        """Writes the slots of this step's tokens; returns the last slots of every row as its "logits": one for each
        token of its draft, and one before."""
        step = self.num_steps
        self.num_steps += 1
        if any(sequence.grammar is not None for sequence in batch.sequences):
            rows = [(s, draft) for s, _, draft in batch.rows() if not s.is_finished]
            self._masks.begin([s for s, _ in rows], [draft for _, draft in rows])
        if self.step_time_s:
            time.sleep(self.step_time_s)
        if self.on_run is not None:
            self.on_run(step, batch)
        if step in self.failing_steps:
            raise RuntimeError("the dummy runner was told to fail")
        if batch.copies:
            sources, targets = zip(*batch.copies, strict=True)
            self.write_blocks(list(targets), self.read_blocks(list(sources)))
        return [self._write(*row) for row in batch.rows()]

    def sample(self, batch: Batch, logits: Any) -> list[list[SampledToken]]:
        self._masks.finish()
        sampled: list[list[SampledToken]] = []
        for (sequence, count, draft), states in zip(batch.rows(), logits, strict=True):
            end = sequence.num_computed_tokens + count - len(draft)
            if sequence.is_finished or end != sequence.num_tokens:
                sampled.append([])
                continue
            drawn = (self._sample_row(sequence, state, i) for i, state in enumerate(states))
            sampled.append(verify(draft, drawn))
        return sampled

    @property
    def block_bytes(self) -> int:
        return 8 * self.cache_config.block_size

    def read_blocks(self, block_ids: list[int]) -> memoryview:
        size = self.cache_config.block_size
        slots = [slot for i in block_ids for slot in self._slots[i * size : (i + 1) * size]]
        return memoryview(np.array(slots, dtype=np.uint64).tobytes())

    def write_blocks(self, block_ids: list[int], data: memoryview) -> None:
        size = self.cache_config.block_size
        slots = np.frombuffer(data, dtype=np.uint64).tolist()
        for place, block_id in enumerate(block_ids):
            self._slots[block_id * size : (block_id + 1) * size] = slots[place * size :][:size]

    def reset(self) -> None:
        self.num_resets += 1
        self._slots = [0] * self.cache_config.num_tokens

    def _write(self, sequence: Sequence, count: int, draft: tuple[int, ...]) -> list[int]:
        size = self.cache_config.block_size
        table, start = sequence.block_ids, sequence.num_computed_tokens
        previous = start - 1
        state = self._slots[table[previous // size] * size + previous % size] if start else 0
        states = []
        token_ids = [*sequence.token_ids[start : start + count], *draft]
        for position, token_id in enumerate(token_ids, start):
            state = _chain(state, token_id)
            self._slots[table[position // size] * size + position % size] = state
            states.append(state)
        if sequence.pool is not None:
            ids = sequence.token_ids[start : start + count]
            sequence.pool.add(start, np.eye(_HIDDEN)[[token_id % _HIDDEN for token_id in ids]])
        if self.checks_context:
            self._check_context(sequence, start + count - len(draft))
        return states[-1 - len(draft) :]

    def _check_context(self, sequence: Sequence, num_tokens: int) -> None:
        size, state = self.cache_config.block_size, 0
        for position in range(num_tokens):
            state = _chain(state, sequence.token_ids[position])
            slot = sequence.block_ids[position // size] * size + position % size
            assert self._slots[slot] == state, (
                f"position {position} holds the data of another prefix"
            )

    def _sample_row(self, sequence: Sequence, state: int, num_guesses: int) -> SampledToken:
        """The token behind the sequence and so many tokens of its draft."""
        if self.row_failure is not None and (cause := self.row_failure(sequence)):
            return SampledToken(token_id=0, failure=cause)
        params = sequence.params
        if params.temperature > 0:
            state = _chain(_chain(state, sequence.seed), sequence.choice_index)
        token_id = drawn = _printable(state)
        if self.script is not None:
            token_id = self._scripted(sequence, num_guesses)
        if params.logit_bias:
            best = max(params.logit_bias, key=params.logit_bias.__getitem__)
            if params.logit_bias[best] >= _STRONG_BIAS:
                token_id = best
        if sequence.grammar is not None:
            mask = sequence.grammar.mask_behind(num_guesses)
            if mask is None:
                return SampledToken(0, failure="grammar")
            token_id = _nearest(mask.allowed.tolist(), token_id, state)
            return SampledToken(token_id, _logprobs(token_id, params.logprobs))
        ends = (*self.shape.eos_token_ids, *params.stop_token_ids)
        num_output = sequence.num_output_tokens + num_guesses
        if num_output < params.min_tokens and token_id in ends:
            token_id = next(i for i in (drawn, *_PRINTABLE) if i not in ends)
        return SampledToken(token_id, _logprobs(token_id, params.logprobs))

    def _scripted(self, sequence: Sequence, num_guesses: int) -> int:
        if callable(self.script):
            return self.script(sequence)
        assert self.script is not None
        index = sequence.num_output_tokens + num_guesses
        return self.script[index] if index < len(self.script) else self.shape.eos_token_ids[0]


def make_dummy_runner(
    *,
    num_blocks: int = 256,
    block_size: int = 16,
    max_context: int = 2048,
    eos_token_ids: tuple[int, ...] = (256,),
    vocab_size: int = 257,
    **options: Any,
) -> DummyRunner:
    """A runner that fits `ByteTokenizer`; `options` are the fields of `DummyRunner`."""
    shape = ModelShape(
        num_layers=1,
        num_kv_heads=1,
        head_dim=1,
        vocab_size=vocab_size,
        max_context=max_context,
        kv_bytes_per_token=8,
        weights_bytes=0,
        eos_token_ids=eos_token_ids,
    )
    return DummyRunner(shape, CacheConfig(block_size=block_size, num_blocks=num_blocks), **options)


def _nearest(allowed: list[bool], token_id: int, state: int) -> int:
    """The token itself where it is allowed, else one that is: printable if possible, an end token if not."""
    if allowed[token_id]:
        return token_id
    left = [i for i in _PRINTABLE if allowed[i]] or [i for i, ok in enumerate(allowed) if ok]
    return left[(state >> 33) % len(left)]


def _chain(state: int, token_id: int) -> int:
    return ((state ^ (token_id + 1)) * 6364136223846793005 + 1442695040888963407) & _MASK


def _printable(state: int) -> int:
    return _PRINTABLE[(state >> 33) % len(_PRINTABLE)]


def _logprobs(token_id: int, wanted: int | None) -> TokenLogprobs | None:
    """Fixed finite values: -0.5 for the chosen token, and one less for each of the others."""
    if wanted is None:
        return None
    top = [(token_id, -0.5)]
    top += [((token_id + rank) % 256, -0.5 - rank) for rank in range(1, wanted)]
    return TokenLogprobs(token_id, -0.5, tuple(top[:wanted]))


class ByteTokenizer:
    """Implements `core.interfaces.TextTokenizer`: ids 0 to 255 are bytes, those from 256 on are end tokens.

    The end tokens are written `<|end|>`, `<|end1|>`, ... in a plain prompt. The chat template is one line
    `role: text` per message, and `assistant: ` as the generation prompt.
    """

    def __init__(
        self,
        num_eos: int = 1,
        *,
        has_chat_template: bool = True,
        tool_format: ToolFormat | None = None,
        has_thoughts: bool = False,
    ) -> None:
        self.tool_format, self.has_thoughts = tool_format, has_thoughts
        self.eos_token_ids = tuple(range(256, 256 + num_eos))
        self.vocab_size = 256 + num_eos
        self.has_chat_template = has_chat_template
        self.control_token_ids = frozenset(self.eos_token_ids)
        self.piece: Callable[[int], str | bytes] | None = self._piece
        self._specials = {
            f"<|end{index or ''}|>": token_id for index, token_id in enumerate(self.eos_token_ids)
        }

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        for name, token_id in self._specials.items():
            before, found, after = text.partition(name)
            if found:
                return [*self.encode(before), token_id, *self.encode(after)]
        return list(text.encode("utf-8", "replace"))

    def min_num_tokens(self, text: str) -> int:
        return -(-len(text) // len("<|end1|>"))

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        if not self.has_chat_template:
            raise InvalidValue("This model has no chat template.", param="messages")
        if add_generation_prompt and continue_final_message:
            raise InvalidValue(
                "add_generation_prompt and continue_final_message exclude each other.",
                param="continue_final_message",
            )
        lines = [f"tools: {json.dumps(tools)}"] if tools else []
        lines += [f"{message['role']}: {_content(message)}" for message in messages]
        text = "\n".join(lines)
        if not continue_final_message:
            text += "\n"
        if add_generation_prompt:
            text += "assistant: "
        return list(text.encode("utf-8", "replace"))

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        return list(f"{suffix}|{prefix}".encode())

    def decode(self, token_ids: list[int]) -> str:
        return bytes(i for i in token_ids if 0 <= i < 256).decode("utf-8", "replace")

    def _piece(self, token_id: int) -> str | bytes:
        if 0 <= token_id < 128:
            return chr(token_id)
        return bytes((token_id,)) if 0 <= token_id < 256 else b""

    def token_bytes(self, token_id: int) -> bytes:
        if 0 <= token_id < 256:
            return bytes((token_id,))
        names = [name for name, special in self._specials.items() if special == token_id]
        return names[0].encode() if names else b""


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(part.get("text", "") for part in content)
    return content or ""
