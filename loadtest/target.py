"""Where requests go: the address, the dialect and the fields that every body shares. No I/O."""

from __future__ import annotations

import argparse
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import orjson

Endpoint = Literal["completions", "chat", "native"]

PATHS: dict[Endpoint, str] = {
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
    "native": "/generate_stream",
}


@dataclass(frozen=True, slots=True)
class Target:
    """A server and how to speak to it. `url` has no `/v1` and no trailing slash. `extra` is merged into each body."""

    url: str
    endpoint: Endpoint = "completions"
    model: str | None = None
    api_key: str | None = None
    ignores_eos: bool = True
    extra: dict[str, Any] = field(default_factory=dict)

    def at(self, url: str) -> Target:
        """The same dialect at another address."""
        return replace(self, url=url)

    @property
    def path(self) -> str:
        return PATHS[self.endpoint]

    @property
    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        return headers

    def body(self, prompt: str, max_tokens: int) -> bytes:
        """A greedy streaming request for exactly `max_tokens` tokens (as far as the server can be told so)."""
        fields: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0}
        if self.endpoint == "chat":
            fields["messages"] = [{"role": "user", "content": prompt}]
        else:
            fields["prompt"] = prompt
        if self.endpoint != "native":
            fields["model"] = self.model
            fields["stream"] = True
            fields["stream_options"] = {"include_usage": True}
        if self.ignores_eos:
            fields["ignore_eos"] = True
            fields["min_tokens"] = max_tokens
        return orjson.dumps(fields | self.extra)


def base_url(url: str) -> str:
    """`http://host:8000/v1/` and the like, as people type it, without the `/v1`."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def json_object(text: str) -> dict[str, Any]:
    """An argparse type: a JSON object."""
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:
        raise argparse.ArgumentTypeError("must be a JSON object") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("must be a JSON object")
    return value


def add_target_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every subcommand needs which speaks to a server."""
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server, with or without /v1"
    )
    parser.add_argument("--model", help="model name in requests (default: first of /v1/models)")
    parser.add_argument("--api-key", help="sent as a bearer token")
    parser.add_argument("--endpoint", choices=sorted(PATHS), default="completions")
    parser.add_argument(
        "--extra", type=json_object, default={}, metavar="JSON", help="merged into each body"
    )
    parser.add_argument(
        "--no-ignore-eos",
        dest="ignores_eos",
        action="store_false",
        help="do not send ignore_eos and min_tokens (for servers that refuse them)",
    )


def target_of(args: argparse.Namespace) -> Target:
    return Target(
        url=base_url(args.url),
        endpoint=args.endpoint,
        model=args.model,
        api_key=args.api_key,
        ignores_eos=args.ignores_eos,
        extra=args.extra,
    )
