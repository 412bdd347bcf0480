"""`python -m proof`: visits every state of each model, then reintroduces each bug and sees it found.

python -m proof                    all of it, tables on standard output
python -m proof --no-bugs          the models alone
python -m proof loads storage      some checks, with the bugs that they find
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ThreadPoolExecutor

from proof.checks import BUGS, CHECKS, Bug
from proof.spin import Found, lacking, search


def main() -> int:
    """Returns 0 if the models violate nothing, and every bug is found."""
    parser = argparse.ArgumentParser(prog="python -m proof", description=__doc__)
    parser.add_argument("checks", nargs="*", help="names of checks; none: all")
    parser.add_argument("--no-bugs", action="store_true", help="check the models alone")
    options = parser.parse_args()
    by_name = {check.name: check for check in CHECKS}
    if unknown := [name for name in options.checks if name not in by_name]:
        parser.error(f"no check is named {unknown[0]}: {', '.join(by_name)}")
    if missing := lacking():
        print(f"not installed: {', '.join(missing)}")
        return 2
    wrong = 0
    print("| check | states | transitions | MiB | seconds | violated |\n|---|---:|---:|---:|---:|---|")
    for name in options.checks or by_name:
        found = search(by_name[name])
        wrong += found.error is not None
        counts = f"{found.states:,} | {found.transitions:,} | {found.memory_mib:,.0f} | {found.seconds:.1f}"
        print(f"| {name} | {counts} | {found.error or 'nothing'} |", flush=True)
    if options.no_bugs:
        return int(wrong > 0)

    def reintroduce(bug: Bug) -> Found:
        return search(by_name[bug.check], [bug.flag])

    bugs = [bug for bug in BUGS if not options.checks or bug.check in options.checks]
    print("\n| bug | check | after states | violated |\n|---|---|---:|---|")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for bug, found in zip(bugs, pool.map(reintroduce, bugs), strict=True):
            wrong += found.error is None
            sight = " ".join((found.error or "**nothing**").replace("|", "/").split())
            print(f"| {bug.name} | {bug.check} | {found.states:,} | {sight[:100]} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
