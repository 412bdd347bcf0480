"""What a storage back end is: values of bytes under keys of 32 bytes, in batches, in buffers of the caller.

    exists(keys) -> n        how many keys from the first on are there, without a gap
    get(keys, buffers)       values into buffers; put(keys, buffers): buffers into values
    delete(keys)  clear()  stats()  close()

A back end knows no pages, tokens or models, and trusts nobody to read only what was written whole: whoever reads
verifies. It need not keep what it was given, and it may lose everything at any time; what it may not do is to block for
ever (its client gets a time-out) or to raise anything but `StorageError`.

A spec names one: `file:/var/cache/kv?capacity=8GiB`, `redis://127.0.0.1:6379/0`, `memory:`; one of your own is
`package.module:Class?option=value`, where the module is installed or lies in the working directory. Wrappers stand in
front: `readonly+redis://127.0.0.1:6379/0`.
"""

from __future__ import annotations

import importlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self
from urllib.parse import parse_qsl

from mainstem.errors import BackendUnavailable, BadArgument, MainstemError
from mainstem.imports import PATH, load_object

KEY_BYTES = 32
"""Every key is as long as a BLAKE3 digest; in names it is written in lower-case hex."""

ABSENT = -1
"""What `get` says of a key that is not there."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a back end promises.

    Args:
        persistent: what was stored is still there after this process ended.
        shared: other processes see it.
        zero_copy: the client reads and writes the caller's buffers themselves, with no copy of a whole value between.
        evicts: it bounds its size and makes room by itself; otherwise `put` refuses when it is full.
        overwrites: `put` replaces a value that is there; otherwise the first one stays.
    """

    persistent: bool
    shared: bool
    zero_copy: bool
    evicts: bool
    overwrites: bool


@dataclass(frozen=True, slots=True)
class BackendStats:
    """What a back end holds, as far as it can say without a walk; None where it cannot.

    Args:
        entries: values held.
        used_bytes: that they take.
        capacity_bytes: that they may take.
        evicted: values that the back end dropped for room since it was opened.
    """

    entries: int | None = None
    used_bytes: int | None = None
    capacity_bytes: int | None = None
    evicted: int = 0


