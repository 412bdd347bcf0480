"""The systems of the index benchmark by name: what each is called in the tables, and where its class is."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

from bench.systems import System


@dataclass(frozen=True, slots=True)
class Entry:
    """A system.

    Attributes:
        label: its name in tables; `short` its name above a column.
        place: module and name of its class.
        peer: whether it runs in the interpreter that has the peers.
        page_sizes: those that make sense for it.
        small: whether the largest tree of the scenarios is a tenth for it.
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
        """The class. Raises ImportError."""
        module, _, name = self.place.partition(":")
        found: type[System] = getattr(import_module(module), name)
        return found


HASHED = (16, 64)
"""Page sizes of systems that hash each page: a hash for each token is not how they are used."""

INDEX_ONLY = "index only: no pool, no eviction"

SYSTEMS = {
    "mainstem": Entry("Mainstem, leases", "leases", "bench.systems:MainstemLease"),
    "mainstem-tree": Entry("Mainstem, Tree and Pool", "Tree, Pool", "bench.systems:MainstemTree"),
    "python": Entry("plain Python", "plain\nPython", "bench.systems:PythonRadix", small=True),
    "dict": Entry(
        "dict of block hashes", "dict of\nhashes", "bench.systems:BlockDict", peer=True, page_sizes=HASHED, small=True
    ),  # no peer, but theirs is the interpreter that has xxhash
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
