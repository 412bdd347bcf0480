"""Replaced prompts: the history that a summary has replaced goes first, and nothing that is used again."""

from __future__ import annotations

import random
from typing import Any

import pytest
from rigs.ghost import VOCAB
from rigs.scheduler import PAGE, Bench

from mainstem.cache.keys import TokenKeys
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.runtime.request import Hints
from mainstem.settings.engine import Limits

ANSWER = 72
FRONT = [9, *(10 + at % 31 for at in range(3 * PAGE - 1))]
HISTORY = [40, *(11 + at % 29 for at in range(40 * PAGE))]


class Compacting(Bench):
    """A bench whose sessions have names."""

    def __init__(self, pages: int = 128) -> None:
        super().__init__(pages)
        self.answer: list[int] = []

    def ask(self, prompt: list[int], session: str | None = "a", answer: int = ANSWER, **given: Any) -> list[int]:
        """Runs a request to its end; returns its prompt and answer."""
        id = self.add(prompt, hints=Hints(session=session), ignore_eos=True, **{"max_tokens": answer, **given})
        self.run()
        self.assert_complete(id)
        self.answer = list(self.output(id)[0])
        return [*prompt, *self.answer]

    def compact(self, session: str | None = "a", begin: int = 2, **given: Any) -> list[int]:
        """Has a session write a summary and go on with a part of it; returns the history with the summary."""
        whole = self.ask([*FRONT, *HISTORY], session, **given)
        self.ask([*FRONT, 41, *self.answer[begin:-2], 42], session, **given)
        return whole

    def cached(self, tokens: list[int], namespace: str | None = None) -> int:
        """Returns how many whole pages are there."""
        return self.cache.tree.peek([*tokens, 0], namespace) // PAGE

    @property
    def replaced(self) -> int:
        return self.scheduler.totals.replaced_prompts


@pytest.mark.parametrize("session", ["a", None])
def test_a_history_that_a_summary_has_replaced_goes_before_what_is_older(session: str | None) -> None:
    bench = Compacting()
    other = bench.ask([30, *range(9, 9 + 20)], "b", answer=4)
    whole = bench.compact(session)
    assert bench.replaced == (session is not None)
    bench.ask([31, *(12 + at % 23 for at in range(50 * PAGE))], "c", answer=1)
    assert bench.cached(FRONT) == 3
    assert (bench.cached(other) > 0) is (session is not None)
    assert bench.cached(whole) < len(whole) // PAGE
    bench.run_and_flush()


def test_what_goes_on_from_the_history_or_its_answer_stays() -> None:
    for end in (-ANSWER - 20, None):
        bench = Compacting()
        whole = bench.ask([*FRONT, *HISTORY])
        said = bench.answer
        forked = bench.ask([*whole[:end], 44, 45, 46, 47, 44, 45, 46, 47], "b", answer=1)
        bench.ask([*FRONT, 41, *said, 42], answer=1)
        assert bench.replaced == (end is not None)
        bench.ask([31, *(12 + at % 23 for at in range(60 * PAGE if end else 30 * PAGE))], "c", answer=1)
        assert bench.cached(forked) == (len(forked) - 1) // PAGE
        assert end is None or bench.cached(whole) < (len(whole) - 1) // PAGE
        bench.run_and_flush()


@pytest.mark.parametrize("policy", ["fifo", "lfu", "priority", "lru"])
def test_what_became_one_with_the_end_of_a_history_stays(policy: str) -> None:
    bench = Compacting()
    cache = PrefixCache(128, PAGE, keys=TokenKeys(VOCAB), policy=policy, copy_page=bench.ghost.copy_page)
    bench.schedule(cache, Limits(checkpoint_tokens=0), 1024)
    whole = bench.ask([*FRONT, *HISTORY])
    said = bench.answer
    bench.ask([*whole, *range(20, 20 + 2 * PAGE)], "b", answer=1)
    bench.ask([*FRONT, 41, *said, 42], answer=1)
    assert bench.replaced == 0


def test_nothing_is_replaced_by_what_has_no_answer_of_it_or_is_half_as_long() -> None:
    bench = Compacting()
    bench.ask([*FRONT, *HISTORY])
    said = bench.answer
    bench.ask([*FRONT, 41, *(12 + at % 23 for at in range(60))])  # a subagent
    bench.ask([*FRONT, *HISTORY, *said, 43])
    bench.ask([*FRONT, 42, *HISTORY[:50], *bench.answer])  # tools have changed
    assert len(FRONT) + 51 + ANSWER >= len(FRONT + HISTORY) / 2 and bench.replaced == 0


def test_a_session_of_another_namespace_or_name_replaces_nothing() -> None:
    bench = Compacting()
    bench.ask([*FRONT, *HISTORY], namespace="a")
    short = [*FRONT, 41, *bench.answer, 42]
    bench.ask(short, namespace="b", answer=1)
    bench.ask(short, "b", namespace="a", answer=1)
    assert bench.replaced == 0
    bench.ask(short, namespace="a", answer=1)
    assert bench.replaced == 1


def test_an_answer_is_known_by_any_of_four_pieces_of_sixteen_tokens() -> None:
    for answer, begin, known in ((64, 0, True), (63, 0, False), (72, 55, False), (72, 53, True)):
        bench = Compacting()
        bench.ask([*FRONT, *HISTORY], answer=answer)
        bench.ask([*FRONT, 41, *bench.answer[begin:]])
        assert bool(bench.replaced) is known, (answer, begin)


def test_1024_sessions_are_known_and_the_one_used_longest_ago_is_forgotten() -> None:
    for others, known in ((1023, True), (1024, False)):
        bench = Compacting()
        bench.ask([*FRONT, *HISTORY])
        said = bench.answer
        for at in range(others):
            bench.ask([20, 21, 22, 23, 24], f"s{at}", answer=1)
        latest = bench.scheduler._replaced._latest
        assert len(latest) == 1024 and ((b"", "a") in latest) is known
        bench.ask([*FRONT, 41, *said], answer=1)
        assert bench.replaced == known


@pytest.mark.parametrize("seed", range(4))
def test_random_sessions_that_compact_are_answered_as_without_a_cache(seed: int) -> None:
    draw, bench = random.Random(seed), Compacting(pages=200)
    talks: dict[str, list[int]] = {}
    for at in range(60):
        name = f"s{draw.randrange(4)}"
        talk = talks.get(name, list(FRONT))
        if len(talk) > 75 * PAGE:
            talk = [*FRONT, 41, *talk[-60:]]
        talks[name] = bench.ask([*talk, *(draw.randrange(8, 40) for _ in range(draw.randrange(1, 30)))], name)
        if at % 7 == 0:
            bench.ask([*talks[name], 43], draw.choice((name, None)), answer=2)
    assert bench.replaced > 3
    bench.run_and_flush()
