"""Files, addresses and memory of this machine. Commands check these before they begin something that takes long.

Each error is a `BadArgument` that names the setting, says what is wrong with its value, and what would do.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from mainstem.errors import BadArgument


def check_output(name: str, path: Path, *others: str | Path) -> None:
    """Checks that a file can be written, before hours are spent on its contents.

    Args:
        name: the setting.
        path: the file.
        others: files that it would overwrite, and therefore must not be.

    Raises:
        BadArgument: it cannot be written, or is one of the others.
    """
    if path.is_dir():
        raise BadArgument(name, str(path), "a file, not a folder")
    if not path.parent.is_dir():
        raise BadArgument(name, str(path), f"a file in a folder that exists; {path.parent} does not")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise BadArgument(name, str(path), "a file that may be written")
    if any(path.resolve() == Path(other).resolve() for other in others):
        raise BadArgument(name, str(path), "a file that is neither read nor another result")


def listen(host: str, port: int) -> socket.socket:
    """Binds an address. Connections are refused until the socket listens.

    Args:
        host: a name or an address of this machine; empty or *: all of its addresses.
        port: 0 takes a free one.

    Raises:
        BadArgument: the host is none of this machine, or the port is taken or not allowed.
    """
    plain = "" if host == "*" else host.strip("[]")
    listener = socket.socket(socket.AF_INET6 if ":" in plain else socket.AF_INET)
    with ExitStack() as undo:
        undo.callback(listener.close)
        # A port whose old connections are still closing counts as free.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((plain, port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise BadArgument("port", port, f"free: another program listens at {host} port {port}") from error
            if error.errno == errno.EACCES:
                raise BadArgument("port", port, f"1024 or more for this user: {error.strerror}") from error
            ours = "an address of this machine, such as 127.0.0.1, or 0.0.0.0 for all of its addresses"
            raise BadArgument("host", host, f"{ours}: {error.strerror}") from error
        undo.pop_all()
    return listener


class Memory(NamedTuple):
    """Bytes of memory of this process's machine or control group: in all, and available without swapping."""

    total: int
    free: int


def machine_memory(root: Path = Path("/")) -> Memory:
    """Returns the memory of this machine, within the limit of this process's control group.

    Args:
        root: the folder that holds /proc and /sys.

    Raises:
        OSError: the system does not report it.
    """
    lines = (line.split() for line in (root / "proc/meminfo").read_text().splitlines())
    sizes = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1}
    try:
        total, free = sizes["MemTotal:"], sizes["MemAvailable:"]
    except KeyError as error:
        raise OSError(f"/proc/meminfo has no {str(error.args[0]).rstrip(':')}") from error
    group = root / "sys/fs/cgroup"
    limit_file, used_file = group / "memory.max", group / "memory.current"
    if limit_file.exists() and used_file.exists() and (limit := limit_file.read_text().strip()) != "max":
        total, free = min(total, int(limit)), min(free, max(int(limit) - int(used_file.read_text()), 0))
    return Memory(total, free)
