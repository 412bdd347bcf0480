"""The simulator: short runs of every profile, runs that repeat for a seed, and bugs that it must find.

`make simulate ARGS="--until-operations 3000000"` is the long run; `make mutants` checks that every known bug is found.
"""

from __future__ import annotations

import json
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from machine import patience

from mainstem.events.replica import Replica as EventReplica
from mainstem.events.source import AllBlocksCleared, BlockRemoved, Event, salt_id
from mainstem.fleet.front.asking import Prompt
from mainstem.fleet.front.routing import CostRouter
from mainstem.tiers.host.transfer import Move
from simulator import campaign, mutants
from simulator.__main__ import main as simulate
from simulator.bugs import NATIVE, PYTHON, Mutant
from simulator.campaign import PROFILES, Record, run_seed
from simulator.events import adapter_of, pages_of, reaches
from simulator.fleet import Fleet
from simulator.ghost import SimMemory, fingerprints, salt
from simulator.mutants import judge
from simulator.record import row, written
from simulator.world import World, WrongError

ROOT = Path(__file__).parents[2]
SEEDS = {"cache": 8, "ranks": 4, "explain": 3}
"""Of the profiles that stand for random tests of the tiers; the others have 2."""


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    """Restores the log level, which a run of the simulator changes, for later tests in this process."""
    caplog.set_level(logging.getLogger("mainstem").level, "mainstem")


def _simulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "simulator", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=patience(120))


@pytest.mark.parametrize("profile", PROFILES)
def test_no_run_fails(profile: str) -> None:
    total, seeds = Record(), SEEDS.get(profile, 2)
    for seed in range(900, 900 + seeds):
        total.add(run_seed(profile, seed, 1500))
    assert not total.failures, "\n".join("\n".join(failure) for failure in total.failures)
    assert total.operations >= 1500 * seeds
    assert total.reads > 500
    assert sum(total.faults.values()) > 10


@pytest.mark.parametrize(
    ("profile", "seed", "operations"),
    [
        ("quotas", 313, 1000),  # a wait for copies left an owner beyond its maximum
        ("quotas", 352, 2000),  # the same, for another component
        ("quotas", 727, 900),  # and one never ended
        ("fleet", 1204, 4000),  # a front that came late did not know where pages in storage belong
    ],
)
def test_what_long_runs_have_found_stays_mended(profile: str, seed: int, operations: int) -> None:
    done = run_seed(profile, seed, operations)
    assert not done.failures and done.operations >= operations


def test_a_seed_always_makes_the_same_run(tmp_path: Path) -> None:
    """Here and in another process: one for all profiles, because its imports take longest."""
    record = tmp_path / "record.json"
    done = _simulate("--seed", "7", "--operations", "200", "--json", str(record))
    assert done.returncode == 0, done.stdout + done.stderr
    there = {profile: total["digest"] for profile, total in json.loads(record.read_text())["profiles"].items()}
    assert there == {profile: run_seed(profile, 7, 200).digest for profile in PROFILES}
    assert all(run_seed(profile, 8, 200).digest != digest for profile, digest in there.items())


def test_the_digest_of_a_single_run_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = "simulator --profile cache --seed 7 --operations 400 --processes 1"
    monkeypatch.setattr(sys, "argv", command.split())
    assert simulate() == 0
    assert f"digest: {run_seed('cache', 7, 400).digest}" in capsys.readouterr().out


@pytest.mark.parametrize(("waits", "limits_s"), [(False, (0.2, 60)), (True, (60, 0.2))])
def test_a_run_that_does_not_end_fails(
    monkeypatch: pytest.MonkeyPatch, waits: bool, limits_s: tuple[float, float]
) -> None:
    """By the processor's time if it goes round in circles, by the clock if it waits: a busy machine is no failure."""

    class Endless:
        def __init__(self, world: World) -> None:
            self.close = self.end = lambda: None

        def step(self) -> None:
            while True:
                if waits:
                    time.sleep(0.01)

    monkeypatch.setattr(campaign, "find_profile", lambda name: Endless)
    kinds = ((signal.SIGVTALRM, signal.ITIMER_VIRTUAL), (signal.SIGALRM, signal.ITIMER_REAL))
    monkeypatch.setattr(campaign, "_LIMITS", [(*kind, s) for kind, s in zip(kinds, limits_s, strict=True)])
    ((_, why),) = run_seed("cache", 0, 10).failures
    assert "the run does not end" in why


