"""The interface of a storage back end: byte values under 32-byte keys, in batches, through buffers of the caller.

    exists(keys)             which keys are present, one answer a key
    get(keys, buffers)       reads values into buffers; put(keys, buffers) writes buffers as values
    scan()                   lists what is there, where the store can
    delete(keys)  clear()  stats()  close()

A back end knows nothing of pages, tokens or models. It does not guarantee that a value is intact: the reader verifies
it. A back end may drop any value at any time. It must not block forever (its client has a timeout), and it must not
raise anything but `StorageError`.

A spec names a back end: `file:/var/cache/kv?capacity=8GiB`, `redis://127.0.0.1:6379/0`, `memory:`. The spec of your own
class is `package.module:Class?option=value`; the module is installed or in the working directory. Wrappers go before
the spec that they wrap: `readonly+redis://127.0.0.1:6379/0`.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from inspect import getattr_static
from pathlib import Path
from typing import ClassVar, Self
from urllib.parse import parse_qsl

from mainstem.errors import BackendUnavailable, BadArgument, MainstemError, StorageError, one_of, redacted
from mainstem.imports import PATH, load_object

KEY_BYTES = 32
"""The length of every key: that of a BLAKE3 digest. Names contain the key in lower-case hex."""

ABSENT = -1
"""The length that `get` returns for a missing key."""

SCANNED = 1000
"""The most values in a batch of `scan`, as far as the store decides it."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The promises of a back end.

    Args:
        persistent: values survive the end of this process.
        shared: other processes see the values.
        zero_copy: the client reads and writes the caller's buffers directly, without copying whole values.
        evicts: the back end bounds its size and evicts values to make room; otherwise `put` refuses when it is full.
        overwrites: `put` replaces an existing value; otherwise the first value stays.
        batched: `exists` asks for any number of keys in a few requests; otherwise each key is one, and lookups ask for
            few keys.
    """

    persistent: bool
    shared: bool
    zero_copy: bool
    evicts: bool
    overwrites: bool
    batched: bool = True


@dataclass(frozen=True, slots=True)
class Limit:
    """The longest value that a back end takes.

    Args:
        size: in bytes.
        remedy: what its user can do about it, such as "its option slot raises that".
    """

    size: int
    remedy: str


@dataclass(frozen=True, slots=True)
class BackendStats:
    """The contents of a back end. A field is None if the back end cannot determine it without listing all values.

    Args:
        entries: values held.
        used_bytes: bytes that the values take.
        capacity_bytes: bytes that the values may take.
        evicted: values evicted since the back end was opened.
    """

    entries: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    evicted: int = 0


@dataclass(frozen=True, slots=True)
class Listed:
    """A value in a listing.

    Args:
        key: its key.
        length: its length in bytes.
        age_s: seconds since it was put or, in a store that counts this, since it was used; None: the store does not
            know.
    """

    key: bytes
    length: int
    age_s: float | None = None


class Backend(ABC):
    """A store of values. Several threads may call it at once; after `close` all calls raise `StorageError`.

    Buffers are contiguous, writable `memoryview`s of bytes ("B"). They belong to the caller, and the back end must not
    use them after the call returns. A `get` that raises may have written to any of its buffers.
    """

    capabilities: ClassVar[Capabilities]

    longest: Limit | None = None
    """The longest value that it takes; None: any that it has room for."""

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """Opens a back end from the parts of a spec, `scheme:address?options`.

        The address of your own class, `module:Class?options`, is always empty.

        Raises:
            BadArgument: the address or an option is invalid; the message names the valid ones. Or the class does not
                define this: it is made in another way.
            BackendUnavailable: the client is not installed, or the server does not answer.
        """
        raise BadArgument("storage", address, f"another one: {cls.__name__} has no spec of its own")

    @classmethod
    def open_existing(cls, address: str, options: Mapping[str, str]) -> Self:
        """Opens a store to look into it or to empty it: makes none that is missing, and drops nothing to fit a size.

        As `from_spec`, unless the back end keeps its values itself.

        Raises:
            BadArgument: the address or an option is invalid; the message names the valid ones.
            BackendUnavailable: there is no store; or as for `from_spec`.
        """
        return cls.from_spec(address, options)

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Registers memory that contains later buffers, such as host pools, with clients that need it (RDMA).

        Raises:
            StorageError: the memory cannot be registered.
        """
        del buffers

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Asks which keys are present, in as few round trips as the store allows.

        Returns:
            For each key whether it has a value. False where the back end cannot determine it for this key.

        Raises:
            StorageError: the back end cannot determine the result for any key.
        """

    @abstractmethod
    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads values into buffers.

        Returns:
            For each key the length of its value, or `ABSENT`. A buffer is filled if it has exactly that length.
            Otherwise its content is undefined. Nothing is written past the end of a buffer.

        Raises:
            StorageError: the back end cannot determine the result for any key.
        """

    @abstractmethod
    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Stores values. Once it returns, a reader sees a whole value or none, never part of one.

        Returns:
            For each key whether the store has a value now, new or old. False: no room.

        Raises:
            StorageError: the back end cannot determine the result for any key; each value may be stored or not.
        """

    def scan(self) -> Iterator[Sequence[Listed]]:
        """Lists all values in batches, in any order, without counting as their use.

        A value that is there from the first batch to the last is listed, possibly twice. One that comes or goes
        meanwhile may be listed. A batch may be empty, and is asked for only when the caller takes it.

        Raises:
            StorageError: the store cannot list its values (cause `refused`), or cannot go on.
        """
        raise StorageError("refused", f"{type(self).__name__} cannot list its values")

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Deletes values. A missing key is not an error.

        Raises:
            StorageError: some values may still exist.
        """

    @abstractmethod
    def clear(self) -> None:
        """Deletes every value of this store, and no other data on the same server or in the same folder.

        Raises:
            StorageError: some values may still exist.
        """

    @abstractmethod
    def stats(self) -> BackendStats:
        """Returns what the back end holds.

        Raises:
            StorageError: the back end cannot determine it.
        """

    @abstractmethod
    def close(self) -> None:
        """Closes the client; a second call does nothing. Persistent values stay."""


