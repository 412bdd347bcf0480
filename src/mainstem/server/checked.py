"""Checks of calls whose schema no grammar can hold in full: what does not fit is logged.

The schemas are those of clients. The package jsonschema reads them, where it is installed; nothing else needs it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mainstem.server.output import Arguments, Call, NoCall, OutputParser, Piece

log = logging.getLogger(__name__)

_SHOWN = 200  # characters of what does not fit


class Checked:
    """An `OutputParser` that checks the calls of some tools once they are complete. It shows all as it is.

    Args:
        parser: finds the calls.
        schemas: of the tools' arguments, by their names.
    """

    def __init__(self, parser: OutputParser, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        self._parser, self._schemas = parser, schemas
        self._calls: dict[int, tuple[str, list[str]]] = {}

    def feed(self, text: str) -> Sequence[Piece]:
        """See `OutputParser.feed`."""
        return [*self._noted(self._parser.feed(text))]

    def close(self, cut: bool = False) -> Sequence[Piece]:
        """See `OutputParser.close`."""
        pieces = [*self._noted(self._parser.close(cut))]
        for name, arguments in self._calls.values():
            _check(name, self._schemas[name], "".join(arguments))
        return pieces

    def _noted(self, pieces: Sequence[Piece]) -> Iterator[Piece]:
        for piece in pieces:
            if isinstance(piece, Call) and piece.name in self._schemas:
                self._calls[piece.number] = piece.name, []
            elif isinstance(piece, Arguments) and piece.number in self._calls:
                self._calls[piece.number][1].append(piece.text)
            elif isinstance(piece, NoCall):
                self._calls.pop(piece.number, None)
            yield piece


def can_check() -> bool:
    """Returns whether anything can be checked: whether jsonschema is installed."""
    return importlib.util.find_spec("jsonschema") is not None


def _check(name: str, schema: Mapping[str, Any], arguments: str) -> None:
    """Logs that arguments do not fit a schema, if they do not; those that were cut off are no JSON."""
    try:
        given = json.loads(arguments)
        validators: Any = importlib.import_module("jsonschema.validators")
        problem = next(validators.validator_for(schema)(schema).iter_errors(given), None)
    except Exception as error:  # noqa: BLE001  # of the client's schema, whatever it is
        log.warning("a call of the tool %s cannot be checked: %s", name, str(error)[:_SHOWN])
        return
    if problem is not None:
        where = "".join(f"[{each!r}]" for each in problem.absolute_path)
        log.warning("a call of the tool %s does not fit its schema: arguments%s: %s", name, where,
                    problem.message[:_SHOWN])  # fmt: skip
