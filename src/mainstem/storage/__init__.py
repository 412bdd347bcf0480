"""Storage back ends: bytes under keys, with one small interface. See `base`."""

from mainstem.storage.base import ABSENT, KEY_BYTES, Backend, BackendStats, Capabilities, Listed, open_backend

__all__ = ["ABSENT", "KEY_BYTES", "Backend", "BackendStats", "Capabilities", "Listed", "open_backend"]
