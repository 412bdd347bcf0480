"""Typed errors. Each names the problem and the allowed values; a call that raises one changes nothing."""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Iterable, Mapping

_LOGIN = re.compile(r"(//).*@|^[^/=?&\s]+:[^/]*@", re.DOTALL)
_SECRET = re.compile(
    r"((?:^|[?&(])[^=?&]*(?:pass|secret|token|key|credential|auth)[^=?&]*(?<!_env)(?<!_file)=)[^&]+", re.I
)


def redacted(spec: str) -> str:
    """Returns the spec of a store, or an address, as it may be shown: without logins and without secret options.

    A login before `@` is hidden, and the value of each option that is named after a password,
    secret, token, key or credential, unless it names a file or a variable (`password_env`).
    """
    return _SECRET.sub(r"\1***", _LOGIN.sub(r"\1***@", spec))


def one_of(name: str, known: Iterable[str], others: str = "") -> str:
    """Returns the allowed names, in words, and the one that may be meant."""
    names = list(known)
    near = difflib.get_close_matches(name, names, 1)
    return f"one of {', '.join(names)}{others}" + (f"; did you mean {near[0]}?" if near else "")


class MainstemError(Exception):
    """Base of every error that Mainstem raises on purpose."""


class BadTokens(MainstemError, ValueError):
    """A token sequence cannot be a key: the message names the position, the value and the allowed range."""


class BadArgument(MainstemError, ValueError):
    """An argument is outside its range.

    Args:
        name: the argument.
        value: the value given; what may be a password in it is hidden, see `redacted`.
        allowed: what is accepted, in words.
    """

    def __init__(self, name: str, value: object, allowed: str) -> None:
        value = redacted(value) if isinstance(value, str) else value
        super().__init__(f"{name} = {value!r}: must be {allowed}")
        self.name = name
        self.value = value
        self.allowed = allowed


def check_integer(name: str, value: object, low: int, high: int) -> int:
    """Returns `value`, an integer of any type, as an int; for arguments of public calls.

    Raises:
        BadArgument: it is not an integer, or outside [low, high].
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
    """The free pages and those that can be evicted are too few.

    Args:
        needed: number of pages requested.
        free: number of free pages.
        evictable: number of pages of unlocked prefixes.
        total: number of pages of the pool.
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
    """The node of a handle was evicted, shortened, or joined to the next one since the handle was returned."""


class NotLocked(MainstemError, RuntimeError):
    """An unlock without a lock."""


class WrongOwner(MainstemError, RuntimeError):
    """A page has another owner than the call implies: a double free, or the page of another lease."""


class LeaseClosed(MainstemError, RuntimeError):
    """The lease of this call was finished or aborted."""


class CorruptTree(MainstemError, AssertionError):
    """A structural rule of the tree is broken; the message names the node and the rule."""


def check_rules(where: str, rules: Mapping[str, bool]) -> None:
    """Raises `CorruptTree` with the first rule that does not hold, and where."""
    for rule, holds in rules.items():
        if not holds:
            raise CorruptTree(f"{where}: {rule}")


class UnsupportedModel(MainstemError):
    """The model's architecture cannot run on a paged cache; the message says why."""


class ModelNotFound(MainstemError, FileNotFoundError):
    """No model of that name is available here; the message lists the ways to get one."""


class RequestTooLong(MainstemError, ValueError):
    """A prompt, or a prompt and its answer, has more tokens than the context.

    The message is in the words of OpenAI's API, by which clients know that they must shorten what they send.

    Args:
        name: what is too long, such as `prompt`.
        tokens: of it; where no tokenizer has counted them, the least that it can have.
        maximum: tokens that prompt and answer may have together.
        answer: tokens asked for in addition; 0: the prompt alone is too long.
        counted: whether `tokens` is exact.
    """

    def __init__(self, name: str, tokens: int, maximum: int, *, answer: int = 0, counted: bool = True) -> None:
        at_least = "" if counted else "at least "
        asked = f"your {name} resulted in {at_least}{tokens} tokens. Please reduce the length of the {name}."
        if answer:
            asked = (
                f"you requested {tokens + answer} tokens ({tokens} in the {name}, {answer} in the completion). "
                f"Please reduce the length of the {name} or the completion."
            )
        super().__init__(f"This model's maximum context length is {maximum} tokens. However, {asked}")
        self.name, self.tokens, self.maximum, self.answer, self.counted = name, tokens, maximum, answer, counted

    def renamed(self, name: str) -> RequestTooLong:
        """Returns the same error with the name that the client uses."""
        return RequestTooLong(name, self.tokens, self.maximum, answer=self.answer, counted=self.counted)


class EngineFull(MainstemError):
    """Too many requests are waiting already."""


class UpdateUnderWay(MainstemError):
    """Another update of the model's weights has not ended."""


class EngineClosed(MainstemError):
    """The engine accepts no more requests."""


class RankFailed(MainstemError):
    """A process of an engine of several has ended, so that the others cannot go on; the message says which and why."""


class StorageError(MainstemError):
    """A call to a store failed as a whole. The tier above counts it by its cause and treats it as a miss.

    Args:
        cause: one of `CAUSES`.
        message: what happened, in words.
    """

    CAUSES = ("unreachable", "timeout", "full", "refused", "protocol", "io", "closed")

    def __init__(self, cause: str, message: str) -> None:
        assert cause in self.CAUSES, cause
        super().__init__(f"{cause}: {message}")
        self.cause = cause


class BackendUnavailable(MainstemError):
    """A storage back end cannot be opened: a package is missing or no server answers; the message says which."""
