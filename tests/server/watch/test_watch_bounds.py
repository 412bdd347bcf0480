"""What the live page and explanations keep at most, and for how long."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import anyio
import numpy as np
import pytest
from rigs.fake_engine import FakeEngine
from rigs.hand_driven import Clock
from starlette.datastructures import Headers

from mainstem.cache.explain import Stretch
from mainstem.cache.namespaces import Namespace
from mainstem.prompt_rules.rules import Rewrite
from mainstem.runtime.request import Delta, Request, Usage
from mainstem.server.apis.replies import Extras
from mainstem.server.preparation import Prepared
from mainstem.server.watch.explain import Explanations
from mainstem.server.watch.live import Live

USAGE = Usage(4, 0, 1, 0.0, 0.0, 0.0, explanation=(Stretch(0, 4, cause="never_seen"),))


class Watched:
    """Explanations and the live page of a scripted engine; `parts` are what they use of a server."""

    def __init__(self) -> None:
        self.clock, self.engine = Clock(), FakeEngine()
        self.engine.config.__dict__["explain"] = True
        parts: Any = SimpleNamespace(
            engine=self.engine,
            access=SimpleNamespace(is_admin=lambda headers: True),
            preparation=SimpleNamespace(names=["fake"]),
            config=SimpleNamespace(public_prefix=None),
            metrics=SimpleNamespace(reuse=SimpleNamespace(regret_tokens=0)),
            bodies=None,
            name_of=bytes.hex,
            clock=self.clock,
            now=self.clock,
        )
        self.explanations = Explanations(parts, lambda *_: None)  # type: ignore[arg-type,return-value]
        self.live = Live(parts, self.explanations)

    def ask(self, id: str, tenant: str | None = None, tokens: int = 4, rewrites: int = 0) -> None:
        asked: Any = SimpleNamespace(choices=1, rewrites=(Rewrite("clock", "drop", "system", 8, 0),) * rewrites)
        request = Request(np.full(tokens, 7, np.int32), namespace=Namespace(salt=tenant))
        made = Prepared(asked, [request], Extras(asked), *[None] * 3)  # type: ignore[arg-type]
        _, [[watcher]] = self.explanations.follow(id, Headers(), None, made)
        watcher.see(Delta("", (1,), finish_reason="stop", usage=USAGE))

    def sample(self) -> Any:
        return json.loads(anyio.run(self.live.sample))


def test_the_latest_fifty_requests_are_listed() -> None:
    watched = Watched()
    for number in range(200):
        watched.ask(f"{number}")
        latest = [f"{each}" for each in range(max(0, number - 49), number + 1)]
        assert [each.id for each in watched.explanations.recent()] == latest


def test_misses_are_counted_of_256_tenants_of_whom_the_oldest_goes() -> None:
    watched = Watched()
    for number in range(256):
        watched.ask(f"{number}", f"tenant-{number}")
    first = [each.name for each in watched.explanations.tenants()]
    assert len(first) == 256
    watched.ask("again", "tenant-0")  # one of those that are known pushes nobody out
    assert [each.name for each in watched.explanations.tenants()] == first
    assert watched.explanations.tenants()[0].prompt_tokens == 8
    for number in range(3):
        watched.ask(f"new-{number}", f"new-{number}")
    assert [each.name for each in watched.explanations.tenants()][:-3] == first[3:]
    watched.ask("back", "tenant-0")  # begins anew
    last = watched.explanations.tenants()[-1]
    assert (last.name, last.prompt_tokens, last.missed_tokens) == (first[0], 4, {"never_seen": 4})
    assert len(watched.explanations.tenants()) == 256


@pytest.mark.parametrize(("after_s", "there"), [(3599.9, True), (3600.0, False), (3_600_000.0, False)])
def test_an_explanation_is_kept_for_an_hour(after_s: float, there: bool) -> None:
    watched = Watched()
    watched.ask("one")
    watched.clock.now_s += after_s
    for _ in range(2):
        assert [each.id for each in watched.explanations.recent()] == ["one"] * there
    watched.ask("two")
    assert [each.id for each in watched.explanations.recent()] == ["one"] * there + ["two"]


@pytest.mark.parametrize(("more", "kept"), [(0, ["0", "1", "2", "3"]), (1, ["1", "2", "3"]), (4_000_000, [])])
def test_explanations_take_sixteen_megabytes_at_most(more: int, kept: list[str]) -> None:
    watched = Watched()
    whole = ((4 << 20) - 512 - 2000) // 4 + more  # tokens of four bytes, of a quarter of the room
    for number in range(4):
        watched.ask(f"{number}", tokens=whole)
    assert [each.id for each in watched.explanations.recent()] == kept
    watched.ask("small")
    assert watched.explanations.recent()[-1].id == "small"


@pytest.mark.parametrize(("more", "kept"), [(0, ["0", "1"]), (1, ["1"])])
def test_changes_by_rules_count_in_the_sixteen_megabytes(more: int, kept: list[str]) -> None:
    watched, changes = Watched(), 40_000
    for number in range(2):  # 200 bytes for each change
        tokens = ((8 << 20) - 512 - 2000 - 200 * changes) // 4
        watched.ask(f"{number}", tokens=tokens, rewrites=changes + more)
    assert [each.id for each in watched.explanations.recent()] == kept


# ---------------------------------------------------------------- the live page


@pytest.mark.parametrize(("after_s", "anew"), [(0.999, False), (1.0, True), (1000.0, True)])
def test_a_sample_is_taken_anew_after_a_second(after_s: float, anew: bool) -> None:
    watched = Watched()
    first = watched.sample()
    assert first["every_s"] == 1.0
    watched.clock.now_s += after_s
    assert (watched.sample() != first) == anew
    assert watched.sample()["at_s"] == (1000.0 + after_s if anew else 1000.0)


@pytest.mark.parametrize(("took_s", "pause_s"), [(0.04, 1.0), (0.05, 1.0), (0.06, 1.2), (2.0, 40.0)])
def test_a_look_that_takes_long_is_followed_by_a_pause_of_twenty_times_as_much(took_s: float, pause_s: float) -> None:
    watched = Watched()
    survey, watched.engine.shown = watched.engine.shown.survey, SimpleNamespace()  # type: ignore[assignment]

    def slowly(*given: Any) -> Any:
        watched.clock.now_s += took_s
        return survey(*given)

    watched.engine.shown.survey = slowly  # type: ignore[method-assign]
    first = watched.sample()
    assert first["every_s"] == pytest.approx(pause_s)
    watched.clock.now_s += pause_s - 0.01
    assert watched.sample() == first
    watched.clock.now_s += 0.02
    assert watched.sample() != first


def test_sixteen_look_at_a_time_and_who_leaves_makes_room() -> None:
    watched = Watched()

    async def look() -> None:
        open_now = [watched.live.events(0, lambda: False) for _ in range(16)]
        assert [await anext(each) for each in open_now] == [b"retry: 3000\n\n"] * 16

        async def another() -> AsyncIterator[bytes]:
            return watched.live.events(0, lambda: True)

        for _ in range(2):
            assert [event async for event in await another()] == [b"event: full\ndata: {}\n\n"]
        await open_now.pop().aclose()  # type: ignore[attr-defined]
        for _ in range(2):
            assert [event async for event in await another()] == [b"retry: 3000\n\n"]
        for each in open_now:
            await each.aclose()  # type: ignore[attr-defined]

    anyio.run(look)


def test_the_twenty_largest_tenants_are_named() -> None:
    watched = Watched()
    tree, ids = watched.engine.shown, iter(range(10_000))
    for number in range(20):
        tree.insert([number] * 16 * (number + 1), [next(ids) for _ in range(number + 1)], Namespace(salt=f"{number}"))
    assert len(watched.sample()["tenants"]) == 20
    for number in (30, 25):  # later ones, that are larger
        tree.insert([number] * 16 * number, [next(ids) for _ in range(number)], Namespace(salt=f"{number}"))
    watched.clock.now_s += 1.0
    sizes = [each["device"] // 16 for each in watched.sample()["tenants"]]
    assert sizes == [30, 25, *range(20, 2, -1)]


@pytest.mark.parametrize(("looks", "idle_s"), [(598, 598), (599, 599), (600, 599), (6000, 599)])
def test_the_times_of_the_latest_six_hundred_looks_are_known(looks: int, idle_s: int) -> None:
    """What was used before that is idle at least since the oldest of them."""
    watched = Watched()
    watched.engine.shown.insert([1] * 16, [0])
    watched.sample()
    for tick in range(100, 100 + looks):
        watched.clock.now_s += 1.0
        watched.live.looked(tick, watched.clock.now_s)
    tree = watched.sample()["tree"]
    assert max(row[tree["columns"].index("idle_s")] for row in tree["rows"]) == idle_s
