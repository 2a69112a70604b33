"""What the structs of requests cannot tell of their fields, for the OpenAPI document.

Descriptions, ranges, and the schemas of what is read by hand. Data; knows no aiohttp. Used by `requests.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from core import sampling_params as limits
from server.protocol import responses, structured, tools
from server.protocol.messages import MAX_MESSAGES
from server.protocol.prompts import MAX_PROMPTS
from server.protocol.sampling_fields import MAX_CHOICES, MAX_LABEL_LENGTH

Schema = dict[str, Any]
REF_TEMPLATE = "#/components/schemas/{name}"

TEXT: Schema = {"type": "string", "minLength": 1}
IDS: Schema = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
CONTENT: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": PART}, {"type": "null"}],
    "description": "A text, or a list of text parts that are joined in order.",
}
MESSAGE: Schema = {
    "type": "object",
    "description": "One message of a conversation.",
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": CONTENT,
        "name": {"type": ["string", "null"]},
        "tool_call_id": {"type": ["string", "null"]},
    },
    "required": ["role", "content"],
}
MESSAGES: Schema = {
    "type": "array",
    "items": {"$ref": REF_TEMPLATE.format(name="ChatMessage")},
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "description": "The conversation so far.",
}
INPUT: Schema = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "object"}, "minItems": 1, "maxItems": MAX_MESSAGES},
    ],
    "description": "The conversation: a text, or items: messages, function calls and their outputs.",
}
BLOCK: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["text", "tool_use", "tool_result", "thinking", "redacted_thinking"]},
    },
    "required": ["type"],
}
TURNS: Schema = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "role": {"enum": ["user", "assistant"]},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": BLOCK}]},
        },
        "required": ["role", "content"],
    },
    "minItems": 1,
    "maxItems": MAX_MESSAGES,
    "description": "The turns so far: texts, and blocks of text, of calls (`tool_use`) and results (`tool_result`).",
}
SYSTEM: Schema = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": PART}, {"type": "null"}],
    "description": "The system prompt.",
}
PROMPT: Schema = {**TEXT, "description": "The text to continue."}
PROMPTS: Schema = {
    "type": "array",
    "items": TEXT,
    "maxItems": MAX_PROMPTS,
    "description": "The texts to continue.",
}
ANY_PROMPT: Schema = {
    "anyOf": [
        TEXT,
        {"type": "array", "items": TEXT, "minItems": 1, "maxItems": MAX_PROMPTS},
        IDS,
        {"type": "array", "items": IDS, "minItems": 1, "maxItems": MAX_PROMPTS},
    ],
    "description": "One or many prompts, as texts or as token ids.",
}

ONE_PROMPT: Schema = {
    "anyOf": [TEXT, IDS, {"type": "null"}],
    "description": "The beginning of prompts, as text or as token ids.",
}
STORED: Mapping[str, tuple[object, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
}
OF_RESPONSES = {
    "max_tool_calls",
    "prompt_cache_retention",
    "prompt_cache_options",
}
OF_MESSAGES = (
    "metadata",
    "service_tier",
    "inference_geo",
    "cache_control",
    "diagnostics",
    "speed",
)
GRAMMAR: Schema = {"type": ["string", "null"], "minLength": 1}
JSON_SCHEMA: Schema = {"type": ["object", "string", "boolean", "null"]}
RESPONSE_FORMAT: Schema = {
    "anyOf": [
        {
            "type": "object",
            "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}},
            "required": ["type"],
        },
        {"type": "null"},
    ],
    "description": "`text`, `json_object`, or `json_schema` with `json_schema.schema`.",
}
_FUNCTION: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,128}$"},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
    "required": ["name"],
}
TOOLS: dict[str, Schema] = {
    "tools": {
        "type": ["array", "null"],
        "items": {
            "type": "object",
            "properties": {
                "type": {"const": "function"},
                "function": _FUNCTION,
            },
            "required": ["type", "function"],
        },
        "maxItems": tools.MAX_TOOLS,
        "description": "Functions that the model may call; `parameters` are JSON schemas.",
    },
    "tool_choice": {
        "anyOf": [
            {"enum": ["auto", "none", "required", None]},
            {
                "type": "object",
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "properties": {"name": {"type": "string"}},
                        "required": ["name"],
                    },
                },
                "required": ["type", "function"],
            },
        ],
        "description": "`required` and a named function are enforced by a grammar, with any model.",
    },
    "parallel_tool_calls": {
        "type": ["boolean", "null"],
        "description": "False: at most one call.",
    },
}
_NAMED: Schema = {
    "type": "object",
    "properties": {"type": {"const": "function"}, "name": {"type": "string"}},
    "required": ["type", "name"],
}
_FLAT: Schema = {
    **_FUNCTION,
    "properties": {"type": {"const": "function"}, **_FUNCTION["properties"]},
    "required": ["type", "name"],
}
RESPONSE_TOOLS: dict[str, Schema] = {
    "tools": {**TOOLS["tools"], "items": _FLAT},
    "tool_choice": {
        **TOOLS["tool_choice"],
        "anyOf": [{"enum": ["auto", "none", "required", None]}, _NAMED],
    },
    "parallel_tool_calls": TOOLS["parallel_tool_calls"],
}
MESSAGE_TOOLS: dict[str, Schema] = {
    "tools": {
        **TOOLS["tools"],
        "items": {
            "type": "object",
            "properties": {
                "type": {"enum": ["custom", None]},
                "name": _FUNCTION["properties"]["name"],
                "description": {"type": ["string", "null"]},
                "input_schema": {"type": "object"},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name", "input_schema"],
        },
        "description": "Tools that the model may use; `input_schema` are JSON schemas.",
    },
    "tool_choice": {
        "type": ["object", "null"],
        "properties": {
            "type": {"enum": ["auto", "any", "tool", "none"]},
            "name": {"type": ["string", "null"]},
            "disable_parallel_tool_use": {"type": ["boolean", "null"]},
        },
        "required": ["type"],
        "description": "`any` and a named tool are enforced by a grammar, with any model.",
    },
}
# At most one of these, or `response_format`, binds the answer to a grammar.
GRAMMARS: dict[str, Schema] = {
    "structured_outputs": {
        "type": ["object", "null"],
        "description": "One of `json`, `regex`, `choice`, `grammar` and `json_object`.",
    },
    "guided_json": {**JSON_SCHEMA, "description": "A JSON schema, also as text."},
    "guided_regex": {**GRAMMAR, "description": "A regular expression."},
    "guided_choice": {
        "type": ["array", "null"],
        "items": TEXT,
        "maxItems": structured.MAX_CHOICES,
        "description": "One of these texts; an empty list means none.",
    },
    "guided_grammar": {**GRAMMAR, "description": "A Lark grammar."},
    "regex": {**GRAMMAR, "description": "As `guided_regex`."},
    "grammar": {**GRAMMAR, "description": "As `guided_grammar`."},
}


def _span(low: float, high: float) -> Schema:
    return {"minimum": low, "maximum": high}


# What a struct cannot say of its fields: (description, constraints of the value where it is not null).
FIELDS: Mapping[str, tuple[str, Schema]] = {
    "echo": ("Whether the texts begin with their prompts; not together with `logprobs`.", {}),
    "suffix": ("The text behind the one to generate, for models with infill tokens.", {}),
    "pin": ("Whether its blocks stay until they are unpinned; false only computes it.", {}),
    "label": ("What the list shows beside the id.", {"maxLength": MAX_LABEL_LENGTH}),
    "encoding_format": (
        "`float` for numbers, `base64` for their float32 bytes.",
        {"pattern": "^(float|base64)$"},
    ),
    "model": ("A name or alias of the served model; absent means it.", {}),
    "max_tokens": (
        "At most so many tokens; clamped to the room left in the context.",
        _span(1, limits.MAX_TOKENS),
    ),
    "max_completion_tokens": ("The newer name of `max_tokens`; wins.", _span(1, limits.MAX_TOKENS)),
    "min_tokens": (
        "End tokens and stop strings have no effect before; at most `max_tokens`.",
        _span(0, limits.MAX_TOKENS),
    ),
    "ignore_eos": ("Goes on behind end tokens.", {}),
    "temperature": ("0 always takes the likeliest token.", _span(0, 2)),
    "top_p": ("Only the likeliest tokens that together have this probability.", _span(0, 1)),
    "top_k": ("Only so many of the likeliest tokens; 0 or -1: all.", _span(-1, limits.MAX_TOKENS)),
    "min_p": ("Only tokens with this part of the best one's probability.", _span(0, 1)),
    "presence_penalty": ("Against tokens that the answer already has.", _span(-2, 2)),
    "frequency_penalty": ("The same, for each time.", _span(-2, 2)),
    "repetition_penalty": (
        "Against tokens of prompt and answer; 1 is off.",
        {"exclusiveMinimum": 0, "maximum": 10},
    ),
    "seed": (
        "The same seed, prompt and settings give the same answer; null or -1: a fresh one.",
        _span(-1, limits.MAX_SEED),
    ),
    "stop": (
        f"One or up to {limits.MAX_STOPS} strings that end the answer.",
        {"minLength": 1, "maxLength": limits.MAX_STOP_LENGTH, "maxItems": limits.MAX_STOPS},
    ),
    "stop_token_ids": ("Token ids that end the answer.", {"maxItems": limits.MAX_STOP_TOKEN_IDS}),
    "include_stop_str_in_output": ("Keeps the stop string in the text.", {}),
    "logit_bias": (
        "Token id to a number from -100 to 100 that is added to its logit.",
        {"maxProperties": limits.MAX_LOGIT_BIAS, "propertyNames": {"pattern": "^[0-9]{1,10}$"}},
    ),
    "n": ("So many answers to each prompt.", _span(1, MAX_CHOICES)),
    "stream": ("One event per token instead of one body.", {}),
    "request_id": ("A label for the log.", {"maxLength": MAX_LABEL_LENGTH}),
    "logprobs": ("Log-probabilities of the tokens.", _span(0, limits.MAX_LOGPROBS)),
    "top_logprobs": ("And so many of the best; needs `logprobs`.", _span(0, limits.MAX_LOGPROBS)),
    "stream_options": ("Whether a stream tells its usage.", {}),
    "continue_final_message": ("Goes on with the last message, which is the assistant's.", {}),
    "add_generation_prompt": ("Whether the template opens an answer; excludes the former.", {}),
    "chat_template_kwargs": ("Scalars for the chat template.", {"maxProperties": 32}),
    "add_special_tokens": ("Whether the tokenizer's own are added; true by default.", {}),
    "prompt": ("The text.", {}),
    "instructions": ("The system prompt.", {}),
    "max_output_tokens": ("At most so many tokens.", _span(1, limits.MAX_TOKENS)),
    "include": (f"`{responses.LOGPROBS}` asks for log-probabilities.", {}),
    "text": (
        "`format` is `text`, `json_object`, or `json_schema` with `schema` beside `type`.",
        {},
    ),
    "reasoning": ("Accepted and ignored.", {}),
    "user": ("Accepted and ignored.", {}),
    "safety_identifier": ("Accepted and ignored.", {}),
    "prompt_cache_key": ("Accepted and ignored.", {}),
    "metadata": ("Told back in the answer.", {}),
    "stop_sequences": (
        "Strings that end the answer.",
        {"minLength": 1, "maxLength": limits.MAX_STOP_LENGTH, "maxItems": limits.MAX_STOPS},
    ),
    "pinned": ("Whether it stays loaded whatever else is asked for; null: as it is.", {}),
    "thinking": ("Only `disabled` and `adaptive`.", {}),
    "output_config": ("`format` is `json_schema` with a `schema`; the rest is ignored.", {}),
    "output_format": ("The older name of `output_config.format`.", {}),
}
