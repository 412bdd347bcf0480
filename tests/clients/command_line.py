"""Agents that are commands: each runs in a folder and a home of its own, and reaches this machine alone."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

NOWHERE = "http://127.0.0.1:9"  # nothing listens there: a report home fails at once
KEPT = ("PATH", "LANG", "SSL_CERT_FILE")
ANN = {f"GIT_{who}_{what}": value for who in ("AUTHOR", "COMMITTER") for what, value in (
    ("NAME", "Ann"), ("EMAIL", "ann@example.org"), ("DATE", "2026-01-01T00:00:00Z"),
)}  # fmt: skip


def ran(
    *command: str,
    given: str = "",
    files: dict[str, Any] | None = None,
    env: dict[str, str] | None = None,
    committed: bool = False,
) -> Path:
    """Runs a command, which must succeed; returns its folder, whose `printed.txt` has what it printed.

    Args:
        command: `{home}` stands for its home.
        given: its standard input.
        files: texts or JSON, by their paths below the folder, `home/` being its home.
        env: besides a plain environment.
        committed: whether the folder is a repository, with instructions for agents that are committed and a file that
            is not.
    """
    folder = Path(tempfile.mkdtemp())
    (folder / "home").mkdir()
    for name, content in (files or {}).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    if committed:
        _commit(folder)
    plain = {name: os.environ[name] for name in KEPT if name in os.environ}
    for name in ("http_proxy", "https_proxy"):
        plain |= {name: NOWHERE, name.upper(): NOWHERE}
    plain |= {"HOME": str(folder / "home"), "no_proxy": "127.0.0.1,localhost", "NO_PROXY": "127.0.0.1,localhost"}
    plain |= {"DO_NOT_TRACK": "1", "CI": "1", **(env or {})}
    words = [word.replace("{home}", str(folder / "home")) for word in command]
    done = subprocess.run(
        words, input=given, capture_output=True, text=True, env=plain, cwd=folder, timeout=120, check=False
    )
    assert done.returncode == 0, (
        f"{command[0]} ended with {done.returncode}: {done.stdout[-2000:]} {done.stderr[-2000:]}"
    )
    (folder / "printed.txt").write_text(done.stdout + done.stderr)
    return folder


def _commit(folder: Path) -> None:
    (folder / "AGENTS.md").write_text("Answer briefly.\n")
    (folder / ".gitignore").write_text("home\n")
    for words in (["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "Begin"]):
        subprocess.run(["git", *words], cwd=folder, env={**os.environ, **ANN}, check=True)
    (folder / "new.txt").write_text("new\n")


def printed(folder: Path) -> str:
    """Returns what a command printed, both streams together."""
    return (folder / "printed.txt").read_text()
