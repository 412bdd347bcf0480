"""`Listener`: a router that follows the events of one server, over a network that loses, repeats and delays them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np

from mainstem.cache.components import Full
from mainstem.cache.namespaces import Namespace, NamespaceLike, encode_namespace
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.tree import Tree
from mainstem.events.feed import Feed, Follower
from mainstem.events.replica import Block, Replica
from mainstem.events.source import PUBLIC_SECRET, BlockStored, Event, Medium, Source, salt_id
from simulator.world import World, require

Page = tuple[str | None, str | None, Medium, tuple[int, ...]]
"""A page by its adapter, salt, medium, and all tokens from the beginning of its sequence to its end."""

_MEDIA: tuple[Medium, ...] = ("GPU", "CPU")
_RESTART_S = 0.01


def followed(replica: Replica) -> Counter[Page]:
    """Returns what a replica knows of device and host."""
    return Counter(
        (block.stored.lora_name, block.stored.cache_salt, medium, replica.path(hash_))
        for hash_, block in replica.blocks.items()
        for medium in block.media
        if medium != "STORAGE"
    )


def pages_of(replica: Replica) -> set[Page]:
    """Returns what a replica knows of all tiers, as far as all pages before are somewhere."""
    pages: set[Page] = set()
    for hash_, block in replica.blocks.items():
        if all(above and above.media for above in _path(replica, hash_)):
            path = replica.path(hash_)
            pages.update((block.stored.lora_name, block.stored.cache_salt, medium, path) for medium in block.media)
    return pages


def _path(replica: Replica, hash_: int | None) -> Iterator[Block | None]:
    """Yields a page and those that it continues, as far as they are known; None for one that is not."""
    while hash_ is not None:
        block = replica.blocks.get(hash_)
        yield block
        hash_ = block.stored.parent_block_hash if block else None


def reaches(pages: set[Page], adapter: str | None, salt: str | None, path: tuple[int, ...]) -> tuple[int, int, int]:
    """Returns how many tokens of a path are on the device, there or on the host, there or in storage."""
    ends = sorted({len(page[3]) for page in pages if page[3] == path[: len(page[3])]})

    def reach(media: tuple[Medium, ...]) -> int:
        found = 0
        for end in ends:
            if not any((adapter, salt, medium, path[:end]) in pages for medium in media):
                break
            found = end
        return found

    return reach(("GPU",)), reach(("GPU", "CPU")), reach(("GPU", "CPU", "STORAGE"))


def listed(tree: Tree, namespaces: Sequence[NamespaceLike], secret: bytes = PUBLIC_SECRET) -> Counter[Page]:
    """Returns what can be found in a tree, from the description of its nodes."""
    names = {
        encode_namespace(each): (each.adapter if isinstance(each, Namespace) else None, salt_id(each, secret))
        for each in namespaces
    }
    paths: dict[int, tuple[int, ...]] = {0: ()}
    pages: Counter[Page] = Counter()
    for view in tree.nodes():
        path = paths[view.node] = paths[view.parent] + tuple(np.frombuffer(view.key, np.int32).tolist())
        for tier in range(tree.tiers):
            if view.cells[tree.names[0], tier].present and not view.removed:
                ends = range(view.start + tree.page_size, len(path) + 1, tree.page_size)
                pages.update((*names[view.namespace], _MEDIA[tier], path[:end]) for end in ends)
    return pages


def compare(known: Replica, sent: Replica, tree: Tree, namespaces: Sequence[NamespaceLike]) -> Counter[Page]:
    """Checks that a replica knows exactly what can be found in a tree; returns the pages.

    Args:
        known: what the replica has followed.
        sent: the same of one that has lost nothing.
        tree: of the server.
        namespaces: that it may have.
    """
    pages, wanted = followed(known), listed(tree, namespaces)
    require(pages == wanted, "events tell another state", _apart(pages, wanted))
    require(_stored(known) == _stored(sent), "events tell of other pages in storage")
    return pages


class Listener:
    """A router and its connection to a server, which may begin anew.

    Args:
        world: the clock.
        number: which of the servers it follows; with the seed of the world, it decides all choices.
    """

    def __init__(self, world: World, number: int) -> None:
        self._world, self._random = world, Random(f"{world.digest()}/{number}")
        self._loss = self._random.choice((0.0, 0.1, 0.5))
        self._follower = Follower()
        self._channel: deque[tuple[int, bytes]] = deque()
        self._begun = self._dropped = 0
        self._source: Source | None = None
        self._feed = Feed(0)
        self._sent = Replica()  # what a router without losses knows

    def begin(self, cache: PrefixCache, places: list[int]) -> None:
        """The server begins, with an empty cache."""
        self._begun += 1
        self._dropped = 0
        self._channel.clear()
        self._sent = Replica()
        self._source = None
        if isinstance(cache.tree.components[0], Full):
            limit, step_pages = self._random.choice((3, 20, 10_000)), self._random.choice((1, 5, 1000))
            self._source = Source(cache.tree, places, limit=limit, step_pages=step_pages)
            self._feed = Feed(self._now_s(), self._random.choice((0, 1000, 100_000)))

    def go_on(self) -> None:
        """Some of what happened is sent; some of what was sent arrives."""
        if self._random.random() < 0.3:
            self._send(self._loss)
        if self._random.random() < 0.3:
            self._receive(self._random.randint(1, 4), self._loss)
        if self._random.random() < 0.01:
            self._follower = Follower()  # another one joins late

    def check(self, cache: PrefixCache, namespaces: Sequence[NamespaceLike]) -> None:
        """Checks that the router knows exactly what can be found, once everything has arrived."""
        if self._source is None:
            return
        self._send(0.0)
        while self._source.waiting:
            self._send(0.0)
        self._receive(len(self._channel), 0.0)
        for each in (self._source, self._feed, self._follower.replica, self._sent):
            each.check()
        known = compare(self._follower.replica, self._sent, cache.tree, namespaces)
        self._world.seen["followed pages"] += known.total()
        for lora, salt, medium, path in known if cache.tree.components == (Full(),) else ():
            name = next(each for each in namespaces if (adapter_of(each), salt_id(each)) == (lora, salt))
            key = np.array(path, np.int32).tobytes()
            device, _, host = cache.tree.core.peek(encode_namespace(name), key, 0, False)
            found = device + (host if medium == "CPU" else 0)
            require(found >= len(path), "events tell of a page that no match finds", medium, path, found)

    def _now_s(self) -> float:
        return self._world.now_s + self._begun * _RESTART_S

    def _send(self, loss: float) -> None:
        if self._source is not None:
            dropped = self._source.dropped
            self._world.seen["events dropped"] += dropped - self._dropped
            self._dropped = dropped
            events = self._source.take()
            for event in events:
                parent = event.parent_block_hash if isinstance(event, BlockStored) else None
                above = self._sent.blocks.get(parent) if parent is not None else None
                require(parent is None or (above and above.media), "a page comes before its parent", event)
                self._sent.apply([event])
            batch = self._feed.publish(events, self._now_s())
            if self._random.random() >= loss:
                self._channel.append(batch)
                if self._random.random() < loss:
                    self._channel.append(batch)

    def _state(self) -> Iterator[Event]:
        assert self._source is not None
        return self._source.state()

    def _receive(self, most: int, loss: float) -> None:
        for _ in range(min(most, len(self._channel))):
            batch = self._channel.popleft()
            first = self._follower.missing(batch[0])
            if first is None:
                self._follower.follow(*batch)
            elif self._random.random() >= loss:  # else no answer: the next batch will show the gap again
                for replayed in self._feed.replay(first, self._now_s(), self._state()):
                    self._follower.follow(*replayed)


def _stored(replica: Replica) -> set[int]:
    return {hash_ for hash_, block in replica.blocks.items() if "STORAGE" in block.media}


def adapter_of(namespace: NamespaceLike) -> str | None:
    """Returns the adapter of a namespace."""
    return namespace.adapter if isinstance(namespace, Namespace) else None


def _apart(known: Counter[Page], wanted: Counter[Page]) -> str:
    surplus, lacking = known - wanted, wanted - known
    return f"too many: {sorted(surplus, key=str)[:3]}, missing: {sorted(lacking, key=str)[:3]}"
