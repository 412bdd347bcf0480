"""Drafts: what a text repeats, and how many tokens to guess."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.runtime.schedule.drafts import Pace, begin_with, look_up


def drafted(text: str, most: int = 4) -> str:
    return bytes(look_up(np.frombuffer(text.encode(), np.uint8).astype(np.int32), most).astype(np.uint8)).decode()


def test_a_draft_is_what_followed_the_last_tokens_before() -> None:
    assert drafted("the cat sat. the c") == "at s"
    assert drafted("abcX abcY ab") == "cY a"  # the last of equally long ones


def test_the_longest_repetition_counts_not_the_last() -> None:
    assert drafted("one two three; six two three; one two t") == "hree"
    assert drafted("xyzA  yzB  xyz", 1) == "A"


def test_one_token_is_too_little_to_go_by() -> None:
    assert drafted("a1 b2 c3 a") == ""
    assert drafted("") == drafted("a") == drafted("aa") == drafted("ab") == ""


@pytest.mark.parametrize(("same", "found"), [(1, []), (2, [50])])
def test_two_tokens_are_enough_to_go_by_and_one_is_not(same: int, found: list[int]) -> None:
    tail = [*range(8)]
    assert look_up(np.array([90, *tail[-same:], 50, 91, *tail], np.int32), 1).tolist() == found


@pytest.mark.parametrize(("later", "found"), [(6, 50), (7, 50), (8, 60), (9, 60), (20, 60)])
def test_of_two_occurrences_of_eight_tokens_or_more_the_last_counts(later: int, found: int) -> None:
    tail = [*range(30)]
    known = [90, *tail[-25:], 50, 91, *tail[-later:], 60, 92, *tail]
    assert look_up(np.array(known, np.int32), 1).tolist() == [found]


def test_a_text_that_repeats_itself_is_drafted_whole() -> None:
    assert drafted("aaaaaaaa", 4) == "aaaa"
    assert drafted("abababab", 4) == "abab"
    assert drafted("abc abc", 6) == " abc a"


def test_nothing_is_drafted_where_nothing_is_asked() -> None:
    assert drafted("abab", 0) == ""


def slow(known: list[int], most: int) -> list[int]:
    """Returns what followed the last occurrence of at least two of the last tokens, at most eight, over and over."""
    for size in range(min(8, len(known) - 1), 1, -1):
        for end in range(len(known) - 1, size - 1, -1):
            if known[end - size : end] == known[-size:]:
                return (known[end:] * most)[:most]
    return []


@given(st.lists(st.integers(0, 2), max_size=30), st.integers(1, 6))
def test_a_draft_follows_the_last_of_the_longest_repetitions(known: list[int], most: int) -> None:
    assert look_up(np.array(known, np.int32), most).tolist() == slow(known, most)


def test_drafts_grow_while_they_are_right_and_shrink_when_not() -> None:
    pace, lengths = Pace(), []
    for kept in (2, 4, 7, 1, 1):
        lengths.append(pace.length(7))
        pace.observe(lengths[-1], kept)
    assert lengths == [2, 4, 7, 7, 7]
    assert pace.length(7) < 7


def test_drafts_pause_longer_and_longer_while_none_is_right_and_go_on_after_one() -> None:
    pace, steps = Pace(), []
    for step in range(60):
        if n := pace.length(7):
            steps.append(step)
            pace.observe(n, 0)
    gaps = np.diff(steps).tolist()
    assert gaps[:5] == [1, 4, 8, 16, 17]
    assert set(gaps[4:]) == {17}
    while not (n := pace.length(7)):
        pass
    pace.observe(n, n)
    assert pace.length(7) > 0


def test_a_draft_begins_with_what_is_forced() -> None:
    guess = np.array([5, 6, 7, 8], np.int32)
    assert begin_with((), guess) is guess
    assert begin_with((5, 6), guess) is guess, "it goes on"
    assert begin_with((5, 9), guess).tolist() == [5, 9]
    assert begin_with((5, 6, 7, 8, 9), guess).tolist() == [5, 6, 7, 8, 9]
    assert begin_with((5,), guess[:0]).tolist() == [5]
    assert begin_with((5,), guess[:0]).dtype == np.int32


def test_what_is_forced_says_nothing_of_guesses() -> None:
    pace = Pace()
    for _ in range(5):  # nothing but forced tokens: neither more guesses, nor fewer
        assert pace.length(9, 3) == 5
        pace.observe(3, 3)
    for _ in range(2):  # forced tokens were right, guesses after them were not
        pace.observe(pace.length(9, 3), 3)
    assert pace.length(9, 3) == 3, "a pause, but not for what is forced"
    assert pace.length(2, 2) == 2
    other = Pace()
    other.observe(other.length(9, 3), 5)
    assert other.length(9) == 4
