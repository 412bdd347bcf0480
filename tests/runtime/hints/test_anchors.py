"""Anchors: what several sessions begin with is found when a flood has pushed out everything else."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from rigs.scheduler import PAGE, Bench

from mainstem.cache.namespaces import encode_namespace
from mainstem.errors import BadArgument
from mainstem.runtime.hints import anchors
from mainstem.runtime.request import Hints, Request
from mainstem.runtime.schedule.sequence import Sequence
from mainstem.settings.engine import Limits

HOUR_S = 3600.0


class Forks(Bench):
    """A bench of sessions that begin alike, and of prompts that share nothing."""

    def __init__(self, pages: int = 64, share: float = 0.25, **limits: Any) -> None:
        super().__init__(pages, anchor_share=share, **limits)
        self.asked = 0

    def ask(self, prompt: list[int], session: str | None = None, no_store: bool = False, **given: Any) -> int:
        """Runs a request to its end; returns how many whole pages of its prompt were found."""
        hints = Hints(session=session, no_store=no_store)
        id = self.add(prompt, hints=hints, ignore_eos=True, **{"max_tokens": 1, **given})
        self.run()
        self.assert_complete(id)
        return self.usage(id).cached_tokens // PAGE

    def flood(self, prompts: int = 12, pages: int = 8, **given: Any) -> None:
        """Asks what shares no page with anything else, in sessions of their own."""
        for _ in range(prompts):
            self.asked += 1
            first = [8 + self.asked // 1600, 8 + self.asked // 40 % 40, 8 + self.asked % 40]
            self.ask([*first, *(8 + at % 40 for at in range(pages * PAGE - 3))], **given)

    def share(self, prefix: list[int], sessions: int = 2, **given: Any) -> None:
        """Lets new sessions begin with a prefix."""
        for _ in range(sessions):
            self.asked += 1
            self.ask([*prefix, 8 + self.asked // 40, 8 + self.asked % 40, 1, 2], **given)

    def cached(self, prefix: list[int], namespace: str | None = None) -> int:
        """Returns how many whole pages of a prefix are there."""
        return self.cache.tree.peek([*prefix, 0], namespace) // PAGE

    @property
    def found(self) -> int:
        return self.scheduler.totals.anchors["found"]

    @property
    def kept(self) -> int:
        return self.cache.stats().retention.spare


def front(pages: int, of: int = 0) -> list[int]:
    return [9 + of, *(10 + at % 31 for at in range(pages * PAGE - 1))]


# ---------------------------------------------------------------- what is an anchor


@pytest.mark.parametrize(("share", "pages"), [(0.0, 0), (0.25, 6)])
def test_what_two_sessions_begin_with_survives_a_flood(share: float, pages: int) -> None:
    bench = Forks(share=share)
    bench.share(front(6))
    bench.flood()
    assert bench.cached(front(6)) == pages and bench.kept == (share > 0)
    assert bench.ask([*front(6), 47, 41, 42, 43]) == pages
    bench.run_and_flush()


def test_what_one_session_has_is_none_however_long_it_grows() -> None:
    bench, prompt = Forks(), front(3)
    for turn in range(6):
        bench.ask(prompt)
        prompt = [*prompt, *bench.output(f"r{turn}")[0], 20, 30, 40]
    assert bench.found == bench.kept == 0
    bench.flood()
    assert bench.cached(front(3)) == 0


def test_what_was_evicted_between_two_sessions_is_found_at_a_mark_or_at_a_length_near_it() -> None:
    for marks, pages in (((), 8), ((*range(1, 8), 10 * PAGE + 1), 10), ((*range(1, 9), 10 * PAGE + 1), 8)):
        bench = Forks(pages=128)
        for last in (40, 41):
            bench.flood(prompts=20)
            assert bench.ask([*front(10), last, last, last, last], marks=marks) == 0
        bench.flood(prompts=20)
        assert bench.cached(front(10)) == pages


def test_a_session_that_was_forgotten_by_the_cache_has_no_anchor_either() -> None:
    bench = Forks()
    bench.ask(front(6))
    bench.flood()
    assert bench.ask([*front(6), 41, 42, 43, 44]) == 0 and bench.found == 0


def test_a_retry_of_a_session_is_none_until_it_goes_on_from_it() -> None:
    bench, said = Forks(), [*front(5), 40, 41]
    bench.ask(front(5), "a")
    bench.ask(said, "a")
    for last in (20, 21, 21, 22):
        bench.ask([*front(5), last, last, last, last], "a")
    assert bench.found == 0
    bench.ask([*front(5), 22, 22, 22, 22, 23, 23, 23, 23], "a")
    assert bench.found == bench.kept == 1
    bench.flood()
    assert bench.cached(front(5)) == 5


def test_where_a_subagent_went_on_from_a_history_is_one() -> None:
    bench = Forks()
    for session in ("a", None):
        before, history = bench.found, front(6, of=1 + (session is None))
        bench.ask(history, session)
        bench.ask([*history, 30, 31, 32, 33], session)  # the subagent
        bench.ask([*history, 30, 31, 32, 33, 34, 35, 36, 37], session)
        bench.ask([*history, 20, 21, 22, 23], session)  # the agent
        bench.ask([*history, 20, 21, 22, 23, 24, 25, 26, 27], session)
        assert bench.found == before + 1
        bench.flood(prompts=8, pages=6)
        assert bench.cached(history) >= 6


def test_namespaces_do_not_see_each_other() -> None:
    bench = Forks()
    for namespace in ("a", "b", None):
        bench.share(front(4), 1, namespace=namespace)
    assert bench.found == bench.kept == 0


def test_what_is_not_stored_or_not_answered_does_not_count() -> None:
    bench = Forks()
    bench.share(front(4), 1)
    bench.share(front(4), no_store=True)
    bench.share(front(4), max_tokens=0)
    assert bench.found == 0
    bench.share(front(4), 1)
    assert bench.found == 1


# ---------------------------------------------------------------- bounds and ages


def test_the_prefix_that_the_most_sessions_begin_with_stays_where_not_all_fits() -> None:
    bench = Forks(share=0.125)  # 8 pages
    bench.share(front(6), 4)
    bench.share(front(6, of=1), 2)
    bench.flood()
    assert (bench.cached(front(6)), bench.cached(front(6, of=1))) == (6, 2)
    bench.share(front(6, of=2), 6)
    bench.flood()
    assert (bench.cached(front(6)), bench.cached(front(6, of=1)), bench.cached(front(6, of=2))) == (6, 0, 2)
    bench.share(front(6, of=2), 3)
    bench.flood()
    assert (bench.cached(front(6)), bench.cached(front(6, of=1)), bench.cached(front(6, of=2))) == (0, 0, 6)
    assert bench.cache.stats().retention.given_way == 2


def test_a_session_of_an_hour_ago_counts_half() -> None:
    for hours, stays in ((1.9, True), (2.1, False)):
        bench = Forks(share=0.125)
        bench.share(front(6), 3)  # counted twice
        for _ in range(3):
            bench.now_s += (hours * HOUR_S - 100) / 3
            bench.ask([*front(6), 8, 11, 1, 2])  # the last one again
        bench.share(front(6, of=1), 2)  # once: more than twice as much after two hours
        bench.flood()
        assert (bench.cached(front(6)) == 6) is stays


def test_an_anchor_ends_an_hour_after_the_last_request_that_began_with_it() -> None:
    bench = Forks()
    bench.share(front(6))
    for _ in range(3):
        bench.now_s += HOUR_S - 200
        assert bench.ask([*front(6), 40, 41, 42, 43], "a") == 6
        bench.flood()
    bench.now_s += HOUR_S
    bench.flood()
    assert bench.cached(front(6)) == 0 and bench.kept == 0


def test_one_that_was_evicted_is_kept_again_by_the_first_session_that_comes() -> None:
    bench = Forks()
    bench.share(front(6))
    bench.cache.retention.clear()
    bench.flood()
    assert bench.cached(front(6)) == 0
    bench.share(front(6), 1)
    bench.flood()
    assert bench.cached(front(6)) == 6


@pytest.mark.parametrize("session", [None, "s"])
def test_an_answer_that_goes_on_elsewhere_is_counted_by_its_prompt(session: str | None) -> None:
    bench, other, prompt = Forks(), Forks(), front(4)
    id = other.one(prompt, max_tokens=4 * PAGE)
    said = [token for delta in other.deltas[id] for token in delta.tokens]
    bench.ask([*prompt, *said], session)
    for _ in range(2):
        bench.ask(prompt, session, said=said, max_tokens=len(said) + 3)
        bench.scheduler.check()


@pytest.mark.parametrize("owners", [2, 12])
def test_all_owners_together_have_the_share(owners: int) -> None:
    bench = Forks(pages=128, share=0.125)
    for number in range(owners):
        bench.share(front(6), namespace=f"salt {number}")
    assert sum(bench.cache.stats().retention.device.values()) <= 16
    assert bench.kept >= 2


def test_a_flood_of_partings_takes_no_more_than_the_share_and_nothing_from_others() -> None:
    bench = Forks(pages=128, share=0.125)
    bench.share(front(8), namespace="a")
    for at in range(40):
        prefix = [8 + at // 8, 8 + at % 8, *front(9)]
        bench.share(prefix[: -(at % 5) or None], 2 + at % 2, namespace="b")
        assert bench.cache.retention.kept(encode_namespace("b")) <= 16 * PAGE
    assert bench.cached(front(8), "a") == 8
    room = (128 - 8 - 16) * PAGE
    bench.ask([8 + at % 39 for at in range(room - 1)], namespace="c")  # takes all that nobody keeps
    assert bench.cached(front(8), "a") == 8
    bench.run_and_flush()


def test_what_a_client_asks_to_be_retained_has_the_room_of_anchors() -> None:
    bench = Forks(share=0.25)
    bench.share(front(14))
    assert bench.kept == 1
    bench.ask(front(16, of=1))
    assert bench.cache.retention.pin(front(16, of=1)).positions == 16 * PAGE
    assert bench.kept == 0 and bench.cache.stats().retention.pinned == 1
    bench.check()


def test_64_owners_are_known_and_the_one_that_asked_longest_ago_is_forgotten() -> None:
    for others, known in ((63, True), (64, False)):
        bench = Forks()
        bench.share(front(4), 1, namespace="a")
        bench.share(front(1), 1, namespace="b")
        bench.share(front(4), 1, namespace="a")
        for at in range(others):
            bench.share(front(1), 1, namespace=f"n{at}")
        assert len(bench.scheduler._anchors._owners) == 64
        assert (encode_namespace("a") in bench.scheduler._anchors._owners) is known


def test_1024_prompts_and_names_of_an_owner_are_known() -> None:
    for others, known in ((1023, True), (1024, False)):
        bench = Forks()
        bench.ask([9, 10, 11], "a")
        for at in range(others):
            bench.ask([9, 12 + at // 900, 10 + at // 30 % 30, 10 + at % 30], f"s{at}")
        (owner,) = bench.scheduler._anchors._owners.values()
        assert len(owner.names) == len(owner.prompts) == 1024
        assert ((b"", "a") in owner.names) is any(length == 3 for length, _ in owner.prompts.values()) is known


def test_256_partings_of_an_owner_are_known_and_the_least_is_forgotten() -> None:
    bench = Forks(pages=1024, share=0.01)
    for at in range(257):
        prefix = [9 + at // 30, 9 + at % 30, 10, 11]
        bench.share(prefix, 2 + (at != 100))
        (owner,) = bench.scheduler._anchors._owners.values()
        assert len(owner.partings) == min(at + 1, 256) and bench.found == at + 1
    forgotten = [at for at in range(257) if not any(n == 4 for n in _known(bench, [9 + at // 30, 9 + at % 30, 10, 11]))]
    assert forgotten == [100]


def test_8192_beginnings_of_an_owner_are_known() -> None:
    """A first prompt of 181 pages and one mark has 16 of them."""
    for others, known in ((511, True), (512, False)):
        bench = Forks(pages=256, share=0.01)
        for at in range(others + 1):
            prompt = [10 + at // 30, 10 + at % 30, *([9] * (181 * PAGE - 2))]
            bench.scheduler._anchors.ended(ended(bench, prompt), 1.0)
        (owner,) = bench.scheduler._anchors._owners.values()
        assert len(owner.beginnings) == 16 * min(others + 1, 512)
        first = anchors._digests(b"", np.array([10, 10, 9, 9], np.int32), [4])[4]
        assert (first in owner.beginnings) is known


def ended(bench: Forks, prompt: list[int]) -> Sequence:
    """Returns a request that has ended, without running it."""
    request = Request(np.array(prompt, np.int32), marks=(5 * PAGE,))
    intake = bench.scheduler.intake
    return intake.sequence("x", request, intake.check(request), 0, 0.0, 0, 0)


def _known(bench: Forks, prompt: list[int]) -> list[int]:
    """Returns at which lengths of a prompt sessions are known to have parted."""
    (owner,) = bench.scheduler._anchors._owners.values()
    digests = anchors._digests(b"", np.array(prompt, np.int32), range(len(prompt) + 1))
    return [length for length, digest in digests.items() if digest in owner.partings]


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan")])
def test_a_share_is_a_part(share: float) -> None:
    with pytest.raises(BadArgument, match="anchor_share"):
        Limits(anchor_share=share)


# ---------------------------------------------------------------- the same as a slow model


class Slow:
    """All prompts as they are, and nothing is forgotten."""

    def __init__(self) -> None:
        self.first: list[list[int]] = []
        self.latest: list[tuple[list[int], int]] = []  # prompts that nothing has gone on from; what is not counted yet
        self.names: set[str] = set()
        self.partings: dict[tuple[int, ...], int] = {}

    def ended(self, prompt: list[int], name: str | None, found: int) -> None:
        known = [n for n in range(1, len(prompt) + 1) if tuple(prompt[:n]) in self.partings]
        begun = {round(2 ** (power / 2)) * PAGE for power in range(12)}
        known += [n for n in begun if len(prompt) >= n and any(prompt[:n] == each[:n] for each in self.first)]
        parted = max([found * PAGE, *known])
        before = max(
            (each for each in self.latest if prompt[: len(each[0])] == each[0]), key=lambda e: len(e[0]), default=None
        )
        if before is None:
            self.first.append(prompt)
        later = to_count = 0
        if before is not None:
            self.latest.remove(before)
            later, to_count = (before[1], 0) if before[0] == prompt else (0, before[1])
        elif name in self.names:
            later = parted
        else:
            to_count = parted
        self.names |= set() if name is None else {name}
        self.latest.append((prompt, later))
        if to_count:
            self.partings.setdefault(tuple(prompt[:to_count]), 0)
            for prefix in self.partings:
                self.partings[prefix] += len(prefix) <= to_count and tuple(prompt[: len(prefix)]) == prefix


@pytest.mark.parametrize("seed", range(8))
def test_random_sessions_have_the_anchors_of_a_slow_model(seed: int) -> None:
    draw, slow = random.Random(seed), Slow()
    bench = Forks(pages=draw.choice((40, 64, 512)), share=draw.choice((0.05, 0.25, 1.0)))
    talks: list[tuple[list[int], str | None]] = []
    for at in range(120):
        kind = draw.random()
        if talks and kind < 0.5:
            prompt, name = draw.choice(talks)
            prompt = [*prompt, *(draw.randrange(8, 12) for _ in range(draw.randrange(0, 6)))]
        elif talks and kind < 0.75:
            prompt, name = draw.choice(talks)
            cut = draw.randrange(1, len(prompt) + 1)
            prompt = [*prompt[:cut], *(draw.randrange(8, 12) for _ in range(draw.randrange(1, 8)))]
        else:
            prompt, name = [draw.randrange(8, 10) for _ in range(draw.randrange(3, 24))], draw.choice((None, f"s{at}"))
        talks.append((prompt, name))
        slow.ended(prompt, name, bench.ask(prompt, name))
        known = bench.scheduler._anchors._owners[b""]
        assert len(known.partings) == len(slow.partings)
        assert bench.found == len(slow.partings)
    if seed != 7:
        assert any(count > 2 for count in slow.partings.values())
    lengths = sorted(n for n, _ in known.partings.values())
    assert lengths == sorted(map(len, slow.partings))
    ranked = sorted(slow.partings.values())
    counts = sorted(2.0 ** (count - bench.now_s / HOUR_S) for _, count in known.partings.values())
    assert np.allclose(counts, ranked, rtol=0.6)  # ages of minutes
    bench.run_and_flush()
