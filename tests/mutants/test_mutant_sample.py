"""The sample of a round: by area, from a seed, and never the same seed twice; judgements, the record and its table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mutation import record
from mutation.record import BadJudgement, SeedUsed
from mutation.sample import AREAS, PACKAGE, area_of, draw, mutants_of, share

ROOT = Path(__file__).parents[2]


def repository(root: Path) -> Path:
    """Writes a package with a few lines in each area."""
    texts = {f"{folders[0] or 'watch/'}one.py": "def f(a):\n" for folders in AREAS.values() if folders[0] != "core/"}
    for file, text in texts.items():
        path = root / PACKAGE / file
        path.parent.mkdir(parents=True)
        path.write_text(text + "".join(f"    a = g(a, {n} + a)\n" for n in range(8)))
    native = root / PACKAGE / "core" / "csrc" / "tree" / "tree.cpp"
    native.parent.mkdir(parents=True)
    native.write_text("int f(int a) {\n" + "".join(f"  a = a + {n};\n" for n in range(30)) + "}\n")
    return root


def test_a_seed_draws_the_same_lines_again_and_another_seed_others(tmp_path: Path) -> None:
    repository(tmp_path)
    first, again, other = (draw(tmp_path, seed, 30, 5) for seed in (1, 1, 2))
    assert first == again
    assert {mutant.key for mutant in first} != {mutant.key for mutant in other}


def test_each_area_has_its_share_and_no_line_has_two(tmp_path: Path) -> None:
    mutants = draw(repository(tmp_path), 3, 40, 5)
    python = [mutant for mutant in mutants if mutant.area != "core"]
    assert {area: sum(mutant.area == area for mutant in python) for area in AREAS if area != "core"} == {
        area: 4 for area in AREAS if area != "core"
    }
    assert len(mutants) - len(python) == 8, "some of the core are spare: they may not compile"
    assert len({(mutant.file, mutant.site.line) for mutant in mutants}) == len(mutants)
    assert all(mutant.source(tmp_path) != (tmp_path / PACKAGE / mutant.file).read_text() for mutant in mutants)


def test_half_is_shared_by_size_and_half_alike() -> None:
    assert share({"a": 900, "b": 100}, 100) == {"a": 70, "b": 30}
    assert sum(share({"a": 7, "b": 5, "c": 3}, 10).values()) == 10
    assert share({"a": 1}, 0) == {"a": 0} and share({}, 5) == {}


def test_every_file_belongs_to_one_area() -> None:
    files = {
        "core/csrc/tree/tree.cpp": "core",
        "hf.py": "integrations",
        "cli.py": "the rest",
        "owner/held.py": "owner and events",
    }
    assert {file: area_of(file) for file in files} == files


def test_places_of_lines_with_the_same_text_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / PACKAGE / "a.py"
    path.parent.mkdir(parents=True)
    path.write_text("x = 1\ny = 2\nx = 1\n")
    found = [mutant for mutant in mutants_of(tmp_path, "a.py") if mutant.site.operator == "TimesTen"]
    assert [(mutant.site.text, mutant.occurrence) for mutant in found] == [("x = 1", 0), ("y = 2", 0), ("x = 1", 1)]
    assert found[2].diff(tmp_path) == "-x = 1\n+x = (1 * 10)"


# ---------------------------------------------------------------- judgements and the record


def entry(outcome: str, file: str = "cache/a.py", occurrence: int = 0, **more: Any) -> dict[str, Any]:
    named = {"file": file, "line": 3, "operator": "TimesTen", "text": "x = 1", "occurrence": occurrence}
    return {**named, "outcome": outcome, "diff": "-x = 1\n+x = (1 * 10)", **more}


def judged(path: Path, *rows: str) -> Path:
    path.write_text("".join(f"[[equivalent]]\n{row}\n" for row in rows))
    return path


ROW = 'file = "cache/a.py"\noperator = "TimesTen"\ntext = "x = 1"\nbecause = "Nothing reads x."'


def test_a_seed_that_is_in_the_record_is_refused() -> None:
    record.refuse_used(3, [{"seed": 1}, {"seed": 2}])
    with pytest.raises(SeedUsed, match="seed 2 was used; take one that is not in 1, 2"):
        record.refuse_used(2, [{"seed": 2}, {"seed": 1}])


def test_a_survivor_that_is_judged_equivalent_counts_neither_way(tmp_path: Path) -> None:
    mutants = [entry("killed"), entry("survived"), entry("survived", occurrence=1), entry("killed", "hf.py")]
    why = record.judgements(judged(tmp_path / "judged.toml", ROW))
    counts = record.counts(mutants, why)
    assert counts["cache"] == {"killed": 1, "survived": 1, "equivalent": 1}
    assert counts["all"] == {"killed": 2, "survived": 1, "equivalent": 1}
    assert record.rows([{"seed": 5, "mutants": mutants}], why) == [
        "| 5 | cache | 3 | 1 | 1 | 1 | 50.0 % |",
        "| 5 | integrations | 1 | 1 | 0 | 0 | 100.0 % |",
        "| 5 | all | 4 | 2 | 1 | 1 | 66.7 % |",
    ]
    (left,) = record.survivors(mutants, why)
    assert record.said(left).startswith("cache/a.py:3  TimesTen, occurrence 1; 0 tests ran, 0 were left\n-x = 1\n")


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([ROW, ROW], "judged twice"),
        ([ROW.replace("because", "reason")], "a sentence as because"),
        ([ROW.replace("Nothing reads x.", "")], "a sentence as because"),
    ],
)
def test_a_judgement_without_a_sentence_or_a_second_one_is_refused(
    rows: list[str], message: str, tmp_path: Path
) -> None:
    with pytest.raises(BadJudgement, match=message):
        record.judgements(judged(tmp_path / "judged.toml", *rows))


def test_mutants_that_one_test_alone_kills_are_counted_by_test() -> None:
    mutants = [entry("killed", killers=["a"]), entry("killed", killers=["a", "b"]), entry("killed", killers=["b"])]
    assert record.killing([*mutants, entry("killed", killers=["a"]), entry("survived")]) == {"a": 2, "b": 1}


def test_the_table_is_that_of_the_record_and_every_judgement_is_of_a_survivor() -> None:
    rounds, why, page = record.rounds(), record.judgements(), record.PAGE.read_text()
    assert record.written(page, record.rows(rounds, why)) == page, "`python -m mutation --rewrite` writes the table"
    survived = {record.key_of(each) for one in rounds for each in one["mutants"] if each["outcome"] == "survived"}
    assert why.keys() - survived == set()
    assert len({one["seed"] for one in rounds}) == len(rounds)


def test_rows_are_written_in_place_of_those_that_were_there() -> None:
    page = f"before\n{record.HEAD}| 1 | old |\n| 2 | old |\n\nafter\n"
    assert record.written(page, ["| 3 | new |"]) == f"before\n{record.HEAD}| 3 | new |\n\nafter\n"
    with pytest.raises(ValueError, match="no table"):
        record.written("nothing", [])
