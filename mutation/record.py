"""The record of rounds, what is judged equivalent by hand, and the table of docs/reliability.md.

`mutation/recorded.json` has every mutant of every round with its verdict. `mutation/equivalent.toml` has those that no
test can see, each with a sentence that says why; a judgement holds as long as the line has the same text, wherever it
moves.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from mutation.copies import ROOT
from mutation.rounds import Round
from mutation.sample import AREAS, area_of

RECORD = ROOT / "mutation" / "recorded.json"
JUDGED = ROOT / "mutation" / "equivalent.toml"
PAGE = ROOT / "docs" / "reliability.md"
HEAD = "| seed | area | mutants | killed | survived | equivalent | score |\n|---|---|---:|---:|---:|---:|---:|\n"

Key = tuple[str, str, str, int]


class BadJudgement(ValueError):
    """A judgement lacks something, or judges what was never seen."""


class SeedUsed(ValueError):
    """A round with this seed is in the record."""


def rounds(path: Path = RECORD) -> list[dict[str, Any]]:
    """Returns the rounds that are recorded, in order."""
    return list(json.loads(path.read_text())["rounds"]) if path.exists() else []


def refuse_used(seed: int, recorded: Sequence[Mapping[str, Any]]) -> None:
    """Raises SeedUsed for a seed that is in the record: it would draw lines that the tests were written for."""
    used = sorted(each["seed"] for each in recorded)
    if seed in used:
        raise SeedUsed(f"seed {seed} was used; take one that is not in {', '.join(map(str, used))}")


def judgements(path: Path = JUDGED) -> dict[Key, str]:
    """Returns why mutants are equivalent, by what names them.

    Raises:
        BadJudgement: a field is missing or empty, or a mutant is judged twice.
    """
    found: dict[Key, str] = {}
    for each in tomllib.loads(path.read_text()).get("equivalent", ()) if path.exists() else ():
        if {"file", "operator", "text", "because"} - each.keys() or not each["because"].strip().endswith("."):
            raise BadJudgement(f"{path.name}: a judgement has file, operator, text and a sentence as because: {each}")
        key = (each["file"], each["operator"], each["text"], each.get("occurrence", 0))
        if key in found:
            raise BadJudgement(f"{path.name}: judged twice: {key}")
        found[key] = each["because"]
    return found


def key_of(entry: Mapping[str, Any]) -> Key:
    """Returns what names a mutant of the record."""
    return entry["file"], entry["operator"], entry["text"], entry["occurrence"]


def entries(round_: Round) -> list[dict[str, Any]]:
    """Returns the mutants of a round that have a verdict, as the record keeps them; survivors with their diff."""
    found: list[dict[str, Any]] = []
    native = 0
    for mutant in round_.mutants:
        verdict = round_.verdicts.get(mutant.key)
        if verdict is None or verdict.outcome == "invalid":
            continue
        native += mutant.area == "core"
        if mutant.area == "core" and native > round_.native:  # two that ran at a time may be one too many
            continue
        file, operator, text, occurrence = mutant.key
        entry = {"file": file, "line": mutant.site.line, "operator": operator, "text": text, "occurrence": occurrence}
        entry |= {name: said for name, said in asdict(verdict).items() if said and name != "what"}
        found.append(entry | ({"diff": mutant.diff(round_.root)} if verdict.outcome == "survived" else {}))
    return found


def added(recorded: Sequence[dict[str, Any]], round_: Round) -> list[dict[str, Any]]:
    """Returns the rounds of the record with one that is whole.

    Raises:
        SeedUsed: its seed is in the record.
    """
    refuse_used(round_.seed, recorded)
    head = {"seed": round_.seed, "date": datetime.now(UTC).isoformat(timespec="seconds"), "commit": round_.commit}
    return [*recorded, {**head, "mutants": entries(round_)}]


def counts(mutants: Sequence[Mapping[str, Any]], judged: Mapping[Key, str]) -> dict[str, Counter[str]]:
    """Returns how many mutants of each area were killed, survived, or are equivalent; "all" has the sums."""
    found: dict[str, Counter[str]] = {area: Counter() for area in (*AREAS, "all")}
    for entry in mutants:
        outcome = "equivalent" if entry["outcome"] == "survived" and key_of(entry) in judged else entry["outcome"]
        for area in (area_of(entry["file"]), "all"):
            found[area][outcome] += 1
    return {area: each for area, each in found.items() if each}


def rows(recorded: Sequence[Mapping[str, Any]], judged: Mapping[Key, str]) -> list[str]:
    """Returns the rows of the table: each round by area, and in all."""
    found = []
    for each in recorded:
        for area, count in counts(each["mutants"], judged).items():
            killed, survived = count["killed"], count["survived"]
            score = f"{killed / (killed + survived):.1%}".replace("%", " %") if killed + survived else "-"
            cells = [each["seed"], area, count.total(), killed, survived, count["equivalent"], score]
            found.append("| " + " | ".join(map(str, cells)) + " |")
    return found


def table_of(page: str, head: str) -> tuple[str, list[str], str]:
    """Returns a page up to the head of a table, the rows of the table, and the rest.

    Raises:
        ValueError: the page has no such table.
    """
    before, found, rest = page.partition(head)
    if not found:
        raise ValueError(f"there is no table with this head: {head}")
    table = re.match(r"(?:\|.*\n)*", rest)
    assert table is not None
    return before + head, table[0].splitlines(), rest[table.end() :]


def written(page: str, lines: Sequence[str]) -> str:
    """Returns a page with rows in its table.

    Raises:
        ValueError: the page has no such table.
    """
    before, _, after = table_of(page, HEAD)
    return before + "".join(line + "\n" for line in lines) + after


def survivors(mutants: Sequence[dict[str, Any]], judged: Mapping[Key, str]) -> list[dict[str, Any]]:
    """Returns the survivors that nobody has judged."""
    return [entry for entry in mutants if entry["outcome"] == "survived" and key_of(entry) not in judged]


def said(entry: Mapping[str, Any]) -> str:
    """Returns a survivor with what it changes, as text."""
    ran = f"{entry.get('tests', 0)} tests ran, {entry.get('left', 0)} were left"
    named = f"{entry['operator']}, occurrence {entry['occurrence']}"
    return f"{entry['file']}:{entry['line']}  {named}; {ran}\n{entry['diff']}"


def killing(mutants: Sequence[Mapping[str, Any]]) -> Counter[str]:
    """Returns how many mutants each test alone kills; of those that met every test which reaches them."""
    return Counter(entry["killers"][0] for entry in mutants if len(entry.get("killers", ())) == 1)
