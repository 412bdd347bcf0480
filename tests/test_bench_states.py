"""The benchmark of states finds what a session left, and more of it with more slots."""

from __future__ import annotations

import random

import pytest

from bench.states import PAGE, SLOTS, WORKLOADS, found, sessions


def test_one_session_finds_all_that_it_said_before() -> None:
    asked = list(sessions(1)(random.Random(1), 20))
    border = [(len(prompt) - 1) // PAGE * PAGE for prompt, _ in asked]
    before = [(len(prompt) + len(answer) - 1) // PAGE * PAGE for prompt, answer in asked]
    expected = sum(before[4:-1]) / sum(border[5:])
    assert found(sessions(1), 10, requests=20) == pytest.approx(expected)


def test_states_that_were_grown_past_leave_room_for_those_that_go_on() -> None:
    assert found(sessions(20), 25, weigh=False, requests=300) > 0.85


@pytest.mark.parametrize("name", WORKLOADS)
def test_more_slots_find_more(name: str) -> None:
    few, many = (found(WORKLOADS[name], slots, requests=150) for slots in (SLOTS[0] // 5, SLOTS[-1]))
    assert 0 < few < many < 1
