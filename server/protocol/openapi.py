"""The OpenAPI document: made of the table of operations, the structs of requests and answers, and the error tree.

Pure and independent of the model; made once, when somebody asks. Knows no aiohttp.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from typing import Any

import msgspec
import orjson

from core import __version__
from core import errors as error_tree
from core.errors import NoriaError
from server.protocol import admin, admin_answers, answers, other_answers
from server.protocol.operation import Operation
from server.protocol.operations import OPERATIONS
from server.protocol.request_fields import REF_TEMPLATE
from server.protocol.requests import STRUCTS, request_schemas

_ABOUT = """Noria serves one language model as streams of tokens.

Bodies are JSON objects in UTF-8. `null` on an optional field means absent; unknown fields are ignored and logged once;
a field that would change the answer and is not supported is refused. Every answer carries `x-request-id`.

What goes wrong is told as `{"error": {"message", "type", "param", "code"}}`, also for unknown paths (404) and methods
(405). After the first byte of a stream it is an event of the same shape. Where the server has keys, they are sent as
`authorization: Bearer …` or `x-api-key`."""


@functools.cache
def document_bytes() -> bytes:
    return orjson.dumps(document())


def document() -> dict[str, Any]:
    structs = (*STRUCTS, *_answer_types())
    _, components = msgspec.json.schema_components(structs, ref_template=REF_TEMPLATE)
    requests = request_schemas(components)
    schemas = {name: schema for name, schema in components.items() if not _is_part_of_request(name)}
    paths: dict[str, dict[str, Any]] = {}
    for operation in OPERATIONS:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, requests)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Noria", "version": __version__, "description": _ABOUT},
        "servers": [{"url": "./"}],
        "security": [{"bearer": []}, {"header": []}],
        "tags": [{"name": tag} for tag in dict.fromkeys(each.tag for each in OPERATIONS)],
        "paths": paths,
        "components": {
            "schemas": {**requests, **schemas},
            "responses": {f"Error{status}": response for status, response in _error_responses()},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _is_part_of_request(name: str) -> bool:
    """Structs that only exist because several read the same body."""
    return name in {kind.__name__ for kind in STRUCTS}


def _answer_types() -> list[type]:
    members = [
        each
        for module in (answers, other_answers, admin, admin_answers)
        for each in vars(module).values()
    ]
    return [
        kind
        for kind in dict.fromkeys(each for each in members if isinstance(each, type))
        if issubclass(kind, answers.Exact) and kind is not answers.Exact
    ]


def _ref(name: str, kind: str = "schemas") -> dict[str, str]:
    return {"$ref": f"#/components/{kind}/{name}"}


def _operation(operation: Operation, requests: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "tags": [operation.tag],
        "summary": operation.summary,
        "operationId": _identifier(operation),
        "responses": _responses(operation),
    }
    if operation.text:
        shown["description"] = operation.text
    if operation.aliases:
        shown["x-aliases"] = list(operation.aliases)
    if operation.is_open:
        shown["security"] = []
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in ("id", "name")
        if f"{{{name}}}" in operation.path
    ]
    if operation.request and operation.method == "get":
        parameters += _query(requests[operation.request])
    elif operation.request:
        content: dict[str, Any] = {"schema": _ref(operation.request)}
        if operation.example is not None:
            content["example"] = operation.example
        shown["requestBody"] = {
            "required": not operation.is_body_optional,
            "content": {"application/json": content},
        }
    if operation.query is not None:
        parameters += _query(requests[operation.query])
    if parameters:
        shown["parameters"] = parameters
    return shown


def _identifier(operation: Operation) -> str:
    words = operation.path.strip("/").replace("{", "by_").replace("}", "")
    for character in "/.":
        words = words.replace(character, "_")
    return f"{operation.method}_{words or 'page'}"


_NO_SCALARS = (
    "stop_token_ids",
    "logit_bias",
    "guided_choice",
    "structured_outputs",
    "response_format",
)


def _query(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The scalar fields of a body as query parameters; what is no scalar cannot stand in a query."""
    for name, field in schema["properties"].items():
        if name in _NO_SCALARS or "enum" in field:
            continue
        field = copy.deepcopy(field)
        parameter = {
            "name": name,
            "in": "query",
            "required": name in schema.get("required", ()),
            "description": field.pop("description", ""),
            "schema": field,
        }
        if name == "stop":
            parameter["schema"] = next(
                part for part in field["anyOf"] if part.get("type") == "array"
            )
            parameter["style"], parameter["explode"] = "form", True
        elif "anyOf" in field:
            (only,) = (part for part in field.pop("anyOf") if part.get("type") != "null")
            parameter["schema"] = {**field, **only}
            if only.get("type") in ("integer", "number", "boolean"):  # read as JSON
                parameter["schema"]["type"] = [only["type"], "null"]
            elif "const" in only:
                parameter["schema"] = {"enum": [only["const"], None]}
        yield parameter


