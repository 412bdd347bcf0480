"""`python -m simulator.record RECORD.json --run NAME`: writes the record of a run into docs/reliability.md.

    python -m simulator.record simulator/recorded-campaign.json --run campaign

A row of the same name is replaced. Without `--write` the row is printed, with what each profile has done.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

_PAGE = Path(__file__).parent.parent / "docs" / "reliability.md"
_TABLE = re.compile(r"(?<=<!-- record -->\n)(\| date .*?\n\|[-|]+\n)((?:\|.*\n)+)")


def row(record: dict[str, Any], run: str) -> str:
    """Returns a record as a row of the table.

    Args:
        record: as `python -m simulator --json` writes it.
        run: its name.
    """
    profiles = record["profiles"]

    def total(field: str) -> int:
        return sum(profile[field] for profile in profiles.values())

    faults = sum(sum(profile["faults"].values()) for profile in profiles.values())
    failures = [what for profile in profiles.values() for _, what in profile["failures"]]
    said = ", ".join(f"`{name}` {_short(profile['operations'])}" for name, profile in profiles.items())
    cells = [
        record["date"][:10],
        record["commit"].rstrip("+"),
        f"{run}: {said}; seeds from {record['first_seed']}",
        *(f"{n:,}" for n in (total("seeds"), total("operations"), faults, total("reads"))),
        str(sum("WRONG" in what for what in failures)),
        str(len(failures)),
        f"{record['seconds']:,.0f} s",
    ]
    return "| " + " | ".join(cells) + " |"


def written(page: str, added: str, run: str) -> str:
    """Returns a page with a row in its table, in place of the one with the same name if there is one.

    Raises:
        ValueError: the page has no such table.
    """
    found = _TABLE.search(page)
    if found is None:
        raise ValueError("there is no table of runs")
    kept = [line for line in found[2].splitlines() if not line.split(" | ")[2].startswith(f"{run}: ")]
    return page[: found.start(2)] + "\n".join([*kept, added]) + "\n" + page[found.end(2) :]


def _short(operations: int) -> str:
    return f"{operations / 1e6:.1f}M" if operations >= 1e5 else f"{operations:,}"


def main() -> int:
    """Returns 0."""
    parser = argparse.ArgumentParser(prog="python -m simulator.record", description=__doc__)
    parser.add_argument("record", type=Path, help="what `python -m simulator --json` wrote")
    parser.add_argument("--run", required=True, help="the name of the row")
    parser.add_argument("--write", action="store_true", help="into docs/reliability.md")
    options = parser.parse_args()
    record = json.loads(options.record.read_text())
    print(row(record, options.run))
    for name, profile in record["profiles"].items():
        rate = profile["operations"] / max(profile["seconds"], 1e-9)
        print(f"{name:<18}{profile['operations']:>14,}{rate:>10,.0f} operations a second")
    if options.write:
        _PAGE.write_text(written(_PAGE.read_text(), row(record, options.run), options.run))
    return 0


if __name__ == "__main__":
    sys.exit(main())