class ReadOnlyBackend(Backend):
    """A store that others fill.

    `put` returns False for every key, as a full store does, so that a tier can write to it without errors. `delete` and
    `clear` raise, because their callers must know that the values still exist.
    """

    refusal: ClassVar[str]
    """Why it deletes nothing, for error messages."""

    @abstractmethod
    def check_open(self) -> None:
        """Checks that it is open.

        Raises:
            StorageError: it is closed (cause `closed`).
        """

    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        self.check_open()
        return [False for _ in zip(keys, buffers, strict=True)]

    def delete(self, keys: Sequence[bytes]) -> None:
        self.check_open()
        if keys:
            raise StorageError("refused", f"{self.refusal}: nothing was deleted")

    def clear(self) -> None:
        self.check_open()
        raise StorageError("refused", f"{self.refusal}: nothing was cleared")


# ---------------------------------------------------------------- specs

RANK = "{rank}"
"""Stands in a spec for the number of a rank. A process with ranks replaces it before it opens the store."""

FOLDERS = ("vendors", "unproven")
"""The packages whose modules are back ends of one scheme each, which is the name of the module."""


SCHEMES: Mapping[str, str] = {
    **{name: f"{__package__}.{name}:BACKEND" for name in ("memory", "file", "peer")},
    **{
        module.name: f"{__package__}.{folder}.{module.name}:BACKEND"
        for folder in FOLDERS
        for module in pkgutil.iter_modules([str(Path(__file__).parent / folder)])
    },
}
"""The class of each scheme."""

WRAPPERS: dict[str, str] = {
    "readonly": "mainstem.storage.wrappers:ReadOnly",
    "tee": "mainstem.storage.wrappers:Tee",
}

SHARED = "mainstem.owner.client:SharedBackend"
"""`shared+spec`: the wrapped back end is opened by another process, the owner."""


def read_fault(expected: int, length: int) -> str | None:
    """Returns why a buffer of this size does not hold a value, "absent" or "length"; None: it does.

    Args:
        length: what `get` returned.
    """
    if length == expected:
        return None
    return "absent" if length == ABSENT else "length"


