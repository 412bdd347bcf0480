"""The benchmark of states: sessions hit their own history, and more of it with more slots."""

from __future__ import annotations

import random

import pytest

from bench.states import PAGE, SLOTS, WORKLOADS, found, sessions


def test_one_session_hits_its_whole_history() -> None:
    asked = list(sessions(1)(random.Random(1), 20))
    boundary = [(len(prompt) - 1) // PAGE * PAGE for prompt, _ in asked]
    before = [(len(prompt) + len(answer) - 1) // PAGE * PAGE for prompt, answer in asked]
    expected = sum(before[4:-1]) / sum(boundary[5:])
    assert found(sessions(1), 10, requests=20) == pytest.approx(expected)


def test_superseded_states_are_evicted_before_those_in_use() -> None:
    assert found(sessions(20), 25, weigh=False, requests=300) > 0.85


@pytest.mark.parametrize("name", WORKLOADS)
def test_more_slots_have_more_hits(name: str) -> None:
    few, many = (found(WORKLOADS[name], slots, requests=150) for slots in (SLOTS[0] // 5, SLOTS[-1]))
    assert 0 < few < many < 1
