"""A model of 100 tokens' context, and every route's parser with the least body that it takes."""

from __future__ import annotations

from typing import Any

from core.config import MemoryPlan, ModelShape
from core.dummy_runner import ByteTokenizer
from server.backends.base import ServedModel
from server.protocol import chat, completions, native
from server.protocol.fields import UnknownFields

VOCAB = 257


def make_model(**changes: Any) -> ServedModel:
    shape = ModelShape(1, 1, 1, VOCAB, 100, 8, 0, (256,))
    plan = MemoryPlan(0, 0.3, None, 0, 0, 8, 16, 10, 100, "kv_cache.num_blocks")
    values: dict[str, Any] = {
        "name": "dummy",
        "root": "org/dummy",
        "created": 1,
        "max_model_len": 100,
        "shape": shape,
        "plan": plan,
        "tokenizer": ByteTokenizer(),
    }
    return ServedModel(**{**values, **changes})


MODEL = make_model()
USER = [{"role": "user", "content": "hi"}]


def complete(body: dict[str, Any], model: ServedModel = MODEL, max_waiting: int = 4096) -> Any:
    body = {"prompt": "a", **body}
    return completions.parse_completion(body, model, UnknownFields(), max_waiting=max_waiting)


def chat_with(body: dict[str, Any], model: ServedModel = MODEL) -> Any:
    body = {"messages": USER, **body}
    return chat.parse_chat(body, model, UnknownFields(), max_waiting=4096)


def basic(body: dict[str, Any]) -> Any:
    return native.parse_one(
        {"prompt": "a", **body}, MODEL, native.GENERATE_DEFAULTS, UnknownFields(), streams=False
    )


def listed(body: dict[str, Any]) -> Any:
    return native.parse_list(
        {"prompts": ["a"], **body}, MODEL, native.VLLM_DEFAULTS, UnknownFields(), max_waiting=4096
    )


ROUTES = [complete, chat_with, basic, listed]
