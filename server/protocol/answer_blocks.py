"""`AnswerBlocks`: one answer as a list of blocks, for the APIs whose answers are lists: thoughts, texts and calls.

Knows no aiohttp and no API. Fed with outputs; gives what has changed since it was last asked.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from core.outputs import FinishReason, StepOutput, TokenLogprobs
from server.protocol.answer_parser import AnswerParser
from server.protocol.logprobs import is_end_token
from server.protocol.tool_parser import CallArguments, CallStart, Event, Reasoning

Kind = Literal["thoughts", "text", "call"]


@dataclass(slots=True)
class Block:
    """`pieces` joined are the text, or the arguments of a call (JSON text). `call_id` begins with `call_`."""

    kind: Kind
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    entries: list[TokenLogprobs] = field(default_factory=list)
    is_cut: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Change(NamedTuple):
    """A piece of block number `at`, and the log-probabilities of its tokens. The first one of a block may be empty."""

    at: int
    text: str
    entries: list[TokenLogprobs]


class AnswerBlocks:
    """The last block is the only one that still grows. An answer that says nothing is one empty text."""

    def __init__(self, parser: AnswerParser | None, *, has_logprobs: bool = False) -> None:
        self._parser = parser
        self._has_logprobs = has_logprobs
        self._held: list[TokenLogprobs] = []  # of tokens whose text is held back
        self._changes: list[Change] = []
        self.blocks: list[Block] = []
        self.final: StepOutput | None = None
        self.num_thoughts = 0  # tokens

    @property
    def is_length(self) -> bool:
        return self.final is not None and self.final.finish_reason is FinishReason.LENGTH

    @property
    def is_call(self) -> bool:
        """The answer ended by itself, with whole calls."""
        return not self.is_length and self._parser is not None and self._parser.has_called

    def add(self, output: StepOutput) -> None:
        if self._has_logprobs and output.logprobs is not None and not is_end_token(output):
            self._held.append(output.logprobs)
        parser = self._parser
        if parser is None:
            if output.text:
                self._grow("text", output.text)
        else:
            self._take(parser.push(output.text, output.token_id))
            self.num_thoughts += parser.is_thinking
        if output.finish_reason is not None:
            self.final = output
            self._finish()

    def take(self, *, merges: bool = False) -> list[Change]:
        """What is new; `merges` joins the pieces of each block."""
        changes, self._changes = self._changes, []
        if not merges:
            return changes
        joined: dict[int, Change] = {}
        for index, text, entries in changes:
            before = joined.get(index, Change(index, "", []))
            joined[index] = Change(index, before.text + text, before.entries + entries)
        return list(joined.values())

    def _finish(self) -> None:
        parser = self._parser
        if parser is not None:
            self._take(parser.finish())
        if not self.blocks and (parser is None or not parser.is_enforced):
            self._begin(Block("text"))
        if not self.blocks:
            return
        last = self.blocks[-1]
        last.is_cut = self.is_length or (
            last.kind == "call" and parser is not None and parser.ends_in_call
        )
        if last.kind == "text":
            last.entries += self._held

    def _take(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case CallStart(_, call_id, name):
                    self._begin(Block("call", call_id, name))
                case CallArguments(_, text):
                    self._grow("call", text)
                case Reasoning(text):
                    self._grow("thoughts", text)
                case _:
                    self._grow("text", event.text)

    def _begin(self, block: Block) -> None:
        self.blocks.append(block)
        self._changes.append(Change(len(self.blocks) - 1, "", []))

    def _grow(self, kind: Kind, text: str) -> None:
        if not self.blocks or self.blocks[-1].kind != kind:
            self._begin(Block(kind))
        block, held = self.blocks[-1], self._held
        block.pieces.append(text)
        if held:
            self._held = []
            held = held if kind == "text" else []
            block.entries += held
        self._changes.append(Change(len(self.blocks) - 1, text, held))
