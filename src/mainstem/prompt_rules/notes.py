"""`Notes`: what `move` put behind the last message of earlier turns, so that it stands there in later ones, too.

A note moves from the front of a prompt to its end, but the end of one turn is the middle of the next. A client does not
send the note again, so without a memory all after it would be computed again: the answer, and the results that follow.
A note is found by a digest of all messages up to the one that it is behind.

    turn 1   system, user + note                           the answer is computed after the note
    turn 2   system, user + note, answer, user             the note stands where it stood; nothing new is to be said
    turn 3   system, user + note, answer, user, answer, user + another note
"""

from __future__ import annotations

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

_ENTRY_BYTES = 200  # of one place, besides its texts


class Note(NamedTuple):
    """A text that a rule moved.

    Args:
        rule: its name.
        text: the note.
    """

    rule: str
    text: str


class Notes:
    """The notes of earlier turns. Any thread may call it.

    Args:
        most_bytes: of all of them; those of the conversation that went on longest ago are forgotten first.
    """

    def __init__(self, most_bytes: int = 8 << 20) -> None:
        self._most_bytes = most_bytes
        self._bytes = 0
        self._by_place: OrderedDict[bytes, tuple[Note, ...]] = OrderedDict()
        self._lock = threading.Lock()

    def placed(
        self,
        scope: object,
        messages: Sequence[Mapping[str, Any]],
        last: int,
        moved: Sequence[Note],
        *,
        remember: bool = True,
    ) -> dict[int, tuple[Note, ...]]:
        """Returns the notes behind each message of a conversation.

        Args:
            scope: what must be equal for two conversations to be one, such as the client and its model.
            messages: after the rules, without notes.
            last: the message that new notes go behind.
            moved: what the rules moved in this turn; what stands behind an earlier message is not said again.
            remember: whether the request is answered, so that later turns follow it.
        """
        places = list(_places(scope, messages[: last + 1]))
        with self._lock:
            found = {i: self._by_place.get(place, ()) for i, place in enumerate(places[:last])}
            new = tuple(_new([note for notes in found.values() for note in notes], moved))
            found[last] = new
            for place, notes in zip(places, found.values(), strict=True) if remember else ():
                self._put(place, notes)
        return {i: notes for i, notes in found.items() if notes}

    def check(self) -> None:
        """Checks that the size is that of what is remembered, and within its bound."""
        with self._lock:
            assert self._bytes == sum(map(_size, self._by_place.values())) <= self._most_bytes, self._bytes

    def _put(self, place: bytes, notes: tuple[Note, ...]) -> None:
        """Remembers the notes of a place as the latest, or that there are none."""
        self._bytes -= _size(self._by_place.pop(place, ()))
        if notes:
            self._by_place[place] = notes
            self._bytes += _size(notes)
        while self._bytes > self._most_bytes:
            self._bytes -= _size(self._by_place.popitem(last=False)[1])


def _size(notes: Sequence[Note]) -> int:
    return _ENTRY_BYTES + sum(len(note.text.encode()) for note in notes) if notes else 0


def _places(scope: object, messages: Sequence[Mapping[str, Any]]) -> Iterator[bytes]:
    """Yields the digest of all messages up to each one."""
    digest = blake2b(repr(scope).encode(), digest_size=16)
    for message in messages:
        digest.update(json.dumps(message, sort_keys=True, default=str).encode())
        yield digest.digest()


def _new(earlier: Sequence[Note], moved: Sequence[Note]) -> Iterator[Note]:
    """Yields the notes that say what no earlier one says.

    A rule that moved one text says it if it differs from what the rule said last; one that moved several, such as the
    times of all messages, says those that it has not said.
    """
    said, last, number = set(earlier), {each.rule: each for each in earlier}, Counter(each.rule for each in moved)
    for note in moved:
        known = last.get(note.rule) == note if number[note.rule] == 1 else note in said
        if not known:
            yield note
