"""Results of commands on standard output, progress on standard error. Loads rich when it draws something."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress, TaskID

_FILE_WIDTH = 160  # of tables that are not printed to a terminal

STAGES = {
    "import": "importing PyTorch and transformers",
    "download": "downloading the model",
    "convert": "converting the model",
    "load": "loading the model",
    "quantize": "quantizing its weights",
    "test": "allocating memory for KV, testing the model over it",
    "tiers": "allocating host memory, opening storage",
    "measure": "measuring how fast the model computes, to compare with storage",
    "adapters": "loading adapters",
    "calibrate": "reading the text",
    "read": "reading the requests",
    "answer": "answering",
}
"""Descriptions of the stages of a command; a stage that is not here is shown by its name."""


class Bars:
    """Progress bars on standard error, one per stage. Without a terminal: a line per stage, or nothing.

    Args:
        words: descriptions of stages; a stage that is not among them is shown by its name.
        lines: print a line as each stage begins.
    """

    def __init__(self, words: Mapping[str, str] = MappingProxyType({}), *, lines: bool = False) -> None:
        self._words, self._lines = words, lines
        self._progress: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._begun: set[str] = set()

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Removes the bars from the screen; later updates do nothing."""
        self._lines = False
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def update(self, stage: str, done: int, total: int, words: str = "") -> None:
        """Updates a stage's bar, from any thread.

        Args:
            stage: its name.
            done, total: what was done, and of how much; a total of 0 means unknown.
            words: its description from now on, in place of the one given before.
        """
        words, progress = words or self._words.get(stage, stage), self._progress
        if progress is not None:
            if stage not in self._tasks:
                self._tasks[stage] = progress.add_task(words)
            progress.update(self._tasks[stage], completed=done, total=total or None, description=words)
        elif self._lines and stage not in self._begun:
            self._begun.add(stage)
            say(words)


@contextmanager
def bar(stage: str) -> Iterator[Callable[..., None]]:
    """Shows one bar. Yields `Bars.update` of this stage."""
    with Bars() as bars:
        bars.update(stage, 0, 0)
        yield partial(bars.update, stage)


def say(line: str) -> None:
    """Prints a line about the command itself."""
    print(f"mainstem: {line}", file=sys.stderr, flush=True)


def results() -> Console:
    """Returns a console for standard output, wide enough for every number if it is not a terminal."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else _FILE_WIDTH)


def printable(text: str) -> str:
    """Replaces characters that could control a terminal: names come from untrusted files."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
