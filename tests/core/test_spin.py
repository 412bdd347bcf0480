"""The models of `proof`: each state of them is as it should be, and each bug that can be reintroduced is found."""

from __future__ import annotations

from pathlib import Path

import pytest
from skips import SPIN

from proof.checks import BUGS, CHECKS, Bug, Check
from proof.spin import ProofError, search
from simulator.bugs import NATIVE, PYTHON

BY_NAME = {check.name: check for check in CHECKS}


def test_each_bug_is_one_of_the_mutants() -> None:
    mutants = {mutant.name for mutant in (*PYTHON, *NATIVE)}
    assert [bug.name for bug in BUGS if bug.name not in mutants] == []
    assert len({bug.flag for bug in BUGS}) == len(BUGS) >= 15


def test_the_documentation_has_the_states_of_each_check() -> None:
    text = (Path(__file__).parents[2] / "docs" / "reliability.md").read_text()
    assert [check.name for check in CHECKS if f"| `{check.name}` | {check.states:,} |" not in text] == []
    assert f"all {len(BUGS)} bugs" in text


@SPIN.needed
def test_a_model_that_does_not_compile_is_told() -> None:
    with pytest.raises(ProofError, match=r"cache\.pml"):
        search(Check("wrong", "cache", ("N_PAGES(",), 0))


@SPIN.needed
@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_no_reachable_state_violates_anything(check: Check) -> None:
    found = search(check)
    assert found.error is None
    assert found.states == check.states


@SPIN.needed
@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.flag.lower())
def test_the_bug_is_found(bug: Bug) -> None:
    assert search(BY_NAME[bug.check], [bug.flag]).error is not None
