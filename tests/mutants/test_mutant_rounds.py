"""Mutants of a tiny package run against its tests, which kill some; a round goes on where it ended."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from machine import patience

from mutation import rounds
from mutation.copies import Builder, copy_repository, environment, write
from mutation.reach import Reach, files_of_tests, lines_of
from mutation.rounds import Again, Bench, Budget, Round, SourceChanged, Verdict, go_on
from mutation.runner import Run, Runner
from mutation.sample import PACKAGE, Mutant, mutants_of

SOURCE = '''"""A package."""

BOUND = 3


def larger(a, b):
    return a if a > b else b


def smaller(a, b):
    return a if a < b else b


def count(n):
    while n > 0:
        n -= 1
    return n


def leave(status):
    import os

    if status > BOUND:
        os._exit(9)
    return status
'''
TESTS = """from mainstem.tiny import count, larger, leave, smaller


def test_larger():
    assert larger(1, 2) == 2 and larger(2, 1) == 2


def test_larger_again():
    assert larger(5, 6) == 6


def test_smaller():
    assert smaller(1, 1) == 1


def test_count():
    assert count(2) == 0


def test_leave():
    assert leave(3) == 3


def test_that_fails():
    assert larger(1, 2) == 1
"""
FILE = "tests/cache/test_tiny.py"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("repository")
    for name, text in {f"{PACKAGE}/__init__.py": "", f"{PACKAGE}/tiny.py": SOURCE, FILE: TESTS}.items():
        write(root / name, text.encode())
    return root


@pytest.fixture(scope="module")
def copy(root: Path) -> Path:
    copy: Path = root.with_name("copy")
    shutil.copytree(root, copy)
    return copy


@pytest.fixture(scope="module")
def runner(copy: Path) -> Iterator[Runner]:
    with closing(Runner(copy, ["pytest", "hypothesis", "coverage"], test_s=patience(1.0))) as runner:
        yield runner


@pytest.fixture(scope="module")
def reach(root: Path, runner: Runner) -> Reach:
    reach = Reach(root.with_name("reach"), root)
    assert reach.missing(files_of_tests(root)) == [FILE]
    reach.record(FILE, runner)
    return reach


def bench(reach: Reach, root: Path, copy: Path, runner: Runner, budget: Budget | None = None) -> Bench:
    return Bench(reach, root, [(copy, runner)], lambda: pytest.fail("no mutant is of the core"), budget or Budget())


def mutant(root: Path, operator: str, text: str) -> Mutant:
    found = (each for each in mutants_of(root, "tiny.py") if each.site.operator == operator)
    return next(each for each in found if each.site.text == text)


def names(*tests: str) -> list[str]:
    return [f"{FILE}::{test}" for test in tests]


def test_the_tests_that_reach_a_line_are_recorded_but_for_those_that_fail(reach: Reach) -> None:
    assert reach.parts[FILE].failed == names("test_that_fails")
    assert set(reach.reaching("tiny.py", 7)) == set(names("test_larger", "test_larger_again"))
    assert reach.reaching("tiny.py", 16) == names("test_count")
    assert reach.reaching("tiny.py", 3) == names("test_leave"), "what uses a constant reaches it"
    assert reach.reaching("tiny.py", 20) == names("test_leave"), "the head of a function is reached by its body"
    assert reach.reaching("tiny.py", 24) == [], "nothing has run this"


def test_a_recording_is_found_again_until_its_file_changes_though_lines_of_the_package_move(
    reach: Reach, root: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(root, moved)
    write(moved / PACKAGE / "tiny.py", ("# one line more\n" + SOURCE).encode())
    again = Reach(root.with_name("reach"), moved)
    assert again.missing([FILE]) == []
    assert again.reaching("tiny.py", 17) == names("test_count")
    write(moved / FILE, (TESTS + "\n").encode())
    assert again.missing([FILE, "simulator: cache"]) == [FILE, "simulator: cache"]


@pytest.mark.parametrize(
    ("operator", "text", "outcome", "how", "by"),
    [
        ("ReplaceComparisonOperator_Gt_LtE", "return a if a > b else b", "killed", "failed", "test_larger"),
        ("ReplaceComparisonOperator_Lt_LtE", "return a if a < b else b", "survived", "", ""),
        ("ReplaceComparisonOperator_Gt_GtE", "if status > BOUND:", "killed", "died", "test_leave"),
        ("DeleteStatement", "n -= 1", "killed", "hung", "test_count"),
        ("DeleteStatement", "BOUND = 3", "killed", "failed", "test_leave"),
    ],
)
def test_a_mutant_is_killed_by_a_test_that_fails_hangs_or_dies_and_else_survives(
    operator: str, text: str, outcome: str, how: str, by: str, reach: Reach, root: Path, copy: Path, runner: Runner
) -> None:
    verdict = bench(reach, root, copy, runner).judge(mutant(root, operator, text))
    assert (verdict.outcome, verdict.how) == (outcome, how)
    assert verdict.by.removesuffix("_again") == (f"{FILE}::{by}" if by else "")  # either of two that take as long
    assert (copy / PACKAGE / "tiny.py").read_text() == SOURCE == (root / PACKAGE / "tiny.py").read_text()
    assert verdict.stage == ("reach" if by else "")


def test_all_tests_that_kill_a_mutant_are_named_if_all_are_asked(
    reach: Reach, root: Path, copy: Path, runner: Runner
) -> None:
    of = mutant(root, "ReplaceComparisonOperator_Gt_LtE", "return a if a > b else b")
    assert len(bench(reach, root, copy, runner).judge(of).killers) == 1
    verdict = bench(reach, root, copy, runner, Budget(every=True)).judge(of)
    assert sorted(verdict.killers) == names("test_larger", "test_larger_again")


def test_tests_that_do_not_fit_the_time_are_left(reach: Reach, root: Path, copy: Path, runner: Runner) -> None:
    of = mutant(root, "ReplaceComparisonOperator_Gt_GtE", "return a if a > b else b")
    verdict = bench(reach, root, copy, runner, Budget(first_s=-1.0, reach_s=-1.0, wider_s=-1.0)).judge(of)
    assert verdict.outcome == "survived" and verdict.tests == 3, "each time gives room for one test"
    assert verdict.left == 2


def test_a_test_that_a_busy_machine_may_fail_has_to_fail_twice(
    reach: Reach, root: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late, other = names("test_larger", "test_larger_again")
    asked: list[list[str]] = []

    class Busy(Runner):
        def __init__(self) -> None:
            pass

        def test(self, files: object, wanted: list[str], *_: object, **__: object) -> Run:  # type: ignore[override]
            asked.append(list(wanted))
            return Run({late: "late"}, "failed", done={late: 1.0}) if len(asked) == 1 else Run(done={other: 0.1})

    monkeypatch.setitem(reach.__dict__, "deadline", {late})
    of = mutant(root, "ReplaceComparisonOperator_Gt_GtE", "return a if a > b else b")
    verdict = bench(reach, root, copy, Busy()).judge(of)
    assert verdict.outcome == "survived"
    assert asked[1] == [late], "the one that failed, alone"
    assert asked[2] == [other], "and then those after it"


def test_a_test_that_fails_without_a_mutant_kills_none(reach: Reach, root: Path, copy: Path) -> None:
    (broken,) = names("test_larger")
    asked: list[tuple[list[str], bool]] = []

    class Broken(Runner):
        def __init__(self) -> None:
            pass

        def test(self, files: object, wanted: list[str], *_: object, **__: object) -> Run:  # type: ignore[override]
            asked.append((list(wanted), (copy / PACKAGE / "tiny.py").read_text() == SOURCE))
            return Run({broken: "broken"}, "failed") if broken in wanted else Run(done=dict.fromkeys(wanted, 0.1))

    of = mutant(root, "ReplaceComparisonOperator_Gt_GtE", "return a if a > b else b")
    verdict = bench(reach, root, copy, Broken()).judge(of)
    assert verdict.outcome == "survived" and broken not in asked[-1][0]
    assert ([broken], True) in asked, "without the mutant"


def test_what_a_line_reaches_depends_on_where_it_stands() -> None:
    source = "A = 1\n\n\ndef f(\n    a=A,\n):\n    b = [\n        a,\n    ]\n    return b\n"
    assert lines_of(source, 8)[0] == {7, 8, 9}, "a statement as a whole"
    assert lines_of(source, 5)[0] == {7, 8, 9, 10}, "the body of the function whose head it is"
    assert lines_of(source, 1)[0] == {5}, "the lines that name what it assigns"


# ---------------------------------------------------------------- rounds


@pytest.fixture
def round_(root: Path, tmp_path: Path) -> Round:
    return Round(tmp_path / "round", root, 1, 6, 0)


def survived(mutant: Mutant) -> Verdict:
    return Verdict("survived", tests=4)


def test_a_round_goes_on_where_it_ended(round_: Round, root: Path, tmp_path: Path) -> None:
    ticks, said = iter([0.0, 1.0, 2.0]), list[str]()
    go_on(round_, survived, 1, 2.0, said.append, lambda: next(ticks))
    assert len(said) == len(round_.verdicts) == 2 and not round_.is_whole
    again = Round(tmp_path / "round", root, 1, 6, 0)
    assert again.verdicts == round_.verdicts and again.mutants == round_.mutants
    judged: list[Mutant] = []
    go_on(again, lambda each: (judged.append(each), survived(each))[1], 2, 1.0, said.append, lambda: 0.0)
    assert again.is_whole and len(judged) == 4
    assert len({each.key for each in judged} | round_.verdicts.keys()) == 6


def test_a_round_ends_with_the_package_that_it_began_with(round_: Round, root: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceChanged, match="with 6 mutants of Python and 0 of the core"):
        Round(tmp_path / "round", root, 1, 7, 0)
    other = tmp_path / "other"
    shutil.copytree(root, other)
    write(other / PACKAGE / "tiny.py", (SOURCE + "# more\n").encode())
    with pytest.raises(SourceChanged, match="end it there"):
        Round(tmp_path / "round", other, 1, 6, 0)


def test_survivors_meet_the_tests_again_where_their_lines_are_now(tmp_path: Path) -> None:
    write(tmp_path / PACKAGE / "a.py", b"x = 1\ny = 2\n")
    first, second = (mutant for mutant in mutants_of(tmp_path, "a.py") if mutant.site.operator == "TimesTen")
    write(tmp_path / PACKAGE / "a.py", b"# moved\nx = 3\ny = 2\n")
    again = Again(tmp_path, [first.key, second.key, ("gone.py", "TimesTen", "x = 1", 0)])
    judged: list[Mutant] = []
    go_on(again, lambda each: (judged.append(each), Verdict())[1], 1, 1.0, lambda line: None, lambda: 0.0)
    assert [(each.key, each.site.line) for each in judged] == [(second.key, 3)], "the text of the first is another"


def test_what_does_not_compile_is_no_mutant_and_the_next_takes_its_place(tmp_path: Path) -> None:
    write(tmp_path / PACKAGE / "core/csrc/tree/tree.cpp", b"int f(int a) {\n" + b"  a = a + 2;\n" * 9 + b"}\n")
    round_ = Round(tmp_path / "round", tmp_path, 1, 0, 3)
    verdicts = iter(["invalid", "killed", "invalid", "survived", "killed"])
    go_on(round_, lambda each: Verdict(next(verdicts)), 1, 1.0, lambda line: None, lambda: 0.0)
    assert next(verdicts, None) is None and round_.is_whole and round_.valid("core") == 3


def test_a_mutant_of_the_core_is_compiled_and_lies_in_the_copy_while_tests_run(
    reach: Reach, root: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = "core/csrc/tree/tree.cpp"
    both = [(root, "int x = 1;\n"), (copy, "int x = 1;\n")]
    for folder, text in both:
        write(folder / PACKAGE / native, text.encode())
        write(folder / PACKAGE / "_core.so", b"whole")

    class Compiler(Builder):
        def __init__(self) -> None:
            pass

        def build(self, file: str, text: str, folder: Path) -> Path:
            if "10" in text:
                raise subprocess.CalledProcessError(1, "g++", stderr="no such\nthing")
            (folder / "_core.so").write_text(f"mutant {text}")
            return folder / "_core.so"

    class Seeing(Runner):
        def __init__(self) -> None:
            self.seen: list[str] = []

        def test(self, files: object, wanted: list[str], *_: object, **__: object) -> Run:  # type: ignore[override]
            self.seen.append((copy / PACKAGE / "_core.so").read_text())
            return Run({wanted[0]: "wrong"}, "failed") if "mutant" in self.seen[-1] else Run()

    seeing = Seeing()
    bench = Bench(reach, root, [(copy, seeing)], Compiler, Budget())
    add, ten = (
        next(each for each in mutants_of(root, native) if each.site.operator == operator)
        for operator in ("NumberReplacer", "TimesTen")
    )
    assert bench.judge(add).by.startswith(FILE)
    assert seeing.seen == ["mutant int x = (1 + 1);\n", "whole"]
    assert (copy / PACKAGE / "_core.so").read_text() == "whole"
    assert replace(bench.judge(ten), seconds=0.0) == Verdict("invalid", what="no such thing")


# ---------------------------------------------------------------- copies


def test_a_copy_is_made_equal_to_the_repository_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, copy, core = tmp_path / "root", tmp_path / "copy", tmp_path / "_core.so"
    core.write_text("core")
    monkeypatch.setattr("mutation.copies.core_file", lambda: core)
    for name, text in {".gitignore": "ignored\n", "a.py": "a = 1\n", "b/c.py": "c = 1\n", "ignored": ""}.items():
        write(root / name, text.encode())
    subprocess.run(["git", "init", "-q"], cwd=root, check=True)
    (copy / PACKAGE).mkdir(parents=True)
    copy_repository(copy, root)
    write(copy / "a.py", b"a = 2\n")
    write(copy / "gone.py", b"")
    copy_repository(copy, root)
    assert (copy / "a.py").read_text() == "a = 1\n"
    assert sorted(path.name for path in copy.rglob("*") if path.is_file()) == [".gitignore", "_core.so", "a.py", "c.py"]


def test_every_process_imports_the_package_from_the_copy(tmp_path: Path) -> None:
    path = environment(tmp_path, tmp_path / "further")["PYTHONPATH"]
    assert path.split(":") == [str(tmp_path), str(tmp_path / "further")]
    assert "ScikitBuildRedirectingFinder" in (tmp_path / "sitecustomize.py").read_text()


def test_the_wider_choice_of_each_area_is_there() -> None:
    root = Path(__file__).parents[2]
    folders = {folder for each in (*rounds.TESTS.values(), *rounds.CORE_TESTS.values()) for folder in each}
    assert [folder for folder in sorted(folders) if not (root / folder).exists()] == []
    parts = {path.name for path in (root / PACKAGE / "core" / "csrc").iterdir()}
    assert (rounds.CORE_TESTS.keys() | set(rounds.NO_PROFILES)) - parts == {""}
