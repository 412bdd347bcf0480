"""Real clients, unchanged, against the real server with the real model: `make test-clients`.

Each program in tests/clients/ uses one package as its users do, and prints the name of every part that worked.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine import patience
from rigs.serving import Server, real_server

ROOT = Path(__file__).parents[1]
CLIENTS = ROOT / ".venv-clients"
PYTHON = {
    "with_openai.py": ["chats", "tools", "structured_output", "completions", "responses", "caching", "errors"],
    "with_anthropic.py": ["messages", "tools", "caching", "errors"],
    "with_litellm.py": ["chats", "tools"],
    "with_langchain.py": ["chats", "bound_tools", "structured_output"],
    "with_llama_index.py": ["chats", "completions"],
    "with_instructor.py": ["typed_answers"],
    "with_pydantic_ai.py": ["text", "typed_answers"],
    "with_lm_eval.py": ["multiple_choice"],
}
NODE = {"with_openai.mjs": ["chats", "tools", "responses", "caching"], "with_ai.mjs": ["chats", "responses"]}

pytestmark = [
    pytest.mark.deadline,
    pytest.mark.skipif(not (CLIENTS / "ready").exists(), reason="no clients here; slow lane: make test-clients"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with real_server({"dtype": "bfloat16"}) as running:
        yield running


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("program", "parts"), [*PYTHON.items(), *NODE.items()], ids=[*PYTHON, *NODE])
def test_a_client(program: str, parts: list[str], server: Server) -> None:
    at = [str(server.http.base_url).rstrip("/"), server.model]
    path = ROOT / "tests" / "clients" / program
    if program in PYTHON:
        command, text = [str(CLIENTS / "bin" / "python"), str(path), *at], ""
    else:  # Node looks for packages beside a program, and for one on standard input in the current folder
        command, text = ["node", "--input-type=module", "-", *at], path.read_text()
    # Clients may neither report home nor load from a hub.
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    limits = {"timeout": patience(300), "env": env, "cwd": CLIENTS / "node"}
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False, **limits)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line for line in done.stdout.splitlines() if line in parts] == parts, done.stdout[-3000:]
