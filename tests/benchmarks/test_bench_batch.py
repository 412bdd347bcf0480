"""The benchmark of batches: its orders are what they are called, and the cache serves them as it would anybody."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from bench import batch
from bench.report import Report
from mainstem import PrefixCache
from mainstem.replay.trace import Batch as Requests
from mainstem.replay.trace import Trace

SETTINGS = replace(batch.QUICK, percents=(5,), size=0.02, end_size=0.02)


def small(prompts: list[list[int]], answers: list[int] | None = None, page_size: int = 1) -> batch.Batch:
    tokens = [np.array(prompt, np.int32) for prompt in prompts]
    return batch.Batch("small", tokens, answers or [1] * len(prompts), page_size)


def greedy(given: batch.Batch, pages: int, window: int) -> int:
    """Returns the tokens that are computed if all that wait are asked for their match before each request."""
    cache, waiting, computed = PrefixCache(pages, given.page_size), list(range(len(given.prompts))), 0
    while waiting:
        best = max(waiting[:window], key=lambda at: cache.peek(given.prompts[at]))
        waiting.remove(best)
        lease = cache.lease(given.prompts[best])
        lease.reserve(len(given.prompts[best]) - lease.hit)
        computed += len(given.prompts[best]) - lease.hit
        lease.finish()
    return computed


def test_the_longest_match_is_that_of_all_that_wait() -> None:
    """Ties may be broken otherwise, so the tokens are compared, not the order."""
    for seed in range(6):
        rng = np.random.default_rng(seed)
        given = small([rng.integers(0, 2, 10).tolist() for _ in range(40)], [0] * 40)
        found = batch.served(given, "longest match", 30, 1)["computed"]
        assert found == pytest.approx(greedy(given, 30, 40), rel=0.1)
        cache = PrefixCache(30, 1)
        chosen = []
        for at in batch.ORDERS["longest match"](given, cache):
            left = [each for each in range(40) if each not in chosen]
            assert cache.peek(given.prompts[at]) == max(cache.peek(given.prompts[each]) for each in left)
            chosen.append(at)
            lease = cache.lease(given.prompts[at])
            lease.reserve(10 - lease.hit)
            lease.finish(10)
        assert sorted(chosen) == list(range(40))


def test_of_a_window_only_those_that_wait_are_asked() -> None:
    rng = np.random.default_rng(0)
    given = small([rng.integers(0, 9, 4).tolist() for _ in range(300)])
    seen: list[int] = []
    for at in batch.ORDERS["longest match, 128"](given, PrefixCache(10, 1)):
        assert at < len(seen) + 128
        seen.append(at)
    assert sorted(seen) == list(range(300))


def test_every_order_has_every_prompt_once() -> None:
    given = batch.tree(np.random.default_rng(0), 0.05)
    for name, make in batch.ORDERS.items():
        assert sorted(make(given, PrefixCache(10))) == list(range(len(given.prompts))), name


def test_what_is_computed_is_what_leases_do_not_find() -> None:
    given = small([[1, 2, 3, 4], [9, 9, 9], [1, 2, 3, 5], [1, 2, 3, 4]], [2, 2, 2, 2])
    assert batch.served(given, "arrival", 100, 1) == {"computed": 9, "steps": 8, "alone": 0, "at_once": 1.0}
    assert batch.served(given, "arrival", 6, 1)["computed"] == 11, "answers take room"
    assert batch.served(given, "sorted", 6, 1)["computed"] == 9
    assert batch.served(given, "arrival", 100, 4) == {"computed": 9, "steps": 2, "alone": 0, "at_once": 4.0}
    assert batch.served(given, "arrival", 11, 4)["steps"] == 4, "as many run as fit"


def test_an_answer_that_does_not_fit_is_cut_and_a_prompt_that_does_not_is_not_kept() -> None:
    given = small([[1, 2, 3, 4], [1, 2, 3, 4]], [9, 9])
    assert batch.served(given, "tree", 5, 2) == {"computed": 5, "steps": 18, "alone": 0, "at_once": 1.0}
    assert batch.served(given, "tree", 3, 2) == {"computed": 8, "steps": 18, "alone": 2, "at_once": 0.0}


@pytest.mark.parametrize("make", batch.GENERATED)
def test_generated_batches_follow_from_their_seed(
    make: Callable[[np.random.Generator, float], batch.Batch],
) -> None:
    one, again, other = (make(np.random.default_rng(seed), 0.02) for seed in (1, 1, 2))
    assert len(one.prompts) == len(one.answers) > 100
    assert [prompt.tolist() for prompt in one.prompts] == [prompt.tolist() for prompt in again.prompts]
    assert one.prompts[0].tolist() != other.prompts[0].tolist()
    computed = {name: batch.served(one, name, 10**5, 1)["computed"] for name in ("arrival", "tree")}
    assert computed["arrival"] == pytest.approx(computed["tree"], rel=0.001), "with room for all any order is the best"


def test_a_run_has_rows_ends_and_goals_and_names_no_folder(tmp_path: Path) -> None:
    requests = [[1, 2, 3], [7, 8], [1, 2, 4], [7, 9], [1, 2, 3], []]
    Trace.of(Requests.of(requests, block_size=8), block_size=8).save(tmp_path / "mine.mstrace")
    report = Report("batch", "2026-11-30", quick=True, progress=lambda line: None)
    batch.run(replace(SETTINGS, traces=(str(tmp_path / "mine.mstrace"),)), report)
    assert report.settings["traces"] == ["mine"]
    names = ["evaluation", "extraction", "samples", "random tree", "mine"]
    assert [row["batch"] for row in report.rows] == [name for name in names for _ in range(2 * len(batch.ORDERS))]
    assert report.rows[-1]["longest"] == 24
    assert all(row["ratio"] >= 0.999 for row in report.rows)
    assert [row["batch"] for row in report.more["ends"]] == names[:-1]
    assert {goal["met"] for goal in report.more["goals"]} == {True, False}
    assert all(" do not fit" in goal["what"] for goal in report.more["goals"] if not goal["met"])
    assert [shown.row_count for shown in report.tables] == [10, 4, 10]
