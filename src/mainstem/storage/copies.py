"""How many copies of a value there are, and where: so that stores of several machines become one memory.

    copies(redis://10.0.0.9:6379/0?name=host-a&enough=2)+file:/kv

Each machine has a store of its own, which others read through it (`mainstem.storage.peer`). A register in Valkey or
Redis says who has a copy of a key. A value that has enough copies elsewhere is not written again; of several machines
that wrote it at once, those too many drop theirs, and never the last ones.

    <prefix>:copies:<key>    sorted set: names of those who have a copy, by when they must say so again

The register is advisory. A read gets what a store has: a wrong entry costs a copy too many, or a miss. When the
register is dead, each machine writes as if it were alone. A deletion is always a deletion, also of the last copy.
"""

from __future__ import annotations

import logging
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from mainstem.errors import BadArgument, redacted
from mainstem.imports import needs
from mainstem.storage.base import ABSENT, Backend, check_options
from mainstem.storage.breaker import Breaker
from mainstem.storage.wrappers import Wrapper
from mainstem.units import parse_timeout

if TYPE_CHECKING:
    from redis import Redis

log = logging.getLogger(__name__)

_FAILURES, _COOLDOWN_S = 3, 5.0
_OPTIONS = ("name", "enough", "ttl", "timeout", "prefix")
_GIVE_UP = """
local own, others = redis.call('zscore', KEYS[1], ARGV[1]), redis.call('zcount', KEYS[1], ARGV[2], '+inf')
if own and tonumber(own) >= tonumber(ARGV[2]) then others = others - 1 end
if others < tonumber(ARGV[3]) then return 0 end
redis.call('zrem', KEYS[1], ARGV[1])
return 1
"""
_NAME = re.compile(r"[\w.:/-]{1,128}")


