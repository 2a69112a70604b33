"""`QueueStream`, one HTTP request's outputs in a queue of its own, and `Ticket`, what is known of each sequence.

Both live on the event loop. Made and fed by `ledger.py`; routes see only `RequestStream` of `base.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from core.outputs import FinishReason, StepOutput
from server.backends.base import RequestRecord


class QueueStream:
    """Implements `RequestStream`. The queue is bounded by what the sequences may generate; `pending_text_bytes` tells
    a handler how far its reader is behind."""

    def __init__(
        self,
        sequence_ids: tuple[str, ...],
        record: RequestRecord,
        on_close: Callable[[QueueStream, str], None],
    ) -> None:
        self.sequence_ids = sequence_ids
        self.longest_choice = 0  # tokens
        self.record = record
        self.is_closed = False
        self.num_running = len(sequence_ids)  # that have not ended in the engine
        self._num_unfinished = len(sequence_ids)  # whose end has not been handed to the handler
        self._queue: asyncio.Queue[tuple[int, StepOutput]] = asyncio.Queue()
        self._pending_text_bytes = 0
        self._on_close = on_close

    @property
    def pending_text_bytes(self) -> int:
        return self._pending_text_bytes

    @property
    def is_finished(self) -> bool:
        return self._num_unfinished == 0

    async def get(self) -> list[tuple[int, StepOutput]]:
        assert not self.is_finished, "a stream was asked for more after its end"
        queue = self._queue
        items = [await queue.get()]
        while not queue.empty():
            items.append(queue.get_nowait())
        self._pending_text_bytes = 0
        for _, output in items:
            if output.finish_reason is not None:
                self._num_unfinished -= 1
        return items

    def put(self, index: int, output: StepOutput) -> None:
        """One output for the handler; nothing once the stream is closed."""
        if not self.is_closed:
            self._queue.put_nowait((index, output))
            self._pending_text_bytes += len(output.text.encode("utf-8", "replace"))

    def close(self, cause: str = "client_gone") -> None:
        if not self.is_closed:
            self.is_closed = True
            self._on_close(self, cause)


@dataclass(slots=True)
class Ticket:
    """One sequence from the moment it is queued until its final output came back from the engine.

    It outlives a closed stream: the engine still holds the sequence, so it still counts against the bound.
    `failure_cause` is the metric label of a stream that was closed early.
    """

    stream: QueueStream
    index: int
    num_prompt_tokens: int
    max_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    failure_cause: str | None = None

    @property
    def has_started(self) -> bool:
        return self.num_output_tokens > 0


def complete_record(ticket: Ticket, output: StepOutput) -> None:
    """Adds a sequence that has ended to the record of its request."""
    record = ticket.stream.record
    reason = output.finish_reason or FinishReason.ERROR
    record.finish_reasons += (reason.value,)
    record.num_cached_tokens += output.num_cached_tokens
    record.num_output_tokens += output.num_output_tokens
    timings = output.timings
    if timings is None:
        return
    record.num_preemptions += timings.num_preemptions
    if not timings.first_token_s:
        return
    record.queue_s = timings.scheduled_s - timings.queued_s
    record.prefill_s = timings.first_token_s - timings.scheduled_s
    record.first_token_s = ticket.first_token_s - record.arrival_s
    record.decode_s = timings.last_token_s - timings.first_token_s
    if output.num_output_tokens > 1:
        record.per_token_s = record.decode_s / (output.num_output_tokens - 1)


def complete_record_of_aborted(ticket: Ticket) -> None:
    """Adds a sequence whose client left: its end in the engine comes after the log line."""
    record = ticket.stream.record
    record.finish_reasons += (FinishReason.ABORT.value,)
    record.num_cached_tokens += ticket.num_cached_tokens
    record.num_output_tokens += ticket.num_output_tokens
    record.num_tokens_saved += ticket.max_tokens - ticket.num_output_tokens
    if ticket.has_started:
        record.first_token_s = ticket.first_token_s - record.arrival_s
