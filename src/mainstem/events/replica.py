"""`Replica`: what a server holds, from its events alone."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import groupby
from typing import get_args

from mainstem.events.source import AllBlocksCleared, BlockRemoved, BlockStored, Event, Medium

_TOKEN_BYTES = array("I").itemsize


@dataclass(slots=True)
class Block:
    """A page.

    Args:
        hash, parent: of this page, and of the one before it; None: it is the first of its sequence.
        tokens: its tokens, 4 bytes each.
        lora_name, cache_salt: of its namespace.
        media: where it is; nowhere while it is only kept for the pages that continue it.
    """

    hash: int
    parent: int | None
    tokens: bytes
    lora_name: str | None
    cache_salt: str | None
    media: frozenset[Medium] = frozenset()

    @property
    def stored(self) -> BlockStored:
        """The event of this page alone; its medium is one of those that have it, or storage if none has."""
        return _as_one([self], min(self.media, default="STORAGE"))


class Replica:
    """A copy of a server's index.

    Attributes:
        blocks: pages by their hashes, and those that they continue.
    """

    def __init__(self) -> None:
        self.blocks: dict[int, Block] = {}
        self._continued: Counter[int] = Counter()  # by how many of them

    def apply(self, events: Iterable[Event]) -> None:
        """Follows events. To follow some of them again, in order up to the last one, changes nothing."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    self._remove(event)
                case AllBlocksCleared():
                    self.blocks.clear()
                    self._continued.clear()

    def state(self) -> Iterator[Event]:
        """Yields events that make another replica equal to this one: all is cleared, and stored, parents first.

        Parents that are nowhere are stored, too, and removed at the end: nobody could say else what continues them.
        """
        yield AllBlocksCleared()
        removed: list[int] = []
        for blocks in self._paths():
            if all(block.media for block in blocks):
                media = get_args(Medium)
            else:
                yield _as_one(blocks, "STORAGE")
                removed += [block.hash for block in blocks if "STORAGE" not in block.media]
                media = ("GPU", "CPU")
            for medium in media:
                yield from _runs(blocks, medium)
        if removed:
            yield BlockRemoved(tuple(removed), "STORAGE")

    def path(self, hash_: int) -> tuple[int, ...]:
        """Returns all tokens from the beginning of a sequence to the end of a page.

        Raises:
            KeyError: the page or one before it is not there.
        """
        run: list[Block] = []
        at: int | None = hash_
        while at is not None:
            run.append(self.blocks[at])
            at = run[-1].parent
        return _tokens(reversed(run))

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, _TOKEN_BYTES * event.block_size
        tokens = array("I", event.token_ids).tobytes()
        for at, hash_ in enumerate(event.block_hashes):
            block = self.blocks.get(hash_)
            if block is None:
                own = tokens[at * size : (at + 1) * size]
                block = self.blocks[hash_] = Block(hash_, parent, own, event.lora_name, event.cache_salt)
                if parent is not None:
                    self._continued[parent] += 1
            block.media = _shared(block.media | {event.medium})
            parent = hash_

    def _remove(self, event: BlockRemoved) -> None:
        for hash_ in event.block_hashes:
            block = self.blocks.get(hash_)
            if block is not None:
                block.media = _shared(block.media - {event.medium})
                self._forget(hash_)

    def _forget(self, hash_: int | None) -> None:
        """Forgets a page that is nowhere and continued by none, and what was kept for it alone."""
        while hash_ is not None and (block := self.blocks.get(hash_)) and not (block.media or self._continued[hash_]):
            del self.blocks[hash_], self._continued[hash_]
            hash_ = block.parent
            if hash_ is not None:
                self._continued[hash_] -= 1

    def _paths(self) -> Iterator[list[Block]]:
        """Divides the pages into paths, each after the one that it continues."""
        done: set[int] = set()
        for hash_ in reversed(self.blocks):  # children mostly came later, so that paths are long
            path: list[Block] = []
            at: int | None = hash_
            while at is not None and at in self.blocks and at not in done:
                done.add(at)
                path.append(self.blocks[at])
                at = path[-1].parent
            if path:
                yield path[::-1]


@cache
def _shared(media: frozenset[Medium]) -> frozenset[Medium]:
    """Returns one object for all pages on the same media."""
    return media


def _runs(path: list[Block], medium: Medium) -> Iterator[BlockStored]:
    """Yields an event for each part of a path that is on a medium."""
    for on_it, run in groupby(path, lambda block: medium in block.media):
        if on_it:
            yield _as_one([*run], medium)


def _as_one(run: list[Block], medium: Medium) -> BlockStored:
    first, size = run[0], len(run[0].tokens) // _TOKEN_BYTES
    hashes = tuple(block.hash for block in run)
    return BlockStored(hashes, first.parent, _tokens(run), size, medium, first.lora_name, first.cache_salt)


def _tokens(run: Iterable[Block]) -> tuple[int, ...]:
    return tuple(array("I", b"".join(block.tokens for block in run)))
