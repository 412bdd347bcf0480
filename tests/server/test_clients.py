"""Real clients, unchanged: `make test-clients`.

Each program in tests/clients/ uses one package as its users do, and prints the name of every part that worked. Some ask
a real model. Agents ask one that is scripted, so that it calls the tools that they offer; what they send is kept in
tests/recorded/clients, which `test_client_recordings.py` sends again.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import pytest
from machine import patience
from rigs.client_calls import Call, Listening, anonymous, keep, kept
from rigs.client_rules import of_one_session, rules_at_work
from rigs.clients import running
from rigs.scripted_model import scripted_app
from rigs.serving import real_server

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / ".venv-clients"


@dataclass(frozen=True)
class Client:
    """A program, the names that it prints, and the environment below `CLIENTS` that has its packages."""

    program: str
    parts: str
    environment: str

    @property
    def name(self) -> str:
        """Names its recording."""
        return Path(self.program).stem.removeprefix("with_")


REAL = (
    Client(
        "with_openai.py",
        "chats tools structured_output completions responses caching files_and_batches errors",
        "sdks",
    ),
    Client("with_anthropic.py", "messages tools caching errors", "sdks"),
    Client("with_litellm.py", "chats tools", "sdks"),
    Client("with_langchain.py", "chats bound_tools structured_output", "sdks"),
    Client("with_llama_index.py", "chats completions", "sdks"),
    Client("with_instructor.py", "typed_answers", "sdks"),
    Client("with_pydantic_ai.py", "text typed_answers", "sdks"),
    Client("with_lm_eval.py", "multiple_choice", "sdks"),
    Client("with_openai.mjs", "chats tools responses caching", "node"),
    Client("with_ai.mjs", "chats responses", "node"),
)
SCRIPTED = (
    Client("with_codex.py", "responses custom_tools namespaces", "sdks"),
    Client("with_claude_code.py", "messages", "sdks"),
    Client("with_opencode.py", "chats responses messages", "sdks"),
    Client("with_cline.py", "chats responses", "sdks"),
    Client("with_qwen_code.py", "chats responses messages", "sdks"),
    Client("with_aider.py", "whole changes", "sdks"),
    Client("with_tool_runner.py", "tool_runner streamed", "agents"),
    Client("with_openai_agents.py", "responses chats typed_answers handing_over remembering", "agents"),
    Client("with_smolagents.py", "tool_calls streamed code", "agents"),
    Client("with_google_adk.py", "chats messages", "agents"),
    Client("with_agno.py", "chats responses messages", "agents"),
    Client("with_dspy.py", "chats responses schemas react", "agents"),
    Client("with_haystack.py", "chats responses", "agents"),
    Client("with_autogen.py", "chats streamed", "agents"),
    Client("with_langgraph.py", "chats responses messages typed_answers", "agents"),
    Client("with_semantic_kernel.py", "chats responses", "agents"),
    Client("with_outlines.py", "schemas choices expressions grammars streamed", "agents"),
    Client("with_guidance.py", "chats schemas", "agents"),
    Client("with_magentic.py", "text typed_answers tools", "agents"),
    Client("with_mem0.py", "memories", "agents"),
    Client("with_open_webui.py", "chats documents", "webui"),
    Client("with_strands.py", "chats responses messages typed_answers", "crews"),
    Client("with_crewai.py", "chats responses typed_answers", "crews"),
    Client("with_openai_agents_js.mjs", "responses chats", "node"),
    Client("with_llamaindex.mjs", "chats", "node"),
)
QUIET = {
    "CREWAI_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OTEL_SDK_DISABLED": "true",
}
"""Clients may neither report home nor load from a hub."""

RECOVERED = "thread_unsupported_request"
"""The one error that a client asks for: it tries what few servers have, and goes on without."""

FOLDER = r"/tmp/tmp\w+"
PLACES = {
    FOLDER: "/folder",
    r"-tmp-tmp\w+": "-folder",
    rf"{ROOT}(?=/)": "/repository",
    r"127\.0\.0\.1:\d+": "127.0.0.1:8000",
}

pytestmark = [
    pytest.mark.deadline,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not (CLIENTS / "ready").exists(), reason="no clients here; slow lane: make test-clients"),
]


def run(client: Client, url: str, model: str) -> None:
    """Runs a program, which must print all of its parts."""
    node, path = CLIENTS / "node", ROOT / "tests" / "clients" / client.program
    if client.environment == "node":  # Node looks for packages beside a program, or in the folder for standard input
        command, text = ["node", "--input-type=module", "-", url, model], path.read_text()
    else:
        command, text = [str(CLIENTS / client.environment / "bin" / "python"), str(path), url, model], ""
    folders = [node / "node_modules" / ".bin", CLIENTS / "aider" / "bin", os.environ["PATH"]]
    env = {**os.environ, **QUIET, "PATH": ":".join(map(str, folders))}
    limits = {"timeout": patience(300), "env": env, "cwd": node}
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, **limits)
    assert done.returncode == 0, done.stderr[-3000:]
    parts = client.parts.split()
    assert [line for line in done.stdout.splitlines() if line in parts] == parts, done.stdout[-3000:]


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    batches = str(tmp_path_factory.mktemp("batches"))
    with real_server({"dtype": "bfloat16", "batch-folder": batches}) as running:
        yield str(running.http.base_url).rstrip("/"), running.model


@pytest.mark.parametrize("client", REAL, ids=lambda client: client.name)
def test_a_client_of_a_real_model(client: Client, real: tuple[str, str]) -> None:
    run(client, *real)


def routes(calls: list[Call]) -> set[tuple[str, str]]:
    return {(call.method, call.path) for call in calls}


@pytest.mark.parametrize("client", SCRIPTED, ids=lambda client: client.name)
def test_an_agent(client: Client) -> None:
    """MAINSTEM_RECORD=1 keeps the calls instead of comparing them."""
    app, settings = scripted_app()
    listening = Listening(app)
    with running(listening, settings) as url:
        run(client, url, settings.served_model_name[0])
    assert [call for call in listening.calls if call.status >= 400 and RECOVERED not in call.reply] == []
    calls = anonymous(listening.calls, PLACES)
    if os.environ.get("MAINSTEM_RECORD"):
        keep(client.name, calls)
    assert routes(calls) == routes(kept(client.name))
    assert rules_at_work(calls) == rules_at_work(kept(client.name)), "it sends something else than rules were made for"
    assert of_one_session(listening.calls, FOLDER, date.today()) == [], "no rule for it"
