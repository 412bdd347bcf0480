"""The greatest numbers that a replay, a plan and a generated trace take, and how many lines are looked at or shown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mainstem.errors import BadArgument
from mainstem.replay.generate import _check_range, _lengths
from mainstem.replay.grow import grow
from mainstem.replay.report.series import merged
from mainstem.replay.simulate.rows import _Spans
from mainstem.replay.trace import Batch, Trace
from mainstem.settings.fleet import FleetSize
from mainstem.settings.replay import Assumptions, Setup


@pytest.mark.parametrize(
    ("make", "greatest"),
    [
        (lambda n: Setup(replicas=n), 4096),
        (lambda n: Setup(host_blocks=n), 2**62),
        (lambda n: Assumptions(replicas=n), 4096),
        (lambda n: Assumptions(gpus=n), 1024),
        (lambda n: FleetSize(replicas=n), 1024),
        (lambda n: _check_range("prompts", n, whole=True), 10**6),
    ],
)
def test_counts_have_a_greatest_value(make: Callable[[int], Any], greatest: int) -> None:
    make(greatest)
    for more in (greatest + 1, greatest * 1000):
        with pytest.raises(BadArgument):
            make(more)


@pytest.mark.parametrize(("flops", "taken"), [(1e-3, True), (0.9e-3, False), (1e24, True), (1.1e24, False)])
def test_an_amount_that_is_a_typo_is_refused(flops: float, taken: bool) -> None:
    if taken:
        assert Assumptions(flops=flops).flops == flops
    else:
        with pytest.raises(BadArgument):
            Assumptions(flops=flops)


def test_a_trace_is_grown_a_million_times_at_most() -> None:
    nothing = Trace.of(Batch.of([], time_s=[]))
    with pytest.raises(BadArgument, match="1 request or more"):
        grow(nothing, 10**6)
    with pytest.raises(BadArgument, match="times"):
        grow(nothing, 10**6 + 1)


def test_no_generated_length_overflows_a_sum() -> None:
    lengths = _lengths(np.random.default_rng(1), 1e300, 1.0, 100)
    assert set(lengths.tolist()) == {2**30}


def test_a_timeline_has_256_spans_whose_width_doubles() -> None:
    spans, one = _Spans(), np.ones(1, np.int64)
    for second in range(256):
        spans.add(np.array([float(second)]), one, one)
    assert (spans.timeline().width_s, len(spans.timeline().block_accesses)) == (1.0, 256)
    spans.add(np.array([256.0]), one, one)
    assert (spans.timeline().width_s, spans.timeline().block_accesses) == (2.0, (2,) * 128 + (1,))
    spans.add(np.array([256.0 * 2**20]), one, one)
    found = spans.timeline()
    assert found.width_s == 2.0**21 and sum(found.block_accesses) == sum(found.block_hits) == 258
    assert len(merged(found).block_accesses) <= 60


@pytest.mark.parametrize(("spans", "shown"), [(59, 59), (60, 60), (61, 31), (256, 52)])
def test_sixty_spans_are_drawn_at_most(spans: int, shown: int) -> None:
    made, one = _Spans(), np.ones(1, np.int64)
    for second in range(spans):
        made.add(np.array([float(second)]), one, one)
    found = merged(made.timeline())
    assert len(found.block_accesses) == shown and sum(found.block_accesses) == spans
