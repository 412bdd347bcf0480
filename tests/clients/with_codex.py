"""Codex as it comes: a command, its result, a text; custom tools, which it offers to models that it knows; groups."""

from __future__ import annotations

from command_line import printed, ran
from task import MODEL, SAID, V1, run

CONFIG = f"""
model_provider = "mainstem"
approval_policy = "never"
sandbox_mode = "danger-full-access"

[model_providers.mainstem]
name = "Mainstem"
base_url = "{V1}"
env_key = "MAINSTEM_KEY"
wire_api = "responses"
"""
FILES = {"home/.codex/config.toml": CONFIG}
KEY = {"MAINSTEM_KEY": "any"}
EXEC = ("codex", "exec", "--skip-git-repo-check")


def responses() -> None:
    told = f'<call name="exec_command">{{"cmd": "echo rain > weather.txt"}}</call><say>{SAID}</say>'
    folder = ran(*EXEC, "-m", MODEL, told, files=FILES, env=KEY)
    assert (folder / "weather.txt").read_text() == "rain\n"
    assert SAID in printed(folder)


def custom_tools() -> None:
    patch = "*** Begin Patch\n*** Add File: weather.txt\n+sunny\n*** End Patch\n"
    folder = ran(
        *EXEC, "-m", "gpt-5.5", f'<call name="apply_patch">{patch}</call><say>{SAID}</say>', files=FILES, env=KEY
    )
    assert (folder / "weather.txt").read_text() == "sunny\n"
    assert SAID in printed(folder)


def namespaces() -> None:
    told = f'<call name="multi_agent_v1__close_agent">{{"target": "nobody"}}</call><say>{SAID}</say>'
    assert SAID in printed(ran(*EXEC, "-m", MODEL, told, files=FILES, env=KEY))


run(responses, custom_tools, namespaces)
