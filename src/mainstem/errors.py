"""Typed errors. Each names what was wrong and what is allowed; raising one leaves everything as it was."""

from __future__ import annotations

import operator


class MainstemError(Exception):
    """Base of every error that Mainstem raises on purpose."""


class BadTokens(MainstemError, ValueError):
    """A token sequence cannot be a key: the message names the position, the value and the allowed range."""


class BadArgument(MainstemError, ValueError):
    """An argument is outside its range.

    Args:
        name: the argument.
        value: what was given.
        allowed: what would have been accepted, in words.
    """

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(f"{name} = {value!r}: must be {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """An integer of any type, in a range; for arguments of public calls.

    Raises:
        BadArgument: it is no integer, or outside [low, high].
    """
    if type(value) is int and low <= value <= high:
        return value
    try:
        integer = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        integer = None
    if integer is None or not low <= integer <= high:
        raise BadArgument(name, value, f"an integer from {low} to {high}")
    return integer


class OutOfPages(MainstemError):
    """No room: what is free and what could be evicted do not reach.

    Args:
        needed: pages asked for.
        free: pages owned by nobody.
        evictable: pages of unlocked prefixes.
        total: pages of the pool.
        what: "pages", "window pages" or "state slots".
    """

    def __init__(self, needed: int, free: int, evictable: int, total: int, what: str = "pages") -> None:
        super().__init__(f"{needed} {what} needed, but {free} are free and {evictable} can be evicted, of {total}")
        self.what = what
        self.needed = needed
        self.free = free
        self.evictable = evictable
        self.total = total


class StaleHandle(MainstemError, LookupError):
    """A handle whose node was evicted, cut short, or joined to the next since the handle was given out."""


class NotLocked(MainstemError, RuntimeError):
    """An unlock without its lock."""


class WrongOwner(MainstemError, RuntimeError):
    """A page is not owned by whom the call says: a double free, or a page of somebody else."""


class LeaseClosed(MainstemError, RuntimeError):
    """A call on a lease that was finished or aborted."""


class CorruptTree(MainstemError, AssertionError):
    """A structural rule of the tree is broken; the message names the node and the rule."""


class UnsupportedModel(MainstemError):
    """The model's architecture cannot run over the paged cache; the message says why."""


class ModelNotFound(MainstemError, FileNotFoundError):
    """No model of that name can be had here; the message lists the ways to get one."""


class RequestTooLong(MainstemError, ValueError):
    """A request that could never run, however long it waited."""


class EngineFull(MainstemError):
    """Too many requests wait already."""


class EngineClosed(MainstemError):
    """The engine takes no more requests."""


class StorageError(MainstemError):
    """A call to a store failed as a whole. The tier above counts it by its cause and treats it as a miss.

    Args:
        cause: one of `CAUSES`.
        message: what happened, for people.
    """

    CAUSES = ("unreachable", "timeout", "full", "refused", "protocol", "io", "closed")

    def __init__(self, cause: str, message: str) -> None:
        assert cause in self.CAUSES, cause
        super().__init__(f"{cause}: {message}")
        self.cause = cause


class BackendUnavailable(MainstemError):
    """A storage back end cannot be opened here: a package is missing, or nobody answers; the message says which."""
