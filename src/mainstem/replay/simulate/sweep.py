"""Replays a trace through a cache of a given size, policy and set of tiers.

Nothing here imitates a cache. Real trees serve the requests, one after another, with their own policies, driven by a
loop in the core (core/csrc/replay/replay.h). It looks up the whole path of a request; blocks before the first missing
one are hits. It then stores the missing blocks and trims each tier to its capacity, leaf by leaf, even of the same
request.
"""

from __future__ import annotations

import copy
import math
import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from fractions import Fraction
from itertools import pairwise, product
from threading import Event, Lock

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.policies import Policy, find_policy
from mainstem.errors import BadArgument, check_integer
from mainstem.replay.simulate import optimum
from mainstem.replay.simulate.caches import Caches
from mainstem.replay.simulate.first_token import Flops
from mainstem.replay.simulate.rows import Row, Tally
from mainstem.replay.trace import Trace
from mainstem.settings.replay import MAX_BLOCKS, ONE_CACHE, Setup
from mainstem.units import parse_bytes

Progress = Callable[[int, int], None]
"""Called with the number of requests served and their total."""

TIERS = ("device", "host", "storage")
_EXAMPLES = "5%, 1000 (blocks), 2Mtok or 10GB"
_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def tiers_of(setup: Setup, capacity_blocks: int) -> list[tuple[str, int]]:
    """Returns the names and capacities of tiers, from the device down.

    Raises:
        BadArgument: a tier is smaller than the one above, whose blocks it must hold.
    """
    check_integer("capacity_blocks", capacity_blocks, 1, MAX_BLOCKS)
    sizes = zip(TIERS, (capacity_blocks, setup.host_blocks, setup.storage_blocks), strict=True)
    tiers = [(name, size) for name, size in sizes if size is not None]
    for (above, larger), (name, size) in pairwise(tiers):
        if size < larger:
            raise BadArgument("tiers", f"{name}={size}", f"at least as many blocks as {above}: {larger}")
    return tiers


def replay(
    trace: Trace,
    policy: str | Policy | optimum.Optimum,
    capacity_blocks: int,
    *,
    setup: Setup = ONE_CACHE,
    flops: Flops | None = None,
    bytes_per_token: float | None = None,
    workers: int = 1,
    progress: Progress | None = None,
) -> Row:
    """Replays a trace with one policy at one capacity.

    Args:
        trace: the trace, which is read once.
        policy: see `mainstem.cache.policies.find_policy`; or "opt", the offline optimum, or that of this trace. With
            several replicas, each has a copy of an object.
        capacity_blocks: capacity of the device.
        setup: lower tiers, replicas, time to live, rates.
        flops: cost of prefill, to count the FLOPs saved, and the time to the first token by position.
        bytes_per_token: bytes of a token, to count bytes moved.
        workers: threads among which replicas are divided.
        progress: called now and then.

    Raises:
        BadArgument: there is no such policy, a capacity is out of range, or "opt" does not support the setup.

    >>> from mainstem.replay.trace import Batch
    >>> trace = Trace.of(Batch.of([[1, 2], [1, 3], [1, 2]]))
    >>> replay(trace, "lru", 3).block_hits
    3
    """
    check_policy(optimum.NAME if isinstance(policy, optimum.Optimum) else policy, setup)
    policy = optimum.Optimum(trace) if policy == optimum.NAME else policy
    if isinstance(policy, optimum.Optimum):
        row = policy.replay(capacity_blocks, setup=setup, flops=flops)
        if progress is not None:
            progress(len(trace), len(trace))
        return row
    tiers = tiers_of(setup, capacity_blocks)
    tally = Tally(trace, tiers, setup, flops)
    done = 0
    with Caches(policy, tiers, setup, trace.block_size, workers=workers) as caches:
        for batch in trace.batches():
            served = caches.feed(batch)
            tally.add(batch, served.hits, served.replica)
            done += len(batch)
            if progress is not None:
                progress(done, len(trace))
    return tally.row(
        caches.policy,
        caches.counts(),
        routing=setup.routing if setup.replicas > 1 else "",
        ttl_s=setup.ttl,
        block_bytes=None if bytes_per_token is None else bytes_per_token * trace.block_size,
    )


def hit_blocks(
    trace: Trace, policy: str | Policy, capacity_blocks: int, *, setup: Setup = ONE_CACHE, workers: int = 1
) -> NDArray[np.int64]:
    """Returns [requests] blocks that each request hits on any tier; otherwise like `replay`."""
    check_policy(policy, setup)
    if policy == optimum.NAME:
        return optimum.Optimum(trace).hit_blocks(capacity_blocks)
    with Caches(policy, tiers_of(setup, capacity_blocks), setup, trace.block_size, workers=workers) as caches:
        found: NDArray[np.int64] = caches.run(trace).hits.sum(axis=1, dtype=np.int64)
    return found


