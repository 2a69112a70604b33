"""The shapes of answers, for the OpenAPI document and for the tests that hold real answers against them.

The bytes of answers are made elsewhere, where a token counts; nothing here runs while the server serves. A field that
may be absent has the default `UNSET`. Knows no aiohttp.
"""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, Struct, UnsetType

FinishReason = Literal["stop", "length", "tool_calls", "content_filter"]


class Exact(Struct, forbid_unknown_fields=True):
    """An answer carries these fields and no others."""


class ErrorObject(Exact):
    """What went wrong: `param` is the path of the field, `code` the word for programs."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Exact):
    error: ErrorObject


class GeneratedText(Exact):
    """The prompt, followed by its completion."""

    generated_text: str


class GeneratedTexts(Exact):
    """One text for each prompt, in order."""

    generated_texts: list[str]


class PromptTokensDetails(Exact):
    cached_tokens: int


class Usage(Exact):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Timings(Exact):
    """Where the time went; null means that it never happened."""

    queue_ms: float | None
    prefill_ms: float | None
    first_token_ms: float | None
    decode_ms: float | None
    tokens_per_second: float | None
    preemptions: int
    cached_tokens: int
    draft_tokens: int
    accepted_draft_tokens: int


class TokenEvent(Exact):
    token: str
    sequence_id: str


class FinalEvent(Exact):
    """The last event before the end mark, with the text that was still held back."""

    token: str
    sequence_id: str
    finish_reason: FinishReason
    usage: Usage


class TopLogprob(Exact):
    token: str
    logprob: float
    bytes: list[int] | None


class TokenLogprob(Exact):
    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Exact):
    content: list[TokenLogprob] | None
    refusal: str | None


class CompletionLogprobs(Exact):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CalledFunction(Exact):
    """`arguments` is JSON as text; in a stream, a piece of it, and the name only in a call's first chunk."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCall(Exact):
    """`index` is there in streams only; id and type, in a stream, only in a call's first chunk."""

    function: CalledFunction
    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class Message(Exact):
    """`reasoning_content` are the thoughts of models that think."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Exact):
    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatCompletion(Exact):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    timings: Timings


class Delta(Exact):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Exact):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletionChunk(Exact):
    """One token. The last one, if usage was asked for, has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


class CompletionChoice(Exact):
    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(Exact):
    """A whole answer, or one token of it: the chunks of a stream look the same, with usage and timings in the last."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    timings: Timings | UnsetType = UNSET


class Model(Exact):
    """`max_model_len` is prompt and answer together; absent for one of several models that was never loaded."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | UnsetType = UNSET


class ModelList(Exact):
    object: Literal["list"]
    data: list[Model]


class Tokens(Exact):
    tokens: list[int]
    count: int
    max_model_len: int


class Prompt(Exact):
    prompt: str


class ModelState(Exact):
    """Of one of several models; `message` while it loads or after that failed."""

    state: Literal["unloaded", "loading", "loaded", "unloading", "failed"]
    progress: float | UnsetType = UNSET
    message: str | UnsetType = UNSET


class Status(Exact):
    status: str
    models: dict[str, ModelState] | UnsetType = UNSET
    message: str | UnsetType = UNSET
    vllm: str | UnsetType = UNSET


class Unready(Exact):
    """The usual error, with the phase and the progress of loading (0 to 1) beside it."""

    error: ErrorObject
    status: Literal["loading", "draining", "dead", "stale"]
    progress: float | UnsetType = UNSET
    models: dict[str, ModelState] | UnsetType = UNSET


class Version(Exact):
    version: str


class StatsDefaults(Exact):
    """What absent sampling fields of a chat mean."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float


class StatsModel(Exact):
    id: str
    max_model_len: int
    block_size: int
    num_blocks: int
    has_chat_template: bool
    defaults: StatsDefaults


class StatsHello(Exact):
    """The first event; `model` is null while it loads. `history` has a column for each figure, oldest first."""

    version: str
    interval_s: float
    batch_size: int
    model: StatsModel | None
    history: dict[str, list[float]]


class Blocks(Exact):
    used: int
    cached: int
    free: int


class ModelSample(Exact):
    """One of several models. `waiting` counts those that wait for it to be loaded too."""

    state: Literal["unloaded", "loading", "loaded", "unloading", "failed"]
    progress: float | None
    running: int
    waiting: int
    blocks: Blocks
    generated_tokens: int
    generated_tokens_per_s: float


class StatsSample(Exact):
    """The state at this moment, rates since the last event, and totals since the start; of all models together, and in
    `models` of each by name, where there are several."""

    phase: Literal["loading", "ready", "draining", "dead"]
    running: int
    waiting: int
    waiting_prompt_tokens: int
    blocks: Blocks
    generated_tokens_per_s: float
    prompt_tokens_per_s: float
    step_ms: float | None
    preemptions: int
    generated_tokens: int
    prompt_tokens: int
    cached_prompt_tokens: int
    finished_requests: int
    models: dict[str, ModelSample]
