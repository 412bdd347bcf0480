"""`CostRouter`: sends a request where its first token is expected soonest, by what each replica has.

    events of a replica --apply--> index (C++): who has which page, on which tier
    a prompt --------------order-> seconds for each replica: queue + load + compute the rest -> the best first
    routing statistics -----follow-> page size, the replica's own estimates of its costs, what it has queued

A prompt that was sent to a replica counts as cached there soon: until the replica's events say what it has, or for
`expect_s`. So the prompts that it was sent stand for a replica without events. Time is passed in; the same calls give
the same choices. Knows neither Ray nor sockets: `following` brings the events.
"""

from __future__ import annotations

import logging
import math
import secrets
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mainstem import _core
from mainstem.cache.namespaces import Namespace, encode_namespace, split_adapter
from mainstem.errors import BadArgument, CorruptTree, check_integer
from mainstem.events.source import PUBLIC_SECRET, AllBlocksCleared, BlockRemoved, Event, salt_id
from mainstem.fleet.front.asking import Prompt

log = logging.getLogger(__name__)

_CAPACITY = 16 << 20  # pages of all replicas together; about 60 bytes each
_MOST_PAGES, _MOST_TOKENS = 2**32 - 2, 1 << 20
_EXPECT_S = 300.0
_SESSIONS = 1 << 16
_NAMESPACES = 1024  # whose names are kept
_KEY_BYTES = 16
_USUAL_PAGE = 16  # until a replica says how large its pages are
_MOST_STORES = (1 << 12) - 1  # that replicas share
_MEDIA = {"GPU": 0, "CPU": 1, "STORAGE": 2}

Line = tuple[float, float]
"""Seconds: a latency, and for each token."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Times that a replica takes, by its own estimate; None: it does not know yet, or does no such work.

    Args:
        prefill: seconds to compute a token, and for each position that it attends to.
        load: from the host to the device.
        read: from storage to the host.
        pull: from a peer to the host.
    """

    prefill: Line | None = None
    load: Line | None = None
    read: Line | None = None
    pull: Line | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """The router's estimate for a request at one replica.

    Args:
        replica: its name.
        cost_s: the order of replicas. The request's own work counts more in it than the queue, since others wait.
        seconds: until the first token: queue, loading and computing.
        cached: tokens of the prompt that need not be computed.
    """

    replica: str
    cost_s: float
    seconds: float
    cached: int


DEFAULTS = Costs(prefill=(1e-4, 1e-9), load=(0.0, 1e-6), read=(5e-3, 1e-5), pull=(2e-3, 5e-6))
"""While no replica knows better."""


_NOTHING = np.empty(0, np.int32)


@dataclass(slots=True)
class _Replica:
    number: int = 0
    costs: Costs = Costs()
    reads_peers: bool = False
    statistics: Mapping[str, Any] | None = None  # of the last call of `follow`


