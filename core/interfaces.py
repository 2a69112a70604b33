"""What the engine asks of a runner: `core/model/runner.py` computes, `core/dummy_runner.py` plays known tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from core.batch import Batch
from core.config import CacheConfig, ModelShape
from core.outputs import SampledToken
from core.sequence import Sequence


class Drafter(Protocol):
    """Guesses what a runner will sample, with a model of its own. Used by the step thread only, between planning a
    step and running it."""

    description: str  # for the start log

    def draft(self, rows: list[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        """Up to so many tokens behind the known ones of each sequence, whose blocks cover them. All but the last of its
        tokens are computed. Guesses are drawn as the runner samples: with the same parameters and random numbers."""

    def reset(self) -> None:
        """The pool was emptied."""


class Runner(Protocol):
    """Computes batches. Used by the step thread only."""

    shape: ModelShape
    cache_config: CacheConfig
    has_fixed_bits: (
        bool  # a row's logits have the same bits in every batch, and so drafts change no token
    )

    @property
    def drafter(self) -> Drafter | None:
        """Who guesses with `speculative.method: draft`."""

    def run(self, batch: Batch) -> Any:
        """One forward: writes K and V, returns logits (opaque to the engine). An exception ends the whole batch.

        First the copies of `batch.copies` are made, each block as it was before any of them.

        In each layer the keys and values of all rows are written before any row attends: block tables of different
        rows may share blocks that this very step fills.
        """

    def sample(self, batch: Batch, logits: Any) -> list[list[SampledToken]]:
        """One entry per sequence of the batch; empty for rows that are not ready to sample (unfinished prefill, or
        finished sequences kept by policy `static`), one token for the others, and more where a draft was right
        (`verify`). A failing row is reported in its own entry."""

    @property
    def block_bytes(self) -> int:
        """Of keys and values in one block, over all layers."""

    def read_blocks(self, block_ids: list[int]) -> memoryview:
        """A copy of their keys and values, `len(block_ids) * block_bytes` bytes. Between two steps."""

    def write_blocks(self, block_ids: list[int], data: memoryview) -> None:
        """Fills blocks with what `read_blocks` gave for as many. `data` is writable and the runner's to keep."""

    def reset(self) -> None:
        """Forget everything after a failed step; the pool is emptied at the same time."""


ToolFormat = Literal["hermes", "llama", "mistral", "json"]


class TextTokenizer(Protocol):
    """What the engine and the server ask of a tokenizer. Thread-safe: used by the step thread and the executor."""

    vocab_size: int  # ids at or above it have no text
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    tool_format: ToolFormat | None  # how the model writes calls; None: its template knows no tools
    has_thoughts: bool  # the template knows `<think>`
    control_token_ids: frozenset[
        int
    ]  # with a meaning beyond their text: no grammar may produce them
    # What an id adds to any text: its text, or bytes where they are no whole characters. None where that depends on
    # the ids beside it.
    piece: Callable[[int], str | bytes] | None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids. Special tokens typed in `text` become control tokens only where the plain prompt of a
        completion may hold them (`encode`), never in `encode_chat`. A BOS already typed is not doubled."""

    def min_num_tokens(self, text: str) -> int:
        """A lower bound on the number of ids of `text`, without encoding it; 0 where none is known."""

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> list[int]:
        """Messages to ids through the model's template. Raises `InvalidValue(param="messages")` with the
        template's own (bounded) message where it refuses, and where there is no template."""

    def encode_infill(self, prefix: str, suffix: str) -> list[int]:
        """The prompt for the text between two others. Raises `UnsupportedValue(param="suffix")`."""

    def decode(self, token_ids: list[int]) -> str:
        """Ids to text; special tokens are left out, incomplete UTF-8 becomes U+FFFD, ids out of range are empty."""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, special tokens by name; for log-probabilities and `/detokenize`."""
