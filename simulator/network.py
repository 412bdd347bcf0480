"""`Network`: messages between machines. They are late, lost, twice, out of order; any two machines may be cut apart.

cast     a message of its own, as a publisher sends it
Link     a connection: what is sent arrives once and in order, or the connection breaks
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from simulator.world import World

T = TypeVar("T")

_RETRY_S = 0.05


class Network:
    """All connections between machines.

    Args:
        world: the clock and random choices.

    Attributes:
        patience_s: how long a machine that cannot be reached is waited for before a connection breaks.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        random = world.random
        self._loss, self._twice = random.choice((0.0, 0.05, 0.3)), random.choice((0.0, 0.1))
        self._latency_s = random.choice((0.0002, 0.002, 0.02))
        self.patience_s = random.choice((0.2, 1.0, 3.0))
        self._cuts: dict[frozenset[str], float] = {}

    def cut(self, one: str, other: str, seconds: float) -> None:
        """Lets nothing pass between two machines for a while."""
        if one != other:
            self.world.faults["network: cut"] += 1
            self._cuts[frozenset((one, other))] = self.world.now_s + seconds

    def heal(self) -> None:
        """Ends all cuts."""
        self._cuts.clear()

    def reaches(self, one: str, other: str) -> bool:
        """Whether messages pass between two machines now."""
        pair = frozenset((one, other))
        until_s = self._cuts.get(pair)
        if until_s is not None and until_s <= self.world.now_s:
            del self._cuts[pair]
            until_s = None
        return until_s is None

    def delay_s(self) -> float:
        """Draws how long a message is on its way."""
        world = self.world
        late = not world.calm and world.chance(0.02)
        world.faults["network: late"] += late
        return world.random.expovariate(1 / self._latency_s) + (world.random.uniform(0, 2.0) if late else 0.0)

    def cast(self, one: str, other: str, arrive: Callable[[], None]) -> None:
        """Sends a message, which may be lost, or arrive twice, or after later ones."""
        world = self.world
        if not world.calm and world.chance(self._loss):
            world.faults["network: lost"] += 1
            return
        copies = 1 + (not world.calm and world.chance(self._twice))
        world.faults["network: twice"] += copies > 1

        def deliver() -> None:
            reaches = self.reaches(one, other)
            world.did("message", one, other, reaches)
            if reaches:
                arrive()

        for _ in range(copies):
            world.at(self.delay_s(), deliver)


class Link(Generic[T]):
    """One direction of a connection.

    Args:
        network: that it is part of.
        one, other: the machines of sender and receiver.
        take: called with what arrives.
        broken: called once, if the connection breaks.
    """

    def __init__(
        self, network: Network, one: str, other: str, take: Callable[[T], None], broken: Callable[[], None]
    ) -> None:
        self._network, self._ends = network, (one, other)
        self._take, self._broken = take, broken
        self._waiting: deque[T] = deque()
        self._moving = self._reset = self.closed = False
        self._cut_s: float | None = None

    def send(self, item: T) -> None:
        """Sends something."""
        if not self.closed and not self._reset:
            self._waiting.append(item)
            self._move()

    def reset(self) -> None:
        """The sender's process ends: what has been sent may arrive, then the connection breaks."""
        if not self._network.world.calm and self._network.world.chance(0.5):
            self._waiting.clear()
        self._reset = True
        self._move()

    def close(self) -> None:
        """The receiver wants no more."""
        self.closed = True
        self._waiting.clear()

    def _move(self) -> None:
        if not self._moving:
            self._moving = True
            self._network.world.at(self._network.delay_s(), self._arrive)

    def _arrive(self) -> None:
        self._moving = False
        network = self._network
        if self.closed:
            return
        if not network.reaches(*self._ends):
            now_s = network.world.now_s
            self._cut_s = now_s if self._cut_s is None else self._cut_s
            if now_s - self._cut_s > network.patience_s:
                self._break()
            else:
                self._moving = True
                network.world.at(_RETRY_S, self._arrive)
            return
        self._cut_s = None
        while self._waiting and not self.closed:
            network.world.did("piece", *self._ends)
            self._take(self._waiting.popleft())
            if self._waiting and network.world.chance(0.3):
                self._move()
                return
        if self._reset and not self.closed:
            self._break()

    def _break(self) -> None:
        self.close()
        self._broken()
