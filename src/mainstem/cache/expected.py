"""Expected uses: when prefixes are asked for next, because their users have said so.

What is expected last is evicted first, under every policy, and what is expected before the policy would drop it is
spared. `core/csrc/eviction/expected.h` has the rules, and what keeps wrong advice from costing more than a small part
of its owner's hits. The time is the caller's, and is passed in.
"""

from __future__ import annotations

import math

from mainstem.cache.keys import TokenLike
from mainstem.cache.namespaces import NamespaceLike, encode_namespace, owner_of
from mainstem.cache.tree import Tree
from mainstem.errors import BadArgument

_ACCOUNTS = 254
"""Owners that answer for their own advice; those that come after them answer together."""

_LONGEST_S, _MOST_STEPS = 1e9, 1e6

_NEWEST = 0.05
"""How much the newest step counts in the length of a step."""


class Expected:
    """The next uses that are expected of the prefixes of one cache.

    Attributes:
        step_s: seconds that a step takes: a request, from its arrival to its end, as the latest ones took.
    """

    def __init__(self, tree: Tree) -> None:
        self.step_s = 1.0
        self._tree = tree
        self._accounts: dict[bytes, int] = {}
        self._now = 0.0
        self._observed = 0

    def expect(self, tokens: TokenLike, due: float, namespace: NamespaceLike = None) -> int:
        """Says when a prefix is asked for next; what was said of it before does not count any more.

        An expectation ends with the next use of the prefix, or once it is as late as it was said ahead.

        Args:
            tokens: the prefix; with what follows it, as long as that is one sequence.
            due: when, by the clock whose time `poll` takes.

        Returns:
            The positions of the prefix in the tree.

        Raises:
            BadArgument: `due` is no finite number.
            BadTokens: a token is out of range.
        """
        if not math.isfinite(due):
            raise BadArgument("due", due, "a finite number")
        name, key = encode_namespace(namespace), self._tree.keys.encode(tokens)
        account = self._account(owner_of(name))
        return int(self._tree.core.expect(name, key, account, self._now, due)) * self._tree.page_size

    def _account(self, owner: bytes) -> int:
        """Returns the number of an owner's account. Those who share the last one are not remembered."""
        if len(self._accounts) < _ACCOUNTS - 1:
            return self._accounts.setdefault(owner, len(self._accounts) + 1)
        return self._accounts.get(owner, _ACCOUNTS)

    def poll(self, now: float) -> None:
        """Notes the time, which never falls. `PrefixCache.poll` calls it."""
        self._now = max(self._now, now)
        self._tree.core.note_time(self._now)

    def wait(self, seconds: float | None, steps: float | None) -> float | None:
        """Returns in how many seconds a prefix is used next; None: neither is given."""
        return seconds if steps is None else steps * self.step_s

    def observe(self, seconds: float) -> None:
        self._observed += 1
        self.step_s += max(_NEWEST, 1 / self._observed) * (seconds - self.step_s)


def check_next_use(seconds: float | None, steps: float | None, longest_s: float = math.inf, at: str = "") -> None:
    """Checks when a prefix is said to be used next; None: not said.

    Args:
        seconds, steps: from now on.
        longest_s: the most seconds.
        at: what stands before the names of the two in the message of an error.

    Raises:
        BadArgument: one of them is out of range, or both are given.
    """
    most = min(longest_s, _LONGEST_S)
    if seconds is not None and not 0 <= seconds <= most:
        raise BadArgument(f"{at}next_use_s", seconds, f"seconds from 0 to {most:g}")
    if steps is not None and not 0 <= steps <= _MOST_STEPS:
        raise BadArgument(f"{at}next_use_steps", steps, f"a number from 0 to {_MOST_STEPS:g}")
    if seconds is not None and steps is not None:
        raise BadArgument(f"{at}next_use_steps", steps, f"left out with {at}next_use_s")
