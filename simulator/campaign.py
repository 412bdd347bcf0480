"""Runs seeds and records the results."""

from __future__ import annotations

import logging
import signal
import time
import traceback
import warnings
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from importlib import import_module
from typing import NoReturn, Protocol

from simulator.world import World, WrongError


class Profile(Protocol):
    """The workload of a run."""

    def __init__(self, world: World) -> None:
        """Builds the configuration that the seed chooses."""

    def step(self) -> None:
        """Does one operation."""

    def end(self) -> None:
        """Stops the faults and checks that everything ends."""

    def close(self) -> None:
        """Releases what the run holds."""


_CLASSES = {
    "cache": ("leases", "Leases", 8),
    "hybrid": ("leases", "Hybrids", 2),
    "scheduler": ("requests", "Requests", 2),
    "hybrid-scheduler": ("requests", "HybridRequests", 1),
    "weights": ("requests", "Weights", 1),
    "components": ("components", "Components", 1),
    "ranks": ("ranks", "Ranks", 1),
    "advice": ("advice", "Advice", 1),
    "quotas": ("quotas", "Tenants", 1),
    "explain": ("explain", "Explain", 1),
    "fleet": ("fleet", "Fleet", 1),
}
"""Module and class of each profile, and its relative number of seeds in a campaign."""

SHARES = {name: share for name, (_, _, share) in _CLASSES.items()}
PROFILES = tuple(SHARES)


def find_profile(name: str) -> type[Profile]:
    """Returns the profile with a name. Imports only its module: a mutant may break the others."""
    module, kind, _ = _CLASSES[name]
    profile: type[Profile] = getattr(import_module(f"simulator.{module}"), kind)
    return profile


@dataclass
class Record:
    """The results of one or more runs.

    Args:
        seeds: number of runs.
        operations: calls into the cache, leases, tiers and the scheduler, copies, and calls to the store.
        reads: pages that were read and compared, times layers.
        faults: injected faults by kind.
        seen: counters of the cache.
        failures: for each failed run, the command that replays it, and what went wrong.
        digest: digest of all events of the last run.
        seconds: duration.
    """

    seeds: int = 0
    operations: int = 0
    reads: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    seen: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[str, str]] = field(default_factory=list)
    digest: str = ""
    seconds: float = 0.0

    def add(self, other: Record) -> None:
        """Adds another record."""
        self.seeds += other.seeds
        self.operations += other.operations
        self.reads += other.reads
        self.faults += other.faults
        self.seen += other.seen
        self.failures += other.failures
        self.seconds += other.seconds
        self.digest = other.digest


# A run that goes round in circles takes CPU time; one that waits for ever takes none, but a busy machine stretches the
# others just as much.
_LIMITS = (
    (signal.SIGVTALRM, signal.ITIMER_VIRTUAL, 300),
    (signal.SIGALRM, signal.ITIMER_REAL, 3600),
)


def _too_long(signal_number: int, frame: object) -> NoReturn:
    raise WrongError("the run does not end")


def run_seed(profile: str, seed: int, operations: int) -> Record:
    """Runs a seed for this many operations, then ends it."""
    logging.getLogger("mainstem").setLevel(logging.CRITICAL + 1)
    began_s = time.perf_counter()
    world = World(seed, profile)
    failures = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # runs drop leases on purpose
        for number, timer, limit_s in _LIMITS:
            signal.signal(number, _too_long)
            signal.setitimer(timer, limit_s)
        try:
            with closing(find_profile(profile)(world)) as run:
                while world.operations < operations:
                    run.step()
                run.end()
        except Exception as error:  # noqa: BLE001  # any exception fails the run
            line = f"python -m simulator --profile {profile} --seed {seed} --operations {operations}"
            where = "".join(traceback.format_exception(error)[-4:])
            failures.append((line, f"after {world.operations} operations, {type(error).__name__}: {error}\n{where}"))
        finally:
            for _, timer, _ in _LIMITS:
                signal.setitimer(timer, 0)
    seconds = time.perf_counter() - began_s
    return Record(1, world.operations, world.reads, world.faults, world.seen, failures, world.digest(), seconds)
