"""`Replica`: a copy of a server's index, made of its events alone; for tests, and as a model for routers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain

from mainstem.events.source import AllBlocksCleared, BlockRemoved, BlockStored, Event, Medium


@dataclass(slots=True)
class Block:
    """A page.

    Args:
        stored: the event of this page alone; its medium is the first one.
        media: where it is; nowhere while it is only kept for the pages that continue it.
    """

    stored: BlockStored
    media: set[Medium] = field(default_factory=set)


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

    def check(self) -> None:
        """Checks that a page is somewhere, or continued, and that those that continue it are counted.

        Raises:
            AssertionError: a rule is broken.
        """
        parents = (block.stored.parent_block_hash for block in self.blocks.values())
        assert +self._continued == Counter(at for at in parents if at is not None), "what continues a page is counted"
        nowhere = [at for at, block in self.blocks.items() if not (block.media or self._continued[at])]
        assert not nowhere, "a page that is nowhere is kept for those that continue it"

    def path(self, hash_: int) -> tuple[int, ...]:
        """Returns all tokens from the beginning of a sequence to the end of a page.

        Raises:
            KeyError: the page or one before it is not there.
        """
        run: list[BlockStored] = []
        at: int | None = hash_
        while at is not None:
            run.append(self.blocks[at].stored)
            at = run[-1].parent_block_hash
        return tuple(chain.from_iterable(block.token_ids for block in reversed(run)))

    def _store(self, event: BlockStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        for number, hash_ in enumerate(event.block_hashes):
            block = self.blocks.get(hash_)
            if block is None:
                tokens = event.token_ids[number * size : (number + 1) * size]
                one = replace(event, block_hashes=(hash_,), parent_block_hash=parent, token_ids=tokens)
                block = self.blocks[hash_] = Block(one)
                if parent is not None:
                    self._continued[parent] += 1
            block.media.add(event.medium)
            parent = hash_

    def _remove(self, event: BlockRemoved) -> None:
        for hash_ in event.block_hashes:
            block = self.blocks.get(hash_)
            if block is not None:
                block.media.discard(event.medium)
                self._forget(hash_)

    def _forget(self, hash_: int | None) -> None:
        """Forgets a page that is nowhere and continued by none, and what was kept for it alone."""
        while hash_ is not None and (block := self.blocks.get(hash_)) and not (block.media or self._continued[hash_]):
            del self.blocks[hash_], self._continued[hash_]
            hash_ = block.stored.parent_block_hash
            if hash_ is not None:
                self._continued[hash_] -= 1
