"""The live page of the cache, for a browser, and the samples that it draws.

    GET /cache          the page: one file, which asks for nothing but the samples
    GET /cache/events   samples as server-sent events, while the client listens
    GET /cache/sample   one of them, for clients without events

A sample reads the tree in slices, each on the engine's thread between two steps, and puts them together elsewhere. It
is taken only while somebody looks, once for all who do, and so often that it takes a twentieth of the time at most.
"""

from __future__ import annotations

import base64
import hashlib
import re
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread
import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from mainstem.cache.namespaces import owner_of
from mainstem.errors import EngineClosed
from mainstem.server.errors import wrong
from mainstem.server.watch.explained import RecentMiss
from mainstem.watch.outline import Nodes, Numbers, left_device, read

if TYPE_CHECKING:
    from mainstem.runtime.engine_core import EngineStats
    from mainstem.server.parts import Parts
    from mainstem.server.watch.explain import Explanations

EVERY_S = 1.0
_LOAD = 20  # a sample that took t is followed by a pause of 20 t
_MOST_DRAWN = 2000  # nodes; the others are summed up where they belong
_MOST_TENANTS = 20
_MOST_WATCHERS = 16
_TICKS = 600  # looks whose time is remembered

AGES_S = (1.0, 10.0, 60.0, 600.0, 3600.0)
"""The bounds between classes of idle times."""


class TenantSample(Struct):
    """What one tenant has; in tokens."""

    name: str
    nodes: int
    device: int
    host: int


class TreeSample(Struct):
    """The largest nodes, in rows of `columns`; `top`: the node whose subtree this is, 0 for all.

    `parent`: the index of its row, -1 for none. `*_below`: of it and all below it. `rest_*`: of what is below it and
    has no row. `idle_s`: since its last use; since the server was first looked at, if that is later. `device`,
    `host`: 0 absent, 1 in flight, 2 present. `flags`: 2 demoted, 4 retained. `tenant`: the index in `owners`.
    """

    top: int
    nodes: int
    tokens: int
    owners: list[str]
    columns: list[str]
    rows: list[list[int]]


class LeftSample(Struct):
    """What left the device since the last sample: pages by their idle times, in classes that part at `edges_s`."""

    edges_s: list[float]
    by_age: list[int]
    median_s: float | None


class LiveSample(Struct):
    """One sample. Counters are since the start; `cached_tokens` by tier, `missed_tokens` by cause, where it is known.

    `regret_tokens`: those that had been evicted. `requests`: the latest, where they are explained.

    `pools`: of each tier and component; locked and retained pages are cached ones. `at_s`: since the epoch. `every_s`:
    until the next one. `took_s`: to take it. `transfers`: pages under way, by kind.
    """

    at_s: float
    every_s: float
    took_s: float
    model: str
    page_size: int
    running: int
    waiting: int
    prompt_tokens: int
    generated_tokens: int
    cached_tokens: dict[str, int]
    missed_tokens: dict[str, int]
    regret_tokens: int
    evicted_pages: int
    moved_pages: dict[str, int]
    late_pages: int
    transfers: dict[str, int]
    pools: list[dict[str, str | int]]
    tenants: list[TenantSample]
    left: LeftSample
    requests: list[RecentMiss]
    tree: TreeSample


@cache
def page() -> str:
    """Returns the page."""
    return files("mainstem.server").joinpath("live.html").read_text(encoding="utf-8")


