"""Replaced prompts: the history of a session that a summary has replaced is evicted before anything else.

    before   [ system | tools | history ..., "Write down what matters." ] answer
    after    [ system | tools | "What was done so far:" answer ]
                              ^ from here on, nothing of the history is used again

A prompt has replaced the latest one of its session (`Hints.session`) if it is less than half as long, and has a piece
of that one's answer. The device then evicts the earlier prompt first, down from where another sequence goes on
(`PrefixCache.demote`). So a subagent with the name of its session, which has no answer of it, replaces nothing; nor
does a prompt whose tools have changed, which is as long as before, and whose client may change them back.
"""

from __future__ import annotations

from dataclasses import dataclass

from mainstem.cache.prefix_cache import PrefixCache
from mainstem.errors import StaleHandle
from mainstem.runtime.schedule.sequence import Sequence

_MOST_SESSIONS = 1024
_NOBODYS = b"\xff" * 4  # a symbol that no token has: what goes on from a key with it is not demoted with the key
_PIECES, _PIECE_TOKENS = 4, 16  # of an answer; the client may have cut the rest


@dataclass(frozen=True, slots=True)
class _Turn:
    """The latest request of a session.

    Args:
        length: of the prompt.
        node: of the tree, with which prompt and answer end.
        pieces: of the answer, encoded.
    """

    length: int
    node: int
    pieces: tuple[bytes, ...]


class Replaced:
    """The sessions of a cache that have names. One thread, that of the scheduler."""

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache
        self._latest: dict[tuple[bytes, str], _Turn] = {}  # the one used longest ago first

    def ended(self, sequence: Sequence) -> bool:
        """Looks at a request that has ended and is closed; returns whether it has replaced an earlier prompt."""
        request, namespace = sequence.request, sequence.namespace
        name = request.hints.session
        if name is None or request.hints.no_store or not request.params.max_tokens:
            return False
        length, symbols = len(request.tokens), sequence.tokens.symbols.tobytes()
        before = self._latest.pop((namespace, name), None)
        path = self._cache.tree.core.path(namespace, symbols)
        if path:
            self._latest[namespace, name] = _Turn(length, path[-1], _pieces(symbols, length))
        if len(self._latest) > _MOST_SESSIONS:
            del self._latest[next(iter(self._latest))]
        if before is None or 2 * length >= before.length or not _has(symbols[: 4 * length], before.pieces):
            return False
        return self._demote(before.node)

    def check(self) -> None:
        """Checks the bounds.

        Raises:
            AssertionError: a rule is broken.
        """
        assert len(self._latest) <= _MOST_SESSIONS, "too many sessions"
        assert all(len(turn.pieces) <= _PIECES for turn in self._latest.values()), "too many pieces"

    def _demote(self, node: int) -> bool:
        """Demotes what ends with a node, unless the node is gone, or another sequence goes on from there."""
        core = self._cache.tree.core
        try:
            namespace, key = core.path_key(node)
        except StaleHandle:
            return False
        return bool(core.demote(namespace, key + _NOBODYS * self._cache.page_size, 1))


def _pieces(symbols: bytes, begin: int) -> tuple[bytes, ...]:
    """Returns pieces of an answer at equal distances; none of one that is too short to be known again."""
    size, answer = 4 * _PIECE_TOKENS, symbols[4 * begin :]
    if len(answer) < _PIECES * size:
        return ()
    step = len(answer) // 4 // _PIECES * 4
    return tuple(answer[at * step : at * step + size] for at in range(_PIECES))


def _has(symbols: bytes, pieces: tuple[bytes, ...]) -> bool:
    """Returns whether one of the pieces is there, between tokens."""
    for piece in pieces:
        at = symbols.find(piece)
        while at >= 0:
            if at % 4 == 0:
                return True
            at = symbols.find(piece, at + 1)
    return False
