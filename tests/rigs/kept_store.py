"""A store in this process that outlives those who open it, with injected faults: for engines that take a spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Self

from rigs.hand_driven import FaultyBackend

from mainstem.storage.base import Capabilities


class KeptStore(FaultyBackend):
    """The store of a name: every `from_spec` with this name returns the same one, and closing it changes nothing."""

    capabilities: ClassVar[Capabilities] = Capabilities(
        persistent=True, shared=True, zero_copy=False, evicts=False, overwrites=True
    )
    stores: ClassVar[dict[str, KeptStore]] = {}

    @classmethod
    def named(cls, name: str) -> KeptStore:
        return cls.stores.setdefault(name, cls())

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        """`rigs.kept_store:KeptStore?name=a`."""
        return cls.named(options["name"])  # type: ignore[return-value]

    def close(self) -> None:
        """Keeps the values."""

    def alter(self, byte: int = 200) -> int:
        """Changes a byte of each page's content; returns how many there are."""
        pages = [key for key in self.stored_keys() if len(self.value(key)) > byte]
        for key in pages:
            value = bytearray(self.value(key))
            value[byte] ^= 1
            self.set_value(key, bytes(value))
        return len(pages)
