"""A dict of chained block hashes: what an index costs that is not a tree.

    tokens   | block 0 | block 1 | block 2 |          hash of a block = H(hash of the block before it, its tokens)
    hashes       h0        h1        h2      -->  pages {h0: 7, h1: 3, h2: 9}

Equal hashes mean equal prefixes, so a look-up is a dict's look-up for each block. Blocks that nobody locks wait in the
order of their last use, the ends of a prefix before its beginning, and the first of them is evicted. The hash is xxh3
of 128 bits where `xxhash` is installed, else BLAKE2b of the standard library. No namespaces but a salt for the first
block, one tier, no checks of what it is given.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec


def _find_hash() -> tuple[str, Callable[[bytes], bytes]]:
    """Its name, and the function."""
    if find_spec("xxhash"):
        return "xxh3_128", import_module("xxhash").xxh3_128_digest
    return "blake2b", lambda data: hashlib.blake2b(data, digest_size=16).digest()


HASH, digest = _find_hash()


class BlockCache:
    """Maps block hashes to pages.

    Args:
        page_size: tokens a block, 4 bytes each.
        pages: pages in the pool.
    """

    def __init__(self, page_size: int, pages: int) -> None:
        self.page_size = page_size
        self.block_bytes = 4 * page_size
        self._pages: dict[bytes, int] = {}
        self._locks: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._free = list(range(pages))

    def match(self, tokens: bytes, namespace: str | None = None) -> tuple[list[bytes], list[int]]:
        """Hashes and pages of the longest prefix that is known."""
        known, step = self._pages, self.block_bytes
        hashes: list[bytes] = []
        pages: list[int] = []
        parent = (namespace or "").encode()
        for at in range(0, len(tokens) - step + 1, step):
            parent = digest(parent + tokens[at : at + step])
            page = known.get(parent)
            if page is None:
                break
            hashes.append(parent)
            pages.append(page)
        return hashes, pages

    def insert(
        self, tokens: bytes, found: list[bytes], pages: list[int], namespace: str | None = None
    ) -> tuple[list[bytes], list[int]]:
        """Adds and locks what lies behind `found`; hashes and pages of the whole prompt. Evicts what it must."""
        parent = found[-1] if found else (namespace or "").encode()
        hashes, new = self.extend(tokens[len(found) * self.block_bytes :], parent)
        return found + hashes, pages + new

    def extend(self, tokens: bytes, parent: bytes) -> tuple[list[bytes], list[int]]:
        """Adds and locks the blocks behind one that is known; their hashes and pages."""
        hashes = self._hashes(tokens, parent)
        if len(hashes) > len(self._free):
            self.evict(len(hashes) - len(self._free))
        pages = [self._free.pop() for _ in hashes]
        self._pages.update(zip(hashes, pages, strict=True))
        self._locks.update(dict.fromkeys(hashes, 1))
        return hashes, pages

    def lock(self, hashes: Sequence[bytes]) -> None:
        """Keeps blocks from eviction."""
        locks, idle = self._locks, self._idle
        for name in hashes:
            count = locks.get(name, 0)
            if not count:
                del idle[name]
            locks[name] = count + 1

    def unlock(self, hashes: Sequence[bytes]) -> None:
        """Takes one lock back; the end of the prefix will be evicted before its beginning."""
        locks, idle = self._locks, self._idle
        for name in reversed(hashes):
            count = locks[name] - 1
            if count:
                locks[name] = count
            else:
                del locks[name]
                idle[name] = None

    def evict(self, n: int) -> int:
        """Frees n pages, or as many as nobody locks; how many."""
        n = min(n, len(self._idle))
        for _ in range(n):
            name, _ = self._idle.popitem(last=False)
            self._free.append(self._pages.pop(name))
        return n

    def _hashes(self, tokens: bytes, parent: bytes) -> list[bytes]:
        step = self.block_bytes
        hashes: list[bytes] = []
        for at in range(0, len(tokens) - step + 1, step):
            parent = digest(parent + tokens[at : at + step])
            hashes.append(parent)
        return hashes
