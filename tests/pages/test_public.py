"""The public names, and that each of them is documented."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
from types import ModuleType

import mainstem
from mainstem.errors import BackendUnavailable
from mainstem.fleet.place import FleetError
from mainstem.tiers.pending import Pending

PUBLIC = [
    "BackendUnavailable", "BadArgument", "BadTokens", "BigramKeys", "CacheStats", "Chunked", "Component", "Coordinate",
    "CorruptTree", "Full", "HashKeys", "HostPolicy", "HostTier", "Identity", "Image", "Inserted", "KeyKind", "Lease",
    "LeaseClosed", "LeaseCounters", "Load", "MainstemError", "Match", "Namespace", "NodeStats", "NodeView", "NotLocked",
    "OutOfPages", "Policy", "Pool", "PoolStats", "Prefetch", "PrefixCache", "Sealer", "Size", "Spliced", "StaleHandle",
    "State", "StorageConfig", "StorageError", "Store", "Text", "TierStats", "Tiers", "TokenKeys", "Tree", "TreeStats",
    "TypedKeys", "Window", "WrongOwner", "__version__", "hash_blocks", "order",
]  # fmt: skip

PROTOCOLS = (mainstem.KeyKind, Pending)  # their docstrings hold for the methods of classes that have them


def modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(mainstem.__path__, "mainstem.")
    return [module for m in found if not m.name.endswith("__main__") and (module := load(m.name))]


def load(name: str) -> ModuleType | None:
    """Returns a module; None if it belongs to an engine, or to Ray, that is not installed: its own tests check it."""
    try:
        return importlib.import_module(name)
    except (BackendUnavailable, FleetError):
        assert name.startswith("mainstem.integrations.") or name == "mainstem.fleet.serving", name
        return None


def undocumented(module: ModuleType) -> list[str]:
    """Every module, class and function says what it is; so does every method of what `mainstem` exports."""
    missing = [] if module.__doc__ else [module.__name__]
    for name, member in inspect.getmembers(module, lambda m: inspect.isclass(m) or inspect.isfunction(m)):
        if name.startswith("_") or member.__module__ != module.__name__:
            continue
        missing += [] if member.__doc__ else [f"{module.__name__}.{name}"]
        exported = inspect.isclass(member) and getattr(mainstem, name, None) is member
        for attribute, value in vars(member).items() if exported else ():
            plain = value.fget if isinstance(value, property) else value
            inherited = any(attribute in vars(base) for base in (*member.__mro__[1:], *PROTOCOLS))
            if inspect.isfunction(plain) and not attribute.startswith("_") and not plain.__doc__ and not inherited:
                missing.append(f"{module.__name__}.{name}.{attribute}")
    return missing


def test_the_public_names_are_these() -> None:
    assert sorted(mainstem.__all__) == PUBLIC


def test_everything_public_is_documented() -> None:
    assert [name for module in modules() for name in undocumented(module)] == []


def test_the_examples_in_docstrings_run() -> None:
    from mainstem.cache import prefix_cache as cache
    from mainstem.cache import tree

    for module in (cache, tree):
        results = doctest.testmod(module)
        assert results.attempted > 0
        assert results.failed == 0


def test_the_interface_of_the_cache_stays_small() -> None:
    public = [name for name in vars(mainstem.PrefixCache) if not name.startswith("_")]
    assert len(public) <= 12
