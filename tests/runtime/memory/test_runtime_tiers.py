"""What opens an engine's store closes it again if the engine cannot begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, Self

import pytest

from mainstem.errors import BadArgument, MainstemError, RankFailed, StorageError
from mainstem.runtime.memory.tiers import build_tiers
from mainstem.runtime.parallel.ranks import Ranks
from mainstem.settings.engine import HostSize, TierConfig
from mainstem.storage.memory import MemoryBackend

KEY = bytes(32)


class Kept(MemoryBackend):
    """A back end that a test can reach."""

    opened: ClassVar[list[Kept]] = []

    @classmethod
    def from_spec(cls, address: str, options: Mapping[str, str]) -> Self:
        cls.opened.append(kept := cls(1 << 20))
        return kept


class Alone(Kept):
    """One that only one process can open."""

    capabilities = replace(MemoryBackend.capabilities, persistent=True, shared=False)


class Two(Ranks):
    """The first of two ranks; the other one has ended."""

    def share(self, make: Callable[[], Any]) -> Any:
        """Fails as it does when another rank has ended."""
        raise RankFailed("rank 1 has ended")


@pytest.fixture(autouse=True)
def kept() -> Iterator[list[Kept]]:
    yield Kept.opened
    Kept.opened.clear()


def no_memory(size: HostSize, storage: bool) -> Any:
    raise BadArgument("host_bytes", 1, "at least one page")


@pytest.mark.parametrize(
    ("name", "ranks", "error"),
    [("Kept", Two(size=2), RankFailed), ("Alone", Two(size=2), BadArgument), ("Kept", Ranks(), BadArgument)],
)
def test_a_store_is_closed_if_the_engine_cannot_begin(
    kept: list[Kept], name: str, ranks: Ranks, error: type[MainstemError]
) -> None:
    config = TierConfig(HostSize(host_bytes=1 << 20), storage=f"{__name__}:{name}")
    runner, loaded = SimpleNamespace(host_memory=no_memory, computation=()), SimpleNamespace(ranks=ranks)
    with pytest.raises(error):
        build_tiers(config, runner, loaded, 16, lambda: 0.0)  # type: ignore[arg-type]
    (store,) = kept
    with pytest.raises(StorageError, match="closed"):
        store.exists([KEY])