class Backend(ABC):
    """A store of values. Calls may come from several threads at once; after `close` they raise `StorageError`.

    Buffers are contiguous, writable `memoryview`s of bytes ("B"). They belong to the caller and may be used until the
    call returns, never after; a call that raises may have written to any buffer of a `get`.
    """

    capabilities: ClassVar[Capabilities]

    @classmethod
    @abstractmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """Opens a back end from the parts of a spec, `scheme:address?options`.

        Raises:
            BadArgument: the address or an option is none that it has; names those that it has.
            BackendUnavailable: the client is not installed, or nobody answers.
        """

    def register(self, buffers: Sequence[memoryview]) -> None:
        """Announces memory that later buffers lie in, such as host pools, to clients that must know it (RDMA).

        Raises:
            StorageError: the memory cannot be registered.
        """
        del buffers

    @abstractmethod
    def exists(self, keys: Sequence[bytes]) -> int:
        """How many keys are there, counted from the first up to the first one that is not.

        Raises:
            StorageError: it cannot be told.
        """

    @abstractmethod
    def get(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[int]:
        """Reads values into buffers.

        Returns:
            Of each key the length of the value found, or `ABSENT`. A buffer is filled where that is its own length;
            what a buffer holds otherwise is undefined, and nothing is written behind its end.

        Raises:
            StorageError: nothing can be said of any key.
        """

    @abstractmethod
    def put(self, keys: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        """Stores values. When it returns, others see whole values or none; never a part of one.

        Returns:
            Of each key whether the store has a value now (this one, or the one it had before); False: no room.

        Raises:
            StorageError: nothing can be said of any key; each may be stored or not.
        """

    @abstractmethod
    def delete(self, keys: Sequence[bytes]) -> None:
        """Removes values; those that are not there are no error.

        Raises:
            StorageError: some may still be there.
        """

    @abstractmethod
    def clear(self) -> None:
        """Removes every value of this store, and nothing else that lives beside it.

        Raises:
            StorageError: some may still be there.
        """

    @abstractmethod
    def stats(self) -> BackendStats:
        """What it holds.

        Raises:
            StorageError: it cannot be told.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the client; a second call does nothing. What is persistent stays."""


# ---------------------------------------------------------------- specs

SCHEMES: dict[str, str] = {
    "memory": "mainstem.storage.memory:MemoryBackend",
    "file": "mainstem.storage.file:FileBackend",
    "redis": "mainstem.storage.redis:RedisBackend",
    "s3": "mainstem.storage.s3:S3Backend",
    "mooncake": "mainstem.storage.mooncake:MooncakeBackend",
    "nixl": "mainstem.storage.nixl:NixlBackend",
    "aibrix": "mainstem.storage.aibrix:AIBrixBackend",
    "lmcache": "mainstem.storage.lmcache:LMCacheBackend",
    "hf3fs": "mainstem.storage.hf3fs:HF3FSBackend",
    "simm": "mainstem.storage.simm:SiMMBackend",
    "eic": "mainstem.storage.eic:EICBackend",
    "infinistore": "mainstem.storage.infinistore:InfiniStoreBackend",
}

WRAPPERS: dict[str, str] = {
    "readonly": "mainstem.storage.wrappers:ReadOnly",
    "prefix": "mainstem.storage.wrappers:Prefix",
    "compress": "mainstem.storage.wrappers:Compress",
    "tee": "mainstem.storage.wrappers:Tee",
}


def open_backend(spec: str) -> Backend:
    """Opens the back end that a spec names.

    Args:
        spec: `scheme:address?option=value&...`, `module:Class?...`, or `wrapper+spec`. `tee` takes two specs:
            `tee+file:/a,redis://127.0.0.1:6379/0`. A wrapper's own options are written in brackets:
            `prefix(a1)+file:/a`, `compress(zstd)+file:/a`.

    Raises:
        BadArgument: no such scheme, module, class or option.
        BackendUnavailable: its client is not installed, or nobody answers; or your own class failed to open.
    """
    wrapped = re.fullmatch(r"([a-z]+)(?:\(([^()]*)\))?\+(.+)", spec)
    if wrapped and wrapped[1] in WRAPPERS:
        wrapper = _built_in(WRAPPERS[wrapped[1]])
        parts = wrapped[3].split(",") if wrapped[1] == "tee" else [wrapped[3]]
        return _wrap(wrapper, [open_backend(part) for part in parts], wrapped[2])
    address, _, query = spec.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    scheme, colon, rest = address.partition(":")
    if colon and scheme in SCHEMES:
        return _built_in(SCHEMES[scheme]).from_spec(rest, options)
    if PATH.fullmatch(address):
        return _open_own(spec, address, options)
    allowed = ", ".join(f"{name}:" for name in SCHEMES)
    raise BadArgument("storage", spec, f"one of {allowed}, or module:Class")


def _wrap(wrapper: Callable[..., Backend], inner: list[Backend], argument: str | None) -> Backend:
    try:
        return wrapper(*inner) if argument is None else wrapper(*inner, argument)
    except BaseException:
        for backend in inner:
            backend.close()
        raise


def _built_in(path: str) -> type[Backend]:
    module, _, name = path.partition(":")
    found: type[Backend] = getattr(importlib.import_module(module), name)
    return found


def _open_own(spec: str, path: str, options: Mapping[str, str]) -> Backend:
    """A back end of the user's: his mistakes are named, and are none of ours."""
    found = load_object("storage", path)
    if not (isinstance(found, type) and issubclass(found, Backend)):
        raise BadArgument("storage", spec, f"a subclass of mainstem.storage.Backend; {path} is none")
    if "from_spec" in found.__abstractmethods__:
        raise BadArgument("storage", spec, f"a subclass of mainstem.storage.Backend with from_spec; {path} has none")
    try:
        opened = found.from_spec("", options)
    except MainstemError:
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}"
        raise BackendUnavailable(f"storage {spec!r}: from_spec of {path} failed: {why}") from error
    if not isinstance(opened, Backend):
        raise BadArgument("storage", spec, f"a class whose from_spec returns a back end; {path} returned {opened!r}")
    return opened


def check_options(options: Mapping[str, str], allowed: Sequence[str]) -> None:
    """For `from_spec`: refuses options that a back end does not have.

    Raises:
        BadArgument: names those that it has.
    """
    for name in options:
        if name not in allowed:
            raise BadArgument("storage option", name, "one of " + ", ".join(allowed) if allowed else "none")


_UNITS = {"": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgtp", start=1)
}
_MOST_DIGITS = 30


def parse_bytes(name: str, text: str) -> int:
    """A size as people write it: 500000000, 500MB, 2GiB.

    Raises:
        BadArgument: it is none.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtp]i?|)b?", text.strip().lower())
    if not found or len(found[1]) > _MOST_DIGITS:
        raise BadArgument(name, text, "bytes, or a number with KB, MB, GB, TB, PB, KiB, MiB, GiB, TiB or PiB")
    return int(float(found[1]) * _UNITS[found[2]])


def parse_seconds(name: str, text: str) -> float:
    """A number of seconds above 0.

    Raises:
        BadArgument: it is none.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e9:
        raise BadArgument(name, text, "a number of seconds above 0")
    return seconds
