"""A dict of chained block hashes: the cost of an index that is not a tree.

    tokens   | block 0 | block 1 | block 2 |          hash of a block = H(hash of the previous block, its tokens)
    hashes       h0        h1        h2      -->  page ids {h0: 7, h1: 3, h2: 9}

Equal hashes mean equal prefixes, so a lookup is one dict lookup per block. Unlocked blocks are ordered by last use, the
end of a prefix before its beginning; the first of them is evicted. The hash is 128-bit xxh3 if `xxhash` is installed,
otherwise BLAKE2b of the standard library. Namespaces are a salt for the first block. One tier, no checks of arguments.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec


def _find_hash() -> tuple[str, Callable[[bytes], bytes]]:
    """Returns the name of the hash, and the function."""
    if find_spec("xxhash"):
        return "xxh3_128", import_module("xxhash").xxh3_128_digest
    return "blake2b", lambda data: hashlib.blake2b(data, digest_size=16).digest()


HASH, digest = _find_hash()


class BlockCache:
    """Maps block hashes to page ids.

    Args:
        page_size: tokens per block, 4 bytes each.
        pages: pages in the pool.
    """

    def __init__(self, page_size: int, pages: int) -> None:
        self.page_size = page_size
        self.block_bytes = 4 * page_size
        self._page_ids: dict[bytes, int] = {}
        self._locks: dict[bytes, int] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()
        self._free = list(range(pages))

    def match(self, tokens: bytes, namespace: str | None = None) -> tuple[list[bytes], list[int]]:
        """Returns hashes and page ids of the longest cached prefix."""
        known, step = self._page_ids, self.block_bytes
        hashes: list[bytes] = []
        page_ids: list[int] = []
        parent = (namespace or "").encode()
        for at in range(0, len(tokens) - step + 1, step):
            parent = digest(parent + tokens[at : at + step])
            page = known.get(parent)
            if page is None:
                break
            hashes.append(parent)
            page_ids.append(page)
        return hashes, page_ids

    def insert(
        self, tokens: bytes, found: list[bytes], page_ids: list[int], namespace: str | None = None
    ) -> tuple[list[bytes], list[int]]:
        """Adds and locks the blocks after `found`, evicting if needed; returns the prompt's hashes and page ids."""
        parent = found[-1] if found else (namespace or "").encode()
        hashes, new = self.extend(tokens[len(found) * self.block_bytes :], parent)
        return found + hashes, page_ids + new

    def extend(self, tokens: bytes, parent: bytes) -> tuple[list[bytes], list[int]]:
        """Adds and locks the blocks after a cached one; returns their hashes and page ids."""
        hashes = self._hashes(tokens, parent)
        if len(hashes) > len(self._free):
            self.evict(len(hashes) - len(self._free))
        page_ids = [self._free.pop() for _ in hashes]
        self._page_ids.update(zip(hashes, page_ids, strict=True))
        self._locks.update(dict.fromkeys(hashes, 1))
        return hashes, page_ids

    def lock(self, hashes: Sequence[bytes]) -> None:
        """Protects blocks from eviction."""
        locks, idle = self._locks, self._idle
        for name in hashes:
            count = locks.get(name, 0)
            if not count:
                del idle[name]
            locks[name] = count + 1

    def unlock(self, hashes: Sequence[bytes]) -> None:
        """Removes one lock; the end of the prefix will be evicted before its beginning."""
        locks, idle = self._locks, self._idle
        for name in reversed(hashes):
            count = locks[name] - 1
            if count:
                locks[name] = count
            else:
                del locks[name]
                idle[name] = None

    def evict(self, n: int) -> int:
        """Frees n pages, or all unlocked ones if there are fewer; returns how many."""
        n = min(n, len(self._idle))
        for _ in range(n):
            name, _ = self._idle.popitem(last=False)
            self._free.append(self._page_ids.pop(name))
        return n

    def _hashes(self, tokens: bytes, parent: bytes) -> list[bytes]:
        step = self.block_bytes
        hashes: list[bytes] = []
        for at in range(0, len(tokens) - step + 1, step):
            parent = digest(parent + tokens[at : at + step])
            hashes.append(parent)
        return hashes
