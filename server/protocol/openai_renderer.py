"""Outputs as OpenAI chunks, or joined as one OpenAI answer: the same outputs, the same rules, one place.

Knows no aiohttp. `OpenAIRenderer` is what both routes share; a `Shape` holds what differs. The constant part of a chunk
is encoded once per request, and only the text is spliced in.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from core.errors import NoriaError
from core.interfaces import TextTokenizer
from core.outputs import StepOutput, TokenLogprobs
from server import sse
from server.protocol.errors import error_body
from server.protocol.logprobs import CompletionLogprobs, chat_logprobs, is_end_token
from server.protocol.openai_fields import StreamOptions
from server.protocol.tally import Tally


class Shape(Protocol):
    """What completions and chat do differently."""

    id_prefix: str
    object_name: str
    chunk_object_name: str
    text_start: bytes  # of the member that holds a text in the middle of an answer, before and behind the text
    text_end: bytes

    def piece(self, text: str, *, is_first: bool, is_last: bool) -> bytes:
        """The member of a chunk's choice that holds the text."""

    def whole(self, text: str) -> dict[str, Any]:
        """The member of an answer's choice that holds the text."""

    def logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]: ...


class ChatShape:
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    text_start, text_end = b'"delta":{"content":', b"}"

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer

    def piece(self, text: str, *, is_first: bool, is_last: bool) -> bytes:
        """The role travels with the first text; an answer without any text tells it at the end."""
        if is_first:
            return b'"delta":{"role":"assistant","content":' + _encode(text) + b"}"
        if is_last and not text:
            return b'"delta":{}'
        return self.text_start + _encode(text) + self.text_end

    def whole(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        return chat_logprobs(entries, self._tokenizer)


class CompletionShape:
    id_prefix = "cmpl-"
    object_name = "text_completion"
    chunk_object_name = "text_completion"
    text_start, text_end = b'"text":', b""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._lists: dict[int, CompletionLogprobs] = {}

    def piece(self, text: str, *, is_first: bool, is_last: bool) -> bytes:
        return self.text_start + _encode(text)

    def whole(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def logprobs(self, index: int, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        if index not in self._lists:
            self._lists[index] = CompletionLogprobs(self._tokenizer)
        return self._lists[index].render(entries)


@dataclass(slots=True)
class Choice:
    """What one choice still has to say."""

    index: int
    start: bytes  # of each of its chunks
    texts: list[str] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(
        default_factory=list
    )  # also of tokens whose text is held back
    finish_reason: str | None = None
    has_sent: bool = False
    plain_start: bytes = b""  # of a chunk that tells nothing but a text


class OpenAIRenderer:
    """Renders one request: `write`, `end` and `fail` for a stream, `add` and `body` for a single answer."""

    keep_alive = sse.KEEP_ALIVE

    def __init__(
        self,
        shape: Shape,
        model_name: str,
        tally: Tally,
        *,
        num_sequences: int,
        has_logprobs: bool,
        stream_options: StreamOptions,
        request_id: str = "",
    ) -> None:
        self._shape = shape
        self._tally = tally
        self._has_logprobs = has_logprobs
        self._options = stream_options
        self._request_id = request_id
        self._constants = {
            "id": shape.id_prefix + uuid.uuid4().hex,
            "object": shape.chunk_object_name,
            "created": int(time.time()),
            "model": model_name,
        }
        self._head = b"data: " + sse.escape(orjson.dumps(self._constants))[:-1]
        starts = [self._head + b',"choices":[{"index":%d,' % i for i in range(num_sequences)]
        self._choices = [
            Choice(index, start, plain_start=start + shape.text_start)
            for index, start in enumerate(starts)
        ]
        self._plain_end = shape.text_end + b',"logprobs":null,"finish_reason":null}]}\n\n'
        self._has_plain_chunks = not has_logprobs and not stream_options.is_continuous

    def begin_with(self, texts: list[str]) -> None:
        """Texts that stand before those of the choices, in order; they travel with the first token."""
        for choice, text in zip(self._choices, texts, strict=False):
            choice.texts.append(text)

    def write(self, outputs: list[tuple[int, StepOutput]], *, merges: bool = False) -> bytes:
        """Chunks for what can be said; `merges` joins the tokens of each choice into one chunk."""
        if merges:
            self.add(outputs)
            touched = dict.fromkeys(index for index, _ in outputs)
            return b"".join([self._flush(self._choices[index]) for index in touched])
        parts = []
        for index, output in outputs:
            choice, text = self._choices[index], output.text
            if (
                self._has_plain_chunks
                and choice.has_sent
                and output.finish_reason is None
                and not choice.texts
            ):  # nearly every token: only its text is encoded
                self._tally.observe(index, output)
                if text:
                    parts.append(b"%b%b%b" % (choice.plain_start, _encode(text), self._plain_end))
                continue
            self._take(index, output)
            parts.append(self._flush(choice))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def end(self) -> bytes:
        """The usage chunk if it was asked for, and the end mark."""
        if not self._options.include_usage:
            return sse.DONE
        usage = orjson.dumps({"usage": self._tally.usage(), "timings": self._tally.timings()})
        return self._head + b',"choices":[],' + usage[1:] + b"\n\n" + sse.DONE

    def fail(self, error: NoriaError) -> bytes:
        return sse.event(error_body(error, self._request_id)) + sse.DONE

    def add(self, outputs: list[tuple[int, StepOutput]]) -> None:
        """Keeps outputs for `body`, or for the next merged chunk."""
        for index, output in outputs:
            self._take(index, output)

    def body(self) -> bytes:
        """The whole answer, when all sequences have ended."""
        choices = []
        for choice in self._choices:
            logprobs = None
            if self._has_logprobs:
                logprobs = self._shape.logprobs(choice.index, choice.entries)
            choices.append(
                {
                    "index": choice.index,
                    **self._message(choice),
                    "logprobs": logprobs,
                    "finish_reason": choice.finish_reason,
                }
            )
        answer = {
            **self._constants,
            "object": self._shape.object_name,
            "choices": choices,
            "usage": self._tally.usage(),
            "timings": self._tally.timings(),
        }
        return orjson.dumps(answer)

    def _message(self, choice: Choice) -> dict[str, Any]:
        return self._shape.whole("".join(choice.texts))

    def _take(self, index: int, output: StepOutput) -> None:
        choice = self._choices[index]
        self._tally.observe(index, output)
        if output.text:
            choice.texts.append(output.text)
        if self._has_logprobs and output.logprobs is not None and not is_end_token(output):
            choice.entries.append(output.logprobs)
        if output.finish_reason is not None:
            choice.finish_reason = output.finish_reason.value

    def _flush(self, choice: Choice) -> bytes:
        """One chunk, or nothing while there is nothing to say."""
        is_last = choice.finish_reason is not None
        if not choice.texts and not is_last:
            return b""
        text = choice.texts[0] if len(choice.texts) == 1 else "".join(choice.texts)
        choice.texts.clear()
        piece = self._shape.piece(text, is_first=not choice.has_sent, is_last=is_last)
        choice.has_sent = True
        return self._chunk(choice, piece)

    def _chunk(self, choice: Choice, piece: bytes) -> bytes:
        """`piece` and what else a chunk tells: log-probabilities, the end, usage."""
        logprobs = b"null"
        if self._has_logprobs:
            logprobs = _encode(self._shape.logprobs(choice.index, choice.entries))
            choice.entries.clear()
        reason = b'"%b"' % choice.finish_reason.encode() if choice.finish_reason else b"null"
        usage = b""
        if self._options.is_continuous:
            usage = b',"usage":' + orjson.dumps(self._tally.usage())
        return b'%b%b,"logprobs":%b,"finish_reason":%b}]%b}\n\n' % (
            choice.start,
            piece,
            logprobs,
            reason,
            usage,
        )


def _encode(value: object) -> bytes:
    return sse.escape(orjson.dumps(value))
