"""Outputs of one sequence as an OpenAI response: as its numbered events, or joined as one answer. Knows no aiohttp.

The events of a stream: `response.created`, `.in_progress`, for each item `.output_item.added`, one delta a token and
`.output_item.done`, then `.completed` or `.incomplete`. An item is a message with one text, a function call, or
thoughts (`reasoning`). A failure is `response.failed` and an `error` on which clients raise; there is no `[DONE]`.
"""

from __future__ import annotations

import time
import uuid
from typing import Any

import orjson

from core.errors import NoriaError
from core.interfaces import TextTokenizer
from core.outputs import StepOutput, TokenLogprobs
from server import sse
from server.protocol.answer_blocks import AnswerBlocks, Block, Change
from server.protocol.errors import error_object
from server.protocol.logprobs import chat_logprobs
from server.protocol.tally import Tally

_PREFIXES = {"text": "msg_", "thoughts": "rs_", "call": "fc_"}
_TOLD_AS = {"text": "output_text", "thoughts": "reasoning_text", "call": "function_call_arguments"}


class ResponseRenderer:
    """`write`, `end` and `fail` for a stream, `add` and `body` for a single answer."""

    keep_alive = sse.KEEP_ALIVE

    def __init__(
        self,
        model_name: str,
        tokenizer: TextTokenizer,
        tally: Tally,
        answer: AnswerBlocks,
        echoed: dict[str, Any],
        *,
        request_id: str = "",
    ) -> None:
        self._tokenizer = tokenizer
        self._tally = tally
        self._answer = answer
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
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **echoed,
        }
        self._ids: list[str] = []  # of the items, one per block
        self._number = 0
        self._has_started = False
        self._open = -1  # the item being told
        self._delta = b""  # the constant part of its events
        self._has_entries = False  # its events carry log-probabilities

    def write(self, outputs: list[tuple[int, StepOutput]], *, merges: bool = False) -> bytes:
        """Events for what can be said; the first output opens the response."""
        self.add(outputs)
        if not outputs:
            return b""
        parts = [b"" if self._has_started else self._start()]
        parts += [self._change(change) for change in self._answer.take(merges=merges)]
        return b"".join(parts)

    def end(self) -> bytes:
        closed, answer = self._close(), self._whole()
        return closed + self._event({"type": f"response.{answer['status']}", "response": answer})

    def fail(self, error: NoriaError) -> bytes:
        shown = error_object(error, self._request_id)
        failure = {"code": "server_error", "message": shown["message"]}
        output = [self._item(index) for index in range(self._open + 1)]
        if output:
            output[-1]["status"] = "incomplete"
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
            self._answer.add(output)
        while len(self._ids) < len(self._answer.blocks):
            prefix = _PREFIXES[self._answer.blocks[len(self._ids)].kind]
            self._ids.append(prefix + uuid.uuid4().hex)

    def body(self) -> bytes:
        """The whole answer, when the sequence has ended."""
        return orjson.dumps(self._whole())

    def _whole(self) -> dict[str, Any]:
        is_cut = self._answer.is_length
        return {
            **self._response,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(index) for index in range(len(self._ids))],
            "usage": self._usage(),
            "timings": self._tally.timings(),
        }

    def _item(self, index: int) -> dict[str, Any]:
        block = self._answer.blocks[index]
        item = _bare_item(block, self._ids[index])
        item["status"] = "incomplete" if block.is_cut else "completed"
        if block.kind == "call":
            item["arguments"] = block.text
        else:
            item["content"] = [self._part(block)]
        return item

    def _part(self, block: Block) -> dict[str, Any]:
        if block.kind == "thoughts":
            return {"type": "reasoning_text", "text": block.text}
        return {
            "type": "output_text",
            "text": block.text,
            "annotations": [],
            "logprobs": self._logprobs(block.entries),
        }

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
            "output_tokens_details": {"reasoning_tokens": self._answer.num_thoughts},
            "total_tokens": num_input + num_output,
        }

    def _created(self) -> bytes:
        return self._event({"type": "response.created", "response": self._response})

    def _start(self) -> bytes:
        self._has_started = True
        return self._created() + self._event(
            {"type": "response.in_progress", "response": self._response}
        )

    def _change(self, change: Change) -> bytes:
        opened = b"" if change.at == self._open else self._close() + self._begin(change.at)
        return opened + self._delta_event(change.text, change.entries) if change.text else opened

    def _begin(self, index: int) -> bytes:
        """The events before the first delta of an item."""
        self._open = index
        block = self._answer.blocks[index]
        item = {**_bare_item(block, self._ids[index]), "status": "in_progress"}
        added = {"type": "response.output_item.added", "output_index": index, "item": item}
        kind = f"response.{_TOLD_AS[block.kind]}.delta"
        head = orjson.dumps({"type": kind, **self._place()})[:-1]
        self._delta = b"event: %b\ndata: %b" % (kind.encode(), head)
        self._has_entries = block.kind == "text"
        if block.kind == "call":
            return self._event(added)
        part = self._part(Block(block.kind))
        begun = {"type": "response.content_part.added", **self._place(), "part": part}
        return self._event(added) + self._event(begun)

    def _close(self) -> bytes:
        """The events behind the last delta of the open item."""
        if self._open < 0:
            return b""
        block, place = self._answer.blocks[self._open], self._place()
        done = f"response.{_TOLD_AS[block.kind]}.done"
        events: list[dict[str, Any]] = []
        if block.kind == "call":
            events.append({"type": done, **place, "name": block.name, "arguments": block.text})
        else:
            part = self._part(block)
            text: dict[str, Any] = {
                name: part[name] for name in ("text", "logprobs") if name in part
            }
            events.append({"type": done, **place, **text})
            events.append({"type": "response.content_part.done", **place, "part": part})
        item = {"output_index": self._open, "item": self._item(self._open)}
        events.append({"type": "response.output_item.done", **item})
        return b"".join([self._event(event) for event in events])

    def _place(self) -> dict[str, Any]:
        """Where the open item, or its only part, stands."""
        place = {"item_id": self._ids[self._open], "output_index": self._open}
        is_call = self._answer.blocks[self._open].kind == "call"
        return place if is_call else {**place, "content_index": 0}

    def _delta_event(self, text: str, entries: list[TokenLogprobs]) -> bytes:
        """The one event of every token: only what changes is encoded."""
        number, self._number = self._number, self._number + 1
        logprobs = b""
        if self._has_entries:
            told = sse.escape(orjson.dumps(self._logprobs(entries))) if entries else b"[]"
            logprobs = b',"logprobs":' + told
        return b'%b,"delta":%b%b,"sequence_number":%d}\n\n' % (
            self._delta,
            sse.escape(orjson.dumps(text)),
            logprobs,
            number,
        )

    def _event(self, data: dict[str, Any]) -> bytes:
        number, self._number = self._number, self._number + 1
        numbered = {**data, "sequence_number": number}
        return sse.named_event(data["type"].encode(), sse.escape(orjson.dumps(numbered)))


def _bare_item(block: Block, item_id: str) -> dict[str, Any]:
    """An item before it says anything."""
    if block.kind == "text":
        return {"id": item_id, "type": "message", "role": "assistant", "content": []}
    if block.kind == "thoughts":
        return {"id": item_id, "type": "reasoning", "summary": [], "content": []}
    call = {"call_id": block.call_id, "name": block.name, "arguments": ""}
    return {"id": item_id, "type": "function_call", **call}
