"""Outputs of one sequence as an OpenAI response: as its numbered events, or joined as one answer. Knows no aiohttp.

The events of a stream: `response.created`, `.in_progress`, `.output_item.added`, `.content_part.added`, one
`.output_text.delta` a token, `.output_text.done`, `.content_part.done`, `.output_item.done`, and `.completed` or
`.incomplete`. A failure is `response.failed` and an `error` event on which clients raise; there is no `[DONE]`.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import orjson

from core.errors import NoriaError
from core.interfaces import TextTokenizer
from core.outputs import FinishReason, StepOutput, TokenLogprobs
from server import sse
from server.protocol.errors import error_object
from server.protocol.logprobs import chat_logprobs, is_end_token
from server.protocol.tally import Tally


class ResponseRenderer:
    """`write`, `end` and `fail` for a stream, `add` and `body` for a single answer."""

    keep_alive = sse.KEEP_ALIVE

    def __init__(
        self,
        model_name: str,
        tokenizer: TextTokenizer,
        tally: Tally,
        echoed: dict[str, Any],
        *,
        has_logprobs: bool,
        request_id: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._tally = tally
        self._has_logprobs = has_logprobs
        self._request_id = request_id
        self._response: dict[str, Any] = {
            "id": f"resp_{uuid.uuid4().hex}",
            "object": "response",
            "created_at": int(time.time()),
            "model": model_name,
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "output": [],
            "background": False,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": None,
            **echoed,
        }
        self._item_id = f"msg_{uuid.uuid4().hex}"
        place = {"item_id": self._item_id, "output_index": 0, "content_index": 0}
        self._place = place
        self._delta = sse.escape(orjson.dumps({"type": "response.output_text.delta", **place}))[:-1]
        self._number = 0
        self._has_started = False
        self._texts: list[str] = []
        self._pieces: list[tuple[str, list[TokenLogprobs]]] = []  # not yet written
        self._entries: list[TokenLogprobs] = []
        self._held: list[TokenLogprobs] = []  # of tokens whose text is held back
        self._reason: FinishReason | None = None

    def write(self, outputs: list[tuple[int, StepOutput]], *, merges: bool = False) -> bytes:
        """Events for what can be said; the first output opens the response."""
        self.add(outputs)
        if not outputs:
            return b""
        parts = [b"" if self._has_started else self._start()]
        pieces = self._pieces
        if merges and pieces:
            entries = [entry for _, held in pieces for entry in held]
            pieces = [("".join(text for text, _ in pieces), entries)]
        parts += [self._delta_event(text, entries) for text, entries in pieces]
        self._pieces = []
        return b"".join(parts)

    def end(self) -> bytes:
        text, part = "".join(self._texts), self._part()
        item, answer = self._item(), self._answer()
        done = {"type": "response.output_text.done", **self._place, "text": text}
        return (
            self._event({**done, "logprobs": part["logprobs"]})
            + self._event({"type": "response.content_part.done", **self._place, "part": part})
            + self._event({"type": "response.output_item.done", "output_index": 0, "item": item})
            + self._event({"type": f"response.{answer['status']}", "response": answer})
        )

    def fail(self, error: NoriaError) -> bytes:
        shown = error_object(error, self._request_id)
        failure = {"code": "server_error", "message": shown["message"]}
        output = [{**self._item(), "status": "incomplete"}] if self._has_started else []
        answer = {**self._response, "status": "failed", "error": failure, "output": output}
        last = {name: shown[name] for name in ("code", "message", "param")}
        return (
            (b"" if self._has_started else self._created())
            + self._event({"type": "response.failed", "response": answer})
            + self._event({"type": "error", **last, "error": shown})
        )

    def add(self, outputs: list[tuple[int, StepOutput]]) -> None:
        for index, output in outputs:
            self._tally.observe(index, output)
            if self._has_logprobs and output.logprobs is not None and not is_end_token(output):
                self._held.append(output.logprobs)
            if output.text:
                self._texts.append(output.text)
                self._pieces.append((output.text, self._held))
                self._entries += self._held
                self._held = []
            if output.finish_reason is not None:
                self._reason = output.finish_reason
                self._entries += self._held
                self._held = []

    def body(self) -> bytes:
        """The whole answer, when the sequence has ended."""
        return orjson.dumps(self._answer())

    def _answer(self) -> dict[str, Any]:
        is_cut = self._reason is FinishReason.LENGTH
        return {
            **self._response,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item()],
            "usage": self._usage(),
            "timings": self._tally.timings(),
        }

    def _item(self) -> dict[str, Any]:
        return {
            "id": self._item_id,
            "type": "message",
            "role": "assistant",
            "status": "incomplete" if self._reason is FinishReason.LENGTH else "completed",
            "content": [self._part()],
        }

    def _part(self) -> dict[str, Any]:
        logprobs = self._logprobs(self._entries)
        text = "".join(self._texts)
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def _logprobs(self, entries: list[TokenLogprobs]) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = chat_logprobs(entries, self._tokenizer)["content"]
        return content

    def _usage(self) -> dict[str, Any]:
        num_input, num_output = self._tally.num_prompt_tokens, self._tally.num_output_tokens(0)
        cached = self._tally.num_cached_tokens
        return {
            "input_tokens": num_input,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": num_output,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": num_input + num_output,
        }

    def _created(self) -> bytes:
        return self._event({"type": "response.created", "response": self._response})

    def _start(self) -> bytes:
        self._has_started = True
        item = {**self._item(), "status": "in_progress", "content": []}
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        return (
            self._created()
            + self._event({"type": "response.in_progress", "response": self._response})
            + self._event({"type": "response.output_item.added", "output_index": 0, "item": item})
            + self._event({"type": "response.content_part.added", **self._place, "part": part})
        )

    def _delta_event(self, text: str, entries: list[TokenLogprobs]) -> bytes:
        """The one event of every token: only what changes is encoded."""
        number, self._number = self._number, self._number + 1
        logprobs = sse.escape(orjson.dumps(self._logprobs(entries))) if entries else b"[]"
        return (
            b'event: response.output_text.delta\ndata: %b,"delta":%b,"logprobs":%b,'
            b'"sequence_number":%d}\n\n'
            % (self._delta, sse.escape(orjson.dumps(text)), logprobs, number)
        )

    def _event(self, data: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        numbered = {**data, "sequence_number": number}
        return sse.named_event(data["type"].encode(), sse.escape(orjson.dumps(numbered)))
