"""`python -m simulator`: runs seeds, prints the results, and for each failure the command that replays it.

python -m simulator --seeds 0:200                          all profiles, 200 seeds of each
python -m simulator --until-operations 3000000             seeds until this many operations are done
python -m simulator --profile cache --seed 17 --operations 4000
python -m simulator --until-operations 1e9 --json record.json --resume       continues a recorded campaign
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from simulator.campaign import PROFILES, SHARES, Record, run_seed

_SAVED_EVERY_S = 60.0


def main() -> int:
    """Returns 0 if no run failed."""
    options = _parse()
    began_s = saved_s = time.perf_counter()
    campaign = Campaign(options)
    for record in campaign.run():
        for line, what in record.failures:
            print(f"FAILED  {line}\n        {what}", flush=True)
        if options.json is not None and time.perf_counter() - saved_s > _SAVED_EVERY_S:
            saved_s = time.perf_counter()
            campaign.save(saved_s - began_s)
        if campaign.failed >= options.failures or campaign.operations >= options.until_operations:
            break
    campaign.report(time.perf_counter() - began_s)
    if options.json is not None:
        campaign.save(time.perf_counter() - began_s)
    return int(campaign.failed > 0)


class Campaign:
    """Many runs, several at once, counted in the order of their seeds."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._commit = options, _commit()
        self._former: dict[str, Record] = {}
        self.totals = {profile: Record() for profile in options.profile}
        self.former_s = 0.0
        if options.resume:
            former = json.loads(options.json.read_text())
            self.former_s = former["seconds"]
            options.first, options.operations = former["first_seed"], former["operations_a_seed"]
            for profile, record in former["profiles"].items():
                self.totals[profile] = total = _from_json(record)
                total.failures = [each for each in total.failures if _fails_still(each[0])]

    @property
    def operations(self) -> int:
        return sum(total.operations for total in self.totals.values())

    @property
    def failed(self) -> int:
        return sum(len(total.failures) for total in self.totals.values())

    def run(self) -> Iterator[Record]:
        """Yields the record of each run."""
        options = self._options
        tasks = self._tasks()
        if options.processes == 1:
            for task in tasks:
                yield self._count(task[0], run_seed(*task))
            return
        pool = ProcessPoolExecutor(options.processes, get_context("spawn"))
        try:
            first = itertools.islice(tasks, options.processes * 3)
            waiting = deque((task, pool.submit(run_seed, *task)) for task in first)
            while waiting:
                task, future = waiting.popleft()
                record = future.result()
                waiting.extend((task, pool.submit(run_seed, *task)) for task in itertools.islice(tasks, 1))
                yield self._count(task[0], record)
        except BrokenProcessPool:
            for profile, seed, operations in [task, *(task for task, _ in waiting)]:
                line = f"python -m simulator --profile {profile} --seed {seed} --operations {operations}"
                yield self._count(profile, Record(failures=[(line, "the process died, in this run or a later one")]))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _count(self, profile: str, record: Record) -> Record:
        self.totals[profile].add(record)
        return record

    def _tasks(self) -> Iterator[tuple[str, int, int]]:
        """Yields runs of all profiles in turn, as often as `SHARES` says."""
        options = self._options
        numbers = {profile: options.first + total.seeds for profile, total in self.totals.items()}
        end = sys.maxsize if options.end is None else options.end
        while any(number < end for number in numbers.values()):
            for profile in numbers:
                for _ in range(SHARES[profile] if options.end is None else 1):
                    if numbers[profile] < end:
                        yield profile, numbers[profile], options.operations
                        numbers[profile] += 1

    def save(self, seconds: float) -> None:
        """Writes the record that a campaign can be resumed from."""
        path: Path = self._options.json
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".new").write_text(json.dumps(self._as_json(seconds), indent=1))
        path.with_suffix(".new").rename(path)

    def _as_json(self, seconds: float) -> dict[str, object]:
        return {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": self._commit,
            "first_seed": self._options.first,
            "operations_a_seed": self._options.operations,
            "seconds": round(seconds + self.former_s, 1),
            "profiles": {profile: vars(total) for profile, total in self.totals.items()},
        }

    def report(self, seconds: float) -> None:
        """Prints the results."""
        total = Record()
        print(f"{'profile':<12}{'seeds':>8}{'operations':>14}{'faults':>12}{'pages read':>14}{'failed':>8}{'CPU s':>9}")
        for profile, record in self.totals.items():
            total.add(record)
            _row(profile, record)
        _row("all", total)
        seconds += self.former_s
        print(f"{total.operations / max(seconds, 1e-9):,.0f} operations a second, {seconds:.0f} s")
        print("faults: " + ", ".join(f"{kind} {n:,}" for kind, n in total.faults.most_common()))
        print("seen: " + ", ".join(f"{kind} {n:,}" for kind, n in total.seen.most_common()))
        wrong = sum("WRONG" in what for _, what in total.failures)
        print(f"wrong reads: {wrong}; failed runs: {len(total.failures)}")
        if total.seeds == 1:
            print(f"digest: {total.digest}")


def _fails_still(line: str) -> bool:
    """Replays a failure by its command."""
    command = [sys.executable, *line.split()[1:]]
    fails = subprocess.run(command, capture_output=True, check=False).returncode != 0
    print(f"{'FAILED' if fails else 'mended'}  {line}", flush=True)
    return fails


def _commit() -> str:
    """Returns the commit that is checked out, with a + if there are changes; empty without git."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("--seeds", default=None, help="first:end, for each profile; first: without end")
    parser.add_argument("--seed", type=int, help="run one seed")
    parser.add_argument("--profile", nargs="+", default=list(PROFILES), choices=PROFILES)
    parser.add_argument("--operations", type=int, default=4000, help="operations per seed")
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="default: one per core")
    parser.add_argument("--until-operations", type=float, default=float("inf"), help="total over all seeds")
    parser.add_argument("--failures", type=int, default=5, help="stop after this many")
    parser.add_argument("--json", type=Path, help="file to write the record to")
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the record in --json, with its seeds and operations; its failures are replayed first",
    )
    options = parser.parse_args()
    if options.resume and options.json is None:
        parser.error("--resume needs --json")
    if options.seed is not None:
        options.seeds, options.processes = f"{options.seed}:{options.seed + 1}", 1
    first, _, end = (options.seeds or ("0:" if options.until_operations < float("inf") else "0:20")).partition(":")
    options.first, options.end = int(first), int(end) if end else None
    return options


def _row(name: str, record: Record) -> None:
    faults, failed = sum(record.faults.values()), len(record.failures)
    print(
        f"{name:<12}{record.seeds:>8,}{record.operations:>14,}{faults:>12,}{record.reads:>14,}"
        f"{failed:>8}{record.seconds:>9,.0f}"
    )


def _from_json(record: dict[str, Any]) -> Record:
    record["faults"], record["seen"] = Counter(record["faults"]), Counter(record["seen"])
    record["failures"] = [tuple(failure) for failure in record["failures"]]
    return Record(**record)


if __name__ == "__main__":
    sys.exit(main())
