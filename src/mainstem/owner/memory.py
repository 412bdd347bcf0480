"""Memory that an owner shares with its clients: a file without a name (memfd) that can neither shrink nor grow."""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

from mainstem.errors import BackendUnavailable

_FIXED = 0x0001 | 0x0002 | 0x0004
"""F_SEAL_SEAL, F_SEAL_SHRINK and F_SEAL_GROW of Linux; other systems do not define them."""


def create(size: int) -> int:
    """Creates shared memory. It takes no memory of the machine until it is written.

    Args:
        size: in bytes.

    Returns:
        A file descriptor, which the caller owns.
    """
    descriptor = os.memfd_create("mainstem", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _FIXED)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def attach(descriptor: int, size: int) -> memoryview:
    """Maps shared memory, for reading and writing. The mapping lasts as long as the view and its slices.

    Args:
        descriptor: stays open and with the caller.
        size: what the owner says that it is.

    Raises:
        BackendUnavailable: its size can change, so that access to it could end this process, or is another one.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError:
        seals = 0
    if seals & _FIXED != _FIXED or os.fstat(descriptor).st_size != size:
        raise BackendUnavailable(f"the shared memory of the owner is not sealed, or not of {size} bytes")
    mapping = mmap.mmap(descriptor, size)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)
