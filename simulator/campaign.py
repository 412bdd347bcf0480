"""Runs seeds, one after another, and says what came of them."""

from __future__ import annotations

import logging
import signal
import time
import traceback
import warnings
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from typing import NoReturn, Protocol

from simulator.world import World, WrongError


class Profile(Protocol):
    """What is done in a run."""

    def __init__(self, world: World) -> None:
        """Builds what the seed says."""

    def step(self) -> None:
        """Does one thing more."""

    def end(self) -> None:
        """Stops the faults, and checks that everything ends."""

    def close(self) -> None:
        """Lets go of what the run held."""


def find_profile(name: str) -> type[Profile]:
    """The profile of that name."""
    if name == "cache":
        from simulator.leases import Leases

        return Leases
    if name == "hybrid":
        from simulator.leases import Hybrids

        return Hybrids
    if name == "components":
        from simulator.components import Components

        return Components
    if name == "ranks":
        from simulator.ranks import Ranks

        return Ranks
    from simulator.requests import HybridRequests, Requests

    return HybridRequests if name == "hybrid-scheduler" else Requests


SHARES = {"cache": 8, "hybrid": 2, "scheduler": 2, "hybrid-scheduler": 1, "components": 1, "ranks": 1}
"""Seeds of each profile in a campaign."""

PROFILES = tuple(SHARES)


@dataclass
class Record:
    """What one run, or many, came to.

    Args:
        seeds: runs.
        operations: calls into the cache, leases, tiers and the scheduler, copies, and calls to the store.
        reads: pages times layers that were read and compared.
        faults: by kind.
        seen: counts of the cache, of what it did.
        failures: for each run that failed, the line that replays it, and what went wrong.
        digest: of everything that happened, for one run.
        seconds: that it took.
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
        """Counts another one in."""
        self.seeds += other.seeds
        self.operations += other.operations
        self.reads += other.reads
        self.faults += other.faults
        self.seen += other.seen
        self.failures += other.failures
        self.seconds += other.seconds
        self.digest = other.digest


_MOST_S = 300  # that a run may take on the wall


def _too_long(signal_number: int, frame: object) -> NoReturn:
    raise WrongError("a run that does not end")


def run_seed(profile: str, seed: int, operations: int) -> Record:
    """One run of so many operations, and its end."""
    logging.getLogger("mainstem").setLevel(logging.CRITICAL + 1)
    began_s = time.perf_counter()
    world = World(seed, profile)
    failures = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # dropped leases are a part of it
        signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(_MOST_S)
        try:
            with closing(find_profile(profile)(world)) as run:
                while world.operations < operations:
                    run.step()
                run.end()
        except Exception as error:  # noqa: BLE001  # whatever was raised, the run has failed
            line = f"python -m simulator --profile {profile} --seed {seed} --operations {operations}"
            where = "".join(traceback.format_exception(error)[-4:])
            failures.append((line, f"after {world.operations} operations, {type(error).__name__}: {error}\n{where}"))
        finally:
            signal.alarm(0)
    seconds = time.perf_counter() - began_s
    return Record(1, world.operations, world.reads, world.faults, world.seen, failures, world.digest(), seconds)
