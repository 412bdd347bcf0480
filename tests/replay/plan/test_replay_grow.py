"""Growth: what is kept exactly, what within bounds, and that the model is the one of the docs."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mainstem import cli
from mainstem.errors import BadArgument
from mainstem.replay.generate import Chat, Documents, Mix, Tenants, generate
from mainstem.replay.grow import grow
from mainstem.replay.info import info
from mainstem.replay.simulate.sweep import replay
from mainstem.replay.trace import Batch, Seen, Trace
from mainstem.settings.replay import Growth

Blocks = tuple[int, ...]


def recorded(seed: int = 2) -> Trace:
    parts = ((Chat(turns=4.0, prompts=3), 2.0), (Tenants(prompts=30), 2.0), (Documents(), 1.0))
    return generate(Mix(rate_per_s=2.0, parts=parts), 1200, seed=seed)


def paths(trace: Trace) -> list[Blocks]:
    batch = trace.whole
    return [tuple(batch.blocks[a:b].tolist()) for a, b in pairwise(batch.offsets.tolist())]


def hit_rates(trace: Trace, shares: tuple[float, ...]) -> list[float]:
    blocks = trace.distinct_blocks
    return [replay(trace, "lru", max(1, int(blocks * share))).block_hit_rate for share in shares]


def test_a_grown_trace_has_n_times_the_requests_and_keeps_what_sessions_share() -> None:
    trace = recorded()
    grown = grow(trace, 5, Growth(seed=7, new_prompts=1.0))
    assert len(grown) == 5 * len(trace) and len(grown.whole.blocks) == 5 * len(trace.whole.blocks)
    assert grown.distinct_blocks == 5 * trace.distinct_blocks, "with new prompts alone, populations share nothing"
    assert Counter(map(len, paths(grown))) == {n: 5 * count for n, count in Counter(map(len, paths(trace))).items()}
    uses = Counter(Counter(trace.whole.blocks.tolist()).values())
    assert Counter(Counter(grown.whole.blocks.tolist()).values()) == {n: 5 * count for n, count in uses.items()}
    for name in ("input_tokens", "output_tokens", "tenant", "kind", "turn"):
        want, found = (Counter(getattr(each.whole, name).tolist()) for each in (trace, grown))
        assert found == {value: 5 * count for value, count in want.items()}, name


def test_names_are_still_of_all_blocks_before() -> None:
    parents: dict[int, int] = {}
    for path in paths(grow(recorded(), 4, Growth(new_prompts=0.5))):
        for parent, block in pairwise((0, *path)):
            assert parents.setdefault(block, parent) == parent


@pytest.mark.parametrize("new_prompts", [0.0, 0.3, 1.0])
def test_distinct_blocks_are_known_without_counting(new_prompts: float) -> None:
    grown = grow(recorded(), 6, Growth(new_prompts=new_prompts))
    seen = Seen()
    for batch in grown.batches():
        seen.add(batch.blocks)
    assert grown.distinct_blocks == len(seen)


def test_requests_of_a_session_keep_their_distance_and_come_at_most_a_shift_later() -> None:
    trace = recorded()
    times: dict[int, list[float]] = defaultdict(list)
    for chat, time_s in zip(trace.whole.chat.tolist(), trace.whole.time_s.tolist(), strict=True):
        times[chat].append(time_s)
    grown = grow(trace, 3, Growth(shift=20.0)).whole
    found: dict[int, list[float]] = defaultdict(list)
    for chat, time_s in zip(grown.chat.tolist(), grown.time_s.tolist(), strict=True):
        found[chat].append(time_s)
    for chat, population in ((chat, each) for chat in times if chat >= 0 for each in range(3)):
        shifts = np.array(found[3 * chat + population]) - np.array(times[chat])
        assert np.abs(shifts).max() <= 20.5 and np.ptp(shifts) < 1e-6
    assert (np.diff(grown.time_s) >= 0).all() and grown.time_s[-1] <= trace.whole.time_s[-1] + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_the_hit_rate_at_the_same_share_of_all_blocks_is_that_of_the_recorded_trace(seed: int) -> None:
    trace = recorded(seed)
    grown = grow(trace, 12, Growth(seed=seed, new_prompts=1.0))
    shares = (0.02, 0.05, 0.1, 0.3, 1.0)
    for want, found in zip(hit_rates(trace, shares), hit_rates(grown, shares), strict=True):
        assert abs(want - found) < 0.04
    shared = hit_rates(grow(trace, 12, Growth(seed=seed, new_prompts=0.0)), shares)
    assert all(found > want - 0.04 for want, found in zip(hit_rates(trace, shares), shared, strict=True))


def test_reuse_distances_grow_as_the_trace_does_and_waits_do_not() -> None:
    trace = recorded()
    grown = grow(trace, 8, Growth(new_prompts=1.0))
    want, found = info(trace), info(grown)
    assert found.block_hit_rate == pytest.approx(want.block_hit_rate)

    def within(rows: list[tuple[float, int]], high: float) -> float:
        return sum(uses for top, uses in rows if top <= high) / sum(uses for _, uses in rows)

    reuses, grown_reuses = ([(row.high, row.uses) for row in each.reuses] for each in (want, found))
    for high, _ in reuses:
        assert abs(within(reuses, high) - within(grown_reuses, 8 * high)) < 0.06, high
    waits, grown_waits = ([(row.high_s, row.uses) for row in each.waits] for each in (want, found))
    for high, _ in waits:
        assert abs(within(waits, high) - within(grown_waits, high)) < 0.05, high


def test_new_prompts_is_the_share_of_populations_with_prompts_of_their_own() -> None:
    prompts = [[10 * root, 10 * root + 1, 1000 + 100 * root + i] for root in range(1, 41) for i in range(20)]
    trace = Trace.of(Batch.of(prompts))
    for share in (0.0, 0.25, 1.0):
        grown = grow(trace, 50, Growth(new_prompts=share))
        roots = Counter(path[0] for path in paths(grown))
        own = sum(count for root, count in roots.items() if root % 10 or root > 400) / len(grown)
        assert abs(own - share) < 0.04
    kept = Counter(path[:2] for path in paths(grow(trace, 50, Growth(new_prompts=0.0))))
    assert set(kept) == {(10 * root, 10 * root + 1) for root in range(1, 41)}, "what is shared is shared by all"


def test_a_block_is_shared_from_so_many_continuations_on() -> None:
    trace = Trace.of(Batch.of([[1, 2, 10 + i] for i in range(5)] + [[1, 2]] + [[1]] + [[7, 20 + i] for i in range(4)]))
    grown = grow(trace, 2, Growth(new_prompts=0.0, shared_by=5))
    assert grown.distinct_blocks == 2 + 2 * (5 + 1 + 4), "1 and 2 are shared; 7 has four continuations"
    blocks = Counter(grown.whole.blocks.tolist())
    assert (blocks[1], blocks[2]) == (14, 12) and 7 not in blocks


def test_equal_seeds_give_equal_traces_and_others_others() -> None:
    trace = recorded()
    one, same, other = (grow(trace, 3, Growth(seed=seed)).whole for seed in (5, 5, 6))
    assert (one.blocks == same.blocks).all() and (one.time_s == same.time_s).all()
    assert (one.time_s != other.time_s).any() and set(one.blocks.tolist()) != set(other.blocks.tolist())


def test_small_pieces_and_windows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = recorded()
    whole = grow(trace, 4).whole
    monkeypatch.setattr("mainstem.replay.grow._WINDOW_REQUESTS", 300)
    monkeypatch.setattr("mainstem.replay.grow._PIECE_BLOCKS", 1000)
    monkeypatch.setattr("mainstem.replay.grow._TIMES_AT_ONCE", 500)
    pieces = grow(trace, 4).whole
    assert (whole.time_s == pieces.time_s).all() and (whole.blocks == pieces.blocks).all()
    assert (whole.offsets == pieces.offsets).all()


def test_empty_prompts_and_one_request() -> None:
    assert len(grow(Trace.of(Batch.of([[], [1], []])), 3)) == 9
    grown = grow(Trace.of(Batch.of([[4, 5]])), 2)
    assert grown.distinct_blocks == 4 and grown.whole.time_s.tolist() == [0, 0]
    assert re.fullmatch(r"Grown, not recorded: 2 populations of .*, with seed=\d+, shift=60s, new_.*", grown.notes[-1])


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, target = tmp_path / "few.mstrace", tmp_path / "many.mstrace"
    recorded().save(trace)
    command = ["trace", "grow", str(trace), "--times", "3", "--shift", "5m", "--new-prompts", "0.5", "--seed", "2"]
    assert cli.main([*command, "-o", str(target), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["requests"], shown["distinct_blocks"]) == (3600, Trace.open(target).distinct_blocks)
    want = grow(Trace.open(trace), 3, Growth(seed=2, shift=300.0, new_prompts=0.5))
    assert (Trace.open(target).whole.blocks == want.whole.blocks).all()
    for output in (trace, tmp_path / "many.json"):
        assert cli.main([*command, "-o", str(output)]) == 2
        assert "output" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("times", "growth", "message"),
    [
        (0, {}, "times = 0: must be"),
        (10**7, {}, "times = 10000000: must be"),
        (2, {"new_prompts": 1.5}, "new_prompts = 1.5: must be a number, 0 or more, up to 1"),
        (2, {"shift": -1.0}, "shift = -1.0: must be a number, 0 or more"),
        (2, {"shared_by": 1}, "shared_by = 1: must be an integer from 2"),
    ],
)
def test_arguments_outside_their_range_are_refused(times: int, growth: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        grow(Trace.of(Batch.of([[1]])), times, Growth(**growth))
    with pytest.raises(BadArgument, match="a trace with 1 request or more"):
        grow(Trace.of(Batch.of([])), 2)
