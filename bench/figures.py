"""Writes the figures of the documentation from the recorded results.

    python -m bench.figures [--write]

A page marks each figure from a record: a table by its name in `TABLES`, a number by its place in the record and its
format:

    <!--= requests -->
    | ...
    <!--/-->

    takes <!--= core: long match, page 16, 1 nodes, over its floor / median | .2f -->1.01<!--/--> times what

Without `--write`, it reports what differs from the records, as a test does. With it, it rewrites the pages.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.recorded.caches import CACHES
from bench.recorded.fleets import FLEETS
from bench.recorded.models import MODELS
from bench.recorded.numbers import FORMS, Records, number
from bench.recorded.records import RECORDS

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = (
    "README.md", "docs/arithmetic.md", "docs/batch.md", "docs/fleet.md", "docs/gpu.md", "docs/models.md",
    "docs/numbers.md", "docs/performance.md", "docs/planning.md", "docs/policies.md", "docs/scoring.md",
    "docs/serving.md", "docs/vllm.md",
)  # fmt: skip
"""Pages with recorded figures."""
MARK = re.compile(r"(<!--= (?P<what>.+?) -->)(?P<line>\n?)(?P<now>.*?)(?P<end>\n?<!--/-->)", re.DOTALL)


TABLES: Mapping[str, Callable[[Records], str]] = {**CACHES, **FLEETS, **MODELS, **RECORDS}
"""By the names that pages use."""


def load(folder: Path = RESULTS) -> Records:
    """Loads all records; `gpu` is the newest one of a GPU."""
    paths = folder.glob("recorded-*.json")
    records = {path.stem.removeprefix("recorded-"): json.loads(path.read_text()) for path in paths}
    of_gpus = [json.loads(path.read_text()) for path in folder.glob("gpu-*.json") if "gpu-tests-" not in path.name]
    return {**records, "gpu": max(of_gpus, key=lambda record: record["date"])} if of_gpus else records


def rewritten(page: str, records: Records) -> str:
    """Returns a page with the figures of these records.

    Raises:
        KeyError: a mark names neither a table nor a number; the message quotes it.
    """
    return MARK.sub(lambda found: found[1] + found["line"] + _figure(found["what"], records) + found["end"], page)


def _figure(what: str, records: Records) -> str:
    if what in TABLES:
        return TABLES[what](records)
    where, _, form = what.partition(" | ")
    try:
        return FORMS[form](number(where, records)) if form in FORMS else format(number(where, records), form)
    except (KeyError, ValueError) as error:
        raise KeyError(f"no such figure: {what!r} ({error})") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks or rewrites the pages; returns 1 if a page differs from the records and was not rewritten."""
    parser = argparse.ArgumentParser(prog="python -m bench.figures", description=__doc__)
    parser.add_argument("--write", action="store_true", help="rewrite the pages")
    options = parser.parse_args(arguments)
    records, status = load(), 0
    for name in PAGES:
        path = ROOT / name
        before = path.read_text()
        after = rewritten(before, records)
        if after != before:
            print(f"{name}: {'written' if options.write else 'differs from the records; --write rewrites it'}")
            status = int(not options.write)
        if options.write:
            path.write_text(after)
    return status


if __name__ == "__main__":
    sys.exit(main())
