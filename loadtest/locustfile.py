"""Locust users that read streams as they arrive.

    locust -f loadtest/locustfile.py --headless -u 8 -r 8 -t 20s -H http://127.0.0.1:8000

Beside locust's own entry per route (whose time is end to end), each stream reports events of its own, by route:
`ttft` (ms to the first non-empty text), `itl` (ms between texts) and `tokens` (the *value* is a number of tokens, not
a time: its average is tokens per request). Name user classes on the command line to run only those. Locust patches
the standard library when imported, so this file is loaded by locust and by nothing else.
"""

from __future__ import annotations

import random
import time
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

import orjson
from locust import FastHttpUser, events, task

from loadtest.sse_client import RequestRecord, SseParser

QUESTIONS = (
    "What is the capital of France?",
    "Tell a short story about a river that forgot its way.",
    "Explain why the sky is blue.",
    "List five things to take on a walk in the rain.",
    "Describe a kitchen in the morning.",
)
HEADERS = {"content-type": "application/json"}


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--max-tokens", type=int, default=64, env_var="LOCUST_MAX_TOKENS")
    parser.add_argument("--served-model", default=None, env_var="LOCUST_SERVED_MODEL")
    parser.add_argument("--api-key", default=None, env_var="LOCUST_API_KEY")


class NativeStreamUser(FastHttpUser):
    """Reads `POST /generate_stream` token by token."""

    weight = 3

    @task
    def generate_stream(self) -> None:
        body = {"prompt": unique_prompt(), "max_tokens": max_tokens(self)}
        run_stream(self, "/generate_stream", body)


class ChatStreamUser(FastHttpUser):
    """Reads `POST /v1/chat/completions` as chat front ends do."""

    weight = 3

    @task
    def chat(self) -> None:
        body: dict[str, Any] = {
            "messages": [{"role": "user", "content": unique_prompt()}],
            "max_tokens": max_tokens(self),
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.environment.parsed_options.served_model:
            body["model"] = self.environment.parsed_options.served_model
        run_stream(self, "/v1/chat/completions", body)


class BasicGenerateUser(FastHttpUser):
    """Waits for the whole answer of `POST /basic_generate`."""

    weight = 1

    @task
    def basic_generate(self) -> None:
        prompt = unique_prompt()
        body = json_text({"prompt": prompt, "max_tokens": max_tokens(self)})
        with self.client.post(
            "/basic_generate", data=body, headers=headers(self), catch_response=True
        ) as response:
            if response.status_code != 200:
                response.failure(f"HTTP {response.status_code}")
                return
            text = orjson.loads(response.content).get("generated_text")
            if not isinstance(text, str) or not text.startswith(prompt):
                response.failure("the answer does not begin with the prompt")


def unique_prompt() -> str:
    """A question behind a number, so that no two requests share a prefix."""
    return f"{random.randrange(10**9)}. {random.choice(QUESTIONS)}"


def json_text(body: dict[str, Any]) -> str:
    return orjson.dumps(body).decode()


def max_tokens(user: FastHttpUser) -> int:
    value: int = user.environment.parsed_options.max_tokens
    return value


def headers(user: FastHttpUser) -> dict[str, str]:
    api_key = user.environment.parsed_options.api_key
    return HEADERS | {"authorization": f"Bearer {api_key}"} if api_key else HEADERS


def run_stream(user: FastHttpUser, path: str, body: dict[str, Any]) -> None:
    """Sends one request, reads its stream and reports it."""
    record = RequestRecord(sent_s=time.perf_counter())
    with user.client.post(
        path, data=json_text(body), headers=headers(user), stream=True, catch_response=True
    ) as response:
        record.status = response.status_code
        if response.status_code == 200:
            read_stream(response.stream, record)
        else:
            record.fail(f"HTTP {response.status_code}")
        record.end(time.perf_counter())
        response.request_meta["response_time"] = record.e2e_s * 1000
        response.request_meta["response_length"] = len(record.text.encode())
        if record.error is not None:
            response.failure(record.error)
        else:
            response.success()
    if record.is_ok:
        report_tokens(user, path, record)


def read_stream(stream: Any, record: RequestRecord) -> None:
    """Takes the body line by line, each as soon as it is there."""
    parser = SseParser()
    try:
        for line in lines_of(stream):
            now_s = time.perf_counter()
            for event in parser.feed(line):
                if not record.take(event, now_s):
                    return
    except (
        Exception
    ) as error:  # whatever the connection does is a failed request, not the end of the user
        record.fail(f"{type(error).__name__}: {error}"[:300])


def lines_of(stream: Any) -> Iterator[bytes]:
    """geventhttpclient's `read` waits until a whole buffer is full; its `readline` returns at each LF."""
    while line := stream.readline(b"\n"):
        yield bytes(line)


def report_tokens(user: FastHttpUser, path: str, record: RequestRecord) -> None:
    def fire(kind: str, value: float) -> None:
        user.environment.events.request.fire(
            request_type=kind,
            name=f"{kind} {path}",
            response_time=value,
            response_length=0,
            exception=None,
            context={},
        )

    if record.ttft_s is not None:
        fire("ttft", record.ttft_s * 1000)
    for gap_s in record.gaps_s:
        fire("itl", gap_s * 1000)
    fire("tokens", record.num_output_tokens)
