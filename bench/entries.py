"""The systems of the index benchmark by name: their labels in tables, and their classes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from bench.systems import System


@dataclass(frozen=True, slots=True)
class Entry:
    """A system.

    Attributes:
        label: its name in tables; `short` is its name above a column.
        place: module and name of its class.
        peer: whether it runs in the interpreter with the peers.
        page_sizes: page sizes that make sense for it.
        small: whether its largest tree in the scenarios has a tenth of the size.
        note: what its figures do not include.
    """

    label: str
    short: str
    place: str
    peer: bool = False
    page_sizes: tuple[int, ...] = (1, 16, 64)
    small: bool = False
    note: str = ""

    def find(self) -> type[System]:
        """Returns the class. Raises ImportError."""
        module, _, name = self.place.partition(":")
        found: type[System] = getattr(import_module(module), name)
        return found


HASHED = (16, 64)
"""Page sizes of systems that hash each page: nobody uses them with a hash for each token."""

INDEX_ONLY = "index only: no pool, no eviction"

SYSTEMS = {
    "mainstem": Entry("Mainstem, leases", "leases", "bench.systems:MainstemLease"),
    "mainstem-tree": Entry("Mainstem, Tree and Pool", "Tree, Pool", "bench.systems:MainstemTree"),
    "python": Entry("plain Python", "plain\nPython", "bench.systems:PythonRadix", small=True),
    "dict": Entry(
        "dict of block hashes", "dict of\nhashes", "bench.systems:BlockDict", peer=True, page_sizes=HASHED, small=True
    ),  # not a peer, but xxhash is in the interpreter with the peers
    "sglang-rust": Entry("SGLang, Rust core", "SGLang\nRust", "bench.peers:SGLangRust", peer=True, small=True),
    "sglang-python": Entry(
        "SGLang, RadixCache", "SGLang\nRadixCache", "bench.peers:SGLangPython", peer=True, small=True
    ),
    "vllm": Entry("vLLM, sha256", "vLLM", "bench.peers:VLLM", peer=True, page_sizes=HASHED, small=True),
    "dynamo": Entry(
        "Dynamo, RadixTree", "Dynamo", "bench.peers:Dynamo",
        peer=True, page_sizes=HASHED, small=True, note=INDEX_ONLY,
    ),
}  # fmt: skip
