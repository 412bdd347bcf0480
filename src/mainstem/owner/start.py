"""The place of the owner of a store on this machine, and how a client starts it.

    NAME.sock          its socket: NAME is a digest of the store's spec
    NAME.sock.lock     locked (flock) from before it starts until it has ended, so there is at most one
    NAME.sock.log      what it logs, if a client started it

All in a folder that only this user can open: `$XDG_RUNTIME_DIR/mainstem`, or `/tmp/mainstem-UID`. A client that finds
nobody takes the lock, and passes it on to the owner that it starts. So of several clients one starts it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import select
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from mainstem.errors import BackendUnavailable, BadArgument, redacted
from mainstem.settings.owner import OwnerConfig

READY = b"ready"

_LONGEST_PATH = 107  # of a Unix socket
_LONGEST_SPEC = 4096
_DETACH = "import os, sys\nif os.fork():\n    os._exit(0)\nos.execv(sys.argv[1], sys.argv[1:])"
"""Lets the owner outlive its starter without becoming its child: nobody has to wait for it."""


def absolute(spec: str) -> str:
    """Returns the spec with the real paths of `file:` stores, so that one folder has one name."""
    return re.sub(r"((?:^|[+,])file:)([^?,]+)", lambda match: match[1] + os.path.realpath(match[2]), spec)


def default_folder() -> Path:
    """Returns the folder of the sockets of this user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "mainstem" if runtime else Path(f"/tmp/mainstem-{os.getuid()}")


@dataclass(frozen=True, slots=True)
class Place:
    """The place of the owner of one store.

    Args:
        spec: the store, see `absolute`.
        path: of the socket.
    """

    spec: str
    path: Path

    @classmethod
    def of(cls, spec: str, socket: str | None = None) -> Self:
        """Finds the place of a store, and makes its folder if it is the default one.

        Raises:
            BadArgument: the spec is too long, or the path is for a socket.
            BackendUnavailable: the folder does not exist, or others can open it; or this is not Linux.
        """
        if not hasattr(os, "memfd_create"):
            raise BackendUnavailable("shared stores need Linux: memory without a name that cannot shrink")
        spec = absolute(spec)
        if len(spec.encode("utf-8", "surrogateescape")) > _LONGEST_SPEC:
            raise BadArgument("storage", spec, f"at most {_LONGEST_SPEC} bytes long")
        if socket is None:
            name = hashlib.blake2b(spec.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
            path = default_folder() / f"{name}.sock"
            try:
                path.parent.mkdir(mode=0o700, exist_ok=True)
            except OSError as error:
                raise BackendUnavailable(f"the folder of a socket, {path.parent}: {error.strerror}") from error
        else:
            path = Path(os.path.abspath(socket))
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise BadArgument("socket", str(path), f"a path of at most {_LONGEST_PATH} bytes")
        _check_folder(path.parent)
        return cls(spec, path)

    @property
    def shown(self) -> str:
        """Returns the spec without passwords."""
        return redacted(self.spec)

    @property
    def log(self) -> Path:
        """Returns where an owner logs that a client started."""
        return Path(f"{self.path}.log")

    def lock(self) -> int | None:
        """Takes the lock. Returns its file descriptor, which the caller owns; None: there is an owner."""
        descriptor = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor


def running() -> Iterator[Path]:
    """Yields the sockets in the default folder; some may be left by owners that were killed.

    Raises:
        BackendUnavailable: others can open the folder.
    """
    folder = default_folder()
    if folder.exists():
        _check_folder(folder)
        yield from sorted(folder.glob("*.sock"))


def launch(place: Place, config: OwnerConfig, lock: int, timeout_s: float) -> None:
    """Starts an owner as a process of its own, and waits until it can be reached.

    Args:
        config: what it has.
        lock: the lock of the place; the owner keeps a copy.
        timeout_s: how long to wait. An owner that takes longer goes on starting.

    Raises:
        BackendUnavailable: it did not start; the message says why.
    """
    reader, writer = os.pipe()
    try:
        try:
            _spawn(place, config, lock, writer)
        finally:
            os.close(writer)
        answer = _read_all(reader, timeout_s)
    except (OSError, subprocess.SubprocessError) as error:
        raise BackendUnavailable(f"the owner of {place.shown} cannot be started: {error}") from error
    finally:
        os.close(reader)
    if answer is None:
        raise BackendUnavailable(f"the owner of {place.shown} is not ready after {timeout_s:g} s, see {place.log}")
    if answer != READY:
        why = answer.decode("utf-8", "replace") or f"it ended while starting, see {place.log}"
        raise BackendUnavailable(f"the owner of {place.shown} cannot be started: {why}")


def _spawn(place: Place, config: OwnerConfig, lock: int, ready: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    log = os.open(place.log, flags, 0o600)
    own = {**asdict(config), "socket": str(place.path)}
    order = json.dumps({"spec": place.spec, "config": own, "lock": lock, "ready": ready})
    try:
        subprocess.run(  # the spec may hold a password, and everybody can read the arguments of a process
            [sys.executable, "-I", "-S", "-c", _DETACH, sys.executable, "-m", "mainstem.owner"],
            check=True, pass_fds=(lock, ready), input=order.encode(), stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    finally:
        os.close(log)


def _read_all(reader: int, timeout_s: float) -> bytes | None:
    """Reads up to the end. Returns None if that takes too long."""
    end_s = time.monotonic() + timeout_s
    waiter = select.poll()  # files may have numbers that `select` cannot take
    waiter.register(reader, select.POLLIN)
    data = b""
    while True:
        if not waiter.poll(max(0.0, end_s - time.monotonic()) * 1000):
            return None
        piece = os.read(reader, 1 << 16)
        if not piece:
            return data
        data += piece


def _check_folder(folder: Path) -> None:
    try:
        status = folder.lstat()
    except OSError as error:
        raise BackendUnavailable(f"the folder of a socket, {folder}: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise BackendUnavailable(f"the folder of a socket, {folder}, must be this user's alone (mode 0700)")