@cache
def policy() -> str:
    """Returns the Content-Security-Policy of the page: its own script and style, and this server, nothing else."""

    def sources(tag: str) -> str:
        parts = re.findall(rf"<{tag}>(.*?)</{tag}>", page(), re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in parts)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    rules = (
        "default-src 'none'",
        f"script-src {sources('script')}",
        f"style-src {sources('style')}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
    return "; ".join(rules)


def node_of(query: Mapping[str, str]) -> int:
    """Returns the node that a client wants to see the subtree of; 0: all.

    Raises:
        ApiError: 400; it is no number.
    """
    text = query.get("node", "0")
    if not (text.isascii() and text.isdecimal() and len(text) <= 10):
        raise wrong("node", "must be the id of a node")
    return int(text)


@dataclass(frozen=True)
class _Look:
    """One look at the tree and the counters."""

    at_s: float
    took_s: float
    nodes: Nodes
    stats: EngineStats
    regret_tokens: int
    left: LeftSample


class Live:
    """Takes the samples of one server.

    Args:
        parts: of the server.
        explanations: of the latest requests.
    """

    def __init__(self, parts: Parts, explanations: Explanations) -> None:
        self._engine, self._reuse, self._model = parts.engine, parts.metrics.reuse, parts.preparation.names[0]
        self._name_of, self._clock, self._now = parts.name_of, parts.clock, parts.now
        self._explanations, self._page_size = explanations, parts.engine.config.page_size
        self._taking = anyio.Lock()
        self._look: _Look | None = None
        self._looked_s = 0.0
        self._encoded: dict[int, bytes] = {}  # by the top node, of this look
        self._ticks: list[tuple[int, float]] = []  # the tree's counter at each look, and when
        self._watchers = 0

    async def sample(self, node: int = 0) -> bytes:
        """Returns a sample as JSON. One that is younger than its pause is returned again.

        Args:
            node: of which the subtree is shown; 0: all.

        Raises:
            EngineClosed: the engine is closed or has failed.
        """
        async with self._taking:
            if self._look is None or self._clock() - self._looked_s >= self._pause(self._look):
                look = await anyio.to_thread.run_sync(self._take, self._look)
                self._look, self._looked_s, self._encoded = look, self._clock(), {}
            if node not in self._encoded:
                self._encoded[node] = await anyio.to_thread.run_sync(self._describe, self._look, node)
            return self._encoded[node]

    async def events(self, node: int, ends: Callable[[], bool]) -> AsyncIterator[bytes]:
        """Yields samples as server-sent events, until `ends` or the engine does; one event `full` if too many look."""
        if self._watchers >= _MOST_WATCHERS:
            yield b"event: full\ndata: {}\n\n"
            return
        self._watchers += 1
        try:
            yield b"retry: 3000\n\n"
            while not ends():
                yield b"data: " + await self.sample(node) + b"\n\n"
                assert self._look is not None
                await anyio.sleep(self._pause(self._look))
        except EngineClosed:
            return
        finally:
            self._watchers -= 1

    def _pause(self, look: _Look) -> float:
        return max(EVERY_S, _LOAD * look.took_s)

    def _take(self, before: _Look | None) -> _Look:
        began_s = self._clock()
        nodes = read(self._engine.survey)
        at_s = self._now()
        tick = int(max(nodes.column("accessed").max(initial=0), nodes.column("created").max(initial=0)))
        self.looked(tick, at_s)
        _ = nodes.below  # summed up here, once for all who look
        left = self._left(before, nodes, at_s)
        stats, regret = self._engine.stats(), self._reuse.regret_tokens
        return _Look(at_s, self._clock() - began_s, nodes, stats, regret, left)

    def looked(self, tick: int, at_s: float) -> None:
        """Notes what the tree's counter was at a time."""
        if not self._ticks or tick > self._ticks[-1][0]:
            self._ticks.append((tick, at_s))
            del self._ticks[:-_TICKS]

    def _idle_s(self, ticks: Numbers, at_s: float) -> NDArray[np.float64]:
        """Returns how long ago ticks were; at least."""
        known, times = zip(*self._ticks, strict=True)
        idle_s: NDArray[np.float64] = np.maximum(at_s - np.interp(ticks, known, times), 0.0)
        return idle_s

    def _left(self, before: _Look | None, nodes: Nodes, at_s: float) -> LeftSample:
        pages = [0] * (len(AGES_S) + 1)
        if before is None:
            return LeftSample(list(AGES_S), pages, None)
        ticks, lost = left_device(before.nodes, nodes)
        idle_s = self._idle_s(ticks, at_s)
        for age_s, count in zip(idle_s, lost, strict=True):
            pages[bisect_right(AGES_S, age_s)] += int(count)
        order = np.argsort(idle_s)
        half = int(np.searchsorted(np.cumsum(lost[order]), lost.sum() / 2)) if len(lost) else 0
        return LeftSample(list(AGES_S), pages, float(idle_s[order][half]) if len(lost) else None)

    def _describe(self, look: _Look, node: int) -> bytes:
        stats, totals, tiers = look.stats, look.stats.totals, look.stats.tiers
        below = look.nodes.below
        flying = int(below["flight"][np.flatnonzero(look.nodes.column("parent") == 0)].sum()) if len(below) else 0
        owners, tenants, index = self._tenants(look.nodes)
        return msgspec.json.encode(
            LiveSample(
                at_s=look.at_s,
                every_s=self._pause(look),
                took_s=look.took_s,
                model=self._model,
                page_size=self._page_size,
                running=stats.running,
                waiting=stats.waiting,
                prompt_tokens=totals.prompt_tokens,
                generated_tokens=totals.generated_tokens,
                cached_tokens={
                    "device": totals.device_tokens,
                    "host": totals.host_tokens,
                    "storage": totals.storage_tokens,
                },
                missed_tokens=totals.missed,
                regret_tokens=look.regret_tokens,
                evicted_pages=stats.cache.tree.evicted_pages,
                moved_pages={}
                if tiers is None
                else {
                    "device to host": tiers.backed_up,
                    "host to device": tiers.loaded,
                    "storage to host": tiers.prefetched,
                    "host to storage": tiers.stored,
                },
                late_pages=0 if tiers is None else sum(tiers.late.values()),
                transfers={"in_flight": flying, "to_storage": 0 if tiers is None else tiers.queued},
                pools=_pools(stats),
                tenants=tenants,
                left=look.left,
                requests=self._explanations.recent(),
                tree=self._tree(look, node, owners, index),
            )
        )

    def _tenants(self, nodes: Nodes) -> tuple[list[str], list[TenantSample], dict[int, int]]:
        """Returns the names of owners, samples of the largest ones, and the index of an owner by the row of a root."""
        by_owner: dict[bytes, list[int]] = {}
        for place, name in nodes.names.items():
            by_owner.setdefault(owner_of(name), []).append(int(nodes.index[place]))
        names = [self._name_of(owner) for owner in by_owner]
        size = self._page_size
        found = [
            TenantSample(
                name,
                int(nodes.below["nodes"][rows].sum()),
                int(nodes.below["device"][rows].sum()) * size,
                int(nodes.below["host"][rows].sum()) * size,
            )
            for name, rows in zip(names, by_owner.values(), strict=True)
        ]
        found.sort(key=lambda tenant: tenant.device + tenant.host, reverse=True)
        index = {row: at for at, rows in enumerate(by_owner.values()) for row in rows}
        return names, found[:_MOST_TENANTS], index

    def _tree(self, look: _Look, node: int, owners: list[str], index: Mapping[int, int]) -> TreeSample:
        nodes, size = look.nodes, self._page_size
        chosen = nodes.largest(_MOST_DRAWN, node or None)
        if node and not len(chosen):
            node, chosen = 0, nodes.largest(_MOST_DRAWN)  # it was evicted
        row_of = np.full(len(nodes.rows) + 1, -1, np.int64)
        row_of[chosen] = np.arange(len(chosen))
        above = nodes.above[chosen]
        parents = np.where(above == chosen, -1, row_of[above])
        rest, below, root = nodes.rest(chosen), nodes.below, nodes.reached[0]
        tenant = [index.get(int(at), 0) for at in root[chosen]]
        used = sorted({*tenant})
        named = {at: new for new, at in enumerate(used)}
        columns = {
            "id": nodes.column("place")[chosen],
            "parent": parents,
            "start": nodes.column("start")[chosen] * size,
            "tokens": nodes.column("pages")[chosen] * size,
            "nodes_below": below["nodes"][chosen],
            "tokens_below": below["pages"][chosen] * size,
            "device_below": below["device"][chosen] * size,
            "host_below": below["host"][chosen] * size,
            "rest_nodes": rest["nodes"],
            "rest_tokens": rest["pages"] * size,
            "idle_s": self._idle_s(nodes.column("accessed")[chosen], look.at_s).astype(np.int64),
            "idle_below_s": self._idle_s(below["accessed"][chosen], look.at_s).astype(np.int64),
            "hits": nodes.column("hits")[chosen],
            "device": nodes.column("device")[chosen],
            "host": nodes.column("host")[chosen],
            "locks": nodes.column("locks")[chosen],
            "flags": nodes.column("flags")[chosen],
            "tenant": np.array([named[at] for at in tenant], np.int64),
        }
        rows = np.stack([*columns.values()], axis=1).tolist()
        real = nodes.column("pages") > 0
        shown = [owners[at] for at in used] if owners else []
        return TreeSample(node, int(real.sum()), int(nodes.column("pages").sum()) * size, shown, list(columns), rows)


def _pools(stats: EngineStats) -> list[dict[str, str | int]]:
    cache, host = stats.cache, {} if stats.tiers is None else stats.tiers.host_pools
    tiers = (("device", cache.pools, cache.retention.device), ("host", host, cache.retention.host))
    return [
        {"tier": tier, "component": name, **asdict(pool), "retained": retained[name]}
        for tier, pools, retained in tiers
        for name, pool in pools.items()
    ]
