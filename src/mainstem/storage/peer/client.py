"""`peer://HOST:PORT`: the memory of other engines as a store that is only read.

    peer://10.0.0.2:7100            one peer
    peer://10.0.0.2:7100,10.0.0.3:7100?secret_file=/run/secrets/kv&timeout=500ms

    peer://dns:mainstem:7100        all machines of a name, such as the pods of a headless service, but this one

All peers are asked at once which keys they have; a value is asked of the one that said so. A peer that fails repeatedly
is left out for a while by a breaker of its own. One that is busy counts as one that has nothing.
"""

from __future__ import annotations

import itertools
import logging
import os
import re
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from mainstem.errors import BackendUnavailable, BadArgument, StorageError
from mainstem.storage.base import ABSENT, BackendStats, Capabilities, ReadOnlyBackend
from mainstem.storage.breaker import Breaker
from mainstem.storage.calls import Calls
from mainstem.storage.options import check_options
from mainstem.storage.peer import wire
from mainstem.storage.peer.lines import Line, Lines, ZmqLines
from mainstem.storage.peer.wire import Request
from mainstem.units import parse_timeout

log = logging.getLogger(__name__)

ADDRESS = re.compile(r"(?P<dns>dns:)?+(?P<host>[\w.-]+|\[[\da-fA-F:]+\]):(?P<port>\d{1,5})")
"""HOST:PORT; with `dns:` all addresses of the host."""

NO_SECRET = b"mainstem: peers without a secret"
"""The secret of peers that were given none."""

_FAILURES, _COOLDOWN_S = 3, 5.0
_FOLLOW_S = 5.0  # how often names are looked up
_SEEN = 1 << 16  # keys of which it is known who has them


@dataclass(frozen=True, slots=True)
class Peering:
    """An engine among its peers.

    Args:
        address: HOST:PORT at which they read its pages; None: they do not.
        follow: takes the addresses of all whose pages it reads; see `PeerBackend.follow`. None: it reads none.
        identity: names all that its pages depend on; engines with another one have nothing for it.
    """

    address: str | None
    follow: Callable[[Sequence[str]], None] | None
    identity: str = ""


@dataclass(eq=False)
class _Peer:
    """A peer.

    Args:
        address: HOST:PORT.
        breaker: stops calls after repeated failures.
        idle: lines to it that no call uses.
        gone: whether it is no peer any more.
    """

    address: str
    breaker: Breaker
    idle: list[Line] = field(default_factory=list)
    gone: bool = False


@dataclass(eq=False)
class _Exchange:
    """A request to one peer, and its outcome.

    Args:
        peer: the peer that is asked.
        places: the places of its keys in the batch of the caller.
        lengths: the answer; empty: the peer is busy.
        values: those that fit their buffers, in the order of the keys.
        error: why there is no answer.
    """

    peer: _Peer
    request: Request
    places: Sequence[int]
    line: Line | None = None
    lengths: list[int] = field(default_factory=list)
    values: list[memoryview] = field(default_factory=list)
    error: StorageError | None = None


