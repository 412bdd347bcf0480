"""Profiles "scheduler", "hybrid-scheduler", "weights": the real scheduler over a model that knows what each page holds.

Several processes share a store. Requests arrive, continue earlier ones, are cancelled; forwards fail. Every answer must
be the one that the request gets without a cache. Once faults have stopped every request must end.
"hybrid-scheduler" has windows, chunks and states, and in "weights" the model's weights change.
"""

from __future__ import annotations

import random as random_module
from collections.abc import Sequence as AnySequence
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.cache.components import Component, Full, Local, State
from mainstem.cache.namespaces import Namespace
from mainstem.runtime.memory.sizing import window_pages
from mainstem.runtime.request import Delta, Hints, Request
from mainstem.runtime.schedule.scheduler import Scheduler
from mainstem.runtime.schedule.sequence import Sequence
from mainstem.runtime.segments import Segment
from mainstem.settings.engine import Limits, SamplingParams
from simulator.ghost import POISON, Numbers, fingerprints
from simulator.leases import Prompts
from simulator.process import IDENTITY, NAMESPACES, WEIGHTS, Process, Sizes, draw_empty, hybrid_sizes, other_identity
from simulator.storage import Disk
from simulator.world import World, require

_VOCAB = 5
_EOS = 4
_LETTERS = "ABCDE"
_LOGITS = torch.eye(_VOCAB)
MIXED = np.uint64(0x5EED5EED5EED5EED)
"""What pages differ by that were computed on top of those of other weights."""

torch.set_num_threads(1)  # tiny tensors gain nothing from threads


