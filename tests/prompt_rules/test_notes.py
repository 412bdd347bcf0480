"""A note goes behind the last message, or behind the user's first one, where the next turn finds it again."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from mainstem.prompt_rules.notes import Note, Notes
from mainstem.prompt_rules.rewriting import Declared, Rewritten, rewritten
from mainstem.prompt_rules.rule_file import BadRule, read_rules
from mainstem.prompt_rules.rules import Rule

FOLDER = """[[rule]]
name = "folder"
action = "move"
after = "first"
places = ["system", "user", "tools"]
match = 'Folder: (?P<value>\\w+)'
example = "Folder: a"
"""
CLOCK = """[[rule]]
name = "clock"
action = "move"
match = 'Time: (?P<value>\\d+)'
example = "Time: 12"
"""
NOTE = "\n\n[Folder: a (moved here from the system prompt)]"
TIME = "\n\n[Time: 1 (moved here from the system prompt)]"


def rules(tmp_path: Path, text: str) -> tuple[Rule, ...]:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    return read_rules([path])


def chat(*turns: tuple[str, Any]) -> list[dict[str, Any]]:
    return [{"role": role, "content": content} for role, content in turns]


def ruled(found: Sequence[Rule], messages: Sequence[dict[str, Any]], notes: Notes | None = None) -> Rewritten:
    """Returns a prompt after rules, with its notes and those of earlier turns."""
    made, known = rewritten(found, messages), notes or Notes()
    made.place(known, ())
    known.check()
    return made


def texts(made: Rewritten) -> list[Any]:
    return [message["content"] for message in made.messages]


FIRST = chat(("system", "Folder: a."), ("user", "Hi."))


def test_the_next_turn_begins_with_what_the_last_one_was(tmp_path: Path) -> None:
    later = chat(("assistant", "Yes?"), ("user", "Folder: b"), ("assistant", "No."), ("user", "Folder: c"))
    made, next_made = (ruled(rules(tmp_path, FOLDER), FIRST + more) for more in ([], later))
    assert texts(made) == ["Folder: .", "Hi." + NOTE]
    assert texts(next_made) == [*texts(made), "Yes?", "Folder: b", "No.", "Folder: c"]


def test_a_text_of_the_first_message_goes_to_its_end(tmp_path: Path) -> None:
    made = rewritten(rules(tmp_path, FOLDER), chat(("user", "Folder: a. Hi.")))
    assert texts(made) == ["Folder: . Hi.\n\n[Folder: a (moved here from the conversation)]"]


def test_descriptions_of_tools_are_before_the_first_message(tmp_path: Path) -> None:
    tool = Declared("ls", "Folder: a", {}, 0)
    made = rewritten(rules(tmp_path, FOLDER), chat(("user", "Hi.")), [tool])
    assert made.tools[0].description == "Folder: "
    assert texts(made) == ["Hi.\n\n[Folder: a (moved here from the description of a tool)]"]


def test_earlier_notes_come_back_only_where_a_rule_moves_text_behind_the_last_message(tmp_path: Path) -> None:
    notes, clock = Notes(), rules(tmp_path, CLOCK)
    asked = chat(("system", "Time: 1"), ("user", "Hi."))
    later = [*asked, *chat(("assistant", "Yes?"), ("user", "Go on."))]
    assert texts(ruled(clock, asked, notes))[1] == "Hi." + TIME
    assert texts(ruled(rules(tmp_path, FOLDER), later, notes)) == ["Time: 1", "Hi.", "Yes?", "Go on."]
    assert texts(ruled(clock, later, notes))[1] == "Hi." + TIME


def test_each_note_has_its_place_whatever_the_number_of_turns(tmp_path: Path) -> None:
    both = rules(tmp_path, FOLDER + CLOCK)
    head = chat(("system", "Folder: a. Time: 1"), ("user", "Hi."))
    assert texts(ruled(both, head)) == ["Folder: . Time: ", "Hi." + NOTE + TIME]
    more = chat(("assistant", "Yes?"), ("tool", "0"))
    assert texts(ruled(both, head + more)) == ["Folder: . Time: ", "Hi." + NOTE, "Yes?", "0" + TIME]


def test_without_a_message_of_the_user_nothing_is_moved_behind_it(tmp_path: Path) -> None:
    made = rewritten(rules(tmp_path, FOLDER), chat(("system", "Folder: a."), ("assistant", "Hi.")))
    assert texts(made) == ["Folder: a.", "Hi."] and made.changes == []


@pytest.mark.parametrize("rule", [FOLDER, CLOCK])
def test_a_beginning_of_prompts_is_what_they_begin_with(tmp_path: Path, rule: str) -> None:
    """A prefix that a client names may end before the message that notes go behind."""
    ruled = rules(tmp_path, rule)
    head = chat(("system", "Folder: a. Time: 1"))
    named = rewritten(ruled, head, whole=False)
    assert texts(named) == texts(rewritten(ruled, [*head, *chat(("user", "Hi."))]))[:1] != ["Folder: a. Time: 1"]


def test_a_beginning_with_the_first_message_has_its_note(tmp_path: Path) -> None:
    assert texts(rewritten(rules(tmp_path, FOLDER), FIRST, whole=False)) == ["Folder: .", "Hi." + NOTE]


def test_another_message_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(BadRule, match=r"rules\.toml:1: rule 'folder': after = 'frist': must be .*first"):
        rules(tmp_path, FOLDER.replace('"first"', '"frist"'))


# ---- notes of earlier turns


def note(time: int, place: str = "system prompt") -> str:
    return f"\n\n[Time: {time} (moved here from the {place})]"


def turns(*times: int) -> list[list[dict[str, Any]]]:
    """Returns the messages of each turn of a conversation whose system prompt has a clock."""
    said: list[dict[str, Any]] = []
    made = []
    for number, time in enumerate(times):
        said += chat(("user", f"q{number}"))
        made.append([*chat(("system", f"Time: {time}")), *said])
        said += chat(("assistant", f"a{number}"))
    return made


def test_a_note_stands_where_it_stood(tmp_path: Path) -> None:
    notes, found = Notes(), rules(tmp_path, CLOCK)
    made = [ruled(found, messages, notes) for messages in turns(1, 2, 3)]
    assert texts(made[2]) == ["Time: ", "q0" + note(1), "a0", "q1" + note(2), "a1", "q2" + note(3)]
    for before, after in pairwise(made):
        assert after.messages[: len(before.messages)] == before.messages
    places = [(change.at, change.added) for change in made[2].changes]
    assert places == [("system", 0), *((f"messages[{at}]", len(note(1))) for at in (1, 3, 5))]


def test_a_note_that_says_nothing_new_is_left_out(tmp_path: Path) -> None:
    notes, found = Notes(), rules(tmp_path, CLOCK)
    made = [texts(ruled(found, messages, notes)) for messages in turns(1, 1, 2, 1, 1)]
    assert made[4][1::2] == ["q0" + note(1), "q1", "q2" + note(2), "q3" + note(1), "q4"]


def test_times_of_all_messages_are_said_once_each(tmp_path: Path) -> None:
    notes, found = Notes(), rules(tmp_path, CLOCK.replace("match", 'places = ["user"]\nmatch'))
    messages = chat(("user", "Time: 1"))
    for time in (2, 3):
        ruled(found, messages, notes)
        messages += chat(("assistant", "a"), ("user", f"Time: {time}"))
    where = "conversation"
    assert texts(ruled(found, messages, notes))[::2] == [f"Time: {note(time, where)}" for time in (1, 2, 3)]


def test_a_turn_that_is_asked_again_has_the_note_of_now(tmp_path: Path) -> None:
    notes, found = Notes(), rules(tmp_path, CLOCK)
    [first] = turns(1)
    again = [*chat(("system", "Time: 5")), *first[1:]]
    assert texts(ruled(found, first, notes)) == ["Time: ", "q0" + note(1)]
    assert texts(ruled(found, again, notes)) == ["Time: ", "q0" + note(5)]
    later = [*again, *chat(("assistant", "a0"), ("user", "q1"))]
    assert texts(ruled(found, later, notes))[1:] == ["q0" + note(5), "a0", "q1"]


def test_another_conversation_has_notes_of_its_own(tmp_path: Path) -> None:
    notes, found = Notes(), rules(tmp_path, CLOCK)
    first, second = turns(1, 1)
    ruled(found, first, notes)
    other = [*chat(("system", "Time: 1. Else.")), *second[1:]]
    assert texts(ruled(found, other, notes))[1:] == ["q0", "a0", "q1" + note(1)]
    mine = rewritten(found, second)
    mine.place(notes, "somebody else")
    assert texts(mine)[1:] == ["q0", "a0", "q1" + note(1)]


def test_what_is_only_counted_is_not_remembered(tmp_path: Path) -> None:
    notes, found = Notes(), rules(tmp_path, CLOCK)
    first, second = turns(1, 1)
    counted = rewritten(found, first)
    counted.place(notes, (), remember=False)
    assert texts(counted)[1] == "q0" + note(1)
    assert texts(ruled(found, second, notes))[1:] == ["q0", "a0", "q1" + note(1)]


def test_the_conversation_that_went_on_longest_ago_is_forgotten(tmp_path: Path) -> None:
    size = 200 + len(note(1))
    found, second = rules(tmp_path, CLOCK), turns(1, 1)[1]
    for most, known in ((2 * size, True), (2 * size - 1, False)):
        notes = Notes(most_bytes=most)
        for _ in range(3):
            ruled(found, second[:2], notes)
        ruled(found, chat(("system", "Time: 7"), ("user", "other")), notes)
        assert texts(ruled(found, second, notes))[1] == ("q0" + note(1) if known else "q0")


def test_nothing_is_kept_that_has_no_room(tmp_path: Path) -> None:
    notes = Notes(most_bytes=0)
    assert notes.placed((), chat(("user", "q")), 0, [Note("clock", "x")]) == {0: (Note("clock", "x"),)}
    notes.check()
    assert notes.placed((), chat(("user", "q"), ("user", "r")), 1, []) == {}


# ---------------------------------------------------------------- threads


class Guarded(OrderedDict[bytes, tuple[Note, ...]]):
    """The places of notes; whoever looks or writes without the lock fails."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self._notes, self.uses = notes, 0

    def _use(self) -> None:
        self.uses += 1
        assert self._notes._lock.locked(), "another thread may change the places meanwhile"

    def get(self, *given: Any) -> Any:
        self._use()
        return super().get(*given)

    def pop(self, *given: Any) -> Any:
        self._use()
        return super().pop(*given)

    def popitem(self, last: bool = True) -> Any:
        self._use()
        return super().popitem(last)

    def values(self) -> Any:
        self._use()
        return super().values()

    def __setitem__(self, *given: Any) -> None:
        self._use()
        super().__setitem__(*given)


def test_places_are_looked_at_and_changed_with_the_lock_alone() -> None:
    notes = Notes(2000)
    notes._by_place = places = Guarded(notes)
    for turn in range(30):
        said = [{"role": "user", "content": f"{turn // 3} {at}"} for at in range(turn % 3 + 1)]
        notes.placed("scope", said, len(said) - 1, [Note("rule", f"{turn}" * 40)], remember=turn % 5 > 0)
        notes.check()
    assert places.uses > 100 and len(places) > 1


def test_threads_that_place_notes_at_once_leave_sound_notes() -> None:
    notes, done = Notes(4000), Barrier(8)

    def work(number: int) -> None:
        done.wait()
        for turn in range(300):
            said = [{"role": "user", "content": f"{turn % 7} {at}"} for at in range(3)]
            notes.placed("scope", said, 2, [Note(f"rule {number}", f"{turn * number} " * (turn % 9))])

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    finally:
        sys.setswitchinterval(before)
    notes.check()
