"""How much longer a deadline is on a slow or busy machine."""

from __future__ import annotations

import machine
import pytest
from machine import MOST, REFERENCE_S, slowness


@pytest.mark.parametrize(
    ("wall", "cpu", "load", "wanted"),
    [
        (1.0, 1.0, 1.0, 1.0),  # the machine on which the deadlines were written
        (0.5, 0.5, 0.5, 1.0),  # a quicker one: they stay
        (4.0, 4.0, 1.0, 4.0),  # four times as slow
        (1.0, 1.0, 10.0, 5.0),  # five want each core
        (5.0, 1.0, 10.0, 5.0),  # which was so when it was measured, too: it counts once
        (8.0, 8.0, 10.0, 40.0),
        (4.0, 1.0, 1.0, 4.0),  # its processor time is rationed
        (1.0, 1.0, 1e6, MOST),
    ],
)
def test_deadlines_grow_with_what_a_core_takes_and_with_how_many_want_it(
    wall: float, cpu: float, load: float, wanted: float
) -> None:
    assert slowness(wall * REFERENCE_S, cpu * REFERENCE_S, load, cores=2) == pytest.approx(wanted)


def test_patience_goes_by_the_load_of_the_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_measured", lambda: (3 * REFERENCE_S, 2 * REFERENCE_S))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for load, wanted in ((0.0, 30.0), (4.0, 40.0), (12.0, 120.0)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert machine.patience(10) == pytest.approx(wanted)
