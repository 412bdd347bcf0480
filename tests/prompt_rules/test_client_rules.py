"""The rules that come with Mainstem, against what clients send: tests/recorded/clients.

A recording has what the rules found when it was made. `make test-clients` compares the clients of the day with it, and
fails where one puts its folder or the date before the first message of the user and no rule finds it.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date
from itertools import pairwise

import pytest
from rigs.client_calls import RECORDED, Call, kept
from rigs.client_rules import all_asked, asked, before_the_user, of_one_session, rewriting, rules_at_work

from mainstem.prompt_rules.rule_file import own_files, read_rules
from mainstem.server.apis.generation import Conversation, Generation

FILES = own_files()
CLIENTS = sorted(path.stem for path in RECORDED.glob("*.json"))
ALL, NONE = rewriting(FILES), rewriting([])
ELSEWHERE = {
    "/folder": "/srv/bob/shop",
    "-folder": "-srv-bob-shop",
    r"\b\d{4}-\d\d-\d\d\b": "2027-02-03",
    r"\b\d+/\d+/\d{4}\b": "2/3/2027",
    r"\b[A-Z][a-z]{2} [A-Z][a-z]{2} \d\d \d{4}\b": "Wed Feb 03 2027",
    r"\b[A-Z][a-z]+day, [A-Z][a-z]+ \d+, \d{4}\b": "Wednesday, February 3, 2027",
    r"git: \?\? new\.txt": "git: (clean)",
    r"Linux-[\w.-]+": "Darwin-26.1",
}
"""Patterns of texts of the recordings, and the texts of a session in another place, on another day."""


def recording(file: str) -> list[Call]:
    return kept(file.replace("-", "_"))


def elsewhere(call: Call) -> Call:
    """Returns a call of another session."""
    text = json.dumps(call.body, ensure_ascii=False)
    for here, there in ELSEWHERE.items():
        text = re.sub(here, there, text)
    return replace(call, body=json.loads(text))


def conversation(made: Generation | None) -> Conversation:
    assert made is not None and isinstance(made.prompt, Conversation)
    return made.prompt


def test_all_files_go_together() -> None:
    assert {rule.name for rule in read_rules(FILES)} == {rule.name for file in FILES for rule in read_rules([file])}


@pytest.mark.parametrize("file", FILES)
def test_each_rule_is_shown_by_a_recording_of_its_client(file: str) -> None:
    assert rules_at_work(recording(file)) == {rule.name for rule in read_rules([file])}


@pytest.mark.parametrize("file", [file for file in FILES if file != "aider"])
def test_a_rule_finds_its_text_in_every_api(file: str) -> None:
    """A request for a title has no tools, and nothing that a rule is for."""
    changed = [bool(made.rewrites) for made in all_asked(recording(file), ALL) if conversation(made).tooling.tools]
    assert changed and all(changed)


@pytest.mark.parametrize("file", FILES)
def test_two_sessions_begin_alike(file: str) -> None:
    parted = 0
    for call in recording(file):
        here, there = (asked(each, ALL) for each in (call, elsewhere(call)))
        if here is None or there is None or not here.rewrites:
            continue
        assert before_the_user(here) == before_the_user(there) != []
        assert conversation(here).tooling == conversation(there).tooling
        plain, plain_there = (asked(each, NONE) for each in (call, elsewhere(call)))
        assert plain is not None and plain_there is not None
        parted += before_the_user(plain) != before_the_user(plain_there)
    assert parted, "without rules they part before the first message of the user"


def test_aider_has_one_beginning_up_to_the_last_message() -> None:
    call = recording("aider")[-1]
    here, there = (conversation(asked(each, ALL)).messages for each in (call, elsewhere(call)))
    assert here[:-1] == there[:-1]
    assert here[-1] != there[-1]


@pytest.mark.parametrize("file", [file for file in FILES if file != "aider"])
def test_each_turn_begins_with_the_one_before(file: str) -> None:
    """A text that a session keeps is where it was; aider begins its turns anew."""
    turns = 0
    calls = [call for call in recording(file) if asked(call, NONE) is not None]
    for earlier, later in pairwise(calls):
        plain, ruled = (
            [conversation(asked(each, rules)).messages for each in (earlier, later)] for rules in (NONE, ALL)
        )
        n = len(plain[0])
        if plain[1][:n] == plain[0] and len(plain[1]) > n:
            assert ruled[1][:n] == ruled[0]
            turns += ruled[0] != plain[0]
    assert turns


@pytest.mark.parametrize("client", CLIENTS)
def test_what_no_rule_finds_is_what_came(client: str) -> None:
    for call in kept(client):
        plain, ruled = asked(call, NONE), asked(call, ALL)
        if plain is None or ruled is None or not ruled.rewrites:
            assert plain is ruled is None or (plain and ruled and plain.prompt == ruled.prompt)
            continue
        before, after = conversation(plain), conversation(ruled)
        named = {0 if each.at == "system" else int(each.at[len("messages[") : -1]) for each in ruled.rewrites}
        for i, (old, new) in enumerate(zip(before.messages, after.messages, strict=True)):
            assert (i in named) == (old != new)
        assert before.tooling == after.tooling
        assert client.replace("_", "-") in FILES


def test_a_client_that_sends_something_else_is_seen() -> None:
    text = json.dumps(recording("opencode")[1].body).replace("<env>", "<environment>")
    other = replace(recording("opencode")[1], body=json.loads(text))
    assert rules_at_work([other]) != rules_at_work(recording("opencode"))


@pytest.mark.parametrize(
    ("text", "names"),
    [("in /tmp/tmpab1/web.", True), ("on Feb 03 2027", True), ("on 2/3/2027", True), ("in /tmp, 2027", False)],
)
def test_a_folder_or_a_date_that_no_rule_finds_is_seen(text: str, names: bool) -> None:
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "in /tmp/tmpab1, on 2027-02-03"}]
    call = Call("POST", "/v1/chat/completions", 200, body={"model": "m", "messages": messages})
    assert of_one_session([call], r"/tmp/tmp\w+", date(2027, 2, 3)) == ([text] if names else [])
