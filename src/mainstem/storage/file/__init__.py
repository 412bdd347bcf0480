"""A store on a local disk, without a server: values in one preallocated file, and a small log that locates them.

    root/  lock     held by the one process that has the store open
           values   [ value | value | free ............ | value | free ]     in grains of 4 KiB; grows in steps
           index    [ record | record | record ]                             append only; rewritten when half is dead

    put:  destroy old values -> write values -> sync values -> append records -> sync index -> announce to readers
    get:  look up -> read into the caller's buffer -> compare the digest of that buffer with the one in the record

    backend   FileBackend: the order of these steps, and what a failure leaves to do
    catalog   in memory: what is stored where, what was used when, what leaves to make room
    values    the file `values`: to and from buffers, with digests
    index     the file `index`: records
    space     places in `values`, and its free parts
    disk      the folder, its files, and the calls of the file system

Three rules keep the store correct after a kill or a power loss at any instruction, and after later damage:

1. A value counts only if its 128-bit digest and the checksum of its record verify. Otherwise it is a miss and dropped.
   So torn, lost or misdirected writes are harmless, and so is a reader that finds the next value in an extent.
2. A value that leaves the store (deleted, replaced, evicted) is destroyed in the same sync as the next change, before
   that change is announced: another value takes its extent, or junk overwrites its first grain. So no older state of
   the index can bring an old value back, unless the same bytes are written there again.
3. A write that started and failed counts as written: its place in the index is not reused, its extents are destroyed.

The store does not know what a value means. It does not protect against someone who can write to its folder and compute
digests: against that, the caller must verify a keyed seal of its own.
"""

from mainstem.storage.file.backend import FileBackend
from mainstem.storage.file.disk import FileSystem

BACKEND = FileBackend

__all__ = ["BACKEND", "FileBackend", "FileSystem"]
