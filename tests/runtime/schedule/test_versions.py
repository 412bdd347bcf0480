"""Versions of the weights over a scheduler whose model is a ghost, which computes the same with all."""

from __future__ import annotations

from rigs.ghost import prompt
from rigs.scheduler import Bench

from mainstem.runtime.request import Hints


def test_the_1024_groups_that_asked_last_are_known() -> None:
    bench = Bench()
    tokens, versions = prompt(1, 13), bench.scheduler.versions
    bench.one(tokens, hints=Hints(group="0"))
    for number in range(1, 1024):
        bench.scheduler.cancel(bench.add(tokens, hints=Hints(group=f"{number}"), max_tokens=1))
    bench.run()
    bench.scheduler.renew("w", "group")

    def found(group: str) -> int:
        id = bench.add(tokens, hints=Hints(group=group), max_tokens=1)
        bench.run()
        usage = bench.deltas[id][-1].usage
        assert usage is not None
        return usage.cached_tokens

    assert found("0") == 12, "it is the 1024th"
    assert versions.older(bench.requests["r1"]) == [0]
    found("new")
    assert versions.older(bench.requests["r0"]) == [0], "it has asked again"
    assert versions.older(bench.requests["r1"]) == [], "it is the 1025th"
    bench.scheduler.check()


def test_a_waiting_request_counts_what_storage_brought_for_the_weights_that_it_has() -> None:
    bench = Bench(max_running=1)
    first, second = (bench.add(prompt(seed, 17), max_tokens=4, ignore_eos=True) for seed in (1, 2))
    bench.step(2)
    assert bench.scheduler.renew("w", "strict") == 1
    bench.run()
    usages = [bench.deltas[id][-1].usage for id in (first, second)]
    assert [each.weight_versions for each in usages if each is not None] == [((0, 2), (1, 2)), ((1, 4),)]
    bench.scheduler.totals.check()