def open_backend(spec: str, *, existing: bool = False) -> Backend:
    """Opens the back end that a spec names.

    Args:
        spec: `scheme:address?option=value&...`, `module:Class?...`, or `wrapper+spec`. `tee` takes two specs:
            `tee+file:/a,redis://127.0.0.1:6379/0`. `shared+spec` is the store of another process on this machine
            (`mainstem.owner`), which opens it, with that one's options in brackets: `shared(host_bytes=4GiB)+file:/a`.
        existing: open only what is there, as it is: see `Backend.open_existing`.

    Raises:
        BadArgument: no such scheme, module, class or option; or the spec contains `RANK`.
        BackendUnavailable: the client is not installed, the server does not answer, there is no store, or your own
            class failed to open.
    """
    return _find(spec)(existing)


def check_spec(spec: str) -> None:
    """Refuses a spec that no back end, class or wrapper has, without opening anything.

    Raises:
        BadArgument: no such scheme; or the spec contains `RANK`.
    """
    _find(spec)


def _find(spec: str) -> Callable[[bool], Backend]:
    """Returns what opens the store of a spec, given whether it must exist."""
    if RANK in spec:
        raise BadArgument("storage", spec, f"the spec of one store, with the number of a rank in place of {RANK}")
    wrapped = re.fullmatch(r"([a-z]+)(?:\(([^()]*)\))?\+(.+)", spec)
    if wrapped and wrapped[1] == "shared":
        check_spec(wrapped[3])
        options = dict(parse_qsl(wrapped[2] or "", keep_blank_values=True))
        return lambda existing: _opener(_built_in(SHARED), existing)(wrapped[3], options)
    if wrapped and wrapped[1] in WRAPPERS:
        if wrapped[2] is not None:
            raise BadArgument("storage", spec, f"{wrapped[1]}+ without brackets")
        parts = wrapped[3].split(",") if wrapped[1] == "tee" else [wrapped[3]]
        inner = [_find(part) for part in parts]
        return lambda existing: _wrap(_built_in(WRAPPERS[wrapped[1]]), inner, existing)
    address, _, query = spec.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    scheme, colon, rest = address.partition(":")
    if colon and scheme in SCHEMES:
        return lambda existing: _opener(_built_in(SCHEMES[scheme]), existing)(rest, options)
    if PATH.fullmatch(address):
        return lambda existing: _open_own(spec, address, options, existing)
    wrapping, wrappers = re.match(r"([a-z]+)(\([^()]*\))?\+", spec), (*WRAPPERS, "shared")
    if wrapping and wrapping[1] not in wrappers:
        raise BadArgument("storage", spec, one_of(f"{wrapping[1]}+", [f"{name}+" for name in wrappers]))
    raise BadArgument("storage", spec, one_of(f"{scheme}:", [f"{name}:" for name in SCHEMES], ", or module:Class"))


def _opener(kind: type[Backend], existing: bool) -> Callable[[str, Mapping[str, str]], Backend]:
    return kind.open_existing if existing else kind.from_spec


def _wrap(wrapper: Callable[..., Backend], parts: Sequence[Callable[[bool], Backend]], existing: bool) -> Backend:
    with ExitStack() as opened:
        inner: list[Backend] = []
        for part in parts:
            inner.append(part(existing))
            opened.callback(inner[-1].close)
        made = wrapper(*inner)
        opened.pop_all()  # it owns them now
        return made


def _built_in(path: str) -> type[Backend]:
    module, _, name = path.partition(":")
    found: type[Backend] = getattr(importlib.import_module(module), name)
    return found


def _open_own(spec: str, path: str, options: Mapping[str, str], existing: bool) -> Backend:
    """Opens a class of the user's. An error in that class is reported as its own, not as a bug of Mainstem."""
    found = load_object("storage", path)
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BadArgument("storage", spec, f"a subclass of mainstem.storage.Backend; {path} is not")
    if getattr_static(found, "from_spec") is vars(Backend)["from_spec"]:
        raise BadArgument("storage", spec, f"a subclass of mainstem.storage.Backend with from_spec; {path} has none")
    try:
        opened = _opener(found, existing)("", options)
    except MainstemError:
        raise
    except Exception as error:
        why = redacted(f"{type(error).__name__}: {error}")
        raise BackendUnavailable(f"storage {redacted(spec)!r}: from_spec of {path} failed: {why}") from error
    if not isinstance(opened, Backend):
        raise BadArgument("storage", spec, f"a class whose from_spec returns a back end; {path} returned {opened!r}")
    return opened
