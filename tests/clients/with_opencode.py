"""opencode over chats, Responses and Messages: a command, its result, a text."""

from __future__ import annotations

from command_line import printed, ran
from task import MODEL, SAID, V1, run

PACKAGES = {"chats": "openai-compatible", "responses": "openai", "messages": "anthropic"}
CONFIG = {
    "autoupdate": False,
    "share": "disabled",
    "provider": {
        api: {"npm": f"@ai-sdk/{package}", "options": {"baseURL": V1, "apiKey": "any"}, "models": {MODEL: {}}}
        for api, package in PACKAGES.items()
    },
}
ENV = {f"OPENCODE_DISABLE_{name}": "1" for name in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")}
# The task comes on standard input: what is given as an argument gets quotes.
TOLD = f'<call name="bash">{{"command": "echo rain > weather.txt", "description": "Writes"}}</call><say>{SAID}</say>'


def _asked(api: str) -> None:
    folder = ran(
        "opencode", "run", "-m", f"{api}/{MODEL}", given=TOLD, files={"opencode.json": CONFIG}, env=ENV, committed=True
    )
    assert (folder / "weather.txt").read_text() == "rain\n"
    assert SAID in printed(folder)


def chats() -> None:
    _asked("chats")


def responses() -> None:
    _asked("responses")


def messages() -> None:
    _asked("messages")


run(chats, responses, messages)
