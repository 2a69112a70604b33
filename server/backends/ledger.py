"""`Ledger`: all sequences that have not ended, the bound on them, and what metrics and records learn of each output.

Lives on the event loop. Knows no threads and no engine; a backend brings it the outputs and takes the ids that must be
aborted.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Callable

from core.config import EngineConfig
from core.errors import Draining, EngineDead, ModelLoading, NoriaError, QueueFull
from core.outputs import FinishReason, OutputError, StepOutput, StepStats
from core.pooling import MeanPool
from core.sequence import Sequence
from core.structured.follow import GrammarState
from server.backends.base import BackendStatus, GenerationRequest, RequestRecord
from server.backends.queue_stream import (
    QueueStream,
    Ticket,
    complete_record,
    complete_record_of_aborted,
)
from server.logs import StatsReporter
from server.metrics import Metrics

LOADING = "The model is loading."
MAX_RETRY_AFTER_S = 60.0
_RATE_WINDOW = 64
_log = logging.getLogger("noria.backend")


class Ledger:
    """A ticket enters when its sequence is queued and leaves when its final output arrives; the engine gives exactly
    one for every sequence, so nothing stays behind (B117)."""

    def __init__(self, config: EngineConfig, metrics: Metrics, reporter: StatsReporter) -> None:
        self._config = config
        self._metrics = metrics
        self._reporter = reporter
        self._tickets: dict[str, Ticket] = {}
        self._ends_s: deque[float] = deque(maxlen=_RATE_WINDOW)  # when sequences ended
        self._has_failed_to_count = False

    def __len__(self) -> int:
        """Sequences that have not ended."""
        return len(self._tickets)

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of sequences without a first token."""
        return sum(t.num_prompt_tokens for t in self._tickets.values() if not t.has_started)

    def refuse_if_closed(self, status: BackendStatus, num_sequences: int) -> None:
        """Raises `ModelLoading`, `Draining` or `EngineDead` unless the backend takes work."""
        error: NoriaError
        match status.phase:
            case "loading":
                error = ModelLoading(LOADING, retry_after_s=2)
            case "draining":
                error = Draining("The server is shutting down.", retry_after_s=5)
            case "dead":
                error = EngineDead("The engine has stopped and cannot answer.")
            case "ready":
                if not status.is_step_stale:
                    return
                error = EngineDead("The engine does not answer.")
        self._metrics.observe_rejection(error.code or "engine_dead", num_sequences)
        raise error

    def refuse_if_full(self, requests: list[GenerationRequest]) -> None:
        """All or nothing, so that no orphan of a list runs for nobody (B081, B126)."""
        config = self._config
        seats = 1 if config.policy == "single" else config.batch_size
        limit = seats + config.max_waiting
        if len(self._tickets) + len(requests) > limit:
            self._metrics.observe_rejection("queue_full", len(requests))
            raise QueueFull(
                f"The queue is full: {limit} requests are the limit.",
                retry_after_s=self._estimate_wait_s(len(requests)),
            )
        if not config.max_waiting_tokens:
            return
        waiting = self.num_waiting_tokens
        asked = sum(len(request.token_ids) for request in requests)
        if waiting and waiting + asked > config.max_waiting_tokens:
            self._metrics.observe_rejection("queue_tokens", len(requests))
            raise QueueFull(
                f"The queue is full: {config.max_waiting_tokens} waiting prompt tokens are the limit.",
                retry_after_s=self._estimate_wait_s(len(requests)),
            )

    def _estimate_wait_s(self, num_places: int) -> float:
        """How long until so many places are free, at the rate at which sequences ended lately."""
        if len(self._ends_s) < 2:
            return 2.0
        span_s = time.monotonic() - self._ends_s[0]
        return min(MAX_RETRY_AFTER_S, num_places * span_s / len(self._ends_s))

    def open(
        self,
        sequences: list[Sequence],
        record: RequestRecord,
        on_close: Callable[[QueueStream, str], None],
    ) -> QueueStream:
        """Tickets and a stream for the sequences of one HTTP request."""
        ids = tuple(sequence.sequence_id for sequence in sequences)
        stream = QueueStream(ids, record, on_close)
        for index, sequence in enumerate(sequences):
            ticket = Ticket(stream, index, sequence.num_prompt_tokens, sequence.params.max_tokens)
            self._tickets[sequence.sequence_id] = ticket
        record.num_sequences += len(sequences)
        record.num_prompt_tokens += sum(sequence.num_prompt_tokens for sequence in sequences)
        num_choices = max((sequence.choice_index for sequence in sequences), default=0) + 1
        limits = [sequence.params.max_tokens for sequence in sequences]
        self._metrics.observe_submit(limits, num_choices)
        self._reporter.wake()
        return stream

    def close(self, stream: QueueStream, cause: str) -> list[str]:
        """A handler is done with its stream. Returns the sequences to abort."""
        unfinished = [i for i in stream.sequence_ids if i in self._tickets]
        for sequence_id in unfinished:
            ticket = self._tickets[sequence_id]
            ticket.failure_cause = cause
            complete_record_of_aborted(ticket)
        return unfinished

    def receive(self, outputs: list[StepOutput], stats: StepStats, delivered_s: float) -> None:
        """The outputs of one step, and what the step did."""
        num_new_tokens = self.take(outputs, delivered_s)
        self.observe_step(stats, num_new_tokens, delivered_s)

    def take(self, outputs: list[StepOutput], delivered_s: float) -> int:
        """Every output into the queue of its request. An error in counting one touches no stream. Returns the number
        of new tokens."""
        num_new_tokens = 0
        gaps: dict[
            float, int
        ] = {}  # by when the token before came, which most sequences of a step share
        for output in outputs:
            ticket = self._tickets.get(output.sequence_id)
            if ticket is None:
                continue
            if output.token_id is not None:
                num_new_tokens += 1
                if ticket.first_token_s:
                    gaps[ticket.last_token_s] = gaps.get(ticket.last_token_s, 0) + 1
            if output.finish_reason is None and ticket.first_token_s:
                ticket.last_token_s = delivered_s
                ticket.num_output_tokens = output.num_output_tokens
            else:
                self._count(ticket, output, delivered_s)
            ticket.stream.put(ticket.index, output)
        self._metrics.observe_gaps(gaps, delivered_s)
        return num_new_tokens

    def observe_step(self, stats: StepStats, num_new_tokens: int, delivered_s: float) -> None:
        self._metrics.observe_step(stats, num_new_tokens, delivered_s)
        self._reporter.observe_step(stats, num_new_tokens)

    def fail(self, error: OutputError) -> list[str]:
        """Ends every open stream from this side, because its outputs are lost. Returns the sequences to
        abort."""
        tickets = dict(self._tickets)
        for sequence_id, ticket in tickets.items():
            output = StepOutput(
                sequence_id=sequence_id,
                token_id=None,
                text="",
                num_prompt_tokens=ticket.num_prompt_tokens,
                num_cached_tokens=ticket.num_cached_tokens,
                num_output_tokens=ticket.num_output_tokens,
                finish_reason=FinishReason.ERROR,
                error=error,
            )
            self._forget(sequence_id, ticket)
            self._count_end(ticket, output, time.monotonic())
            ticket.stream.put(ticket.index, output)
        return list(tickets)

    def _forget(self, sequence_id: str, ticket: Ticket) -> None:
        del self._tickets[sequence_id]
        ticket.stream.num_running -= 1

    def _log_once(self) -> None:
        """A fault per token must not flood the log."""
        if not self._has_failed_to_count:
            self._has_failed_to_count = True
            _log.exception("an output could not be counted; this is logged once")

    def _count(self, ticket: Ticket, output: StepOutput, delivered_s: float) -> None:
        """The first token of a sequence, and its end."""
        if output.finish_reason is not None:
            self._forget(output.sequence_id, ticket)
        try:
            if output.token_id is not None or output.embedding is not None:
                self._count_token(ticket, output, delivered_s)
            if output.finish_reason is not None:
                self._count_end(ticket, output, delivered_s)
        except Exception:
            self._log_once()

    def _count_token(self, ticket: Ticket, output: StepOutput, delivered_s: float) -> None:
        ticket.last_token_s = delivered_s
        ticket.num_output_tokens = output.num_output_tokens
        if ticket.first_token_s:
            return
        ticket.first_token_s = delivered_s
        ticket.num_cached_tokens = output.num_cached_tokens
        since_s = delivered_s - ticket.stream.record.arrival_s
        num_prompt, num_cached = output.num_prompt_tokens, output.num_cached_tokens
        self._metrics.observe_first_token(since_s, num_prompt, num_cached)
        self._reporter.observe_prefix(num_prompt, num_cached)

    def _count_end(self, ticket: Ticket, output: StepOutput, delivered_s: float) -> None:
        self._ends_s.append(delivered_s)
        stream, reason = ticket.stream, output.finish_reason
        assert reason is not None
        stream.longest_choice = max(stream.longest_choice, output.num_output_tokens)
        if not stream.is_closed:
            complete_record(ticket, output)
        cause = output.error.cause if output.error is not None else None
        if reason is FinishReason.ABORT:
            cause = ticket.failure_cause or "client_gone"
            self._metrics.observe_saved(ticket.max_tokens - output.num_output_tokens)
        since_s = ticket.last_token_s - stream.record.arrival_s
        num_tokens = output.num_output_tokens
        self._metrics.observe_end(reason.value, cause, num_tokens, since_s, output.timings)
        if stream.num_running == 0:
            self._metrics.observe_longest_choice(stream.longest_choice)


def to_sequence(request: GenerationRequest, label: str) -> Sequence:
    """What an engine computes. `label` is the client's request id, for logs only."""
    return Sequence(
        sequence_id=str(uuid.uuid4()),  # always ours: clients repeat theirs (B082)
        token_ids=list(request.token_ids),  # the output is appended to it
        params=request.params,
        seed=request.seed,
        choice_index=request.choice_index,
        grammar=None if request.grammar is None else GrammarState(request.grammar),
        label=label[:128],
        pool=MeanPool() if request.pools else None,
        queued_s=time.monotonic(),
    )
