"""Every route as the OpenAPI document tells it: what it takes, what it answers, what can go wrong. Data.

A test compares this table with the routes of the application, in both directions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from server.protocol import answers, other_answers

WORK = (400, 401, 404, 413, 415, 429, 500, 503)  # of routes that compute
TEXT = (400, 401, 404, 413, 415, 500, 503)  # of those that only read a body
LOOK = (401, 500, 503)


@dataclass(frozen=True, slots=True)
class Operation:
    """`path` is the one that is documented, `aliases` are others that do the same. `events` are (name, shape) of the
    stream, '' for events without a name."""

    method: str
    path: str
    tag: str
    summary: str
    text: str = ""
    aliases: tuple[str, ...] = ()
    request: str | None = None  # the name of a schema in `requests.py`
    example: dict[str, Any] | None = None
    answer: type[Struct] | None = None
    events: tuple[tuple[str, type[Struct]], ...] = ()
    media_type: str = ""  # of an answer that is neither JSON nor events
    errors: tuple[int, ...] = ()
    is_open: bool = False
    no_content: str = ""  # when the answer is 204
    is_refused: bool = False  # there for clients that ask; never answers but with an error
    error_shape: str = "ErrorBody"


def _v1(path: str) -> tuple[str, ...]:
    return (f"/v1{path}/", path, f"{path}/")


_HI = [{"role": "user", "content": "What is the capital of France?"}]
_TOKENS = (("", answers.TokenEvent), ("", answers.FinalEvent), ("", answers.ErrorBody))
_NAMED = (
    ("token", answers.TokenEvent),
    ("done", answers.FinalEvent),
    ("error", answers.ErrorBody),
)
_END = "The stream ends with `data: [DONE]`."

Events = tuple[tuple[str, type[Struct]], ...]
_RESPONSE_EVENTS: Events = (
    *(
        (f"response.{name}", other_answers.ResponseEvent)
        for name in ("created", "in_progress", "completed", "incomplete", "failed")
    ),
    ("response.output_item.added", other_answers.ResponseItemEvent),
    ("response.output_item.done", other_answers.ResponseItemEvent),
    ("response.content_part.added", other_answers.ResponsePartEvent),
    ("response.content_part.done", other_answers.ResponsePartEvent),
    ("response.output_text.delta", other_answers.ResponseTextDelta),
    ("response.output_text.done", other_answers.ResponseTextDone),
    ("error", other_answers.ResponseErrorEvent),
)
_MESSAGE_EVENTS: Events = (
    ("message_start", other_answers.MessageStart),
    ("content_block_start", other_answers.ContentBlockStart),
    ("ping", other_answers.BareEvent),
    ("content_block_delta", other_answers.ContentBlockDelta),
    ("content_block_stop", other_answers.ContentBlockStop),
    ("message_delta", other_answers.MessageDelta),
    ("message_stop", other_answers.BareEvent),
    ("error", other_answers.AnthropicErrorBody),
)

OPERATIONS = (
    Operation(
        "post",
        "/v1/chat/completions",
        "OpenAI",
        "Answer a conversation",
        f"As one body, or with `stream: true` one event per token. {_END}",
        _v1("/chat/completions"),
        request="ChatRequest",
        example={"messages": _HI, "max_tokens": 64},
        answer=answers.ChatCompletion,
        events=(("", answers.ChatCompletionChunk), ("", answers.ErrorBody)),
        errors=WORK,
    ),
    Operation(
        "post",
        "/v1/completions",
        "OpenAI",
        "Continue one or many prompts",
        f"Prompts are texts or token ids; choice i of prompt p has the index p · n + i. {_END}",
        _v1("/completions"),
        request="CompletionRequest",
        example={"prompt": "Once upon a time", "max_tokens": 32},
        answer=answers.Completion,
        events=(("", answers.Completion), ("", answers.ErrorBody)),
        errors=WORK,
    ),
    Operation(
        "post",
        "/v1/responses",
        "OpenAI",
        "Answer a conversation in the form of the Responses API",
        "Stateless: nothing is stored. A stream has named and numbered events and no `[DONE]`.",
        _v1("/responses"),
        request="ResponseRequest",
        example={"input": "What is the capital of France?", "max_output_tokens": 64},
        answer=other_answers.Response,
        events=_RESPONSE_EVENTS,
        errors=WORK,
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "OpenAI",
        "Turn texts into vectors",
        "The mean of the served model's last hidden states over all tokens of a text, scaled to length 1.",
        _v1("/embeddings"),
        request="EmbeddingRequest",
        example={"input": ["The cat sleeps.", "A cat is asleep."]},
        answer=other_answers.EmbeddingList,
        errors=WORK,
    ),
    *(
        Operation(
            method,
            "/v1/responses/{id}",
            "OpenAI",
            "Say that no response is stored",
            aliases=_v1("/responses/{id}"),
            errors=(401, 404),
            is_refused=True,
        )
        for method in ("get", "delete")
    ),
    Operation(
        "post",
        "/v1/messages",
        "Anthropic",
        "Answer a conversation in the form of the Messages API",
        "Errors have that API's shape, too. A last turn of the assistant is continued.",
        _v1("/messages"),
        request="MessagesRequest",
        example={"model": "smollm2-135m-instruct", "max_tokens": 64, "messages": _HI},
        answer=other_answers.AnthropicMessage,
        events=_MESSAGE_EVENTS,
        errors=(*WORK, 529),
        error_shape="AnthropicErrorBody",
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "Anthropic",
        "Count the tokens of a conversation",
        aliases=_v1("/messages/count_tokens"),
        request="CountRequest",
        example={"model": "smollm2-135m-instruct", "messages": _HI},
        answer=other_answers.InputTokens,
        errors=(*TEXT, 529),
        error_shape="AnthropicErrorBody",
    ),
    Operation(
        "get",
        "/v1/models",
        "OpenAI",
        "List what is served",
        aliases=_v1("/models"),
        answer=answers.ModelList,
        errors=LOOK,
    ),
    Operation(
        "get",
        "/v1/models/{id}",
        "OpenAI",
        "Describe one model",
        "The id may contain slashes.",
        ("/models/{id}",),
        answer=answers.Model,
        errors=(401, 404, 500, 503),
    ),
    Operation(
        "get",
        "/v1",
        "OpenAI",
        "Say that this is the base of the API",
        aliases=("/v1/",),
        answer=answers.Status,
        errors=(401, 500),
    ),
    Operation(
        "post",
        "/basic_generate",
        "Native",
        "Continue a prompt",
        "Greedy unless a temperature is given.",
        request="GenerateRequest",
        example={"prompt": "The river", "max_tokens": 32},
        answer=answers.GeneratedText,
        errors=WORK,
    ),
    Operation(
        "post",
        "/generate",
        "Native",
        "Continue a list of prompts",
        "All or none are taken into the queue; an empty list is answered with an empty list.",
        request="GenerateListRequest",
        example={"prompts": ["The sea is", "My dog likes"], "max_tokens": 16},
        answer=answers.GeneratedTexts,
        errors=WORK,
    ),
    Operation(
        "post",
        "/generate_stream",
        "Native",
        "Stream the continuation of a prompt",
        f"One event per token, then one with the reason and the usage. {_END}",
        request="StreamRequest",
        example={"prompt": "The river", "max_tokens": 32},
        events=_TOKENS,
        errors=WORK,
    ),
    Operation(
        "get",
        "/generate_stream",
        "Native",
        "The same for the browser's EventSource",
        "Fields are query parameters, `stop` may be repeated. The stream ends with `done` or `error`.",
        request="StreamRequest",
        events=_NAMED,
        errors=(400, 401, 404, 429, 500, 503),
        no_content="The stream has been read: sent to a browser that asks again (`Last-Event-ID`).",
    ),
    Operation(
        "post",
        "/generate_vllm",
        "Native",
        "Completions of a real vLLM",
        "Only where vLLM is installed and `vllm.enabled` is true; the answers leave out the prompts.",
        request="VllmRequest",
        example={"prompts": ["The sea is"]},
        answer=answers.GeneratedTexts,
        errors=(400, 401, 404, 413, 415, 429, 500, 501, 503),
    ),
    Operation(
        "post",
        "/tokenize",
        "Text",
        "Text or messages to token ids",
        "Exactly one of `prompt` and `messages`.",
        ("/tokenize/", "/v1/tokenize", "/v1/tokenize/"),
        request="TokenizeRequest",
        example={"prompt": "Hello"},
        answer=answers.Tokens,
        errors=TEXT,
    ),
    Operation(
        "post",
        "/detokenize",
        "Text",
        "Token ids to text",
        aliases=("/detokenize/", "/v1/detokenize", "/v1/detokenize/"),
        request="DetokenizeRequest",
        example={"tokens": [1, 2, 3]},
        answer=answers.Prompt,
        errors=TEXT,
    ),
    Operation(
        "get",
        "/health",
        "Operation",
        "Whether requests can be answered",
        "Loaded, not draining, and no step that hangs. While the model loads, the 503 tells how far it is.",
        ("/health/ready",),
        answer=answers.Status,
        errors=(503,),
        is_open=True,
    ),
    Operation(
        "get",
        "/health/live",
        "Operation",
        "Whether the process should be left alone",
        answer=answers.Status,
        errors=(503,),
        is_open=True,
    ),
    Operation(
        "get",
        "/metrics",
        "Operation",
        "Prometheus metrics",
        "Needs a key only if `metrics.open` is false.",
        media_type="text/plain",
        errors=(401, 500),
        is_open=True,
    ),
    Operation(
        "get",
        "/stats/stream",
        "Operation",
        "The state of the server, once a second",
        "For EventSource and the chat page. It ends when the server shuts down.",
        events=(("hello", answers.StatsHello), ("stats", answers.StatsSample)),
        errors=(401, 500),
    ),
    Operation(
        "get", "/version", "Operation", "The version", answer=answers.Version, errors=(401, 500)
    ),
    Operation("get", "/", "Pages", "The chat page", media_type="text/html", is_open=True),
    Operation("get", "/docs", "Pages", "This reference", media_type="text/html", is_open=True),
    Operation(
        "get",
        "/openapi.json",
        "Pages",
        "This document",
        media_type="application/json",
        is_open=True,
    ),
    Operation(
        "get",
        "/static/{name}",
        "Pages",
        "What the pages are made of",
        media_type="text/plain",
        errors=(404,),
        is_open=True,
    ),
)
