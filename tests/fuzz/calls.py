"""Calls of the core, chosen by bytes: each is checked, and what it refuses must leave everything as it was."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

_MOST_CALLS = 300
_SPACES = (None, "a")


class Bytes:
    """Choices, made by bytes; 0 once there are none left."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    @property
    def left(self) -> bool:
        """Whether there are more."""
        return self._at < min(len(self._data), 2048)

    def below(self, end: int) -> int:
        """Returns a number below `end`."""
        self._at += 1
        return self._data[self._at - 1] % end if self._at <= len(self._data) else 0

    def tokens(self, most: int) -> list[int]:
        """Returns tokens of few kinds, so that prompts share prefixes."""
        length, kinds = self.below(most + 1), self.below(256)
        return [kinds >> (at % 8) & 1 for at in range(length)]


def tree_calls() -> Callable[[bytes], None]:
    """Calls of `Tree`, over two tiers."""
    from mainstem.cache.tree import Tree
    from mainstem.errors import BadArgument, NotLocked, StaleHandle

    def run(data: bytes) -> None:
        choose = Bytes(data)
        size = 1 + choose.below(3)
        tree = Tree(page_size=size, tiers=2, policy=("lru", "slru", "gittins")[choose.below(3)])
        handles, fresh = [0], 0
        for _ in range(_MOST_CALLS):
            if not choose.left:
                break
            kind, tier, space = choose.below(11), choose.below(2), _SPACES[choose.below(2)]
            node = handles[choose.below(len(handles))]
            with suppress(BadArgument, NotLocked, StaleHandle):
                if kind == 0:
                    handles.append(tree.match(choose.tokens(12), space, partial=bool(tier)).node)
                elif kind == 1:
                    tokens, ready = choose.tokens(12), choose.below(4) > 0
                    ids = list(range(fresh, fresh + len(tokens) // size))
                    fresh += len(ids)
                    handles.append(tree.insert(tokens, ids, space, tier=tier, ready=ready).node)
                elif kind == 2:
                    tree.lock(node, tier)
                elif kind == 3:
                    tree.unlock(node, tier)
                elif kind == 4:
                    length = tree.length(node) // size
                    pages = 1 + choose.below(max(1, length))
                    fresh += pages
                    tree.attach(node, list(range(fresh - pages, fresh)), tier=tier, ready=bool(choose.below(2)))
                elif kind == 5:
                    tree.commit(node, tier)
                elif kind == 6:
                    tree.cancel(node, tier)
                elif kind == 7:
                    tree.evict(choose.below(6), tier=tier)
                elif kind == 8:
                    tree.remove(choose.tokens(6), space)
                elif kind == 9:
                    tree.evict_removed(tier)
                else:
                    tree.peek(choose.tokens(12), space)
            tree.check()

    return run


def cache_calls() -> Callable[[bytes], None]:
    """Calls of `PrefixCache` and of its leases; at the end nothing is locked or private."""
    from mainstem.cache.prefix_cache import Lease, PrefixCache
    from mainstem.errors import BadArgument, BadTokens, LeaseClosed, OutOfPages

    def use(choose: Bytes, lease: Lease, cache: PrefixCache) -> None:
        kind = choose.below(6)
        if kind == 0:
            lease.reserve(choose.below(9))
        elif kind == 1:
            lease.publish(choose.below(20))
        elif kind == 2:
            lease.append([choose.below(2) for _ in range(choose.below(4))])
        elif kind == 3:
            lease.finish(choose.below(20) if choose.below(2) else None)
        elif kind == 4:
            lease.abort()
        else:
            assert len(lease.page_table) * cache.page_size >= lease.published

    def run(data: bytes) -> None:
        choose = Bytes(data)
        size, pages = 1 + choose.below(4), 1 + choose.below(12)
        copies: Any = (lambda source, target, positions: None) if choose.below(2) else None
        cache = PrefixCache(pages, size, policy=("lru", "slru", "gittins")[choose.below(3)], copy_page=copies)
        leases: list[Lease] = []
        for _ in range(_MOST_CALLS):
            if not choose.left:
                break
            kind, space = choose.below(10), _SPACES[choose.below(2)]
            with suppress(BadArgument, BadTokens, LeaseClosed, OutOfPages):
                if kind < 2:
                    leases.append(cache.lease(choose.tokens(20), space, most=None if kind == 0 else choose.below(8)))
                elif kind < 7 and leases:
                    use(choose, leases[choose.below(len(leases))], cache)
                elif kind == 7 and leases:
                    leases.pop(choose.below(len(leases)))  # dropped without an end
                elif kind == 8:
                    cache.remove(choose.tokens(6), space)
                elif kind == 9:
                    cache.demote(choose.tokens(12), space) if choose.below(2) else cache.flush()
            cache.check()
        for lease in leases:
            lease.abort()
        leases.clear()
        cache.flush()
        cache.check()
        assert cache.pool.free == cache.pool.total

    return run