def sweep(
    trace: Trace,
    policies: Sequence[str | Policy],
    capacities: Sequence[int],
    *,
    setup: Setup = ONE_CACHE,
    flops: Flops | None = None,
    bytes_per_token: float | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
) -> list[Row]:
    """Replays each policy at each capacity; rows are ordered by policy. Threads use all CPU cores, because the core's
    loop releases the GIL. Only policies written in Python wait for each other.

    Args:
        policies: as in `replay`; an object is copied for each capacity.
        capacities: capacities of the device in blocks.
        workers: threads; None: one per CPU core.
        progress: called now and then, from any thread, but never concurrently.

    Raises:
        BadArgument: see `replay`.
    """
    workers = os.cpu_count() or 1 if workers is None else check_integer("workers", workers, 1, 1024)
    for capacity in capacities:
        tiers_of(setup, capacity)
    for policy in policies:
        check_policy(policy, setup)
    best = optimum.Optimum(trace) if optimum.NAME in policies else None
    cells = list(product(policies, capacities))
    threads = max(1, workers // max(1, len(cells)))  # of each cell
    watch = _Watch(progress, len(trace) * len(cells))

    def one(policy: str | Policy, capacity: int) -> Row:
        return replay(
            trace,
            best if best is not None and policy == optimum.NAME else copy.deepcopy(policy),
            capacity,
            setup=setup,
            flops=flops,
            bytes_per_token=bytes_per_token,
            workers=threads,
            progress=watch.follow(),
        )

    with ThreadPoolExecutor(workers, thread_name_prefix="replay") as pool:
        running = [pool.submit(one, policy, capacity) for policy, capacity in cells]
        try:
            for future in wait(running, return_when=FIRST_EXCEPTION).done:
                future.result()
            return [future.result() for future in running]
        except BaseException:
            watch.stop()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


class _Stopped(Exception):
    """Another cell failed, or the user interrupted the sweep."""


class _Watch:
    """Adds up the progress of several replays, and stops them."""

    def __init__(self, progress: Progress | None, total: int) -> None:
        self._progress = progress
        self._total = total
        self._done = 0
        self._lock = Lock()
        self._stopped = Event()

    def follow(self) -> Progress:
        """Returns a progress callback for one replay."""
        before = 0

        def report(done: int, _: int) -> None:
            nonlocal before
            if self._stopped.is_set():
                raise _Stopped
            with self._lock:
                self._done += done - before
                before = done
                if self._progress is not None:
                    self._progress(self._done, self._total)

        return report

    def stop(self) -> None:
        self._stopped.set()


def check_policy(policy: str | Policy, setup: Setup = ONE_CACHE) -> None:
    """Checks that there is such a policy, before anything is replayed.

    Raises:
        BadArgument: there is none, or it is "opt" with a setup that it does not support.
    """
    if policy == optimum.NAME:
        if (setup.host_blocks, setup.storage_blocks, setup.ttl, setup.replicas) != (None, None, None, 1):
            raise BadArgument(
                "policy",
                policy,
                "left out with tiers, replicas or a time to live: the optimum supports only one cache",
            )
        return
    try:
        find_policy(policy)
    except BadArgument as error:
        raise BadArgument("policy", policy, f"{optimum.NAME} (the offline optimum), {error.allowed}") from None


# --- capacities ---------------------------------------------------------------------------------------------------


def parse_capacities(text: str, trace: Trace, bytes_per_token: float | None = None) -> list[int]:
    """Parses capacities into blocks.

    Args:
        text: a comma-separated list of blocks (1000, 20k), tokens (2Mtok), bytes (10GB, 4GiB), or percentages of the
            trace's distinct blocks (5%). Each is rounded down to whole blocks.
        bytes_per_token: bytes of a token, to convert bytes.

    Raises:
        BadArgument: an entry is none of these, is less than a block, or is in bytes without `bytes_per_token`.
    """
    return [_blocks("capacity", entry.strip(), trace, bytes_per_token) for entry in text.split(",")]


def parse_tiers(text: str, trace: Trace, bytes_per_token: float | None = None) -> dict[str, int]:
    """Parses tiers such as device=5%,host=20%,storage=1TB into blocks by name, see `parse_capacities`.

    Raises:
        BadArgument: a name is unknown or repeated, or a capacity is invalid.
    """
    tiers: dict[str, int] = {}
    for entry in text.split(","):
        name, given, capacity = map(str.strip, entry.partition("="))
        if name not in TIERS or name in tiers or not given:
            raise BadArgument("tiers", text, f"NAME=CAPACITY, with names among {', '.join(TIERS)}, each at most once")
        tiers[name] = _blocks("tiers", capacity, trace, bytes_per_token)
    return tiers


def _blocks(name: str, text: str, trace: Trace, bytes_per_token: float | None) -> int:
    blocks = math.floor(_exact_blocks(name, text, trace, bytes_per_token))
    if not 1 <= blocks <= MAX_BLOCKS:
        distinct = f"the trace has {trace.distinct_blocks} of {trace.block_size} tokens"
        raise BadArgument(name, text, f"at least one block, and at most 2**62; {distinct}")
    return blocks


def _exact_blocks(name: str, text: str, trace: Trace, bytes_per_token: float | None) -> Fraction:
    lower = text.strip().lower()
    if lower.endswith("b"):
        return _blocks_of_bytes(name, text, trace, bytes_per_token)
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:(%)|([kmg]?)(tok|tokens|blocks)|)", lower)
    if not found:
        raise BadArgument(name, text, f"a capacity, such as {_EXAMPLES}")
    if found[2]:
        return Fraction(found[1]) * trace.distinct_blocks / 100
    number = Fraction(found[1]) * _MULTIPLES[found[3] or ""]
    return number / trace.block_size if (found[4] or "").startswith("tok") else number


def _blocks_of_bytes(name: str, text: str, trace: Trace, bytes_per_token: float | None) -> Fraction:
    try:
        size = parse_bytes(name, text)
    except BadArgument:
        raise BadArgument(name, text, f"a capacity, such as {_EXAMPLES}") from None
    if bytes_per_token is None or not bytes_per_token > 0:
        raise BadArgument(
            name, text, "blocks, tokens or a percentage, unless --bytes-per-token gives the bytes of a token"
        )
    return size / (Fraction(bytes_per_token) * trace.block_size)
