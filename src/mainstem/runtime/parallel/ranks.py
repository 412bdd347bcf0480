"""Ranks: the processes that serve one model together, each with some of its heads, and what they exchange.

    rank 0    takes requests, samples             share(make): what rank 0 made, on every rank
    rank k    repeats what rank 0 shares          agree(votes): the lowest vote of all ranks

Every rank has its own engine, scheduler, tree, pools, host and store, and runs the same steps. So only decisions travel
here, by pipes. The numbers inside a forward travel by `torch.distributed`.

This module does not know what is shared. `parallel` starts the processes.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import TypeVar

from mainstem.errors import MainstemError, RankFailed

T = TypeVar("T")

ANSWER_S = 300.0
"""Seconds after which a rank that does not answer has failed. Ranks run the same steps at the same time."""

_END_S = 2.0  # between an error that the end of a process causes and that end
_GONE = (EOFError, ConnectionError)


class Ranks:
    """All ranks, as one of them sees them. Every rank makes the same calls in the same order, on one thread.

    This class is a process that has the whole model; `FirstRank` and `LaterRank` are those of several.

    Args:
        rank: this one, from 0.
        size: how many there are.
    """

    def __init__(self, rank: int = 0, size: int = 1) -> None:
        self.rank, self.size = rank, size

    def share(self, make: Callable[[], T]) -> T:
        """Returns on every rank what `make` returns on rank 0; the others do not call it. It must be picklable.

        Raises:
            RankFailed: a rank has ended.
        """
        return make()

    def agree(self, votes: Sequence[int]) -> Sequence[int]:
        """Returns on every rank the lowest of all ranks' votes, element by element.

        Raises:
            RankFailed: a rank has ended, or does not answer.
        """
        return votes

    def cause(self, error: BaseException) -> BaseException:
        """Returns the end or the silence of another rank if that explains an error, such as that of a connection.

        Else it returns the error.
        """
        return error


ONE_RANK = Ranks()


def require_equal(ranks: Ranks, make: Callable[[], object], what: str) -> None:
    """Raises RankFailed on a rank that makes another value than rank 0, before it computes something else."""
    if ranks.size > 1 and ranks.share(make) != make():
        raise RankFailed(f"its {what} are not those of rank 0")


def largest(ranks: Ranks, value: float) -> float:
    """Returns on every rank the largest of all ranks' values, so that all decide alike by it.

    A matrix product may round differently on another rank: it depends on where the numbers lie.

    Args:
        ranks: which.
        value: at least 0; may be infinite.
    """
    (bits,) = struct.unpack("<q", struct.pack("<d", value))  # ordered as the values are
    (lowest,) = ranks.agree([-bits])
    (highest,) = struct.unpack("<d", struct.pack("<q", -lowest))
    return float(highest)


@dataclass(frozen=True, slots=True)
class LastWords:
    """Why a rank has ended: the last thing that it sends."""

    text: str


@dataclass(frozen=True, slots=True)
class Peer:
    """Another rank, as rank 0 sees it."""

    rank: int
    process: BaseProcess
    pipe: Connection


class FirstRank(Ranks):
    """Rank 0.

    Args:
        peers: the others, by rank.
        answer_s: seconds after which one that does not answer has failed.
    """

    def __init__(self, peers: Sequence[Peer], answer_s: float = ANSWER_S) -> None:
        super().__init__(0, 1 + len(peers))
        self._peers = tuple(peers)
        self._answer_s = answer_s

    def share(self, make: Callable[[], T]) -> T:
        value = make()
        for peer in self._peers:
            try:
                peer.pipe.send(value)
            except _GONE:
                raise self._failure(peer) from None
        return value

    def agree(self, votes: Sequence[int]) -> Sequence[int]:
        columns = zip(votes, *map(self._votes, self._peers), strict=True)
        lowest = [min(column) for column in columns]
        return self.share(lambda: lowest)

    def cause(self, error: BaseException) -> BaseException:
        if isinstance(error, MainstemError):
            return error  # such as a setting that every rank refuses
        if _timed_out(error):
            for peer in self._peers:
                peer.process.join(_END_S)  # those that waited for the silent one end too
            if silent := [peer for peer in self._peers if peer.process.is_alive()]:
                return self._silence(silent[0])
        ended = wait([peer.process.sentinel for peer in self._peers], _END_S)
        return next((self._failure(peer) for peer in self._peers if peer.process.sentinel in ended), error)

    def watch(self, ended: Callable[[], object]) -> None:
        """Calls `ended` once another rank has ended, on a thread of its own."""

        def run() -> None:
            wait([peer.process.sentinel for peer in self._peers])
            ended()

        threading.Thread(target=run, name="mainstem-ranks", daemon=True).start()

    def _votes(self, peer: Peer) -> list[int]:
        try:
            if not peer.pipe.poll(self._answer_s):
                raise self._silence(peer)
            received = peer.pipe.recv()
        except _GONE:
            raise self._failure(peer) from None
        if isinstance(received, LastWords):
            raise self._failure(peer, received)
        votes: list[int] = received
        return votes

    def _failure(self, peer: Peer, words: LastWords | None = None) -> RankFailed:
        """Returns why a rank has ended: because another was killed, by its last words, or by its exit code."""
        peer.process.join(_END_S)
        for one in self._peers:
            if (code := one.process.exitcode or 0) < 0:
                return self._ended(one, f"it was killed by signal {-code}")
        with contextlib.suppress(*_GONE):
            while words is None and peer.pipe.poll():
                received = peer.pipe.recv()
                words = received if isinstance(received, LastWords) else None
        return self._ended(peer, f"its exit code is {peer.process.exitcode}" if words is None else words.text)

    def _silence(self, peer: Peer) -> RankFailed:
        return RankFailed(f"rank {peer.rank} of {self.size} does not answer: {self._answer_s:g} s are allowed")

    def _ended(self, peer: Peer, why: str) -> RankFailed:
        return RankFailed(f"rank {peer.rank} of {self.size} has ended: {why}")


class LaterRank(Ranks):
    """Any rank but 0.

    Args:
        rank: its number.
        size: how many there are.
        pipe: to rank 0.
    """

    def __init__(self, rank: int, size: int, pipe: Connection) -> None:
        super().__init__(rank, size)
        self._pipe = pipe

    def share(self, make: Callable[[], T]) -> T:
        try:
            value: T = self._pipe.recv()
        except _GONE:
            raise RankFailed(f"rank 0 of {self.size} has ended") from None
        return value

    def agree(self, votes: Sequence[int]) -> Sequence[int]:
        self._send(list(votes))
        return self.share(lambda: votes)

    def cause(self, error: BaseException) -> BaseException:
        return RankFailed("another rank does not answer") if _timed_out(error) else error

    def leave(self, why: str) -> None:
        """Tells rank 0 why this one ends."""
        self._send(LastWords(why))

    def _send(self, value: object) -> None:
        try:
            self._pipe.send(value)
        except _GONE:
            raise RankFailed(f"rank 0 of {self.size} has ended") from None


def _timed_out(error: BaseException) -> bool:
    """Returns whether an exchange inside a forward took too long: PyTorch has no type of its own for that."""
    return isinstance(error, RuntimeError) and "timed out" in str(error).lower()