class PeerBackend(ReadOnlyBackend):
    """The memory of peers. Nothing can be put, deleted or listed.

    Args:
        addresses: HOST:PORT of each peer, or dns:HOST:PORT for all that a name has; may be none.
        secret: what all peers share; None: they have none.
        timeout_s: of a call.
        clock: monotonic time in seconds.
        resolve: returns the addresses of a name, HOST:PORT, without this machine's. Raises OSError.
        follow_s: seconds between two looks at names.
        lines: opens connections; by default they are ZeroMQ's.

    Raises:
        BadArgument: an address is none.
        BackendUnavailable: pyzmq is not installed, or a peer refuses the secret. One that does not answer is no error:
            it may start later.
    """

    refusal = "what peers have is theirs"
    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=False, shared=True, zero_copy=False, evicts=True, overwrites=False
    )

    def __init__(
        self,
        addresses: Sequence[str],
        secret: bytes | None = None,
        timeout_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        resolve: Callable[[str], Sequence[str]] | None = None,
        follow_s: float = _FOLLOW_S,
        lines: Lines | None = None,
    ) -> None:
        for address in addresses:
            _check(address)
        self._lines = lines or ZmqLines()
        self._key, self._timeout_s, self._clock = wire.key_of(secret or NO_SECRET), timeout_s, clock
        self._fixed = [address for address in addresses if not address.startswith("dns:")]
        self._found = {name.removeprefix("dns:"): tuple[str, ...]() for name in addresses if name.startswith("dns:")}
        self._resolve, self._follow_s = resolve or addresses_of, follow_s
        self._peers: tuple[_Peer, ...] = ()
        self._numbers = itertools.count(1)
        self._seen: OrderedDict[bytes, _Peer] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._calls, self._greeted = Calls("the store of peers"), False
        self._lock = threading.Lock()  # guards all of the above but the lines
        self._end_of_following = threading.Event()
        self._follower = threading.Thread(target=self._follow, name="mainstem-peers", daemon=True)
        self._look_up()
        try:
            self._greet()
        except BaseException:
            self.close()
            raise
        if self._found:
            self._follower.start()

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`peer://HOST:PORT,...?secret_file=PATH&timeout=1s`; see the module."""
        check_options(options, ("secret_file", "secret_env", "timeout"))
        addresses = [part for part in address.removeprefix("//").split(",") if part]
        if not addresses:
            raise BadArgument("storage address", address, "//HOST:PORT, or several with commas")
        return cls(addresses, _secret(options), parse_timeout("timeout", options.get("timeout", "1s")))

    def follow(self, addresses: Sequence[str]) -> None:
        """Takes these peers in place of those that were named before; what names have stays. Any thread may call it.

        Raises:
            BadArgument: an address is none; then nothing changes.
        """
        for address in addresses:
            _check(address)
        self._fixed = [*addresses]
        self._look_up()

    @property
    def counts(self) -> dict[str, int]:
        """Faults of peers by cause, and how often one was `busy`."""
        with self._lock:
            return dict(self._counts)

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Asks all peers at once."""
        there = [False] * len(keys)
        with self._calls.call():
            for begin in range(0, len(keys), wire.MOST_KEYS):
                part = keys[begin : begin + wire.MOST_KEYS]
                places = range(begin, begin + len(part))
                exchanges = [_Exchange(peer, self._request(wire.EXISTS, part), places) for peer in self._peers]
                self._run(exchanges)
                for exchange in exchanges:
                    for at, length in zip(places, exchange.lengths, strict=False):
                        if length != ABSENT and not there[at]:
                            there[at] = True
                            self._see(keys[at], exchange.peer)
        return there

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Asks for each value the peer that has it, as far as `exists` has found one, else one peer after the other."""
        lengths = [ABSENT for _ in zip(keys, buffers, strict=True)]
        with self._calls.call():
            left = {at: self._candidates(key) for at, key in enumerate(keys)}
            while left := {at: peers for at, peers in left.items() if peers and lengths[at] == ABSENT}:
                asked: dict[_Peer, list[int]] = {}
                for at, peers in left.items():
                    places = asked.setdefault(peers[0], [])
                    if len(places) < wire.MOST_KEYS:
                        places.append(at)
                        left[at] = peers[1:]
                exchanges = [
                    _Exchange(
                        peer,
                        self._request(wire.GET, [keys[at] for at in places], [len(buffers[at]) for at in places]),
                        places,
                    )
                    for peer, places in asked.items()
                ]
                self._run(exchanges)
                for exchange in exchanges:
                    self._take(exchange, buffers, lengths)
        return lengths

    def stats(self) -> BackendStats:
        """Returns no counts."""
        self.check_open()
        return BackendStats()

    def close(self) -> None:
        """Closes all connections, once the calls under way have ended; a second call does nothing."""
        self._end_of_following.set()
        if self._follower.is_alive():
            self._follower.join()
        if self._calls.close():
            for peer in self._peers:
                while peer.idle:
                    peer.idle.pop().close()
            self._lines.close()

    # ---------------------------------------------------------------- calls

    def _follow(self) -> None:
        """Looks names up from time to time, on a thread of its own, since that may block."""
        while not self._end_of_following.wait(self._follow_s):
            self._look_up()

    def _look_up(self) -> None:
        """Adds peers that names have now, and drops those that they have no more. One that fails keeps what it had."""
        for name in self._found:
            with suppress(OSError):
                self._found[name] = tuple(self._resolve(name))
        wanted = dict.fromkeys([*self._fixed, *(address for found in self._found.values() for address in found)])
        with self._lock:
            known = {peer.address: peer for peer in self._peers}
            for address, peer in known.items():
                if address not in wanted:
                    peer.gone = True
                    while peer.idle:
                        peer.idle.pop().close()
            self._peers = tuple(
                known.get(address) or _Peer(address, Breaker(_FAILURES, _COOLDOWN_S, self._clock)) for address in wanted
            )
            gone = [key for key, peer in self._seen.items() if peer.gone]
            for key in gone:
                del self._seen[key]

    def _greet(self) -> None:
        """Asks each peer for nothing, to learn whether it takes the secret.

        Raises:
            BackendUnavailable: one does not.
        """
        exchanges = [_Exchange(peer, self._request(wire.EXISTS, []), ()) for peer in self._peers]
        with self._calls.call():
            self._run(exchanges)
        for exchange in exchanges:
            if exchange.error is not None and exchange.error.cause == "refused":
                raise BackendUnavailable(str(exchange.error))
        self._greeted = True

    def _candidates(self, key: bytes) -> list[_Peer]:
        with self._lock:
            peer = self._seen.get(key)
            return list(self._peers) if peer is None else [peer]

    def _see(self, key: bytes, peer: _Peer) -> None:
        with self._lock:
            if peer.gone:  # it was dropped while it was asked
                return
            self._seen[key] = peer
            self._seen.move_to_end(key)
            if len(self._seen) > _SEEN:
                self._seen.popitem(last=False)

    def _request(self, operation: int, keys: Sequence[bytes], lengths: Sequence[int] = ()) -> Request:
        return Request(operation, next(self._numbers), keys, lengths)

    def _take(self, exchange: _Exchange, buffers: Sequence[memoryview], lengths: list[int]) -> None:
        values = iter(exchange.values)
        for at, length, key in zip(exchange.places, exchange.lengths, exchange.request.keys, strict=False):
            lengths[at] = length
            if length == len(buffers[at]):
                buffers[at][:] = next(values)
            if length == ABSENT:
                with self._lock:
                    self._seen.pop(key, None)

    def _run(self, exchanges: Sequence[_Exchange]) -> None:
        """Makes requests at once. An answer that does not come, or makes no sense, is the error of its request.

        Raises:
            StorageError: there is no answer to any of them.
        """
        deadline_s = self._clock() + self._timeout_s
        waiting = {line: exchange for exchange in exchanges if (line := self._begin(exchange)) is not None}
        while waiting and (left_s := deadline_s - self._clock()) > 0:
            for line in self._lines.wait([*waiting], left_s):
                exchange = waiting.pop(line)
                self._end(exchange, self._read(exchange, line))
        for late in waiting.values():
            self._end(late, StorageError("timeout", f"no answer from peer {late.peer.address} in {self._timeout_s} s"))
        errors = [exchange.error for exchange in exchanges if exchange.error is not None]
        if errors and len(errors) == len(exchanges) and any(exchange.places for exchange in exchanges):
            raise errors[0]

    def _begin(self, exchange: _Exchange) -> Line | None:
        """Sends a request; returns where its answer will come, None: it was not sent."""
        peer = exchange.peer
        with self._lock:
            if not peer.breaker.allow():
                exchange.error = StorageError("unreachable", f"peer {peer.address} has failed repeatedly")
                return None
            while peer.idle and exchange.line is None:
                line = peer.idle.pop()
                if line.alive():
                    exchange.line = line
                else:
                    line.close()
        exchange.line = exchange.line or self._lines.open(peer.address)
        exchange.line.send(wire.write_request(exchange.request, self._key))
        return exchange.line

    def _read(self, exchange: _Exchange, line: Line) -> StorageError | None:
        """Reads an answer; returns why it is none."""
        where, parts = f"peer {exchange.peer.address}", line.read()
        if parts is None:
            return StorageError("unreachable", f"{where} does not answer")
        answer = wire.read_answer(parts, exchange.request.number, len(exchange.request.keys))
        if answer is None:
            return StorageError("protocol", f"{where} answers what was not asked")
        status, lengths = answer
        if status == wire.REFUSED:
            return StorageError("refused", f"{where} has another secret")
        if status not in (wire.OK, wire.BUSY):
            return StorageError("protocol", f"{where} does not understand: it has another version")
        fit = [wanted for length, wanted in zip(lengths, exchange.request.lengths, strict=False) if length == wanted]
        if fit != [len(value) for value in parts[2:]]:
            return StorageError("protocol", f"{where} sent values of other lengths than it says")
        exchange.lengths, exchange.values = lengths, parts[2:]
        if status == wire.BUSY:
            with self._lock:
                self._counts["busy"] += 1
        return None

    def _end(self, exchange: _Exchange, error: StorageError | None) -> None:
        """Notes how a request ended, and keeps or drops its line."""
        assert exchange.line is not None
        line, exchange.line, exchange.error = exchange.line, None, error
        with self._lock:
            if error is None:
                exchange.peer.breaker.succeed()
                if not exchange.peer.gone:
                    exchange.peer.idle.append(line)
                    return
            else:
                exchange.peer.breaker.fail()
                first = not self._counts[error.cause]
                self._counts[error.cause] += 1
        line.close()
        if error is not None and first and (self._greeted or error.cause != "refused"):
            log.warning("peers: %s; further faults of this kind are only counted", error)

    def check(self) -> None:
        """Checks that a key has a home among the peers there are, and each peer one place.

        Raises:
            AssertionError: a rule is broken.
        """
        with self._lock:
            assert not any(peer.gone for peer in self._peers), "a peer that is gone is asked"
            assert len({peer.address for peer in self._peers}) == len(self._peers), "a peer is asked once"
            assert set(self._seen.values()) <= set(self._peers), "who has a key is a peer"
            assert len(self._seen) <= _SEEN, "too many keys are known"
            assert min([0, *self._counts.values()]) == 0, "a count is below 0"

    def check_open(self) -> None:
        with self._calls.call():
            pass


def _check(address: str) -> None:
    found = ADDRESS.fullmatch(address)
    if found is None or not 0 < int(found["port"]) < 1 << 16:
        raise BadArgument("peer", address, "HOST:PORT, such as 10.0.0.2:7100")


def _secret(options: Mapping[str, str]) -> bytes | None:
    """Returns the secret that options name: in a file, or a variable of the environment.

    Raises:
        BadArgument: there is no such file or variable, or both are given.
    """
    file, name = options.get("secret_file"), options.get("secret_env")
    if file is not None and name is not None:
        raise BadArgument("secret_env", name, "left out with secret_file")
    if file is not None:
        with suppress(OSError):
            if secret := Path(file).read_bytes().strip():
                return secret
        raise BadArgument("secret_file", file, "a file that can be read and is not empty")
    given = os.environ.get(name or "MAINSTEM_STORAGE_SECRET")
    if name is not None and not given:
        raise BadArgument("secret_env", name, "a variable that is set")
    return given.encode("utf-8", "surrogateescape") if given else None


def addresses_of(name: str) -> list[str]:
    """Returns the addresses that a name has now, HOST:PORT, without those of this machine's own name.

    Raises:
        OSError: nobody knows the name.
    """
    host, _, port = name.rpartition(":")
    own: set[object] = set()
    with suppress(OSError):
        own = {info[4][0] for info in socket.getaddrinfo(socket.gethostname(), None)}
    found = {str(info[4][0]) for info in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)}
    return [f"[{one}]:{port}" if ":" in one else f"{one}:{port}" for one in sorted(found - own)]
