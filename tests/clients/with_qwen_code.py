"""qwen-code over chats, Responses and Messages: a command, its result, a text."""

from __future__ import annotations

import json

from command_line import printed, ran
from task import MODEL, SAID, URL, V1, run

ARGUMENTS = {"command": "echo rain > weather.txt", "description": "Writes", "is_background": False}
TOLD = f'<call name="run_shell_command">{json.dumps(ARGUMENTS)}</call><say>{SAID}</say>'


def _asked(kind: str, prefix: str, url: str) -> None:
    env = {f"{prefix}_API_KEY": "any", f"{prefix}_BASE_URL": url, f"{prefix}_MODEL": MODEL}
    folder = ran("qwen", "--auth-type", kind, "-m", MODEL, "-y", "--telemetry", "false", TOLD, env=env, committed=True)
    assert (folder / "weather.txt").read_text() == "rain\n"
    assert SAID in printed(folder)


def chats() -> None:
    _asked("openai", "OPENAI", V1)


def responses() -> None:
    _asked("openai-responses", "OPENAI", V1)


def messages() -> None:
    _asked("anthropic", "ANTHROPIC", URL)


run(chats, responses, messages)
