"""Routes, wire types and the OpenAPI document say the same, in every direction."""

from __future__ import annotations

import json
import re

import msgspec
import pytest

from core.errors import NoriaError
from core.sampling_params import SamplingParams
from server.protocol import (
    admin,
    answers,
    anthropic,
    chat,
    completions,
    embeddings,
    native,
    responses,
)
from server.protocol.openapi import document
from server.protocol.operations import OPERATIONS
from server.protocol.request_fields import FIELDS

DOCUMENT = document()
SCHEMAS = DOCUMENT["components"]["schemas"]
BODIES = [operation for operation in OPERATIONS if operation.example is not None]


async def test_every_route_is_in_the_document_and_nothing_else_is(start_server):
    server = await start_server()
    routes = {
        (route.method.lower(), route.resource.canonical)
        for route in server.client.app.router.routes()
        if route.method != "HEAD"
    }
    documented = [
        (method, path)
        for place, methods in DOCUMENT["paths"].items()
        for method, operation in methods.items()
        for path in (place, *operation.get("x-aliases", ()))
    ]
    assert set(documented) == routes
    assert len(documented) == len(set(documented))


def test_every_reference_leads_somewhere_and_every_shape_is_used():
    text = json.dumps(DOCUMENT)
    references = set(re.findall(r'"\$ref": "#/components/([^"]+)"', text))
    there = {
        f"{kind}/{name}"
        for kind in ("schemas", "responses")
        for name in DOCUMENT["components"][kind]
    }
    assert references <= there
    # 405 belongs to no operation; 501 and the rest are referred to.
    assert there - references <= {"responses/Error405"}


def test_every_error_is_documented_with_its_status_type_and_code():
    def kinds(cls):
        yield cls
        for below in cls.__subclasses__():
            yield from kinds(below)

    told = {}
    for name, response in DOCUMENT["components"]["responses"].items():
        for code, example in response["content"]["application/json"]["examples"].items():
            error = example["value"]["error"]
            assert error["code"] == code
            assert error["message"]
            told[code] = (int(name.removeprefix("Error")), error["type"])
    for kind in kinds(NoriaError):
        if kind.__module__ == "core.errors":
            assert told[kind.code] == (kind.status, kind.type)


@pytest.mark.parametrize("name", [name for name in SCHEMAS if name.endswith("Request")])
def test_every_field_of_a_body_is_described(name):
    for field, schema in SCHEMAS[name]["properties"].items():
        assert schema.get("description"), field