def test_a_campaign_resumes_where_it_ended_with_profiles_that_its_record_lacks_and_its_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.json"
    first = "simulator --profile cache components --operations 200 --seeds 5: --until-operations 1500 --processes 1"
    monkeypatch.setattr(sys, "argv", [*first.split(), "--json", str(path)])
    assert simulate() == 0
    record = json.loads(path.read_text())
    before = record["profiles"]["cache"]["seeds"]
    mended, not_yet = ("python -m simulator --profile cache --seed 5 --operations 200", "python -c 1/0")
    record["profiles"]["cache"]["failures"] = [[mended, "then"], [not_yet, "now"]]
    path.write_text(json.dumps(record))
    again = ("--profile", "cache", "components", "quotas", "--until-operations", "5000", "--processes", "2")
    done = _simulate(*again, "--json", str(path), "--resume")
    assert done.returncode == 1 and f"mended  {mended}" in done.stdout and f"FAILED  {not_yet}" in done.stdout
    after = json.loads(path.read_text())
    assert (after["first_seed"], after["operations_a_seed"]) == (5, 200)  # as it began
    profiles = after["profiles"]
    assert sum(profile["operations"] for profile in profiles.values()) >= 5000
    assert profiles["quotas"]["seeds"] and before < profiles["cache"]["seeds"]
    assert profiles["cache"]["failures"] == [[not_yet, "now"]]
    total = Record()
    for seed in range(5, 5 + profiles["cache"]["seeds"]):
        total.add(run_seed("cache", seed, 200))
    assert (total.operations, total.faults) == (profiles["cache"]["operations"], profiles["cache"]["faults"])


def test_a_record_becomes_a_row_that_replaces_the_last_one() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    record = {"date": "2026-01-02T03:04:05", "commit": "abc+", "first_seed": 5, "seconds": 61.2, "profiles": {}}
    for name, operations in (("cache", 1_500_000), ("fleet", 900)):
        run = Record(2, operations, 30, failures=[("again", "after 3 operations, WRONG READ")])
        run.faults["kill"] = 7
        record["profiles"][name] = vars(run)  # type: ignore[index]
    line = row(record, "a test")
    assert line == (
        "| 2026-01-02 | abc | a test: `cache` 1.5M, `fleet` 900; seeds from 5 | 4 | 1,500,900 | 14 | 60 "
        "| 2 | 2 | 61 s |"
    )
    once = written(page, line, "a test")
    assert once.count(line) == 1
    assert len(once.splitlines()) == len(page.splitlines()) + 1
    assert written(once.replace("2026-01-02", "2026-01-01"), line, "a test") == once
    with pytest.raises(ValueError, match="no table"):
        written("nothing", line, "a test")


# ---------------------------------------------------------------- what it detects


def test_a_known_bug_is_found_and_reported_with_the_command_that_replays_it(tmp_path: Path) -> None:
    verdict = judge(PYTHON[0], tmp_path)
    assert verdict.killed
    assert "WRONG READ" in verdict.sight
    record = json.loads((tmp_path / "record.json").read_text())["profiles"]["cache"]
    line, what = record["failures"][0]
    assert line.startswith("python -m simulator --profile cache --seed ")
    assert "operations, WrongError: WRONG READ" in what


def test_the_text_of_each_mutant_occurs_exactly_once() -> None:
    texts = {mutant.file: (ROOT / "src" / "mainstem" / mutant.file).read_text() for mutant in [*PYTHON, *NATIVE]}
    patches = [(mutant, old, new) for mutant in [*PYTHON, *NATIVE] for old, new in mutant.patches]
    assert [
        (mutant.name, old) for mutant, old, new in patches if texts[mutant.file].count(old) != 1 or old == new
    ] == []
    assert [mutant.name for mutant in PYTHON if not mutant.file.endswith(".py")] == [], "these belong to NATIVE"


def test_the_page_has_each_mutant_with_what_finds_it() -> None:
    lines = (ROOT / "docs" / "reliability.md").read_text().splitlines()
    heads = {mutant.name: mutants.row(mutant, "")[:-3] for mutant in [*PYTHON, *NATIVE]}
    assert [name for name, head in heads.items() if sum(line.startswith(head) for line in lines) != 1] == []


