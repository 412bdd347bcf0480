"""Versions of a model's weights: which one computes now, and whose KV a request may find.

```
version     0        1        2  computes          a request goes on from
strict                        2                    what version 2 has computed
lag 1                1        2                    what has more of its prompt: 2, or 1 and no more of it is kept
group       0        .        2                    the same, of 2 and the version with which its group began
```
A version's name, the digest of its weights, is part of the namespace. What a version has computed from the first token
on is kept under its name; what goes on from KV of another version is of none, and is kept for nobody. So a name stands
for the same numbers in every process: two versions with equal weights share, and a store serves both.
"""

from __future__ import annotations

from collections import OrderedDict

from mainstem.cache.keys import Encoded
from mainstem.cache.namespaces import encode_namespace, of_weights
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.errors import BadArgument, check_integer
from mainstem.runtime.request import Request

_MOST_GROUPS = 1024  # that begin with a version, the one used longest ago leaves first
_MOST_LAG = 64  # versions


def check_mode(mode: str, lag: int) -> None:
    """Checks how an update treats what older versions have computed.

    Raises:
        BadArgument: `mode` is unknown, or `lag` is not a number for it.
    """
    if mode not in ("strict", "group", "lag"):
        raise BadArgument("mode", mode, "one of strict, group, lag")
    if mode == "lag":
        check_integer("lag", lag, 1, _MOST_LAG)
    elif lag != 0:
        raise BadArgument("lag", lag, f"0 with mode {mode}")


class Versions:
    """The versions of one model. One thread, that of the scheduler.

    Args:
        cache: what they have computed.

    Attributes:
        number: of the version that computes now; the first is 0.
    """

    def __init__(self, cache: PrefixCache) -> None:
        self._cache, self.number = cache, 0
        self._names: dict[int, str | None] = {0: None}  # of those whose KV may be found, the newest last
        self._groups: OrderedDict[tuple[bytes, str], int] = OrderedDict()  # the versions with which they began
        self._by_group = False

    @property
    def name(self) -> str | None:
        """The name of the version that computes now."""
        return self._names[self.number]

    @property
    def names(self) -> list[str | None]:
        """The names of the versions whose KV may be found."""
        return [*self._names.values()]

    def renew(self, name: str, mode: str, lag: int) -> None:
        """Begins the next version.

        Args:
            name: says which weights it has.
            mode: "strict": nothing of older ones is found; "group": by groups that have begun; "lag": that of the
                last ones is.
            lag: how many.
        """
        self._by_group = mode == "group"
        begun = {*self._groups.values()} if self._by_group else set()
        self.number += 1
        self._names = {
            number: each
            for number, each in self._names.items()
            if number in begun or (mode == "lag" and self.number - number <= lag)
        }
        self._names[self.number] = name
        if not self._by_group:  # all begin anew
            self._groups = OrderedDict.fromkeys(self._groups, self.number)

    def drop(self) -> int:
        """Removes what is not found any more; what is, of older versions, is evicted first. Returns the pages freed."""
        return self._cache.old_weights.keep(self.name, self.names)

    def older(self, request: Request) -> list[int]:
        """Returns the older versions whose KV a request may find, the newest first.

        Those that read log-probabilities or embeddings of a prompt find none, since these would be of other weights.
        """
        if request.params.reads_from is not None:
            return []
        if not self._by_group:
            return [*self._names][-2::-1]
        begun = self._groups.get(_group(request), self.number) if request.hints.group is not None else self.number
        return [begun] if begun != self.number and begun in self._names else []

    def place(self, request: Request, tokens: Encoded) -> tuple[Request, int]:
        """Returns a request with a version in its namespace, the one that has most of these tokens, and its number.

        The newer of two that have as much.
        """
        if request.hints.group is not None:
            self._groups.setdefault(_group(request), self.number)
            self._groups.move_to_end(_group(request))
            if len(self._groups) > _MOST_GROUPS:
                self._groups.popitem(last=False)
        best, longest = self.number, -1
        for number in [self.number, *self.older(request)]:
            namespace = of_weights(request.namespace, self._names[number])
            found = self._cache.peek(tokens, namespace) if len(self._names) > 1 else 0
            if found > longest:
                best, longest = number, found
        return request.in_namespace(of_weights(request.namespace, self._names[best])), best

    def check(self) -> None:
        """Checks the bounds, and that what is found is not of the future.

        Raises:
            AssertionError: a rule is broken.
        """
        assert len(self._groups) <= _MOST_GROUPS, "too many groups"
        assert [*self._names] == sorted(self._names) and [*self._names][-1] == self.number, "the newest computes"
        assert all(number <= self.number for number in self._groups.values()), "groups have begun"


def _group(request: Request) -> tuple[bytes, str]:
    """Returns the name of a request's group, which is one only within a namespace."""
    assert request.hints.group is not None
    return encode_namespace(of_weights(request.namespace, None)), request.hints.group