class CostRouter:
    """Chooses the replica of a request by what each replica has, and what its time costs.

    One thread calls it; another one may call `apply`.

    Args:
        clock: returns seconds, monotonic.
        page_size: tokens of a page; None: that of the first replica that has one.
        secret: of the fleet's events, which names namespaces; see `salt_id`.
        capacity: pages that are known of all replicas together.
        expect_s: how long pages that a replica was sent count as soon to be there.
        key: 16 secret bytes that name pages in this process; default: random.

    Raises:
        BadArgument: a number is out of range.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        page_size: int | None = None,
        secret: bytes = PUBLIC_SECRET,
        capacity: int = _CAPACITY,
        expect_s: float = _EXPECT_S,
        key: bytes | None = None,
    ) -> None:
        if not expect_s >= 0:
            raise BadArgument("expect_s", expect_s, "0 or more seconds")
        check_integer("capacity", capacity, 1, _MOST_PAGES)
        if page_size is not None:
            check_integer("page_size", page_size, 1, _MOST_TOKENS)
        self._clock, self._expect_s, self._capacity = clock, expect_s, capacity
        self._key = secrets.token_bytes(_KEY_BYTES) if key is None else key
        self._space = lru_cache(_NAMESPACES)(lambda namespace: _space_of(namespace, secret))
        self._lock = Lock()
        self._replicas: dict[str, _Replica] = {}
        self._by_number: dict[int, str] = {}
        self._stores: dict[str, int] = {}
        self._sessions: OrderedDict[tuple[bytes, str], str] = OrderedDict()
        self._asked: tuple[tuple[str, ...], NDArray[np.int32]] = ((), _NOTHING)
        self._refused: set[str] = set()
        self._begin(page_size or _USUAL_PAGE, page_size is not None)

    # ---------------------------------------------------------------- reports of replicas

    def follow(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        """Takes the replicas that there are now, and their statistics.

        It reads `page_size`, `costs` (fields of `Costs`), `queued` (tokens that are to be computed), `store` (a name:
        replicas with the same name share a store) and `peers` (whether the replica reads from the others).
        """
        with self._lock:
            sizes = {name: statistics.get("page_size") for name, statistics in replicas.items()}
            known = [size for _, size in sorted(sizes.items()) if isinstance(size, int) and 0 < size <= _MOST_TOKENS]
            if known and not self._reported:
                self._begin(known[0], True)
            self._refuse({name for name, size in sizes.items() if size in known and size != self._page_size})
            for gone in sorted(set(self._replicas) - set(replicas)):
                number = self._replicas.pop(gone).number
                del self._by_number[number]
                self._core.drop(number)
                self._asked = ((), _NOTHING)
            stores = [statistics.get("store") for statistics in replicas.values()]
            named = {store for store in stores if isinstance(store, str)}
            self._stores = {name: number for name, number in self._stores.items() if name in named}
            for name in sorted(replicas):
                self._update(self._replica(name), replicas[name])
            self._set_times()
            for name in sorted(replicas):
                self._note_queue(self._replicas[name], replicas[name])

    def apply(self, replica: str, events: Iterable[Event]) -> None:
        """Applies events of a replica, of which some may be lost, repeated or wrong.

        Args:
            replica: its name; events of one that `follow` does not list are ignored.
            events: since those before.
        """
        for event in events:
            with self._lock:
                known = self._replicas.get(replica)
                if known is None:
                    return
                self._apply(known, event)

    def _apply(self, replica: _Replica, event: Event) -> None:
        core, number = self._core, replica.number
        if isinstance(event, AllBlocksCleared):
            core.clear(number)
            return
        medium = _MEDIA.get(event.medium) if isinstance(event.medium, str) else None
        if medium is None:
            core.malformed(number)
        elif isinstance(event, BlockRemoved):
            core.remove(number, medium, event.block_hashes)
        elif event.block_size != self._page_size or not _texts(event.lora_name, event.cache_salt):
            core.malformed(number)
        else:
            space = _space(event.lora_name, event.cache_salt)
            core.store(number, medium, space, event.parent_block_hash, event.block_hashes, event.token_ids)

    # ---------------------------------------------------------------- requests

    def order(self, prompt: Prompt | None, replicas: Sequence[str]) -> list[str]:
        """Returns the replicas, the best first."""
        with self._lock:
            numbers = self._numbers(replicas)
            space, tokens, stay = self._read(prompt)
            ranked = self._core.rank(space, tokens, numbers, stay, self._clock())
            names = list(map(self._by_number.__getitem__, ranked.tolist()))
        if prompt is not None and prompt.replica in names:  # it alone has what the request continues
            names.remove(prompt.replica)
            names.insert(0, prompt.replica)
        return names

    def estimates(self, prompt: Prompt | None, replicas: Sequence[str]) -> list[Estimate]:
        """Returns the estimates by which `order` ranks the replicas, the best first."""
        with self._lock:
            numbers = self._numbers(replicas)
            space, tokens, stay = self._read(prompt)
            ranked = self._core.estimates(space, tokens, numbers, stay, self._clock())
            return [Estimate(self._by_number[number], cost_s, s, cached) for number, cost_s, s, cached in ranked]

    def match(self, prompt: Prompt) -> dict[str, tuple[int, int, int]]:
        """Returns how many tokens of a prompt each replica has from the beginning, by name: on its device or expected
        there; there or on its host; there or in storage."""
        with self._lock:
            self._core.expire(self._clock())
            pages = self._core.match(self._space(prompt.namespace), prompt.tokens)
            size = self._page_size
            return {
                name: (pages[0][number] * size, pages[1][number] * size, pages[2][number] * size)
                for number, name in self._by_number.items()
            }

    def sent(self, prompt: Prompt | None, replica: str) -> None:
        """Takes into account that a request went to a replica."""
        with self._lock:
            space, tokens, _ = self._read(prompt)
            self._core.sent(self._replica(replica).number, space, tokens, self._clock())
            if prompt is not None and prompt.session is not None:
                self._sessions[space, prompt.session] = replica
                self._sessions.move_to_end((space, prompt.session))
                if len(self._sessions) > _SESSIONS:
                    self._sessions.popitem(last=False)

    def ended(self, replica: str) -> None:
        """Takes into account that a request has ended."""
        with self._lock:
            if replica in self._replicas:
                self._core.ended(self._replicas[replica].number, self._clock())

    def stats(self) -> dict[str, int]:
        """Returns the counts of the index; see `_core.IndexCounts`."""
        with self._lock:
            return self._core.counts().as_dict()

    def check(self) -> None:
        """Checks the index, and that each replica has one number in it.

        Raises:
            CorruptTree: they do not agree with themselves, or with each other.
        """
        with self._lock:
            self._core.check()
            numbers = {replica.number: name for name, replica in self._replicas.items()}
            if numbers != self._by_number or len(numbers) != self._core.counts().workers:
                raise CorruptTree("the router: each replica has one number in the index")
            if len(self._sessions) > _SESSIONS:
                raise CorruptTree("the router: too many sessions are known")
            asked = [self._replicas[name].number for name in self._asked[0] if name in self._replicas]
            if len(asked) == len(self._asked[0]) > 0 and asked != self._asked[1].tolist():
                raise CorruptTree("the router: the replicas that were asked last have other numbers")

    # ---------------------------------------------------------------- parts

    def _begin(self, page_size: int, reported: bool) -> None:
        """Begins with nothing known but the replicas."""
        self._core, self._reported = _core.Routing(self._key, page_size, self._capacity), reported
        self._page_size = page_size
        self._by_number.clear()
        for name in sorted(self._replicas):
            self._add(name, self._replicas[name])

    def _add(self, name: str, replica: _Replica) -> None:
        replica.number = self._core.add()
        self._core.expect_for(replica.number, self._expect_s)
        self._by_number[replica.number] = name
        self._asked = ((), self._asked[1])

    def _refuse(self, names: set[str]) -> None:
        """Notes replicas whose pages have another size: their events are ignored, and counted as malformed."""
        for name in sorted(names - self._refused):
            log.warning("%s has pages of another size than %d tokens; its events are ignored", name, self._page_size)
        self._refused = names

    def _replica(self, name: str) -> _Replica:
        if name not in self._replicas:
            self._add(name, replica := _Replica())
            self._replicas[name] = replica
            self._set_times()
        return self._replicas[name]

    def _update(self, replica: _Replica, statistics: Mapping[str, Any]) -> None:
        """Takes the statistics of a replica."""
        replica.costs, replica.reads_peers = _costs(statistics.get("costs")), statistics.get("peers") is True
        self._core.share_store(replica.number, self._number_of(statistics.get("store")))

    def _number_of(self, store: object) -> int:
        """Returns the number of a store; 0: the replica has one of its own, or there are too many."""
        if not isinstance(store, str):
            return 0
        if store not in self._stores:
            if len(self._stores) == _MOST_STORES:
                return 0
            used = set(self._stores.values())
            self._stores[store] = next(number for number in range(1, _MOST_STORES + 1) if number not in used)
        return self._stores[store]

    def _note_queue(self, replica: _Replica, statistics: Mapping[str, Any]) -> None:
        """Takes a new queue length once: old statistics come again whenever those of another replica change."""
        queued = statistics.get("queued")
        if statistics != replica.statistics and isinstance(queued, int) and queued > 0:
            self._core.set_queue(replica.number, queued, self._clock())
        replica.statistics = statistics

    def _set_times(self) -> None:
        """Gives each replica its own estimates; those that it lacks are the mean of the others', or the defaults."""
        replicas = self._replicas.values()
        means = {each.name: _mean([getattr(one.costs, each.name) for one in replicas]) for each in fields(Costs)}
        for replica in replicas:
            own = [
                getattr(replica.costs, name) or means[name] or getattr(DEFAULTS, name)
                for name in ("prefill", "load", "read", "pull")
            ]
            pull = own[3] if replica.reads_peers else None
            self._core.set_times(replica.number, own[0], own[1], own[2], pull)

    def _numbers(self, replicas: Sequence[str]) -> NDArray[np.int32]:
        asked = tuple(replicas)
        if asked != self._asked[0]:
            numbers = np.array([self._replica(name).number for name in asked], np.int32)
            self._asked = (asked, numbers)
        return self._asked[1]

    def _read(self, prompt: Prompt | None) -> tuple[bytes, NDArray[np.int32], int | None]:
        """Returns the namespace and tokens of a prompt, and the replica that its session was sent to."""
        if prompt is None:
            return b"", _NOTHING, None
        space = self._space(prompt.namespace)
        before = None if prompt.session is None else self._sessions.get((space, prompt.session))
        stay = None if before is None or before not in self._replicas else self._replicas[before].number
        return space, prompt.tokens, stay