def test_a_mutant_runs_again_only_if_its_file_or_what_finds_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("package/a.py", "package/b.py", "simulator/world.py", "simulator/bugs.py", "tests/test_a.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    monkeypatch.setattr(mutants, "_ROOT", tmp_path)
    monkeypatch.setattr(mutants, "_PACKAGE", tmp_path / "package")
    patches = (("1", "2"),)
    one, two = (
        Mutant("one", "", "a.py", patches, "cache"),
        Mutant("two", "", "b.py", patches, "tests/test_a.py::test_x"),
    )
    record = {mutant.name: mutants.digest(mutant) for mutant in (one, two)}
    assert mutants.changed([one, two], record) == []
    assert mutants.changed([one, two], {"two": record["two"]}) == [one]
    for name, again in {
        "package/a.py": [one],
        "package/b.py": [two],
        "simulator/world.py": [one],
        "simulator/bugs.py": [],
        "tests/test_a.py": [two],
    }.items():
        (tmp_path / name).write_text("x = 2\n")
        assert mutants.changed([one, two], record) == again
        (tmp_path / name).write_text("x = 1\n")
    assert mutants.changed([replace(one, by="hybrid")], record)


def test_what_was_found_is_written_in_the_order_of_the_list() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    first, second = (mutants.row(mutant, "7") for mutant in PYTHON[:2])
    again = mutants.written(page, {PYTHON[1].name: second, PYTHON[0].name: first})
    assert f"{first}\n{second}\n" in again and mutants.written(again, {}) == again
    other = page.replace(f"| {PYTHON[0].name} |", "| one that is gone |")
    assert "one that is gone" not in mutants.written(other, {})
    with pytest.raises(ValueError, match="no table"):
        mutants.written("nothing", {})


class PlainIndex(CostRouter):
    """A chooser with an obvious index, which may ignore a kind of event."""

    def __init__(self, ignored: type[Event] | None, world: World, page_size: int) -> None:
        super().__init__(world.clock, page_size=page_size, key=bytes(16))
        self._ignored = ignored
        self._held: dict[str, EventReplica] = {}

    def follow(self, replicas: Mapping[str, Mapping[str, Any]]) -> None:
        super().follow(replicas)
        self._held = {name: self._held.get(name) or EventReplica() for name in replicas}

    def apply(self, replica: str, events: Iterable[Event]) -> None:
        self._held[replica].apply([each for each in events if type(each) is not self._ignored])

    def match(self, prompt: Prompt) -> dict[str, tuple[int, int, int]]:
        space, path = prompt.namespace, tuple(prompt.tokens.tolist())
        return {
            name: reaches(pages_of(known), adapter_of(space), salt_id(space), path)
            for name, known in self._held.items()
        }


def _run_fleets(seeds: range, ignored: type[Event] | None) -> int:
    """Returns how many prefixes were compared."""
    compared = 0
    for seed in seeds:
        world = World(seed, "fleet")
        fleet = type("Indexed", (Fleet,), {"choosers": (partial(PlainIndex, ignored),)})(world)
        while world.operations < 1200:
            fleet.step()
        fleet.end()
        compared += world.seen["prefixes found by the index"]
    return compared


def test_the_index_of_a_router_is_compared_with_every_cache() -> None:
    assert _run_fleets(range(301, 303), None) > 20


@pytest.mark.parametrize("ignored", [BlockRemoved, AllBlocksCleared])
def test_an_index_that_ignores_events_is_found(ignored: type[Event]) -> None:
    with pytest.raises(WrongError, match="the index knows something else"):
        _run_fleets(range(300, 330), ignored)


def _memory(world: World) -> SimMemory:
    return SimMemory(world, [4], [4], page_size=2, layers=2)


def _world() -> World:
    world = World(0, "test")
    world.rate = 0.0
    return world


def _move(source: int, target: int) -> Move:
    return Move(0, np.array([source], np.int32), np.array([target], np.int32))


def test_a_copy_arrives_layer_by_layer_and_is_wrong_before() -> None:
    world = _world()
    memory = _memory(world)
    numbers = fingerprints(salt(b"a"), [1, 2])
    page = np.array([3], np.int32)
    memory.write(page, 0, numbers)
    memory.down([_move(3, 1)]).wait()
    memory.poison(0, 0, [3])
    ticket = memory.up([_move(1, 3)])
    with pytest.raises(WrongError, match="WRONG READ"):
        memory.expect("too early", page, numbers)
    ticket.wait_layer(0)
    memory.expect("layer 0", page, numbers, layers=slice(0, 1))
    ticket.wait()
    memory.expect("all", page, numbers)


def test_conflicting_uses_of_a_page_are_detected() -> None:
    memory = _memory(_world())
    memory.down([_move(0, 1)])
    for wrong in (
        lambda: memory.down([_move(2, 1)]),
        lambda: memory.up([_move(1, 3)]),
        lambda: memory.write(np.array([0], np.int32), 0, fingerprints(salt(), [1])),
        lambda: memory.poison(0, 0, [0]),
    ):
        with pytest.raises(WrongError):
            wrong()


@pytest.mark.parametrize("other", [(b"b", [1, 2, 3]), (b"a", [1, 2, 4]), (b"a", [0, 2, 3]), (b"a", [2, 1, 3])])
def test_content_is_a_function_of_salt_and_all_tokens_up_to_a_position(other: tuple[bytes, list[int]]) -> None:
    one = fingerprints(salt(b"a"), [1, 2, 3])
    assert one[-1] != fingerprints(salt(other[0]), other[1])[-1]
    assert (one[:2] == fingerprints(salt(b"a"), [1, 2])).all()


def test_no_mutant_begins_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (Mutant(name, "", "a.py", (), "cache") for name in ("one", "two"))
    found = mutants.Verdict(True, None, 0.1, "seen")
    monkeypatch.setattr(mutants, "_verdict", lambda mutant, builder: found)
    assert list(mutants._verdicts([one, two])) == [(one, found), (two, found)]
    assert list(mutants._verdicts([one, two], end_s=0.0)) == [(one, None), (two, None)]
