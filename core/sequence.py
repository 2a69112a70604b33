"""`Sequence`: what is computed. A sequence remembers; it never allocates.

Owned by the step thread from the moment it is added; nobody else touches it. Invariants:
`num_prompt_tokens` is stored once and survives preemption; `num_computed_tokens <= num_tokens`;
`block_ids` is append-only between two changes of `num_table_cuts` (a preemption, or a rejected draft).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from core.outputs import FinishReason
from core.pooling import MeanPool
from core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from core.speculation.speculator import Drafting
    from core.structured.follow import GrammarState


class SequenceStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """One prompt and its growing output.

    `seed` is already resolved (fresh if the request gave none); `choice_index` separates the choices of `n`.
    `token_ids` holds prompt and output, (num_tokens,). A row is *ready to sample* in a step when that step computes
    its last known token.
    """

    sequence_id: str
    token_ids: list[int]
    params: SamplingParams
    seed: int = 0
    choice_index: int = 0
    label: str = ""  # the client's request id, for logs only
    grammar: GrammarState | None = None  # which the output must follow
    pool: MeanPool | None = None  # of a sequence whose end is an embedding, not a token

    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0  # of the prompt, taken from the prefix cache at the first admission
    block_ids: list[int] = field(default_factory=list)
    block_digests: list[bytes] = field(
        default_factory=list
    )  # of full blocks; depend on tokens only
    num_published_blocks: int = 0  # of `block_ids`, known to the prefix cache
    status: SequenceStatus = SequenceStatus.WAITING
    finish_reason: FinishReason | None = None

    num_preemptions: int = 0
    num_discarded_tokens: int = 0  # computed tokens that the last preemption threw away
    num_table_cuts: int = 0  # how often `block_ids` lost blocks
    drafting: Drafting | None = None  # what speculation remembers of it
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of those
    queued_s: float = 0.0
    scheduled_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_to_compute(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_finished(self) -> bool:
        return self.status is SequenceStatus.FINISHED
