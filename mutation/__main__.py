"""`python -m mutation`: a round of mutants of a sample of all source lines, against the tests.

python -m mutation --seed 7 --write            a round; goes on where it ended; records it when it is whole
python -m mutation --seed 7 --seconds 3600     a part of it
python -m mutation --survivors                 those of the last round that nobody has judged, with what they change
python -m mutation --again                     whether the tests of now see those
python -m mutation --rewrite                   the table again, after a judgement in mutation/equivalent.toml
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from mutation import record
from mutation.copies import ROOT, Builder, copy_repository
from mutation.reach import Reach, files_of_tests
from mutation.rounds import Again, Bench, Budget, Round, SourceChanged, Work, go_on
from mutation.runner import Runner
from simulator.campaign import PROFILES

_BUILD = ROOT / "build" / "mutants"
_FIRST_MODULES = ("torch", "transformers", "pytest", "hypothesis", "numpy")


def main() -> int:
    """Returns 0 if what was asked for is done, or was given no more time; survivors do not fail it."""
    options = _parse()
    recorded, judged = record.rounds(), record.judgements()
    last = recorded[-1]["mutants"] if recorded else []
    if options.rewrite:
        record.PAGE.write_text(record.written(record.PAGE.read_text(), record.rows(recorded, judged)))
    if options.survivors or options.rewrite:
        print(*map(record.said, record.survivors(last, judged)), sep="\n\n")
        return 0
    end_s = time.monotonic() + options.seconds
    if options.again:
        _judge(Again(ROOT, map(record.key_of, record.survivors(last, judged))), options, end_s)
        return 0
    try:
        record.refuse_used(options.seed, recorded)
        round_ = Round(_BUILD / f"round-{options.seed}", ROOT, options.seed, options.python, options.native)
    except (record.SeedUsed, SourceChanged) as error:
        print(error)
        return 2
    _judge(round_, options, end_s)
    _say(round_, judged, options.write)
    return 0


def _judge(work: Work, options: argparse.Namespace, end_s: float) -> None:
    """Records what reaches what, as far as that is missing, then judges mutants, as far as there is time."""
    names = [*(f"simulator: {profile}" for profile in PROFILES), *files_of_tests(ROOT)]
    reach = Reach(_BUILD / "reach", ROOT)
    if missing := reach.missing(names):
        with _runners(options.jobs, reach) as runners:
            _record(reach, missing, runners, end_s)
        reach = Reach(_BUILD / "reach", ROOT)
    if reach.missing(names):
        return
    objects = _BUILD / "core"
    objects.mkdir(exist_ok=True)
    with _runners(options.jobs, reach) as runners:
        bench = Bench(reach, ROOT, runners, partial(Builder, objects), Budget(every=options.all_killers))
        go_on(work, bench.judge, options.jobs, end_s, partial(print, flush=True))


def _record(reach: Reach, names: list[str], runners: list[tuple[Path, Runner]], end_s: float) -> None:
    """Records test files and profiles, one at a time by each runner."""
    left: SimpleQueue[str] = SimpleQueue()
    for name in names:
        left.put(name)

    def work(runner: Runner) -> None:
        with suppress(Empty):
            while time.monotonic() < end_s:
                part = reach.record(left.get_nowait(), runner)
                failed = f", without those that fail: {', '.join(part.failed)}" if part.failed else ""
                print(f"reach: {part.name}: {len(part.seconds)} tests{failed}; {left.qsize()} files left", flush=True)

    with ThreadPoolExecutor(len(runners)) as pool:
        for done in [pool.submit(work, runner) for _, runner in runners]:
            done.result()


@contextmanager
def _runners(jobs: int, reach: Reach) -> Iterator[list[tuple[Path, Runner]]]:
    """Brings copies up to date and starts what runs tests in them."""
    with ExitStack() as stack:
        found = []
        for job in range(jobs):
            copy = _BUILD / f"copy-{job}"
            copy.mkdir(parents=True, exist_ok=True)
            copy_repository(copy)
            modules = reach.modules() or _FIRST_MODULES
            found.append((copy, stack.enter_context(closing(Runner(copy, modules)))))
        yield found


def _say(round_: Round, judged: dict[record.Key, str], write: bool) -> None:
    """Prints the table; writes it and the record if the round is whole."""
    entries = record.entries(round_)
    known = {"seed": round_.seed, "mutants": entries}
    print(record.HEAD, *(line + "\n" for line in record.rows([known], judged)), sep="", end="")
    if alone := record.killing(entries):
        print("mutants that one test alone kills:", *(f"{n:>4}  {test}" for test, n in alone.most_common()), sep="\n")
    if round_.is_whole and write:
        rounds = record.added(record.rounds(), round_)
        record.RECORD.write_text(json.dumps({"rounds": rounds}, indent=1) + "\n")
        record.PAGE.write_text(record.written(record.PAGE.read_text(), record.rows(rounds, judged)))
        print(f"written to {record.RECORD.name} and {record.PAGE.name}; commit both")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m mutation", description=__doc__)
    parser.add_argument("--seed", type=int, help="draws the lines; one that no recorded round has")
    parser.add_argument("--python", type=int, default=400, help="mutants of Python; default: 400")
    parser.add_argument("--native", type=int, default=150, help="mutants of the core; default: 150")
    parser.add_argument("--jobs", type=int, default=1, help="that run at a time; default: 1")
    parser.add_argument("--seconds", type=float, default=math.inf, help="nothing begins later")
    parser.add_argument("--all-killers", action="store_true", help="ask all tests that reach it, not until one fails")
    parser.add_argument("--again", action="store_true", help="whether the tests of now see the last survivors")
    parser.add_argument("--survivors", action="store_true", help="of the last round that is recorded")
    parser.add_argument("--rewrite", action="store_true", help="the table from the record and the judgements")
    parser.add_argument("--write", action="store_true", help="the record and the table, when the round is whole")
    options = parser.parse_args()
    if options.seed is None and not (options.again or options.survivors or options.rewrite):
        parser.error("a round needs --seed, one that no round has had; SEED=7 of make mutants-sampled")
    return options


if __name__ == "__main__":
    sys.exit(main())
