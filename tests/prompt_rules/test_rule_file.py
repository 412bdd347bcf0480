"""A rule that would do harm is refused by its name and line."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from mainstem.prompt_rules.rule_file import BadRule, own_files, read_rules
from mainstem.prompt_rules.rules import AFTER, PLACES, SORTS, UNITS, UNSORTED, Move, Round, Sort

GOOD = {
    "name": '"clock"',
    "action": '"drop"',
    "match": "'Time: \\d+'",
    "example": '"Time: 12"',
}


def table(**fields: str | None) -> str:
    row = {**GOOD, **fields}
    return "\n".join(["[[rule]]", *(f"{name} = {value}" for name, value in row.items() if value is not None)]) + "\n"


def read(tmp_path: Path, text: str) -> str:
    """Returns what is said of a file that is refused; empty if it is not."""
    path = tmp_path / "rules.toml"
    path.write_text(text)
    try:
        read_rules([path])
    except BadRule as error:
        return str(error).replace(str(path), "FILE")
    return ""


def test_a_rule_is_read(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(
        "# two rules\n"
        + table(
            action='"move"',
            places='["system", "tool"]',
            clients='["a/*"]',
            routes='["/v1/messages"]',
            tenants='["t"]',
            note='"<{value}>"',
        )
        + table(name='"order"', action='"sort"', match=None, example=None, lists='["tools"]')
        + table(name='"round"', action='"round"', match="'At (?P<minute>\\d+)'", example='"At 59"', to='"hour"')
    )
    move, sort, rounding = read_rules([path])
    assert (move.name, move.action, move.example) == ("clock", Move("<{value}>"), "Time: 12")
    assert (move.scope.clients, move.scope.routes, move.scope.tenants) == (("a/*",), ("/v1/messages",), ("t",))
    assert move.places == {"system", "tool"} and move.origin == f"{path}:2"
    assert sort.action == Sort(frozenset({"tools"})) and sort.origin == f"{path}:12"
    assert rounding.action == Round("hour") and rounding.places == {"system"}


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"action": '"dorp"'}, "action = 'dorp': must be one of drop, move, round, sort, keep; did you mean drop?"),
        ({"action": None}, "action: must be a text, and it is missing"),
        ({"action": "1"}, "action: must be a text"),
        ({"macth": "'x'"}, "unknown name 'macth'"),
        ({"lists": '["tools"]'}, "unknown name 'lists': a rule with the action 'drop' has"),
        ({"match": "'('"}, "match: not a pattern of RE2: missing )"),
        ({"match": "'(?<=a)b'"}, "match: not a pattern of RE2"),
        ({"match": None}, "match: must be a text, and it is missing"),
        ({"match": "'.*'"}, "match: finds everything"),
        ({"match": "'(?s).+'"}, "match: finds everything"),
        ({"match": "'x*'"}, "match: finds everything"),
        ({"match": "'\\w*'"}, "match: finds everything"),
        ({"example": '"Time: now"'}, "example: the pattern does not find it"),
        ({"example": None}, "example: must be a text, and it is missing"),
        ({"match": "'Time: (?P<value>\\d*)'", "example": '"Time: "'}, "example: the action 'drop' changes nothing"),
        ({"places": '["sytem"]'}, "places: 'sytem' must be one of " + ", ".join(PLACES)),
        ({"places": "[]"}, "places: must be a list of at least one text"),
        ({"places": '"system"'}, "places: must be a list of at least one text"),
        ({"clients": '[""]'}, "clients: must be a list of at least one text"),
        ({"action": '"move"', "note": '"Gone."'}, "note: must have {match} or {value}"),
        ({"action": '"move"', "places": '["prompt"]'}, "places: a prompt that is completed has no last message"),
        ({"action": '"round"'}, "to: must be a text, and it is missing"),
        ({"action": '"round"', "to": '"week"'}, "to = 'week': must be one of day, hour, minute"),
        ({"action": '"round"', "to": '"hour"'}, "match: needs a group that is finer than hour"),
        (
            {"action": '"round"', "to": '"hour"', "match": "'Time: (?P<hour>\\d+)'"},
            "match: needs a group that is finer than hour",
        ),
    ],
)  # fmt: skip
def test_a_bad_rule_is_named_with_its_line(tmp_path: Path, fields: dict[str, str | None], problem: str) -> None:
    said = read(tmp_path, "\n\n" + table(**fields))
    assert said.startswith("FILE:3: rule 'clock': ") and problem in said


@pytest.mark.parametrize("lists", UNSORTED)
def test_a_list_whose_order_means_something_is_not_sorted(tmp_path: Path, lists: str) -> None:
    said = read(tmp_path, table(action='"sort"', match=None, example=None, lists=f'["tools", "{lists}"]'))
    assert said == f"FILE:1: rule 'clock': lists: {lists!r} cannot be sorted: {UNSORTED[lists]}"


def test_a_sort_needs_lists(tmp_path: Path) -> None:
    row = table(action='"sort"', match=None, example=None, lists='["names"]')
    assert "lists: 'names' must be one of tools, keys" in read(tmp_path, row)
    assert "lists: '' must be one of tools, keys" in read(tmp_path, row.replace('lists = ["names"]\n', ""))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "FILE: it must have at least one [[rule]] table"),
        ("rule = 1", "FILE: it must have at least one [[rule]] table"),
        ("[[rules]]\nname = 'x'", "FILE: unknown name 'rules': a file has [[rule]] tables only"),
        ("[[rule]\n", "FILE: not TOML: "),
        (table(name='""'), "FILE:1: name: every rule needs one"),
        (table(name="3"), "FILE:1: rule 3: name: must be a text"),
    ],
)  # fmt: skip
def test_a_bad_file_is_named(tmp_path: Path, text: str, problem: str) -> None:
    assert read(tmp_path, text).startswith(problem)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRule, match=r"nothing.toml: No such file or directory; a file of rules, or one of"):
        read_rules([str(tmp_path / "nothing.toml")])
    (tmp_path / "latin.toml").write_bytes(b"# \xe9")
    with pytest.raises(BadRule, match="it is not UTF-8"):
        read_rules([tmp_path / "latin.toml"])


def test_two_rules_are_not_for_one_text(tmp_path: Path) -> None:
    second = table(name='"date"', match="'(?m)^Time: .{2}$'", example='"Time: 34"')
    problem = "FILE:6: rule 'date': 'clock' (FILE:1) finds the same text, 'Time: 34'; one of them must be narrower"
    assert read(tmp_path, table() + second) == problem
    assert (
        read(
            tmp_path,
            table(routes='["/v1/messages"]') + second.replace("[[rule]]", '[[rule]]\nroutes = ["/v1/responses"]'),
        )
        == ""
    )
    assert read(tmp_path, table(places='["user"]') + second) == ""
    narrower = table(name='"date"', match="'Time: [a-z]+'", example='"Time: noon"')
    assert read(tmp_path, table() + narrower) == ""


def test_two_rules_do_not_sort_or_keep_the_same(tmp_path: Path) -> None:
    sort = table(action='"sort"', match=None, example=None, lists='["tools", "keys"]')
    keys = table(name='"keys"', action='"sort"', match=None, example=None, lists='["keys"]')
    assert read(tmp_path, sort + keys).endswith("rule 'keys': 'clock' (FILE:1) sorts the same list")
    keep = table(action='"keep"', match=None, example=None)
    assert "keeps the same tools" in read(tmp_path, keep + keep.replace("clock", "again"))
    assert read(tmp_path, sort + keep.replace("clock", "again")) == ""


def test_names_are_unique_over_all_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text(table(places='["user"]' if name == "a" else '["tool"]'))
    with pytest.raises(BadRule, match=r"b.toml:1: rule 'clock': .*a.toml:1 has a rule of this name"):
        read_rules([tmp_path / "a.toml", tmp_path / "b.toml"])


def test_a_table_in_a_text_is_no_line_of_a_rule(tmp_path: Path) -> None:
    text = '[[rule]]\nname = "x"\naction = "drp"\nexample = """\n[[rule]]\n"""\n'
    assert read(tmp_path, text).startswith("FILE: rule 'x': ")


@pytest.mark.parametrize(("repeated", "refused"), [("(a{30}b){30}", False), (r"(\pL{30}b){20}", True)])
def test_a_pattern_has_a_megabyte(tmp_path: Path, repeated: str, refused: bool) -> None:
    said = read(tmp_path, table(match=f"'Time: {repeated}|Time: 12'"))
    assert ("match: not a pattern of RE2: pattern too large" in said) == refused == bool(said)


def test_a_pattern_takes_linear_time(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(table(match="'Time(a+)+b'", example='"Timeab"'))
    [rule] = read_rules([path])
    began = time.process_time()
    assert list(rule.edits("Time" + "a" * 200_000, "system")) == []
    assert time.process_time() - began < 1.0


def test_each_of_our_own_files_loads_and_all_do_together() -> None:
    assert own_files()
    for name in own_files():
        assert read_rules([name])
    assert read_rules(own_files())


def test_the_rules_of_the_page_are_read(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "prompts.md").read_text()
    (tmp_path / "rules.toml").write_text(page.partition("```toml\n")[2].partition("```")[0])
    names = [rule.name for rule in read_rules([tmp_path / "rules.toml"])]
    assert names == ["clock", "git status", "attribution", "tools"]
    for where in (*PLACES, *UNITS, *AFTER, *SORTS):
        assert f"`{where}`" in page or f'"{where}"' in page or f"`{where}," in page, where
