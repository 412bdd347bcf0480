"""Deadlines are longer on a slow or busy machine."""

from __future__ import annotations

import machine
import pytest
from machine import MAX_SLOWNESS, REFERENCE_S, slowness


@pytest.mark.parametrize(
    ("wall", "cpu", "load", "wanted"),
    [
        (1.0, 1.0, 1.0, 1.0),  # the machine on which the deadlines were written
        (0.5, 0.5, 0.5, 1.0),  # a faster one: they stay
        (4.0, 4.0, 1.0, 4.0),  # four times as slow
        (1.0, 1.0, 10.0, 5.0),  # five processes per core
        (5.0, 1.0, 10.0, 5.0),  # also while it was measured: it counts once
        (8.0, 8.0, 10.0, 40.0),
        (4.0, 1.0, 1.0, 4.0),  # its CPU time is limited
        (1.0, 1.0, 1e6, MAX_SLOWNESS),
    ],
)
def test_deadlines_grow_with_the_slowness_of_a_core_and_with_the_load(
    wall: float, cpu: float, load: float, wanted: float
) -> None:
    assert slowness(wall * REFERENCE_S, cpu * REFERENCE_S, load, cores=2) == pytest.approx(wanted)


def test_patience_follows_the_current_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_measured", lambda: (3 * REFERENCE_S, 2 * REFERENCE_S))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for load, wanted in ((0.0, 30.0), (4.0, 40.0), (12.0, 120.0)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        assert machine.patience(10) == pytest.approx(wanted)