KNOWN = {
    "ChatRequest": chat._KNOWN,
    "CompletionRequest": completions._KNOWN,
    "GenerateRequest": native._KNOWN - {"prompts"},
    "StreamRequest": native._KNOWN - {"prompts"},
    "GenerateListRequest": native._KNOWN - {"prompt"},
    "VllmRequest": native._KNOWN - {"prompt"},
    "ResponseRequest": responses._KNOWN,
    "MessagesRequest": anthropic._KNOWN,
    "EmbeddingRequest": embeddings._KNOWN,
    "PrefixRequest": admin._KNOWN,
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_body_documents_the_fields_that_its_parser_knows(name):
    assert set(SCHEMAS[name]["properties"]) == set(KNOWN[name])


RANGED = [
    name for name in FIELDS if name in SamplingParams.__dataclass_fields__ and FIELDS[name][1]
]


@pytest.mark.parametrize("name", RANGED)
def test_ranges_are_those_of_the_parser(name):
    constraints = FIELDS[name][1]

    def accepts(value):
        if name == "seed" and value == -1:
            return True  # means null
        try:
            SamplingParams(**{"max_tokens": 2**31 - 1, name: value})
        except NoriaError:
            return False
        return True

    if "maximum" in constraints:
        low = constraints.get("minimum", constraints.get("exclusiveMinimum"))
        assert accepts(low) == ("minimum" in constraints)
        assert not accepts(low - 1)
        assert accepts(constraints["maximum"])
        assert not accepts(constraints["maximum"] + 1)
    elif name == "stop":
        most, length = constraints["maxItems"], constraints["maxLength"]
        assert accepts(("x" * length,) * most)
        assert not accepts(("x",) * (most + 1))
        assert not accepts(("x" * (length + 1),))
        assert not accepts(("",))
    elif name == "stop_token_ids":
        assert accepts((1,) * constraints["maxItems"])
        assert not accepts((1,) * (constraints["maxItems"] + 1))
    else:
        assert name == "logit_bias"
        assert accepts(dict.fromkeys(range(constraints["maxProperties"]), 1.0))
        assert not accepts(dict.fromkeys(range(constraints["maxProperties"] + 1), 1.0))


def events_of(text):
    """(name, data) of each event, the end mark left out."""
    for event in text.split("\n\n"):
        lines = dict(line.split(": ", 1) for line in event.splitlines() if line)
        if lines and lines["data"] != "[DONE]":
            yield lines.get("event", ""), lines["data"].encode()


@pytest.mark.parametrize("operation", BODIES, ids=lambda operation: operation.path)
async def test_examples_are_answered_in_the_documented_shape(start_server, operation):
    server = await start_server({"server.admin_key": "root"}, step_time_s=0.0)
    server.client.session.headers["x-api-key"] = "root"
    example = operation.example | ({"model": "dummy"} if "model" in operation.example else {})
    response = await server.client.post(operation.path, json=example)
    if operation.path == "/generate_vllm":
        assert response.status == 501
        msgspec.json.decode(await response.read(), type=answers.ErrorBody)
        return
    assert response.status == 200, await response.text()
    if operation.answer is not None:
        msgspec.json.decode(await response.read(), type=operation.answer)
    if operation.events:
        options = {"include_usage": True, "continuous_usage_stats": True}
        extra = {"stream": True, "stream_options": options, "logprobs": 2}
        if "chat" in operation.path:
            extra |= {"logprobs": True, "top_logprobs": 2}
        elif operation.path == "/v1/responses":
            extra = {"stream": True, "top_logprobs": 2}
        elif operation.path == "/v1/messages":
            extra = {"stream": True}
        body = example | (extra if operation.path.startswith("/v1") else {})
        response = await server.client.post(operation.path, json=body)
        check_events(await response.text(), operation)


def check_events(text, operation):
    found = list(events_of(text))
    assert len(found) > 1
    for name, data in found:
        shapes = [shape for event, shape in operation.events if event == name]
        for shape in shapes[:-1]:
            try:
                msgspec.json.decode(data, type=shape)
                break
            except msgspec.ValidationError:
                continue
        else:
            msgspec.json.decode(data, type=shapes[-1])


async def test_answers_with_calls_have_the_documented_shape(start_server):
    server = await start_server()
    function = {"name": "look", "parameters": {"type": "object", "properties": {}}}
    body = {
        "messages": [{"role": "user", "content": "look"}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "temperature": 0,
    }
    (operation,) = [each for each in OPERATIONS if each.path == "/v1/chat/completions"]
    response = await server.client.post(operation.path, json=body)
    assert response.status == 200, await response.text()
    answer = msgspec.json.decode(await response.read(), type=answers.ChatCompletion)
    assert answer.choices[0].message.tool_calls
    response = await server.client.post(operation.path, json={**body, "stream": True})
    check_events(await response.text(), operation)


GETS = ["/v1", "/v1/models", "/v1/models/dummy", "/health", "/health/live", "/version"]


@pytest.mark.parametrize("path", GETS)
async def test_what_can_be_looked_at_has_the_documented_shape(start_server, path):
    server = await start_server()
    place = path.replace("dummy", "{id}")
    (operation,) = [each for each in OPERATIONS if each.path == place]
    response = await server.client.get(path)
    msgspec.json.decode(await response.read(), type=operation.answer)


async def test_the_get_stream_and_the_statistics_have_the_documented_shapes(start_server):
    server = await start_server()
    by_path = {(each.method, each.path): each for each in OPERATIONS}
    response = await server.client.get(
        "/generate_stream", params={"prompt": "a", "max_tokens": "4"}
    )
    check_events(await response.text(), by_path["get", "/generate_stream"])
    response = await server.client.get("/stats/stream")
    text = b""
    while text.count(b"event: stats") < 2:
        text += await response.content.readany()
    check_events(text.decode().rpartition("\n\n")[0], by_path["get", "/stats/stream"])


async def test_a_server_that_is_not_ready_answers_in_the_documented_shape(start_server):
    server = await start_server()
    server.backend.begin_drain()
    response = await server.client.get("/health")
    assert response.status == 503
    told = msgspec.json.decode(await response.read(), type=answers.Unready)
    assert told.status == "draining"


async def test_the_document_is_served_and_needs_no_key(start_server):
    server = await start_server({"server.api_keys": ["k"]})
    response = await server.client.get("/openapi.json")
    assert response.content_type == "application/json"
    assert (await response.json())["paths"].keys() == DOCUMENT["paths"].keys()
