"""The hashes of a store: the digests of values, and the checksums of records."""

from __future__ import annotations

from collections.abc import Callable

from mainstem.imports import needs

HELD_BYTES = 64 << 10
"""Above this size xxhash releases the GIL, which a busy thread then holds for 5 ms: as long as a thousand digests."""


def hashes() -> tuple[Callable[[memoryview], bytes], Callable[[bytes | memoryview, int], int]]:
    """Returns the digest function of values and the checksum function of records, which takes a seed.

    Raises:
        BackendUnavailable: xxhash is not installed.
    """
    with needs("xxhash", "the file store needs xxhash: pip install 'mainstem[file]'"):
        from xxhash import xxh3_64_intdigest, xxh3_128

    def digest(value: memoryview) -> bytes:
        state = xxh3_128()
        for at in range(0, len(value), HELD_BYTES):
            state.update(value[at : at + HELD_BYTES])
        return state.digest()

    return digest, xxh3_64_intdigest