class Letters:
    """Every token is a letter."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False, **kwargs: object) -> str:
        return "".join(_LETTERS[token] for token in token_ids)


def next_token(number: np.uint64) -> int:
    """Returns the token after a position: a function of its number."""
    return int(number >> np.uint64(40)) % _VOCAB


def answer_of(origin: np.uint64, tokens: AnySequence[int], params: SamplingParams) -> list[int]:
    """Returns the answer to a prompt, as computed without a cache."""
    answer: list[int] = []
    while len(answer) < params.max_tokens and (params.ignore_eos or answer[-1:] != [_EOS]):
        answer.append(next_token(fingerprints(origin, [*tokens, *answer])[-1]))
    return answer


class Versions:
    """The weights of a process, and whose KV each request may use: what `schedule.versions` promises."""

    def __init__(self) -> None:
        self.names: list[str | None] = [None]
        self.asked: dict[str, Request] = {}  # as they were added
        self._rule, self._lag = "strict", 0
        self._groups: dict[tuple[object, str], int] = {}

    def add(self, name: str, request: Request) -> None:
        """Takes a request as it was asked."""
        self.asked[name] = request
        if request.hints.group is not None:
            self._groups.setdefault((request.namespace, request.hints.group), len(self.names) - 1)

    def renew(self, name: str, rule: str, lag: int) -> None:
        """Takes the next version."""
        self.names.append(name)
        self._rule, self._lag = rule, lag
        if rule != "group":
            self._groups = dict.fromkeys(self._groups, len(self.names) - 1)

    def allowed(self, request: Request) -> set[str | None]:
        """Returns the weights whose KV a request may use now."""
        oldest = len(self.names) - 1
        if self._rule == "lag":
            oldest = max(0, oldest - self._lag)
        begun = self._groups.get((request.namespace, request.hints.group or "")) if self._rule == "group" else None
        return {*self.names[oldest:], *(() if begun is None else [self.names[begun]])}


class GhostRunner:
    """A model whose forward reads and checks every page that attention would read, layer by layer.

    Args:
        process: owner of the device pages.
    """

    vocab_size = _VOCAB

    def __init__(self, process: Process) -> None:
        self._process = process
        self.scheduler: Scheduler | None = None
        self.wrong: Exception | None = None
        self.versions = Versions()
        self._leases: dict[str, tuple[object, int]] = {}  # by request, and from where on its pages are of no version

    def embed(self, segment: Segment) -> None:
        """Does nothing: there are no images."""

    def forward(self, segments: AnySequence[Segment]) -> torch.Tensor:
        world = self._process.world
        if world.chance(0.1) and world.fault("forward: fails"):
            raise RuntimeError("the forward failed")
        try:
            return self._forward(segments)
        except Exception as error:
            self.wrong = error  # the scheduler would treat it as a failed forward
            raise

    def _forward(self, segments: AnySequence[Segment]) -> torch.Tensor:
        assert self.scheduler is not None
        running = {id(other._lease.page_table): other for other in self.scheduler._running.values() if other._lease}
        process, memory = self._process, self._process.memory
        size = process.cache.page_size
        numbers = []
        for segment in segments:
            sequence = running[id(segment.tables[0])]
            text = np.concatenate([sequence.tokens.known, sequence.draft])[: segment.end]
            require(np.array_equal(text[segment.start :], segment.tokens), "tokens of another request")
            numbers.append(self._numbers(sequence, segment.start, text))
        for layer in range(memory.layers):
            for segment, expected in zip(segments, numbers, strict=True):
                if segment.arriving is not None:
                    segment.arriving.wait_layer(layer)
                    if segment.arriving.error is not None:
                        continue
                only = slice(layer, layer + 1)
                process.read("forward", segment.tables, segment.state, expected[: segment.start], only)
        written: set[int] = set()
        for segment, expected in zip(segments, numbers, strict=True):
            own = set(segment.tables[0][segment.start // size : -(-segment.end // size)].tolist())
            own |= {-1 - segment.state} if segment.state >= 0 else set()
            require(not own & written, "two segments write one page or one state", own)
            written |= own
            arrived = segment.arriving is None or segment.arriving.error is None
            left = expected if arrived else expected ^ POISON
            process.write(segment.tables, segment.state, segment.start, left)
            process.world.did("share", segment.start, segment.end)
        rows = []
        for segment in segments:
            sequence = running[id(segment.tables[0])]
            text = np.concatenate([sequence.tokens.known, sequence.draft])[: segment.end]
            origin = process.origin_of(self.versions.asked[sequence.id].namespace)  # of answers, whatever the weights
            rows += [next_token(number) for number in fingerprints(origin, text)[len(text) - segment.logits :]]
        return _LOGITS[rows]

    def _numbers(self, sequence: Sequence, start: int, text: NDArray[np.int32]) -> Numbers:
        """Returns what the pages of a request hold, if they are found or computed as they should be."""
        namespace = sequence.request.namespace
        weights = namespace.weights if isinstance(namespace, Namespace) else None
        request = self.versions.asked[sequence.id]
        require(weights in self.versions.allowed(request), "STALE", sequence.id, weights)
        if self._leases.get(sequence.id, (None, 0))[0] is not sequence._lease:
            self._leases[sequence.id] = sequence._lease, len(sequence.tokens.ids) + 1
        lease, mixed = self._leases[sequence.id]
        if weights != self.versions.names[-1]:
            mixed = min(mixed, start)
            self._leases[sequence.id] = lease, mixed
        numbers = fingerprints(self._process.origin_of(request.namespace, weights), text)
        numbers[mixed:] ^= MIXED
        return numbers


class Server:
    """A process with a scheduler, and its requests."""

    def __init__(self, process: Process, limits: Limits) -> None:
        self.process = process
        self.runner = GhostRunner(process)
        random, eos, clock = random_module.Random(0), frozenset([_EOS]), process.world.clock
        self.scheduler = Scheduler(
            process.cache, self.runner, Letters(), limits, max_context=1000, eos=eos, clock=clock, random=random
        )
        self.runner.scheduler = self.scheduler
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}

    def add(self, name: str, request: Request) -> None:
        self.requests[name], self.answers[name] = request, []
        self.runner.versions.add(name, request)
        self.scheduler.add(name, request)
        self.process.world.did("add", name, len(request.tokens))

    def renew(self) -> None:
        """Changes the weights of the model."""
        random = self.process.world.random
        how = random.choice((("strict", 0), ("group", 0), ("group", 0), ("lag", 1), ("lag", 1), ("lag", 3)))
        name = random.choice(WEIGHTS)
        self.runner.versions.renew(name, *how)
        number = self.scheduler.renew(name, *how)
        require(number == len(self.runner.versions.names) - 1, "a version is not counted", number)
        self.process.world.did("renew", name, *how)

    def step(self) -> list[list[int]]:
        """Runs a step of the scheduler; returns the sequences that have ended successfully."""
        world = self.process.world
        whole = []
        events = self.scheduler.step()
        world.did("step", len(events))
        if self.runner.wrong is not None:
            raise self.runner.wrong
        self.scheduler.totals.check()
        for name, event in events:
            if isinstance(event, Delta):
                self.answers[name] += event.tokens
                if event.finish_reason is not None:
                    whole.append(self._end(name, event))
                self.heard(name, event)
        return whole

    def heard(self, name: str, event: Delta) -> None:
        """Takes what was generated for a request."""

    def _end(self, name: str, last: Delta) -> list[int]:
        """Compares an answer with the one that the request gets without a cache."""
        request, answer = self.requests.pop(name), self.answers.pop(name)
        assert last.usage is not None
        self.process.world.did("end", name, last.finish_reason, answer, last.usage.cached_tokens)
        tokens: list[int] = request.tokens.tolist()
        expected = answer_of(self.process.origin_of(request.namespace), tokens, request.params)
        if last.finish_reason not in ("stop", "length"):
            expected = expected[: len(answer)]
        require(answer == expected, "WRONG ANSWER", name, answer, expected, last.finish_reason)
        failed = last.finish_reason == "error" and last.error != "RuntimeError: the forward failed"
        require(not failed, "a request failed", name, last.error)
        return tokens + answer


class Requests:
    """A run of the profile "scheduler"."""

    stores: ClassVar = 0.85  # probability of storage
    max_servers: ClassVar = 2

    def __init__(self, world: World) -> None:
        random = world.random
        self.world = world
        self.page_size = random.choice((1, 2, 3, 4))
        self.disk = Disk(world, random.choice((20, 200, 1000)))
        self.storage = random.random() < self.stores
        self.pages = self._sizes()
        self.empty = draw_empty(world, self.pages)
        longest = min(40, self.page_size * self._first_pages() - 6)
        self.prompts = Prompts(world, max(longest, 1))
        self.limits = Limits(
            token_budget=random.choice((2, 8, 100)),
            max_running=random.randint(1, 6),
            age_limit_s=random.choice((0.1, 1.0, 30.0)),
            states_per_path=8,
            draft_tokens=random.choice((0, 3, 20)),
        )
        self.namespaces = NAMESPACES[: random.choice((1, 2, 6))]
        servers = random.randint(1, self.max_servers)
        self.identities = [replace(IDENTITY, page_size=self.page_size) for _ in range(servers)]
        if random.random() < 0.5:
            self.identities[-1] = other_identity(world, self.identities[-1])
        self.servers = [self._start(at) for at in range(len(self.identities))]
        self.kills = random.choice((0.0, 0.0, 0.002, 0.01))
        self.flushes = random.choice((0.0, 0.005, 0.03))
        self._added = 0

    def _sizes(self) -> Sizes:
        return {Full(): self.world.random.choice(((6, 6), (8, 24), (16, 12), (12, 48), (30, 30)))}

    def _first_pages(self) -> int:
        return next(iter(self.pages.values()))[0]

    def _start(self, at: int) -> Server:
        disk = self.disk if self.storage else None
        pages = self._with_windows(self.pages)
        identity = self.identities[at]
        process = Process(self.world, disk, identity, self.page_size, pages=pages, empty=self.empty)
        return Server(process, self.limits)

    def _with_windows(self, sizes: Sizes) -> Sizes:
        """Returns sizes with at least as many window pages as one request needs."""
        chunk, states = min(self.limits.token_budget, 40), any(isinstance(row, State) for row in sizes)
        pages: dict[Component, tuple[int, int]] = {}
        for row, (here, there) in sizes.items():
            least = 1
            if isinstance(row, Local):
                least = window_pages(row.tokens, chunk, self.page_size, states=states)
            pages[row] = max(here, least), there
        return pages

    def step(self) -> None:
        """Does one operation."""
        world, random = self.world, self.world.random
        server = random.choice(self.servers)
        idle_s = server.scheduler.idle_s
        world.pass_time(random.expovariate(200) if idle_s == 0.0 else random.expovariate(20))
        kind = random.random()
        if kind < 0.06:
            self._seldom(server)
        elif kind < 0.06 + self.flushes:
            cache = server.process.cache
            world.did("flush", cache.flush() if world.chance(0.5) else server.process.tiers.flush())
        elif kind < 0.3 and len(server.requests) < 8:
            self._arrive(server)
        elif server.requests and world.chance(0.02):
            name = random.choice(list(server.requests))
            server.scheduler.cancel(name)
            world.did("cancel", name)
        else:
            for sequence in server.step():
                self.prompts.know(sequence)

    def _arrive(self, server: Server) -> None:
        random = self.world.random
        tokens = self.prompts.draw()
        tokens = tokens[: random.randint(max(1, len(tokens) - 3), len(tokens))]
        room = self.page_size * self._first_pages() - len(tokens)
        params = SamplingParams(max_tokens=random.randint(1, max(1, min(6, room))), ignore_eos=random.random() < 0.5)
        namespace = self.namespaces[0] if random.random() < 0.5 else random.choice(self.namespaces)
        self._added += 1
        priority = random.choice((0, 0, 0, 1))
        request = Request(np.array(tokens, np.int32), params, namespace, priority, hints=self._hints())
        server.add(f"r{self._added}", request)

    def _hints(self) -> Hints:
        return Hints()

    def _seldom(self, server: Server) -> None:
        world, random = self.world, self.world.random
        kind = random.randrange(10)
        if kind < 5:
            server.process.poison()
        elif kind == 5:
            server.process.audit()
            server.scheduler.check()
        elif kind == 6:
            self.disk.decay()
        elif kind == 7:
            self.disk.outage = random.choice((*[None] * 9, "dead", "full", "hangs")) if world.rate else None
        elif kind == 8:
            server.process.tiers.remember()
        if world.chance(self.kills):
            self._kill(self.servers.index(server))

    def _kill(self, at: int) -> None:
        world = self.world
        world.faults["kill"] += 1
        self.servers[at].process.kill()
        if world.chance(0.1):
            self.identities[at] = other_identity(world, self.identities[at])
        self.servers[at] = self._start(at)
        world.did("kill", at)
        if world.chance(0.5):
            self.servers[at].process.tiers.warm()

    def end(self) -> None:
        """Stops faults; checks that every request ends within bounded time."""
        self.world.calm, self.disk.outage = True, None
        for server in self.servers:
            for _ in range(5000):
                if not server.scheduler.busy:
                    break
                server.step()
                self.world.pass_time(0.02)
            require(not server.requests, "requests that never end", list(server.requests))
            server.process.drain()

    def close(self) -> None:
        """Does nothing."""


class HybridRequests(Requests):
    """A run of the profile "hybrid-scheduler"."""

    def _sizes(self) -> Sizes:
        return hybrid_sizes(self.world)

    def _seldom(self, server: Server) -> None:
        if self.world.chance(0.5):
            server.process.evict()
        else:
            super()._seldom(server)


class Weights(Requests):
    """A run of the profile "weights"."""

    def _sizes(self) -> Sizes:
        return hybrid_sizes(self.world) if self.world.random.random() < 0.3 else super()._sizes()

    def _hints(self) -> Hints:
        return Hints(group=self.world.random.choice((None, "g", "h")))

    def _seldom(self, server: Server) -> None:
        if self.world.chance(0.3):
            server.renew()
        else:
            super()._seldom(server)
