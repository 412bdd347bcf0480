"""aider: it writes a file from the text of an answer, and changes it."""

from __future__ import annotations

from command_line import ran
from task import MODEL, V1, run

QUIET = (
    "no-git",
    "yes-always",
    "no-check-update",
    "analytics-disable",
    "no-show-model-warnings",
    "no-show-release-notes",
)


def _edited(form: str, before: str, said: str) -> None:
    env = {"OPENAI_API_KEY": "any", "OPENAI_API_BASE": V1}
    told = ("--edit-format", form, "--message", f"<say>weather.txt\n```\n{said}\n```\n</say>", "weather.txt")
    quiet = (f"--{each}" for each in QUIET)
    folder = ran("aider", "--model", f"openai/{MODEL}", *quiet, *told, files={"weather.txt": before}, env=env)
    assert (folder / "weather.txt").read_text() == "sunny\n"


def whole() -> None:
    _edited("whole", "", "sunny")


def changes() -> None:
    _edited("diff", "rainy\n", "<<<<<<< SEARCH\nrainy\n=======\nsunny\n>>>>>>> REPLACE")


run(whole, changes)
