"""`POST /v1/embeddings`: what it accepts and answers. Knows no aiohttp."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import orjson

from core.errors import InvalidValue
from core.sampling_params import SamplingParams
from server.backends.base import ServedModel
from server.protocol.fields import UnknownFields, convert, refuse_unsupported
from server.protocol.prompts import Prompt, check_amount, check_prompts, names_of
from server.protocol.sampling_fields import check_model

PARAMS = SamplingParams(max_tokens=1, temperature=0)
REFUSED_FIELDS: Mapping[str, tuple[object, ...]] = {
    "dimensions": (),  # these models were not trained so that the first values mean something alone
    "truncate_prompt_tokens": (),
}


class EmbeddingFields(msgspec.Struct, frozen=True):
    model: str | None = None
    encoding_format: str | None = None


_KNOWN = REFUSED_FIELDS.keys() | set(EmbeddingFields.__struct_fields__) | {"input", "user"}


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """A valid request, before its inputs are tokens. `names` are the paths of the inputs."""

    inputs: list[Prompt]
    names: list[str]
    is_base64: bool


def parse_embedding(
    body: Mapping[str, Any], model: ServedModel, unknown: UnknownFields, *, max_waiting: int
) -> EmbeddingRequest:
    """Raises `NoriaError`; nothing is left to be found wrong but the number of tokens."""
    fields = convert(body, EmbeddingFields)
    refuse_unsupported(body, REFUSED_FIELDS)
    check_model(fields.model, model)
    if fields.encoding_format not in (None, "float", "base64"):
        raise InvalidValue("encoding_format must be float or base64.", param="encoding_format")
    inputs, is_list = check_prompts(body.get("input"), model.shape.vocab_size, "input")
    check_amount(len(inputs), 1, max_waiting)
    unknown.note(body.keys() - _KNOWN)
    names = names_of(inputs, "input", is_list=is_list)
    return EmbeddingRequest(inputs, names, fields.encoding_format == "base64")


def embeddings_body(
    embeddings: Sequence[bytes], model_name: str, num_tokens: int, *, is_base64: bool
) -> bytes:
    """`embeddings` are float32 values, little-endian. Slow for long lists; belongs in an executor."""
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(raw).decode()
            if is_base64
            else np.frombuffer(raw, dtype="<f4"),
        }
        for index, raw in enumerate(embeddings)
    ]
    answer = {
        "object": "list",
        "data": data,
        "model": model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY)
