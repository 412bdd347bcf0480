"""Storage back ends: bytes under keys, with one small interface. Each back end is one file; see `base`."""

from mainstem.storage.base import ABSENT, KEY_BYTES, Backend, BackendStats, Capabilities, open_backend

__all__ = ["ABSENT", "KEY_BYTES", "Backend", "BackendStats", "Capabilities", "open_backend"]
