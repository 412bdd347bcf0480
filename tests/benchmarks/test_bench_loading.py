"""The time to the first token in virtual time: never much more than loading everything or computing everything."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest

from bench.loading import GOAL, GOAL_S, QUICK, Fault, Machine, Settings, cells, measure, table

SMALL = QUICK


@pytest.mark.parametrize(
    ("bandwidth", "length", "fault"),
    [pytest.param(*cell, marks=[] if cell[:2] == (2e9, 2048) else pytest.mark.slow) for cell in cells(SMALL)],
)
def test_the_first_token_never_takes_much_longer_than_the_better_of_loading_and_computing(
    bandwidth: float, length: int, fault: Fault
) -> None:
    row = measure(SMALL, bandwidth, length, fault)
    better_s = min(row["load"]["p99_s"], row["compute"]["p99_s"])
    assert row["Mainstem"]["p99_s"] <= GOAL * better_s + GOAL_S, row


@pytest.mark.slow
@pytest.mark.parametrize(("bandwidth", "length", "fault"), list(cells(Settings())))
def test_the_same_over_the_whole_grid(bandwidth: float, length: int, fault: Fault) -> None:
    assert measure(Settings(), bandwidth, length, fault)["met"]


def test_where_both_take_as_long_both_at_once_take_about_half() -> None:
    settings = Settings()
    rate = 1 / (1.1 * settings.token_s)  # tokens a second, computed in the middle of the prompt
    row = measure(replace(SMALL, requests=3), rate * settings.token_bytes, 8192, "none")
    assert row["of_better"] < 0.65


def test_a_cell_always_has_the_same_result() -> None:
    cell = (2e9, 512, "failing")
    rows = [measure(replace(SMALL, requests=4), *cell) for _ in range(2)]
    assert rows[0] == rows[1]
    assert table(rows).row_count == 2


def test_faults_are_those_that_were_asked_for() -> None:
    seen = {}
    for fault in get_args(Fault):
        machine = Machine(Settings(), "load", 2e9, 8192, fault)
        times = [machine.first_token_s(number) for number in range(8)]
        assert machine.tiers.store is not None
        seen[fault] = max(times), machine.tiers.store.faults["altered"]
    assert seen["none"][1] == seen["slow"][1] == 0 < seen["failing"][1]
    assert seen["slow"][0] > 1.2 * seen["none"][0]
