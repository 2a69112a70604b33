"""`Engine`: wires scheduler, blocks, runner and detokenizers into `add`, `abort`, `step`; usable from a plain script.

Synchronous and single-threaded: everything here belongs to the thread that calls `step`. Knows no HTTP, no asyncio and
no torch. Every sequence added ends with exactly one final output, whatever happens to it.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from core.admission import check_sequence
from core.block_pool import BlockPool
from core.byte_detokenizer import ByteDetokenizer
from core.config import (
    NO_SPECULATION,
    CacheConfig,
    EngineConfig,
    KVCacheConfig,
    ModelConfig,
    SpeculativeConfig,
)
from core.detokenizer import Detokenizer, make_detokenizer
from core.generation import Generation, GenerationBuilder
from core.interfaces import Runner, TextTokenizer
from core.outputs import FinishReason, OutputError, SampledToken, StepOutput, StepStats
from core.prefixes.cache import PrefixCache
from core.prefixes.pinned import PinnedPrefixes
from core.prefixes.snapshot import SnapshotFile
from core.sampling_params import SamplingParams
from core.scheduler import Scheduler
from core.sequence import Sequence
from core.speculation.speculators import make_speculator
from core.speculation.verify import check_rows
from core.step_report import IDLE, describe, report_step
from core.update import advance, final_output, finish_pooled

_log = logging.getLogger("noria.engine")
_step_log = logging.getLogger("noria.step")

_STEP_FAILED = OutputError(
    "internal_error", "step", "The engine failed while computing this request."
)
_QUEUE_TIMEOUT = OutputError(
    "queue_timeout", "queue_timeout", "The request waited too long in the queue."
)


class Engine:
    """Computes sequences step by step.

    `max_model_len` is prompt plus output of one sequence; by default the model's context or the whole pool, whichever
    is smaller, and never more than either. `speculative` is heeded where it changes nothing but speed: with a runner
    of fixed bits. `clock` gives seconds, monotonic.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: TextTokenizer,
        *,
        max_model_len: int | None = None,
        speculative: SpeculativeConfig = NO_SPECULATION,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.cache_config: CacheConfig = runner.cache_config
        room = min(runner.shape.max_context, self.cache_config.num_tokens)
        self.max_model_len = min(room, max_model_len or room)
        self.runner = runner
        self.tokenizer = tokenizer
        self._clock = clock
        self._pool = BlockPool(self.cache_config.num_blocks)
        prefix_cache = None
        if config.prefix_caching:
            prefix_cache = PrefixCache(self._pool, self.cache_config.block_size)
        self._scheduler = Scheduler(
            config, self.cache_config, self.max_model_len, self._pool, prefix_cache
        )
        self._prefix_cache = prefix_cache
        self.snapshots: SnapshotFile | None = None
        self.speculator = make_speculator(
            speculative, config.batch_size, self._scheduler, self.max_model_len, runner
        )
        self._sequences: dict[str, Sequence] = {}  # all that have not ended
        self._detokenizers: dict[
            str, Detokenizer | ByteDetokenizer
        ] = {}  # of those that have begun
        self._outputs: list[StepOutput] = []  # of the step that is being computed
        self._report = IDLE
        self._total_steps = 0
        self._script_ids = itertools.count()

    @classmethod
    def from_config(
        cls,
        model: ModelConfig,
        engine: EngineConfig | None = None,
        kv_cache: KVCacheConfig | None = None,
        report: Callable[..., None] = lambda *_: None,
        speculative: SpeculativeConfig | None = None,
    ) -> Engine:
        """Loads a model and returns an engine for it. Raises `ModelRefused` and `ConfigError`."""
        from core.model.loader import load_model  # torch is imported only by those who load a model

        engine = engine or EngineConfig()
        speculative = speculative or SpeculativeConfig()
        loaded = load_model(
            model, engine, kv_cache or KVCacheConfig(), report, speculative=speculative
        )
        return cls(
            engine,
            loaded.runner,
            loaded.tokenizer,
            max_model_len=loaded.plan.max_model_len,
            speculative=speculative,
        )

    @property
    def pins(self) -> PinnedPrefixes | None:
        """Prefixes that stay in the cache; None where there is no cache (`engine.prefix_caching`)."""
        return self._scheduler.pins

    def keep_snapshots(self, path: Path, fingerprint: str, max_bytes: int) -> None:
        """From now on there is a file for the prefix cache, if there is one. `fingerprint` stands for all that keys and
        values depend on. Nothing is read or written yet."""
        cache, pins = self._prefix_cache, self.pins
        if cache is not None and pins is not None:
            self.snapshots = SnapshotFile(
                path, fingerprint, max_bytes, self._pool, cache, pins, self.runner
            )

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence. Raises `ContextLengthExceeded` if not even one token fits behind its prompt, and
        `InvalidValue` for an empty prompt or ids outside the vocabulary."""
        check_sequence(sequence, self.runner.shape.vocab_size, self.max_model_len)
        assert sequence.sequence_id not in self._sequences, "a sequence id was used twice"
        sequence.queued_s = sequence.queued_s or self._clock()
        self._sequences[sequence.sequence_id] = sequence
        self._scheduler.add(sequence)

    def abort(self, sequence_id: str) -> StepOutput | None:
        """Ends a sequence between two steps; its blocks are free at once. None if it has already ended."""
        sequence = self._sequences.get(sequence_id)
        if sequence is None:
            return None
        self._forget(sequence, FinishReason.ABORT)
        return final_output(sequence, FinishReason.ABORT)

    def step(self) -> list[StepOutput]:
        """Schedules, computes and updates once. Returns the new outputs, also those of expired and failed sequences."""
        self._compute()
        outputs, self._outputs = self._outputs, []
        return outputs

    def fail_all(self, error: OutputError) -> list[StepOutput]:
        """Ends everything, running and waiting, and empties the pool. Also serves a loop that dies in mid-step: it
        returns whatever outputs that step had ready, and never raises."""
        outputs, self._outputs = self._outputs, []
        for sequence in self._sequences.values():
            sequence.finish_reason = FinishReason.ERROR
            outputs.append(final_output(sequence, FinishReason.ERROR, error=error))
        self._sequences.clear()
        self._detokenizers.clear()
        try:
            self._scheduler.clear()
            self.runner.reset()
        except Exception:
            _log.exception("the engine could not be emptied")
        return outputs

    def stats(self, *, is_after_step: bool = False) -> StepStats:
        """The state as it is now. What the last step did is included only right `is_after_step`."""
        report, scheduler, pool = (
            (self._report if is_after_step else IDLE),
            self._scheduler,
            self._pool,
        )
        return StepStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_waiting_prompt_tokens=scheduler.waiting.num_prompt_tokens,
            num_blocks_used=pool.num_used,
            num_blocks_cached=pool.num_cached,
            num_blocks_free=pool.num_free,
            step_kind=report.kind,
            num_sequences=report.num_sequences,
            num_prefill_tokens=report.num_prefill_tokens,
            num_decode_tokens=report.num_decode_tokens,
            duration_s=report.duration_s,
            parts_s=report.parts_s,
            total_preemptions=scheduler.total_preemptions,
            total_recomputed_tokens=scheduler.total_recomputed_tokens,
            total_prefix_queries=scheduler.total_prefix_queries,
            total_prefix_hits=scheduler.total_prefix_hits,
            total_steps=self._total_steps,
            **({} if self.speculator is None else self.speculator.totals.as_stats()),
        )

    def generate(
        self,
        prompts: list[str | list[int]] | list[str] | list[list[int]],
        params: SamplingParams | list[SamplingParams] | None = None,
    ) -> list[Generation]:
        """Computes all prompts and returns their texts in order. For scripts; the whole list is checked first."""
        each = params if isinstance(params, list) else [params or SamplingParams()] * len(prompts)
        sequences = [
            self._script_sequence(prompt, its_params)
            for prompt, its_params in zip(list[str | list[int]](prompts), each, strict=True)
        ]
        for sequence in sequences:
            check_sequence(sequence, self.runner.shape.vocab_size, self.max_model_len)
        builders = {sequence.sequence_id: GenerationBuilder(sequence) for sequence in sequences}
        for sequence in sequences:
            self.add(sequence)
        while not all(builder.is_finished for builder in builders.values()):
            for output in self.step():
                if output.sequence_id in builders:
                    builders[output.sequence_id].take(output)
        return [builders[sequence.sequence_id].build() for sequence in sequences]

    def check_invariants(self) -> None:
        """Asserts what must hold between two steps; for tests and debugging."""
        self._scheduler.check_invariants()
        queued = [*self._scheduler.running, *self._scheduler.waiting.sequences()]
        live = {sequence.sequence_id for sequence in queued if not sequence.is_finished}
        assert live == set(self._sequences)
        assert set(self._detokenizers) <= live
        if not live:
            assert self._pool.num_used == (self.pins.num_blocks if self.pins else 0)

    def _compute(self) -> None:
        """One step; its outputs are collected in `_outputs`, where they are safe if something raises."""
        moments_s = [self._clock()]
        for sequence in self._scheduler.remove_expired(moments_s[0]):
            self._end(sequence, FinishReason.ERROR, error=_QUEUE_TIMEOUT)
        batch = self._scheduler.schedule(moments_s[0])
        moments_s.append(self._clock())
        if self.speculator is not None:
            batch = self.speculator.extend(batch)
        self._scheduler.release_sources()
        self._report = report_step(batch)
        if not batch.sequences:
            return
        if _step_log.isEnabledFor(logging.DEBUG):
            _step_log.debug("step %d: %s", self._total_steps, describe(batch))
        self._total_steps += 1
        moments_s.append(self._clock())
        try:
            logits = self.runner.run(batch)
            moments_s.append(self._clock())
            tokens = self.runner.sample(batch, logits)
            check_rows(batch, tokens)
        except Exception:
            _log.exception(
                "a step failed; its %d sequences end with an error", len(batch.sequences)
            )
            self._fail_running()
            return
        moments_s.append(self._clock())
        for (sequence, count, draft), gained in zip(batch.rows(), tokens, strict=True):
            if not sequence.is_finished:
                self._update(sequence, count, draft, gained, moments_s[-1])
        self._report = report = self._report.timed([*moments_s, self._clock()])
        self._scheduler.step_budget.observe(
            report.num_prefill_tokens, report.num_decode_tokens, report.duration_s
        )
        if self.speculator is not None:
            self.speculator.observe(batch, tokens, report)

    def _script_sequence(self, prompt: str | list[int], params: SamplingParams) -> Sequence:
        token_ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return Sequence(f"script-{next(self._script_ids)}", token_ids, params, seed=seed)

    def _update(
        self,
        sequence: Sequence,
        count: int,
        draft: tuple[int, ...],
        gained: list[SampledToken],
        now_s: float,
    ) -> None:
        """Takes in what one row computed. What a draft gained behind an end is dropped. An error here ends this
        sequence and touches no other."""
        sequence.num_computed_tokens += count - len(draft)
        sequence.num_draft_tokens += len(draft)
        for place, token in enumerate(gained):
            if place:  # the token before it was guessed, and so computed
                sequence.num_computed_tokens += 1
                sequence.num_accepted_tokens += 1
            if sequence.pool is not None:
                output = finish_pooled(sequence, token, now_s)
            else:
                output = advance(
                    sequence, token, self._detokenizer, self.runner.shape, self.max_model_len, now_s
                )
            if output.finish_reason is not None:
                if draft:
                    self._scheduler.settle(sequence)
                self._forget(sequence, output.finish_reason)
                self._outputs.append(output)
                return
            self._outputs.append(output)
        if draft:
            self._scheduler.settle(sequence)

    def _detokenizer(self, sequence: Sequence) -> Detokenizer | ByteDetokenizer:
        detokenizer = self._detokenizers.get(sequence.sequence_id)
        if detokenizer is None:
            prompt_ids = sequence.token_ids[: sequence.num_prompt_tokens]
            detokenizer = make_detokenizer(self.tokenizer, prompt_ids, sequence.params)
            self._detokenizers[sequence.sequence_id] = detokenizer
        return detokenizer

    def _fail_running(self) -> None:
        failed = self._scheduler.fail_running()
        for sequence in failed:
            self._end(sequence, FinishReason.ERROR, error=_STEP_FAILED)
        self.runner.reset()

    def _end(
        self, sequence: Sequence, reason: FinishReason, *, error: OutputError | None = None
    ) -> None:
        self._forget(sequence, reason)
        self._outputs.append(final_output(sequence, reason, error=error))

    def _forget(self, sequence: Sequence, reason: FinishReason) -> None:
        keeps_seat = reason in (FinishReason.STOP, FinishReason.LENGTH) and sequence.pool is None
        self._scheduler.finish(sequence, keeps_seat=keeps_seat)
        sequence.finish_reason = reason
        self._sequences.pop(sequence.sequence_id, None)
        self._detokenizers.pop(sequence.sequence_id, None)
