"""Reasoning before an answer: how models mark it, and the parser that splits it off.

A thought is at the beginning of an answer. Many templates open it themselves, at the end of the prompt, and some close
it there, too, where thinking is turned off: the prompt's last text decides. White space next to markers is part of the
form, not of the thought.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from mainstem.server.parsing.output import END, OutputParser, Reasoning, Scanner, Steps


@dataclass(frozen=True, slots=True)
class Thinking:
    """How a family of models marks a thought.

    Args:
        begin, end: the markers.
        always: whether answers begin with a thought even if neither the prompt nor the answer has the first marker.
        after: what is between a thought and what follows; empty: some white space.
    """

    begin: str
    end: str
    always: bool = False
    after: str = ""

    def opened(self, ending: str) -> bool:
        """Returns whether a prompt that ends with this text leaves a thought open."""
        ending = ending.rstrip()
        return ending.endswith(self.begin) or (self.always and not ending.endswith(self.end))

    def closed(self, ending: str) -> bool:
        """Returns whether a prompt that ends with this text has ended the thought, so that none follows."""
        return ending.rstrip().endswith(self.end)


THINKING = {
    "qwen3": Thinking("<think>", "</think>"),
    "deepseek_r1": Thinking("<think>", "</think>", always=True),
    "mistral": Thinking("[THINK]", "[/THINK]"),
}
"""The forms, by the name of the option. The first one that fits a model is chosen."""


def thinking_of(template: str, vocabulary: Container[str]) -> Thinking | None:
    """Returns the form of a model whose chat template or vocabulary has both markers; None: it has no thoughts."""
    for each in THINKING.values():
        if all(marker in template or marker in vocabulary for marker in (each.begin, each.end)):
            return each
    return None


class ReasoningParser(Scanner):
    """Splits off the thought at the beginning of an answer; an `OutputParser`.

    Args:
        thinking: how the model marks it.
        opened: whether the prompt has opened it.
        rest: parses what follows.
    """

    def __init__(self, thinking: Thinking, opened: bool, rest: OutputParser) -> None:
        self._thinking, self._opened, self._rest = thinking, opened, rest
        self._thought, self._held = False, ""  # whether there is some, and the white space after it
        super().__init__()

    def _scan(self) -> Steps[None]:
        begun = yield from self._begins()
        if begun or self._opened:
            yield from self._until([self._thinking.end], self._think)
            yield from self._blanks()
        while character := (yield from self._next()):
            self._pieces += self._rest.feed(character)
        self._pieces += self._rest.close(self._cut)

    def _begins(self) -> Steps[bool]:
        """Returns whether a thought begins here; otherwise nothing has been read."""
        read, begin = (yield from self._blanks()), self._thinking.begin
        while not read.endswith(begin):
            character = yield from self._next()
            read += character
            if character == END or not begin.startswith(read.lstrip()):
                self._push_back(read)
                return False
        return True

    def _think(self, character: str) -> None:
        """Adds to the thought. White space waits for the next character, and is dropped at both ends."""
        if not character.isspace():
            self._pieces.append(Reasoning(self._held + character))
            self._thought, self._held = True, ""
        elif self._thought:
            self._held += character