def _space_of(namespace: Namespace | None, secret: bytes) -> bytes:
    return _space(split_adapter(encode_namespace(namespace))[0], salt_id(namespace, secret))


def _space(adapter: str | None, salt: str | None) -> bytes:
    """Returns the name of a namespace, as its events have it."""
    if adapter is None and salt is None:
        return b""
    texts = [b"" if text is None else b"+" + text.encode("utf-8", "surrogatepass") for text in (adapter, salt)]
    return len(texts[0]).to_bytes(8, "little") + b"".join(texts)


def _texts(*values: object) -> bool:
    """Whether each is a text or None; events come from another process."""
    return all(each is None or isinstance(each, str) for each in values)


def _costs(reported: object) -> Costs:
    """Reads the costs that a replica reports; those that make no sense count as unknown."""
    if not isinstance(reported, Mapping):
        return Costs()
    return Costs(**{each.name: line for each in fields(Costs) if (line := _line(reported.get(each.name))) is not None})


def _line(reported: object) -> Line | None:
    match reported:
        case (int() | float() as first, int() | float() as each) if first >= 0 and each >= 0:
            return (float(first), float(each)) if math.isfinite(first + each) else None
    return None


def _mean(lines: Sequence[Line | None]) -> Line | None:
    known = [line for line in lines if line is not None]
    if not known:
        return None
    return sum(line[0] for line in known) / len(known), sum(line[1] for line in known) / len(known)
