"""cline over chats and Responses: a command, its result, a text."""

from __future__ import annotations

from command_line import printed, ran
from task import MODEL, SAID, V1, run

TOLD = f'<call name="run_commands">{{"commands": ["echo rain > weather.txt"]}}</call><say>{SAID}</say>'


def _asked(provider: str) -> None:
    settings = {"provider": provider, "apiKey": "any", "model": MODEL, "baseUrl": V1}
    kept = {"settings": settings, "updatedAt": "2026-01-01T00:00:00.000Z", "tokenSource": "manual"}
    config = {"version": 1, "lastUsedProvider": provider, "modes": {}, "providers": {provider: kept}}
    files = {"home/.cline/data/settings/providers.json": config}
    folder = ran("cline", "-P", provider, "-m", MODEL, TOLD, files=files)
    assert (folder / "weather.txt").read_text() == "rain\n"
    assert SAID in printed(folder)


def chats() -> None:
    _asked("openai-compatible")


def responses() -> None:
    _asked("openai-native")


run(chats, responses)
