"""`Announcements`: nothing is announced before every worker has stored it."""

from __future__ import annotations

from mainstem.integrations.block_events import Announcements


def test_a_save_is_announced_once_after_all_workers_have_confirmed_it() -> None:
    announcements: Announcements[str] = Announcements(2)
    announcements.hold(1, ["a", "b"])
    announcements.hold(2, ["c"])
    assert announcements.take() == []
    announcements.confirm([(1, True), (2, True)])
    assert announcements.take() == [], "one worker of two"
    announcements.confirm([(2, True)])
    announcements.confirm([(1, True)])
    assert announcements.take() == ["c", "a", "b"]
    assert announcements.take() == []


def test_a_save_that_failed_on_one_worker_is_never_announced() -> None:
    announcements: Announcements[str] = Announcements(2)
    announcements.hold(1, ["a"])
    announcements.hold(2, ["b"])
    announcements.confirm([(1, False), (2, True), (1, True), (2, False)])
    announcements.confirm([(1, True), (2, True)])
    assert announcements.take() == []


def test_what_cannot_be_found_any_more_is_not_announced() -> None:
    announcements: Announcements[str] = Announcements(1)
    announcements.hold(1, ["a"])
    announcements.hold(2, ["b"])
    announcements.confirm([(1, True)])
    announcements.clear()
    announcements.confirm([(2, True)])
    assert announcements.take() == []