def _responses(operation: Operation) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if operation.answer is not None:
        content["application/json"] = {"schema": _ref(operation.answer.__name__)}
    if operation.events:
        # No schema: some tools hold it against the whole text, others against each event.
        content["text/event-stream"] = {
            "x-events": [
                {"event": name, "data": _ref(kind.__name__)} for name, kind in operation.events
            ],
        }
    if operation.media_type:
        content[operation.media_type] = {}
    responses: dict[str, Any] = {}
    if not operation.is_refused:
        responses["200"] = {"description": "The answer.", "content": content}
    if operation.no_content:
        responses["204"] = {"description": operation.no_content}
    if operation.error_shape != "ErrorBody":
        body = {"application/json": {"schema": _ref(operation.error_shape)}}
        words = {529: "Draining, loading, or waited too long: try again later."}
        for status in operation.errors:
            text = words.get(status, "As on the other routes.")
            responses[str(status)] = {"description": text, "content": body}
        responses["default"] = {"description": "Any other failure.", "content": body}
        return responses
    for status in operation.errors:
        responses[str(status)] = _ref(f"Error{status}", "responses")
    if operation.path.startswith("/health"):
        body = {"application/json": {"schema": _ref("Unready")}}
        responses["503"] = {"description": "Not now; why stands in the body.", "content": body}
    responses["default"] = _ref("Error500", "responses")
    return responses


def _error_responses() -> Iterator[tuple[int, dict[str, Any]]]:
    """Per status the errors that have it, with `type` and `code` as they come."""
    by_status: dict[int, list[type[NoriaError]]] = {}
    for kind in vars(error_tree).values():
        if isinstance(kind, type) and issubclass(kind, NoriaError) and "code" in vars(kind):
            by_status.setdefault(kind.status, []).append(kind)
    for status, kinds in sorted(by_status.items()):
        unique = list({kind.code: kind for kind in kinds}.values())
        words = ", ".join(f"`{kind.code}`" for kind in unique)
        response: dict[str, Any] = {
            "description": f"{words}: " + " ".join(_first_line(kind) for kind in unique),
            "content": {
                "application/json": {
                    "schema": _ref("ErrorBody"),
                    "examples": {str(kind.code): {"value": _example(kind)} for kind in unique},
                }
            },
        }
        headers = _HEADERS.get(status)
        if headers:
            response["headers"] = {
                name: {"description": text, "schema": {"type": "string"}}
                for name, text in headers.items()
            }
        yield status, response


_HEADERS = {
    401: {"www-authenticate": "`Bearer`"},
    405: {"allow": "The methods of this path."},
    429: {"retry-after": "Seconds, estimated from how fast requests end."},
    503: {
        "retry-after": "Seconds, unless the engine is dead.",
        "x-should-retry": "`false` if the engine is dead.",
    },
}
_WORDS = {
    "invalid_api_key": "A valid API key is required.",
    "admin_disabled": "No admin key is set.",
    "model_not_found": "The model does not exist here; see /v1/models.",
    "not_found": "There is no such path.",
    "method_not_allowed": "This path does not take this method.",
    "body_too_large": "The request body is larger than allowed.",
    "unsupported_media_type": "The content type must be application/json.",
    "queue_full": "The queue is full.",
    "internal_error": "The server failed to answer this request.",
    "vllm_unavailable": "vLLM is not installed or not enabled.",
    "busy": "Other prompts keep the threads that read prompts.",
    "queue_timeout": "The request waited too long.",
    "draining": "The server is shutting down.",
    "engine_dead": "The engine has stopped and cannot answer.",
    "loading": "The model is loading.",
    "model_unavailable": "The model could not be loaded; /admin/models says why.",
    "model_not_loaded": "The model is not loaded; what it has is gone or in its snapshot.",
    "prefix_too_short": "The prefix fills no block of the KV cache.",
    "model_pinned": "The model is pinned; load it with pinned: false first.",
}


def _first_line(kind: type[NoriaError]) -> str:
    own = kind.__doc__ if kind.__doc__ and kind is not NoriaError else None
    text = _WORDS.get(str(kind.code)) or (own or "").split("\n")[0]
    return text.strip()


def _example(kind: type[NoriaError]) -> dict[str, Any]:
    error = {"message": _first_line(kind), "type": kind.type, "param": None, "code": kind.code}
    return {"error": error}
