"""The shapes of answers of `/v1/responses`, `/v1/messages` and `/v1/embeddings`; `answers.py` has all others.

Knows no aiohttp.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from server.protocol.answers import ErrorObject, Exact, Timings, TokenLogprob

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(Exact, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any]
    logprobs: list[TokenLogprob]


class OutputItem(Exact, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"]
    status: ItemStatus
    content: list[OutputText]


class FunctionCallItem(Exact, tag_field="type", tag="function_call"):
    """`arguments` is JSON as text; empty when the item begins."""

    id: str
    call_id: str
    name: str
    arguments: str
    status: ItemStatus


class ReasoningText(Exact, tag_field="type", tag="reasoning_text"):
    text: str


class ReasoningItem(Exact, tag_field="type", tag="reasoning"):
    """The thoughts of models that think."""

    id: str
    summary: list[Any]
    content: list[ReasoningText]
    status: ItemStatus


class InputTokensDetails(Exact):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Exact):
    reasoning_tokens: int


class ResponseUsage(Exact):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseFailure(Exact):
    code: str
    message: str


class IncompleteDetails(Exact):
    reason: Literal["max_output_tokens"]


class Response(Exact):
    """Nothing is stored; members that the request sets are told back."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    output: list[OutputItem | FunctionCallItem | ReasoningItem]
    background: bool
    parallel_tool_calls: bool
    previous_response_id: str | None
    store: bool
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    truncation: str
    usage: ResponseUsage | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    temperature: float
    top_p: float
    top_logprobs: int
    timings: Timings | UnsetType = UNSET


class ResponseEvent(Exact):
    """The response as it begins and as it ends."""

    type: str
    response: Response
    sequence_number: int


class ResponseItemEvent(Exact):
    type: str
    output_index: int
    item: OutputItem | FunctionCallItem | ReasoningItem
    sequence_number: int


class ResponsePartEvent(Exact):
    type: str
    item_id: str
    output_index: int
    content_index: int
    part: OutputText | ReasoningText
    sequence_number: int


class ResponseTextDelta(Exact):
    """One token."""

    type: Literal["response.output_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    logprobs: list[TokenLogprob]
    sequence_number: int


class ResponseTextDone(Exact):
    type: Literal["response.output_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    logprobs: list[TokenLogprob]
    sequence_number: int


class ResponseCallDelta(Exact):
    """A piece of the arguments."""

    type: Literal["response.function_call_arguments.delta"]
    item_id: str
    output_index: int
    delta: str
    sequence_number: int


class ResponseCallDone(Exact):
    type: Literal["response.function_call_arguments.done"]
    item_id: str
    output_index: int
    name: str
    arguments: str
    sequence_number: int


class ResponseThoughtDelta(Exact):
    type: Literal["response.reasoning_text.delta"]
    item_id: str
    output_index: int
    content_index: int
    delta: str
    sequence_number: int


class ResponseThoughtDone(Exact):
    type: Literal["response.reasoning_text.done"]
    item_id: str
    output_index: int
    content_index: int
    text: str
    sequence_number: int


class ResponseErrorEvent(Exact):
    type: Literal["error"]
    code: str | None
    message: str
    param: str | None
    error: ErrorObject
    sequence_number: int


class TextBlock(Exact, tag_field="type", tag="text"):
    text: str


class ToolUseBlock(Exact, tag_field="type", tag="tool_use"):
    """`input` is empty where a stream begins the block, and where the arguments were cut off."""

    id: str
    name: str
    input: dict[str, Any]


class ThinkingBlock(Exact, tag_field="type", tag="thinking"):
    """The thoughts of models that think; nothing signs them."""

    thinking: str
    signature: str


StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class MessageUsage(Exact):
    """All input is the sum of the three."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(Exact):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextBlock | ToolUseBlock | ThinkingBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage
    timings: Timings | UnsetType = UNSET


class MessageStart(Exact):
    type: Literal["message_start"]
    message: AnthropicMessage


class ContentBlockStart(Exact):
    type: Literal["content_block_start"]
    index: int
    content_block: TextBlock | ToolUseBlock | ThinkingBlock


class TextDelta(Exact, tag_field="type", tag="text_delta"):
    text: str


class InputDelta(Exact, tag_field="type", tag="input_json_delta"):
    """A piece of a call's arguments; joined they are JSON."""

    partial_json: str


class ThinkingDelta(Exact, tag_field="type", tag="thinking_delta"):
    thinking: str


class ContentBlockDelta(Exact):
    """One token."""

    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | InputDelta | ThinkingDelta


class ContentBlockStop(Exact):
    type: Literal["content_block_stop"]
    index: int


class StopDelta(Exact):
    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Exact):
    type: Literal["message_delta"]
    delta: StopDelta
    usage: MessageUsage
    timings: Timings


class BareEvent(Exact):
    type: Literal["ping", "message_stop"]


class AnthropicErrorObject(Exact):
    type: str
    message: str


class AnthropicErrorBody(Exact):
    """What goes wrong on these two routes; 529 stands for what is 503 elsewhere, unless the engine is dead."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str | None


class InputTokens(Exact):
    input_tokens: int


class Embedding(Exact):
    """Numbers, or with `encoding_format: base64` their float32 bytes, little-endian."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(Exact):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Exact):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage
