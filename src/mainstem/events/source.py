"""`Source`: makes events, in vLLM's terms, of the pages that come to a tier and leave it.

The core notes each move of pages of full attention, with their hashes (`core/csrc/tree/journal.h`). A page is stored on
a medium as long as a match can find it there: it is committed, and was not removed. Splits and joins of nodes make no
events. A page that was written to storage or read from it counts as stored there until it is deleted, or until too many
others were stored later; stores that others use or that make room by themselves are not watched. A prefix of a hybrid
model is usable only where its windows and states are, too; these have no events.

Knows the tree and its namespaces; nothing of queues, sockets or formats.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Literal, NamedTuple, get_args

import numpy as np

from mainstem.cache.components import Full
from mainstem.cache.namespaces import NamespaceLike, encode_namespace, split_adapter, split_weights
from mainstem.cache.tree import Tree
from mainstem.errors import BadArgument

log = logging.getLogger(__name__)

Medium = Literal["GPU", "CPU", "STORAGE"]

PUBLIC_SECRET = b"mainstem: without a secret, who reads events can guess salts"
"""The default when no secret is given."""

_MEDIA: tuple[Medium, ...] = get_args(Medium)  # device, host, storage
_STORAGE, _ABOVE = 2, 3  # as the core numbers them; the last is what pages in storage continue
_SYMBOL_BYTES = 4
_NOTED_BYTES = 8 << 20  # of tokens that are noted and not taken
_SALT_BYTES = 16
_MAX_STORED = 1 << 17  # pages in storage that are known
_MAX_KNOWN = 1 << 18  # these, and what they continue
_MAX_NAMESPACES = 1024  # whose names are kept
_STEP_PAGES = 1024  # about a millisecond
_STEPS = 128  # at most, until all that is there was taken: with more pages, a step has more

Path = tuple[int, int, bytes, bytes]
Move = tuple[bytes, int, Path | None]
_HASH_BYTES = 8


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Consecutive pages of one path that can be found on a medium from now on.

    Args:
        block_hashes: an opaque number of 64 bits for each page: keyed, over namespace, pages before, and tokens.
        parent_block_hash: that of the page before the first one; None: they are the first of their sequence.
        token_ids: the tokens of these pages.
        block_size: tokens per page.
        medium: where they are.
        lora_name: the adapter of their namespace, if it has one.
        cache_salt: an opaque id of the rest of their namespace; None: there is no more. See `salt_id`.
    """

    block_hashes: tuple[int, ...]
    parent_block_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    medium: Medium
    lora_name: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Pages that cannot be found on a medium any more."""

    block_hashes: tuple[int, ...]
    medium: Medium


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Nothing can be found on any medium. The events that follow store what is there."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class _Run(NamedTuple):
    """Consecutive pages: the hash of the page before them, their encoded namespace, and their symbols."""

    parent: int | None
    namespace: bytes
    symbols: bytes

    @classmethod
    def of(cls, path: Path) -> _Run:
        start, before, namespace, symbols = path
        return cls(before if start else None, namespace, symbols)


def salt_id(namespace: NamespaceLike, secret: bytes = PUBLIC_SECRET) -> str | None:
    """Returns the `cache_salt` of a namespace's events, with which a router asks for a request's prefix.

    It does not depend on the adapter, which has a field of its own, nor on the version of the weights, which routers do
    not know. None: there is nothing else in the namespace. Nobody without the secret can tell the salt from it.

    Raises:
        BadArgument: the namespace has another type.
    """
    return _salt_id(split_adapter(encode_namespace(namespace))[1], secret)


def _salt_id(rest: bytes, secret: bytes) -> str | None:
    rest = split_weights(rest)[1]
    if not rest:
        return None
    return blake2b(rest, digest_size=_SALT_BYTES, key=_key(secret, b"salts")).hexdigest()


def _key(secret: bytes, use: bytes) -> bytes:
    return blake2b(secret, digest_size=32, person=b"kv-event " + use).digest()


class Source:
    """The events of one tree, which must be empty.

    Args:
        tree: the tree.
        places: page ids on each tier are below these.
        secret: keys hashes and salts; the same for all servers of a fleet.
        limit: pages that may have moved between two calls of `take`; more are dropped, and all pages are stored anew.
            Default: as many as 8 MiB of tokens have.
        step_pages: of pages that are stored anew, the fewest that a call of `take` adds.

    Raises:
        BadArgument: symbols are not token ids of 4 bytes, or there is no full attention.
    """

    def __init__(
        self,
        tree: Tree,
        places: Sequence[int],
        secret: bytes = PUBLIC_SECRET,
        limit: int | None = None,
        step_pages: int = _STEP_PAGES,
    ) -> None:
        if tree.keys.symbol_bytes != _SYMBOL_BYTES:
            raise BadArgument("keys", type(tree.keys).__name__, "TokenKeys or TypedKeys if there are events")
        if not isinstance(tree.components[0], Full):
            raise BadArgument("components", tree.names, "full attention among them if there are events")
        self._core, self._page_size = tree.core, tree.page_size
        limit = max(1, _NOTED_BYTES // tree.page_bytes) if limit is None else limit
        tree.core.listen(_key(secret, b"hashes"), list(places), limit)
        self._space = lru_cache(_MAX_NAMESPACES)(
            lambda namespace: (
                split_adapter(namespace)[0],
                _salt_id(split_adapter(namespace)[1], secret),
            )
        )

        self._stored: OrderedDict[int, None] = OrderedDict()  # pages in storage
        self._known: dict[int, _Run] = {}  # these, and what they continue
        self._continued: Counter[int] = Counter()  # by how many of them
        self._moves: deque[Move] = deque()  # without events so far
        self._step_pages, self._room = step_pages, 0

    @property
    def dropped(self) -> int:
        """Moved pages without an event, because more than `limit` moved between two calls of `take`."""
        return self._core.moves_dropped()

    @property
    def waiting(self) -> bool:
        """Whether `take` has more events, even if nothing happens."""
        return bool(self._moves)

    def take(self) -> list[Event]:
        """Returns the events since the last call.

        If some were dropped, all pages are cleared and stored anew: by each call as many pages as a step has, besides
        those that have moved since the last call.
        """
        events: list[Event] = []
        moves = self._core.take_moves()
        if moves is None:
            log.warning("KV events were dropped: more pages moved than are noted; everything is published anew")
            for each in (self._stored, self._known, self._continued):
                each.clear()
            self._moves.clear()
            events.append(AllBlocksCleared())
            self._moves.extend(self._core.all_moves())
            self._room = room = max(self._step_pages, _pages(self._moves) // _STEPS)
        else:
            self._moves.extend(moves)
            room = _pages(moves) + self._room
        while self._moves and room > 0:
            move = self._moves.popleft()
            events.extend(self._events(*move))
            room -= _pages([move])
        return events

    def state(self) -> Iterator[Event]:
        """Yields events that clear all and store all pages, parents first, for a router that knows nothing.

        Any thread may call it. It may contain events that were not taken yet; to apply them again changes nothing. The
        parents of pages in storage may be nowhere. They are stored all the same, since other pages continue them, and
        removed at the end.
        """
        yield AllBlocksCleared()
        for hashes, number, path in self._core.all_moves():
            if path is not None:
                yield self._event(_numbers(hashes), _Run.of(path), _MEDIA[number])
        known, stored = self._known.copy(), set(self._stored)
        done: set[int] = set()
        for last in known:
            run: list[int] = []
            at: int | None = last
            while at in known and at not in done:
                done.add(at)
                run.append(at)
                at = known[at].parent
            for hash_ in reversed(run):
                yield self._event((hash_,), known[hash_], "STORAGE")
        if nowhere := tuple(hash_ for hash_ in known if hash_ not in stored):
            yield BlockRemoved(nowhere, "STORAGE")

    def check(self) -> None:
        """Checks that what is kept of storage is there, or continued, and that those that continue it are counted.

        Raises:
            AssertionError: a rule is broken.
        """
        parents = Counter(run.parent for run in self._known.values() if run.parent is not None)
        assert +self._continued == parents, "what continues a page is counted"
        assert self._stored.keys() <= self._known.keys(), "what is in storage is known"
        assert len(self._stored) <= _MAX_STORED, "too much is known"
        if not self._moves:  # else what continues a page may be yet to come
            assert all(at in self._stored or parents[at] for at in self._known), "what is nowhere is kept for others"

    def _events(self, hashes: bytes, number: int, path: Path | None) -> Iterator[Event]:
        """Yields the events of a move, and notes what is in storage."""
        blocks = _numbers(hashes)
        if path is None:
            yield BlockRemoved(blocks, _MEDIA[number])
            if number == _STORAGE:
                self._give_up(blocks)
            return
        run = _Run.of(path)
        if number >= _STORAGE:
            self._learn(blocks, run)
        if number != _ABOVE:
            yield self._event(blocks, run, _MEDIA[number])
        if number == _STORAGE:
            yield from self._keep(blocks)

    def _event(self, blocks: tuple[int, ...], run: _Run, medium: Medium) -> BlockStored:
        tokens = tuple(np.frombuffer(run.symbols, "<u4").tolist())
        return BlockStored(blocks, run.parent, tokens, self._page_size, medium, *self._space(run.namespace))

    def _learn(self, blocks: Sequence[int], run: _Run) -> None:
        parent, size = run.parent, self._page_size * _SYMBOL_BYTES
        for at, block in enumerate(blocks):
            if block not in self._known:
                self._known[block] = _Run(parent, run.namespace, run.symbols[at * size : (at + 1) * size])
                if parent is not None:
                    self._continued[parent] += 1
            parent = block

    def _keep(self, blocks: Sequence[int]) -> Iterator[BlockRemoved]:
        """Notes pages in storage, and gives up those that were written longest ago if there are too many."""
        for block in blocks:
            self._stored[block] = None
            self._stored.move_to_end(block)
        surplus: list[int] = []
        while len(self._stored) > _MAX_STORED or (self._stored and len(self._known) > _MAX_KNOWN):
            surplus.append(next(iter(self._stored)))
            self._give_up(surplus[-1:])
        if surplus:
            yield BlockRemoved(tuple(surplus), "STORAGE")

    def _give_up(self, blocks: Iterable[int]) -> None:
        """Forgets pages in storage that none of the others continues, and what was kept for them alone."""
        for block in blocks:
            self._stored.pop(block, None)
            at: int | None = block
            while at in self._known and not (at in self._stored or self._continued[at]):
                del self._continued[at]
                at = self._known.pop(at).parent
                if at is not None:
                    self._continued[at] -= 1


def _numbers(hashes: bytes) -> tuple[int, ...]:
    return tuple(np.frombuffer(hashes, np.uint64).tolist())


def _pages(moves: Iterable[Move]) -> int:
    return sum(len(hashes) for hashes, _, _ in moves) // _HASH_BYTES
