"""Draws what `mainstem demo` and `mainstem replay` print: `make pictures`.

A replay of a generated trace prints the same each time: a test runs it again. The times of the demo differ, so its
report is kept beside the picture, and a test draws that again from it, as the command prints it now.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.report import Report as Record
from mainstem.demo import Question, Report, show
from scripts.pictures import Picture

FOLDER = Path(__file__).parents[1] / "docs" / "screens"
COLUMNS = 104
ROW, MARGIN = 15, 24  # pixels
TRACE = "trace generate chat --requests 20000 --seed 1 -o chat.mstrace"
REPLAY = "replay chat.mstrace --capacity 1%,5%,10%,25%,50% --policy lru,opt"


def printed(command: str, folder: Path) -> str:
    """Returns what a command prints, run in a folder."""
    environment = {name: value for name, value in os.environ.items() if name != "FORCE_COLOR"}
    words = [sys.executable, "-m", "mainstem", *command.split()]
    done = subprocess.run(
        words, cwd=folder, env={**environment, "COLUMNS": str(COLUMNS)}, stdout=subprocess.PIPE, text=True, check=True
    )
    return done.stdout


def drawn(title: str, command: str, output: str, note: str = "") -> str:
    """Draws a command, what it prints and a note, in lines as long as the terminal."""
    lines = [f"$ mainstem {command}", *(part for line in output.rstrip().splitlines() for part in _wrapped(line))]
    height = 2 * MARGIN + ROW * len(lines) + (2 * ROW if note else 0)
    picture = Picture(title, height)
    for row, line in enumerate(lines, 1):
        picture.row(MARGIN, MARGIN + ROW * row, line)
    if note:
        picture.text(MARGIN, height - MARGIN, note, "small")
    return picture.svg()


def _wrapped(line: str) -> Iterator[str]:
    text = line.rstrip()
    yield from (text[at : at + COLUMNS] for at in range(0, max(1, len(text)), COLUMNS))


def replay_picture() -> str:
    """Draws a replay of the trace."""
    with tempfile.TemporaryDirectory() as name:
        printed(TRACE, Path(name))
        return drawn("What mainstem replay prints of a generated trace", REPLAY, printed(REPLAY, Path(name)))


def demo_record() -> dict[str, Any]:
    """Runs the demo on the real model; returns its report, and where and when it ran."""
    record = Record("demo", datetime.now(UTC).isoformat(timespec="seconds"), False, print)
    with tempfile.TemporaryDirectory() as name:
        record.rows = [json.loads(printed("demo --json", Path(name)))]
    return record.as_json()


def demo_picture(record: Mapping[str, Any]) -> str:
    """Draws what the demo prints of its report."""
    (row,) = record["rows"]
    report = Report(**{**row, "questions": tuple(Question(**question) for question in row["questions"])})
    out = io.StringIO()
    show(report, Console(file=out, width=COLUMNS, force_terminal=False))
    where = f"One run: {record['machine']['cpu']}, {record['date'][:10]}, {record['commit'][:7]}"
    return drawn("What mainstem demo prints", "demo", out.getvalue(), where)


def main() -> None:
    """Runs both commands, and draws what they print."""
    FOLDER.mkdir(exist_ok=True)
    record = demo_record()
    (FOLDER / "demo.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    (FOLDER / "demo.svg").write_text(demo_picture(record))
    (FOLDER / "replay.svg").write_text(replay_picture())


if __name__ == "__main__":
    main()
