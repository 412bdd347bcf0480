"""A scheduler over a ghost: the test adds requests and makes steps, and every step and every answer is checked."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rigs.ghost import EOS, VOCAB, Ghost, GhostTokenizer, complete

from mainstem.cache.components import Component
from mainstem.cache.keys import Encoded, TokenKeys, TypedKeys
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.runtime.memory.scores import KeptScores
from mainstem.runtime.request import Delta, Hints, ImageInput, Progress, Request, Usage
from mainstem.runtime.schedule.scheduler import Scheduler
from mainstem.runtime.text.detokenizer import Content
from mainstem.settings.engine import Limits, SamplingParams

PAGE = 4
_NONE = Hints()


class Bench:
    """A scheduler over a ghost, checked after every step, and its output.

    Args:
        pages: number of pages; or of pages and slots of each component, in order.
        page_size: positions per page.
        partial: whether a hit may end inside a page.
        cache: whether anything is reused.
        images: whether prompts may have images.
        max_context: positions of one request.
        best: scores are kept beside pages, each with so many of the likeliest tokens; None: they are not.
        limits: fields of `Limits` that differ. A prompt has up to 8 checkpoints, and none at intervals.
    """

    step_s = 1.0
    steps = 0

    def __init__(
        self,
        pages: int | Mapping[Component, int] = 64,
        page_size: int = PAGE,
        *,
        partial: bool = True,
        cache: bool = True,
        images: bool = False,
        max_context: int = 1024,
        best: int | None = None,
        **limits: Any,
    ) -> None:
        self.now_s = 0.0
        self.ghost = Ghost(pages, page_size)
        made = PrefixCache(
            pages,
            page_size,
            keys=TypedKeys(VOCAB) if images else TokenKeys(VOCAB),
            enabled=cache,
            copy_page=self.ghost.copy_page if partial else None,
            copy_state=self.ghost.copy_state,
        )
        if best is not None:
            self.ghost.scores = KeptScores(made.pool.total, page_size, best)
            made.pool.freed_with(self.ghost.scores.forget)
        self.schedule(made, Limits(**{"checkpoint_tokens": 0, "states_per_path": 8, **limits}), max_context)

    def schedule(self, cache: PrefixCache, limits: Limits, max_context: int) -> None:
        """Begins with this cache and without requests; time goes on."""
        self.cache = cache
        self.ghost.guard(cache.pools)
        self.scheduler = Scheduler(
            cache,
            self.ghost,
            GhostTokenizer(),
            limits,
            max_context=max_context,
            eos=frozenset({EOS}),
            clock=lambda: self.now_s,
            random=random.Random(0),
            scores=self.ghost.scores,
        )
        self.requests: dict[str, Request] = {}
        self.deltas: dict[str, list[Delta]] = defaultdict(list)
        self.progress: dict[str, list[Progress]] = defaultdict(list)

    def add(
        self,
        tokens: Sequence[int],
        images: tuple[ImageInput, ...] = (),
        namespace: str | None = None,
        priority: int = 0,
        marks: Sequence[int] = (),
        hints: Hints = _NONE,
        said: Sequence[int] = (),
        content: Callable[[], Content] | None = None,
        **params: Any,
    ) -> str:
        """Adds a request; returns its id."""
        id = f"r{len(self.requests)}"
        given = (np.array(tokens), SamplingParams(**params), namespace, priority, images)
        request = Request(*given, marks=marks, hints=hints, said=np.array(said, np.int32), content=content)
        self.scheduler.add(id, request)
        self.requests[id] = request
        return id

    def encoded(self, tokens: Sequence[int]) -> Encoded:
        return Encoded.of(self.cache.tree.keys, np.array(tokens, np.int32))

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.now_s += self.step_s
            events = self.scheduler.step()
            for id, what in events:
                if isinstance(what, Progress):
                    self.progress[id].append(what)
                else:
                    assert not self.ended(id), "an event after the last"
                    self.deltas[id].append(what)
            self.steps += 1
            if events or self.scheduler.busy or not self.steps % 8:  # where nobody asks, little happens
                self.check()

    def run(self, limit: int = 6000) -> None:
        """Runs all requests to their ends."""
        for _ in range(limit):
            if not self.scheduler.busy:
                break
            self.step()
        assert not self.scheduler.busy, "it never ends"
        assert all(pool.private == 0 for pool in self.cache.pools.values())

    def run_and_flush(self, *failed: str) -> None:
        """Runs all requests to their ends, which but for these and cancelled ones are as without a cache.

        Then nothing may be held.
        """
        self.run()
        for id, request in self.requests.items():
            if id not in failed and request.content is None and self.last(id).finish_reason != "cancelled":
                self.assert_complete(id)
        self.check_at_rest()

    def one(self, tokens: Sequence[int], images: tuple[ImageInput, ...] = (), **params: Any) -> str:
        """Runs a request to its end, and checks its output; returns its id."""
        id = self.add(tokens, images, **{"max_tokens": 1, "ignore_eos": True, **params})
        self.run()
        self.assert_complete(id)
        return id

    # checks

    def check(self) -> None:
        self.cache.check()
        self.scheduler.check()
        for name, pool in self.cache.pools.items():
            assert pool.free + pool.cached + pool.private == pool.total, name

    def check_at_rest(self) -> None:
        """Flushes the cache, and checks that nothing was held."""
        assert self.cache.stats().leases.open == 0
        assert all(pool.private == 0 for pool in self.cache.pools.values())
        self.cache.flush()
        for name, pool in self.cache.pools.items():
            assert (pool.private, pool.free) == (0, pool.total), f"{name}: something is still locked"

    def assert_complete(self, *ids: str) -> None:
        """Checks outputs, or all of them, against those without a cache."""
        for id in ids or self.requests:
            assert self.output(id) == complete(self.requests[id]), (id, self.last(id).error)

    # what came of a request

    def ended(self, id: str) -> bool:
        return bool(self.deltas[id]) and self.deltas[id][-1].finish_reason is not None

    def last(self, id: str) -> Delta:
        assert self.ended(id)
        return self.deltas[id][-1]

    def usage(self, id: str) -> Usage:
        usage = self.last(id).usage
        assert usage is not None
        return usage

    def hit(self, id: str) -> int:
        return self.usage(id).cached_tokens

    def output(self, id: str) -> tuple[tuple[int, ...], str, str | None]:
        """Returns the tokens, the text and the finish reason so far."""
        deltas = self.deltas[id]
        tokens = tuple(token for delta in deltas for token in delta.tokens)
        return tokens, "".join(delta.text for delta in deltas), deltas[-1].finish_reason
