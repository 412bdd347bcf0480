"""Open WebUI: its models, chats through it, whole and streamed, and a document that is found by embeddings."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
from command_line import NOWHERE
from task import MODEL, SAID, V1, run

with socket.socket() as probe:
    probe.bind(("127.0.0.1", 0))
    port = probe.getsockname()[1]
folder = Path(tempfile.mkdtemp())
SETTINGS = {
    "DATA_DIR": str(folder / "data"),
    "HOME": str(folder),
    "OPENAI_API_BASE_URL": V1,
    "OPENAI_API_KEY": "any",
    "RAG_EMBEDDING_ENGINE": "openai",
    "RAG_EMBEDDING_MODEL": MODEL,
    "RAG_OPENAI_API_BASE_URL": V1,
    "RAG_OPENAI_API_KEY": "any",
    "AUDIO_STT_ENGINE": "openai",
    "ENABLE_OLLAMA_API": "False",
    "WEBUI_AUTH": "False",
    "WEBUI_SECRET_KEY": "any",
    "OFFLINE_MODE": "true",
    "ANONYMIZED_TELEMETRY": "false",
    "SCARF_NO_ANALYTICS": "true",
    "http_proxy": NOWHERE,
    "https_proxy": NOWHERE,
    "no_proxy": "127.0.0.1,localhost",
}
web = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)


def _asked(text: str, **fields) -> httpx.Response:
    messages = [{"role": "user", "content": text}]
    made = web.post("/api/chat/completions", json={"model": MODEL, "messages": messages, "stream": False, **fields})
    assert made.status_code == 200, made.text
    return made


def chats() -> None:
    assert MODEL in [each["id"] for each in web.get("/api/models").json()["data"]]
    assert _asked(f"<say>{SAID}</say>").json()["choices"][0]["message"]["content"] == SAID
    assert "data: [DONE]" in _asked(f"<say>{SAID}</say>", stream=True).text


def documents() -> None:
    file = {"file": ("weather.txt", b"The weather in Rome is sunny.", "text/plain")}
    made = web.post("/api/v1/files/?process=true", files=file).json()
    status = "pending"
    while status in ("pending", "processing"):
        time.sleep(0.2)
        status = web.get(f"/api/v1/files/{made['id']}/process/status").json()["status"]
    assert status == "completed", status
    found = web.post(
        "/api/v1/retrieval/query/collection", json={"collection_names": [f"file-{made['id']}"], "query": "Rome"}
    ).json()
    assert found["documents"] == [["The weather in Rome is sunny."]], found


command = [str(Path(sys.executable).with_name("open-webui")), "serve", "--host", "127.0.0.1", "--port", str(port)]
with (folder / "log").open("w") as log:
    server = subprocess.Popen(command, env={**os.environ, **SETTINGS}, cwd=folder, stdout=log, stderr=log)
try:
    end = time.monotonic() + 200
    while True:
        try:
            web.get("/health").raise_for_status()
            break
        except httpx.HTTPError:
            assert server.poll() is None and time.monotonic() < end, (folder / "log").read_text()[-3000:]
            time.sleep(0.5)
    signed = web.post("/api/v1/auths/signin", json={"email": "", "password": ""}).json()
    web.headers["Authorization"] = f"Bearer {signed['token']}"
    run(chats, documents)
finally:
    server.kill()
    server.wait()