class Register:
    """The register of copies. Each call is a round trip or none; one that fails knows nothing, and is counted.

    Args:
        client: of the server.
        name: of this machine, unlike those of others.
        ttl_s: how long a copy counts without being written or read.
        prefix: of all names on the server.
        clock: seconds since the epoch, about the same on all machines.
        monotonic: seconds, for the breaker.

    Attributes:
        name: as given.
    """

    def __init__(
        self,
        client: Redis,
        name: str,
        *,
        ttl_s: float = 3600.0,
        prefix: str = "mainstem-register",
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client, self.name, self._prefix = client, name, prefix
        self._ttl_s, self._clock = ttl_s, clock
        self._breaker = Breaker(_FAILURES, _COOLDOWN_S, monotonic)
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()  # guards the breaker and the counts

    @property
    def counts(self) -> dict[str, int]:
        """Calls that failed, and those that were not made because of that: `failed`, `skipped`."""
        with self._lock:
            return dict(self._counts)

    def elsewhere(self, keys: Sequence[bytes]) -> list[int]:
        """Returns how many others have a copy of each key; 0 where that is unknown."""
        own, now_s = self.name.encode(), self._clock()

        def ask(pipe: Any) -> None:
            for key in keys:
                pipe.zrangebyscore(self._copies(key), now_s, "+inf")

        answers = self._run(ask)
        return [0] * len(keys) if answers is None else [sum(who != own for who in holders) for holders in answers]

    def add(self, keys: Sequence[bytes]) -> None:
        """Says that this machine has copies, from now on for `ttl_s`."""
        until_s = self._clock() + self._ttl_s

        def say(pipe: Any) -> None:
            for key in keys:
                pipe.zadd(self._copies(key), {self.name: until_s})
                pipe.pexpire(self._copies(key), int(self._ttl_s * 1000) + 1000)

        self._run(say)

    def remove(self, keys: Sequence[bytes]) -> None:
        """Says that this machine has no copies."""

        def say(pipe: Any) -> None:
            for key in keys:
                pipe.zrem(self._copies(key), self.name)

        self._run(say)

    def give_up(self, keys: Sequence[bytes], enough: int) -> list[bool]:
        """Says that this machine has no copy any more, of each key of which as many others as are `enough` have one.

        The server does so at once for each key: of several machines that give up theirs, the last ones keep it.

        Returns:
            For each key whether it was given up. False where that is unknown.
        """
        now_s = self._clock()

        def ask(pipe: Any) -> None:
            for key in keys:
                pipe.eval(_GIVE_UP, 1, self._copies(key), self.name, repr(now_s), enough)

        answers = self._run(ask)
        return [False] * len(keys) if answers is None else [bool(answer) for answer in answers]

    def close(self) -> None:
        """Closes the connections."""
        self._client.close()

    def _copies(self, key: bytes) -> str:
        return f"{self._prefix}:copies:{key.hex()}"

    def _run(self, fill: Callable[[Any], object]) -> list[Any] | None:
        """Makes commands in one round trip; returns their answers, or None."""
        with self._lock:
            if not self._breaker.allow():
                self._counts["skipped"] += 1
                return None
        try:
            with self._client.pipeline(transaction=False) as pipe:
                fill(pipe)
                answers = list(pipe.execute())
        except Exception as error:  # noqa: BLE001  # the client's own, of sockets, and of replies that it does not expect
            with self._lock:
                self._breaker.fail()
                first = not self._counts["failed"]
                self._counts["failed"] += 1
            if first:
                log.warning("the register of copies: %s; further faults are only counted", error)
            return None
        with self._lock:
            self._breaker.succeed()
        return answers


class Copies(Wrapper):
    """Writes what has too few copies elsewhere, and drops what has too many.

    `put` returns True for a value that others have: the memory has it, though not this store.

    Args:
        inner: the store of this machine.
        address: of the register, with options: see the module.
        register: the register itself, instead.
        enough: copies of a value, of which no more are needed; 1 or more.

    Raises:
        BadArgument: an option is invalid.
        BackendUnavailable: the package redis is not installed. A server that does not answer is no error.
    """

    def __init__(
        self, inner: Backend, address: str | None = None, *, register: Register | None = None, enough: int = 1
    ) -> None:
        super().__init__(inner)
        if register is None:
            register, enough = _open(address or "")
        self.register_of_copies, self._enough = register, enough
        self._counts: Counter[str] = Counter()

    @property
    def counts(self) -> dict[str, int]:
        """Values that were not written because others have them (`spared`), and copies too many (`dropped`)."""
        return dict(self._counts)

    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads from the store of this machine, and says again what it has."""
        lengths = self._inner.get(keys, buffers)
        if held := [key for key, length in zip(keys, lengths, strict=True) if length != ABSENT]:
            self.register_of_copies.add(held)
        return lengths

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Writes the values of which others have too few copies."""
        pairs = list(zip(keys, buffers, strict=True))
        elsewhere = self.register_of_copies.elsewhere(keys) if pairs else []
        needed = [pair for pair, count in zip(pairs, elsewhere, strict=True) if count < self._enough]
        self._counts["spared"] += len(pairs) - len(needed)
        stored = iter(self._inner.put([key for key, _ in needed], [buffer for _, buffer in needed]))
        results = [count >= self._enough or next(stored) for count in elsewhere]
        own = [key for key, count, good in zip(keys, elsewhere, results, strict=True) if good and count < self._enough]
        if own:
            self.register_of_copies.add(own)
            self._drop_surplus(own)
        return results

    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes values of this machine."""
        self._inner.delete(keys)
        if keys:
            self.register_of_copies.remove(keys)

    def close(self) -> None:
        """Closes the store and the register."""
        try:
            self.register_of_copies.close()
        finally:
            super().close()

    def _drop_surplus(self, keys: Sequence[bytes]) -> None:
        """Drops copies that are too many, because others have written them at the same time."""
        given_up = self.register_of_copies.give_up(keys, self._enough)
        if surplus := [key for key, gone in zip(keys, given_up, strict=True) if gone]:
            self._inner.delete(surplus)  # who counts meanwhile counts too few copies, never too many
            self._counts["dropped"] += len(surplus)


def _open(address: str) -> tuple[Register, int]:
    """Opens the register of an address; returns it, and how many copies are enough."""
    url, _, query = address.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    check_options(options, _OPTIONS)
    if not re.match(r"(redis|rediss|unix)://", url):
        raise BadArgument(
            "copies", redacted(address), "redis://HOST:PORT/DATABASE in brackets, with ?name=... if need be"
        )
    name = options.get("name", socket.gethostname())
    enough, prefix = options.get("enough", "1"), options.get("prefix", "mainstem-register")
    for option, value in (("name", name), ("prefix", prefix)):
        if not _NAME.fullmatch(value):
            raise BadArgument(option, value, "1 to 128 letters, digits, or characters of _.:/-")
    if not (enough.isascii() and enough.isdigit() and int(enough) >= 1):
        raise BadArgument("enough", enough, "1 or more")
    client = connect(url, parse_timeout("timeout", options.get("timeout", "200ms")))
    ttl_s = parse_timeout("ttl", options.get("ttl", "1h"))
    return Register(client, name, ttl_s=ttl_s, prefix=prefix), int(enough)


def connect(url: str, timeout_s: float) -> Redis:
    """Returns a client that fails within a timeout, and does not try again: the breaker does.

    Raises:
        BackendUnavailable: the package redis is not installed.
    """
    with needs("redis", "copies(...) needs the package redis: pip install 'mainstem[redis]'"):
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry
    once = Retry(NoBackoff(), 0)
    return redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=once)
