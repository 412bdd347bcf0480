"""An answer as blocks: the engine's events become steps by which the answer grows, and each API spells these steps.

A block is an unbroken run of text, or of reasoning, or one call of a tool. Blocks are numbered from 0.

    deltas of one choice --> Answer --> Began, Grew, Ended --> the API's events
                               '------> blocks ----------> the API's whole body
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeAlias

from msgspec import Struct

from mainstem.runtime.request import Delta, TokenLogprob
from mainstem.server.apis.replies import Reply, UsageBody
from mainstem.server.parsing.output import Arguments, Call, NoCall, OutputParser, Piece, Reasoning, Text


@dataclass(slots=True, eq=False)
class Block:
    """A part of an answer.

    Args:
        index: its place in the answer.
        begin: the piece that began it; of a text, only its type counts.
        parts: its text so far, or the arguments of a call.
        logprobs: of the tokens of a text, if requested.
        withdrawn: whether it began as a call and turned out to be none. Only a stream has such a block.
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


class Began(NamedTuple):
    """A block begins."""

    block: Block
    text: str = ""


class Grew(NamedTuple):
    """A block has more text, or arguments; with the log-probabilities of its tokens."""

    block: Block
    text: str
    logprobs: Sequence[TokenLogprob] = ()


class Ended(NamedTuple):
    """A block is complete."""

    block: Block


Step: TypeAlias = Began | Grew | Ended


class Answer:
    """One choice, as it grows.

    Args:
        parser: finds its pieces.
        streams: whether the client sees each step, so that nothing can be taken back.
        shows_cut_calls: whether a call that was cut at the answer's limit stays a call; a stream shows it in any case.

    Attributes:
        blocks: so far.
        deltas: so far.
        last: the last event.
        open: the block that grows.
        reasoning_tokens: tokens of reasoning.
        began: whether anything was said.
    """

    def __init__(self, parser: OutputParser, *, streams: bool = True, shows_cut_calls: bool = True) -> None:
        self._parser, self._streams, self._shows_cut_calls = parser, streams, shows_cut_calls
        self.blocks: list[Block] = []
        self.deltas: list[Delta] = []
        self.last = Delta("")
        self.open: Block | None = None
        self.reasoning_tokens = 0
        self.began = self._withdrew = False
        self._tokens = 0  # that have no piece yet
        self._logprobs: list[TokenLogprob] = []  # of the same

    @property
    def calls(self) -> bool:
        """Whether there are calls, and all can be made."""
        return not self._withdrew and any(isinstance(block.begin, Call) for block in self.blocks)

    def take_all(self, deltas: Sequence[Delta]) -> None:
        """Takes events into account without showing their steps."""
        for delta in deltas:
            for _ in self.take(delta):
                pass

    def take(self, delta: Delta) -> Iterator[Step]:
        """Takes an event into account, and yields the steps that are certain now; each has changed its block."""
        self.deltas.append(delta)
        self._tokens += len(delta.tokens)
        self._logprobs += delta.logprobs
        pieces = [*self._parser.feed(delta.text)]
        if delta.finish_reason is not None:
            cut = delta.finish_reason == "length" and (self._streams or self._shows_cut_calls)
            pieces += self._parser.close(cut)
        self._attribute(pieces)
        for piece in pieces:
            yield from self._take(piece)
        if delta.finish_reason is not None:
            self.last = delta
            yield from self._end_open()

    def _attribute(self, pieces: Sequence[Piece]) -> None:
        """Counts the tokens of reasoning: those since the last piece belong to the next one."""
        if pieces:
            self.began = True
            if isinstance(pieces[0], Reasoning):
                self.reasoning_tokens += self._tokens
            self._tokens = 0
            if not any(isinstance(piece, Text) for piece in pieces):
                self._logprobs = []

    def _take(self, piece: Piece) -> Iterator[Step]:
        if isinstance(piece, Call):
            yield from self._begin(piece)
            return
        if isinstance(piece, NoCall):
            yield from self._withdraw()
            return
        if not isinstance(piece, Arguments) and (self.open is None or type(self.open.begin) is not type(piece)):
            yield from self._begin(piece)
        assert self.open is not None, "arguments follow their call"
        logprobs: list[TokenLogprob] = []
        if isinstance(piece, Text):
            logprobs, self._logprobs = self._logprobs, []
        self.open.parts.append(piece.text)
        self.open.logprobs += logprobs
        yield Grew(self.open, piece.text, logprobs)

    def _withdraw(self) -> Iterator[Step]:
        """Ends a block that turned out to be no call: a stream ends it, a whole answer drops it for the text."""
        assert self.open is not None, "it has begun"
        self._withdrew = self.open.withdrawn = True
        if self._streams:
            yield from self._end_open()
            return
        self.blocks.pop()
        before = self.blocks[-1] if self.blocks else None
        self.open = before if before is not None and isinstance(before.begin, Text) else None

    def _begin(self, piece: Text | Reasoning | Call) -> Iterator[Step]:
        yield from self._end_open()
        self.open = Block(len(self.blocks), piece)
        self.blocks.append(self.open)
        yield Began(self.open)

    def _end_open(self) -> list[Step]:
        ended, self.open = self.open, None
        return [] if ended is None else [Ended(ended)]


class BlockReply(Reply):
    """Writes one answer as blocks, which an API spells."""

    shows_cut_calls: ClassVar[bool] = True
    """Whether a whole answer shows a call that was cut at its limit as a call; see `Answer`."""

    @cached_property
    def answer(self) -> Answer:
        """The answer so far."""
        return Answer(self._parser())

    def events(self, index: int, delta: Delta) -> bytes:
        events = []
        for step in self.answer.take(delta):
            match step:
                case Began(block):
                    events.append(self.begun(block))
                case Grew(block, text, logprobs):
                    events.append(self.grown(block, text, logprobs))
                case Ended(block):
                    events.append(self.ended(block))
        return b"".join(events)

    def whole(self, answers: Sequence[Sequence[Delta]], usage: UsageBody) -> Struct:
        self.answer = Answer(self._parser(), streams=False, shows_cut_calls=self.shows_cut_calls)
        self.answer.take_all(answers[0])
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
