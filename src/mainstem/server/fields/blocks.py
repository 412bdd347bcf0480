"""What Responses and Messages share: an answer is a list of blocks, and an API's events say how they grow.

A block is an unbroken run of text, or of reasoning, or one call of a tool. Both APIs stream events with names, number
blocks from 0, and give one answer to a request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from msgspec import Struct

from mainstem.runtime.request import Delta, TokenLogprob
from mainstem.server.apis.replies import UsageBody
from mainstem.server.parsing.output import Arguments, Call, NoCall, OutputParser, Piece, Reasoning, Text


@dataclass(slots=True)
class Block:
    """A part of an answer.

    Args:
        index: its place in the answer.
        begin: the piece that began it; of a text, only its type counts.
        parts: its text so far, or the arguments of a call.
        logprobs: of the tokens of a text, if requested.
        withdrawn: whether it has begun as a call and is none. Only a stream has such a block.
    """

    index: int
    begin: Text | Reasoning | Call
    parts: list[str] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    withdrawn: bool = False

    @property
    def text(self) -> str:
        """All of its text, or of its arguments."""
        return "".join(self.parts)


class BlockReply(ABC):
    """Writes an answer as blocks; the rest of a `Reply` is its API's.

    Args:
        parser: finds the pieces of the answer.
    """

    shows_cut_calls: ClassVar[bool] = True
    """Whether a whole answer can have a call that was cut at the answer's limit; else that is text."""

    def __init__(self, parser: OutputParser) -> None:
        self._parser, self._streams = parser, True
        self.blocks: list[Block] = []
        self.reasoning_tokens = 0
        self.last = Delta("")
        self._open: Block | None = None
        self._withdrew = False
        self._tokens = 0  # that have no piece yet
        self._logprobs: list[TokenLogprob] = []  # of the same

    def events(self, index: int, delta: Delta) -> bytes:
        """See `Reply`."""
        self._tokens += len(delta.tokens)
        self._logprobs += delta.logprobs
        pieces = [*self._parser.feed(delta.text)]
        if delta.finish_reason is not None:
            cut = delta.finish_reason == "length" and (self._streams or self.shows_cut_calls)
            pieces += self._parser.close(cut)
        self._attribute(pieces)
        events = [event for piece in pieces for event in self._take(piece)]
        if delta.finish_reason is not None:
            self.last = delta
            events += self._end_open()
        return b"".join(events)

    def whole(self, answers: Sequence[Sequence[Delta]], usage: UsageBody) -> Struct:
        """See `Reply`."""
        self._streams = False
        for delta in answers[0]:
            self.events(0, delta)
        return self.finish(usage)

    @abstractmethod
    def begun(self, block: Block) -> bytes:
        """Returns the events of a block that begins."""

    @abstractmethod
    def grown(self, block: Block, text: str, logprobs: Sequence[TokenLogprob]) -> bytes:
        """Returns the event of more text, or arguments, of a block, with the log-probabilities of its tokens."""

    @abstractmethod
    def ended(self, block: Block) -> bytes:
        """Returns the events of a block that is complete."""

    @abstractmethod
    def finish(self, usage: UsageBody) -> Struct:
        """Returns the whole response; called once, after the last event."""

    def _attribute(self, pieces: Sequence[Piece]) -> None:
        """Counts the tokens of reasoning: those since the last piece belong to the next one."""
        if pieces:
            if isinstance(pieces[0], Reasoning):
                self.reasoning_tokens += self._tokens
            self._tokens = 0
            if not any(isinstance(piece, Text) for piece in pieces):
                self._logprobs = []

    @property
    def calls(self) -> bool:
        """Whether there are calls, and all can be made."""
        calls = [block for block in self.blocks if isinstance(block.begin, Call)]
        return bool(calls) and not self._withdrew

    def _take(self, piece: Piece) -> Iterator[bytes]:
        if isinstance(piece, Call):
            yield from self._begin(piece)
            return
        if isinstance(piece, NoCall):
            yield from self._withdraw()
            return
        if not isinstance(piece, Arguments) and (self._open is None or type(self._open.begin) is not type(piece)):
            yield from self._begin(piece)
        assert self._open is not None, "arguments follow their call"
        logprobs: list[TokenLogprob] = []
        if isinstance(piece, Text):
            logprobs, self._logprobs = self._logprobs, []
        self._open.parts.append(piece.text)
        self._open.logprobs += logprobs
        yield self.grown(self._open, piece.text, logprobs)

    def _withdraw(self) -> Iterator[bytes]:
        """Ends a call that is none. A stream has begun it; a whole answer has what was written in its place."""
        assert self._open is not None, "it has begun"
        self._withdrew = self._open.withdrawn = True
        if self._streams:
            yield from self._end_open()
            return
        self.blocks.pop()
        before = self.blocks[-1] if self.blocks else None
        self._open = before if before is not None and isinstance(before.begin, Text) else None

    def _begin(self, piece: Text | Reasoning | Call) -> Iterator[bytes]:
        yield from self._end_open()
        self._open = Block(len(self.blocks), piece)
        self.blocks.append(self._open)
        yield self.begun(self._open)

    def _end_open(self) -> list[bytes]:
        ended, self._open = self._open, None
        return [] if ended is None else [self.ended(ended)]


def named_event(name: str, fields: Mapping[str, Any]) -> bytes:
    """Returns one server-sent event with a name, which its JSON repeats as `type`."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))
