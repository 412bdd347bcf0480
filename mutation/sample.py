"""The sample of a round: lines of the package, drawn by area from a seed, and a mutant of each."""

from __future__ import annotations

import difflib
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from mutation import native_operators, python_operators
from mutation.sites import Site

PACKAGE = "src/mainstem"
REST = "the rest"
AREAS: dict[str, tuple[str, ...]] = {
    "core": ("core/",),
    "tiers": ("tiers/",),
    "storage": ("storage/",),
    "cache": ("cache/",),
    "runtime": ("runtime/",),
    "server": ("server/",),
    "fleet": ("fleet/",),
    "owner and events": ("owner/", "events/"),
    "integrations": ("integrations/", "hf.py"),
    "replay": ("replay/",),
    REST: ("",),
}
"""Folders below the package; the rest is what is in no other area: watch, settings and modules of the root."""

SPARE = 1.6
"""How many times as many mutants of the core are drawn: some do not compile, and the next takes their place."""


@dataclass(frozen=True)
class Mutant:
    """A line with a change.

    Args:
        file: below the package.
        occurrence: its number among the places of the operator on lines of the file with the same text, from 0. With
            the file, the operator and the text it names a mutant, wherever the line moves.
    """

    file: str
    site: Site
    occurrence: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The name of the mutant, as long as its line has the same text."""
        return self.file, self.site.operator, self.site.text, self.occurrence

    @property
    def area(self) -> str:
        """The area that its file belongs to."""
        return area_of(self.file)

    def source(self, root: Path) -> str | None:
        """Returns its file with the change; None if that would be the same program, or none."""
        text = (root / PACKAGE / self.file).read_text()
        change = python_operators.change if self.file.endswith(".py") else native_operators.change
        return change(text, self.site)

    def diff(self, root: Path) -> str:
        """Returns the lines that it changes."""
        before, after = (root / PACKAGE / self.file).read_text(), self.source(root) or ""
        lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=0))
        return "\n".join(line for line in lines if not line.startswith(("---", "+++", "@@")))


def area_of(file: str) -> str:
    """Returns the area of a file, named from the package on."""
    return next(area for area, folders in AREAS.items() if file.startswith(folders))


def mutants_of(root: Path, file: str) -> list[Mutant]:
    """Returns all mutants of a file, in its order."""
    text = (root / PACKAGE / file).read_text()
    counts: dict[tuple[str, str], int] = {}
    found = []
    sites = python_operators.sites if file.endswith(".py") else native_operators.sites
    for site in sites(text):
        occurrence = counts[site.operator, site.text] = counts.get((site.operator, site.text), -1) + 1
        found.append(Mutant(file, site, occurrence))
    return found


def draw(root: Path, seed: int, python: int, native: int) -> list[Mutant]:
    """Returns the mutants of a round: so many of Python and, with some to spare, of the core; no two of one line.

    Each area has half of its share by its size, and half alike. On a line an operator is drawn first, then a place.
    """
    package = root / PACKAGE
    files = [path.relative_to(package).as_posix() for path in sorted(package.rglob("*"))]
    sources = defaultdict(list)
    for file in files:
        if file.endswith((".py", ".cpp", ".h")):
            # the core's own parts are drawn apart from each other, too
            sources["/".join(file.split("/")[:3]) if area_of(file) == "core" else area_of(file)].append(file)
    sizes = {name: sum(_size(package / file) for file in each) for name, each in sources.items()}
    parts = [name for name in sizes if name in AREAS]
    shares = share({name: sizes[name] for name in parts}, python)
    shares |= share({name: size for name, size in sizes.items() if name not in AREAS}, round(native * SPARE))
    of_python = [mutant for name in parts for mutant in _of_lines(root, sources[name], shares[name], f"{seed}: {name}")]
    of_core = [
        mutant
        for name in sorted(sizes.keys() - set(parts))
        for mutant in _of_lines(root, sources[name], shares[name], f"{seed}: {name}")
    ]
    for each in (of_python, of_core):
        random.Random(f"{seed}").shuffle(each)
    return [*of_python, *of_core]


def share(sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Divides a number: half by sizes, half alike, with the rest where most is missing."""
    if not sizes or not total:
        return dict.fromkeys(sizes, 0)
    whole = sum(sizes.values())
    wanted = {name: total / 2 * (size / whole + 1 / len(sizes)) for name, size in sizes.items()}
    found = {name: int(number) for name, number in wanted.items()}
    for name in sorted(wanted, key=lambda name: (found[name] - wanted[name], name))[: total - sum(found.values())]:
        found[name] += 1
    return found


def _of_lines(root: Path, files: Iterable[str], wanted: int, seed: str) -> list[Mutant]:
    chance = random.Random(seed)
    lines: dict[tuple[str, int], list[Mutant]] = defaultdict(list)
    for file in files if wanted else ():
        for mutant in mutants_of(root, file):
            lines[file, mutant.site.line].append(mutant)
    places = sorted(lines)
    chance.shuffle(places)
    found: list[Mutant] = []
    for place in places:
        if len(found) == wanted:
            break
        kind = chance.choice(sorted({_kind(mutant.site.operator) for mutant in lines[place]}))
        mutant = chance.choice([mutant for mutant in lines[place] if _kind(mutant.site.operator) == kind])
        if mutant.source(root) is not None:
            found.append(mutant)
    return found


def _kind(operator: str) -> str:
    """Returns what operators have in common that replace the same thing by another."""
    return operator.split("_")[0]


def _size(path: Path) -> int:
    return sum(bool(line.strip()) for line in path.read_text().splitlines())
