"""Peers without sockets: processes ask for pages in another's memory, over a network that fails and lies.

The client and what answers it are the real ones; here are the connections between them. A request and its answer take
place at one instant, as a call to the store does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from mainstem.share import Share
from mainstem.storage.peer import Line, PeerBackend, Responder
from mainstem.tiers.host.shelf import Shelf
from simulator.network import Network
from simulator.process import SECRET
from simulator.storage import flip
from simulator.world import World, require

_IN_FLIGHT_BYTES = 1 << 20
_TICK_S = 0.002  # of the clock of who answers: what an answer takes
_ANSWERS = ("answered", "busy", "refused", "malformed")
_FAULTS = ("peer: lost", "peer: altered", "peer: cut", "peer: another's", "peer: tag", "peer: forged")

Answer = list[memoryview]


class Giver:
    """Answers the peers of a process.

    Args:
        world: the clock.
        shelf: what it has.
    """

    def __init__(self, world: World, shelf: Shelf) -> None:
        self._world, self._spent_s = world, 0.0
        self._asked: Counter[str] = Counter()  # answers, and the values and bytes in them
        self._responder = Responder(
            shelf, SECRET, Share(world.random.choice((0.01, 1.0)), clock=self._clock), self._clock
        )

    def answer(self, parts: Sequence[bytes]) -> Answer:
        """Returns the parts of an answer."""
        head, values = self._responder.answer(parts, lambda: _IN_FLIGHT_BYTES)
        self._world.seen["pulled from a peer"] += len(values)
        self._asked["answers"] += 1
        self._asked["values"] += len(values)
        self._asked["bytes"] += sum(map(len, values))
        counts = self._responder.counts
        given = {
            "values": counts["values"],
            "bytes": counts["bytes"],
            "answers": sum(counts[each] for each in _ANSWERS),
        }
        require(given == self._asked, "who gives to peers counts otherwise", counts, self._asked)
        return [memoryview(part) for part in [*head, *map(bytes, values)]]

    def _clock(self) -> float:
        self._spent_s += _TICK_S
        return self._world.now_s + self._spent_s


class SimLine:
    """A connection of one process to another."""

    def __init__(self, lines: SimLines, address: str) -> None:
        self._lines, self._address = lines, address
        self._answer: Answer | None = None
        self.silent = self._lost = False

    def send(self, parts: Sequence[bytes]) -> None:
        try:
            self._answer = self._lines.ask(self._address, parts)
            self._lost = self._answer is None
        except TimeoutError:
            self.silent = True

    def read(self) -> Answer | None:
        return self._answer

    def alive(self) -> bool:
        return not self._lost

    def close(self) -> None:
        """Does nothing."""


class SimLines:
    """The connections of one process.

    Args:
        network: that they are part of.
        machine: where the process runs.
        giver: returns what answers at an address and its machine; None: nothing. Raises TimeoutError: it is frozen.
    """

    def __init__(self, network: Network, machine: str, giver: Callable[[str], tuple[str, Giver] | None]) -> None:
        self._network, self._machine, self._giver = network, machine, giver
        self._waited_s = 0.0
        self._last: Answer | None = None
        self.lies = False

    def clock(self) -> float:
        """Returns the time of the client: calls that wait in vain take time, though they take place at an instant."""
        return self._network.world.now_s + self._waited_s

    def open(self, address: str) -> Line:
        return SimLine(self, address)

    def wait(self, lines: Sequence[Line], timeout_s: float) -> Sequence[Line]:
        ready = [line for line in lines if isinstance(line, SimLine) and not line.silent]
        if not ready:
            self._waited_s += timeout_s
        return ready

    def close(self) -> None:
        """Does nothing."""

    def ask(self, address: str, parts: Sequence[bytes]) -> Answer | None:
        """Returns the answer of who is at an address; None: nobody is. Raises TimeoutError: none comes."""
        world = self._network.world
        found = self._giver(address)
        kind = world.fault(*_FAULTS) if self.lies else None
        if found is not None and (kind == "peer: lost" or not self._network.reaches(self._machine, found[0])):
            world.did("pull", "lost")
            raise TimeoutError
        if found is None:
            world.did("pull", "nobody")
            return None
        if kind == "peer: tag":
            parts = [*parts[:-1], flip(world, parts[-1])]
        answer = found[1].answer(parts)
        world.did("pull", len(answer), [len(part) for part in answer])
        before, self._last = self._last, answer
        return self._spoilt(kind, answer, before)

    def _spoilt(self, kind: str | None, answer: Answer, before: Answer | None) -> Answer:
        world = self._network.world
        at = world.random.randrange(len(answer))
        if kind == "peer: altered":
            answer[at] = memoryview(flip(world, bytes(answer[at])))
        elif kind == "peer: cut":
            answer = answer[:at] if world.chance(0.5) else [*answer[:at], answer[at][:-1], *answer[at + 1 :]]
        elif kind == "peer: another's" and before is not None:
            answer = before if world.chance(0.5) else [*answer[:2], *before[2:]]
        elif kind == "peer: forged" and len(answer) > 2:
            answer = [*answer[:2], *(memoryview(flip(world, bytes(part))) for part in answer[2:])]
        return answer


def peers(
    network: Network, machine: str, addresses: Sequence[str], giver: Callable[[str], tuple[str, Giver] | None]
) -> PeerBackend:
    """Returns the client of a process."""
    lines = SimLines(network, machine, giver)
    timeout_s = network.world.random.choice((0.1, 1.0))
    made = PeerBackend(addresses, SECRET, timeout_s, lines.clock, lines=lines)
    lines.lies = True
    return made
