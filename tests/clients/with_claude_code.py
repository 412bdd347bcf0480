"""Claude Code over Messages: a command, its result, a text."""

from __future__ import annotations

from command_line import printed, ran
from task import MODEL, SAID, URL, run

ENV = {
    "ANTHROPIC_BASE_URL": URL,
    "ANTHROPIC_AUTH_TOKEN": "any",
    "ANTHROPIC_MODEL": MODEL,
    "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "DISABLE_AUTOUPDATER": "1",
}


def messages() -> None:
    told = (
        f'<call name="Bash">{{"command": "echo rain > weather.txt", "description": "Writes"}}</call><say>{SAID}</say>'
    )
    folder = ran("claude", "-p", "--allowedTools", "Bash", "--", told, env=ENV, committed=True)
    assert (folder / "weather.txt").read_text() == "rain\n"
    assert SAID in printed(folder)


run(messages)
