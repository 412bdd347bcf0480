"""mem0: facts from a conversation, which the model tells as JSON. Vectors are made up: no server is asked for them."""

from __future__ import annotations

import json
import os
import tempfile

os.environ["MEM0_TELEMETRY"] = "False"
os.environ["MEM0_DIR"] = tempfile.mkdtemp()

from langchain_core.embeddings import DeterministicFakeEmbedding
from mem0 import Memory
from task import MODEL, V1, run


def memories() -> None:
    folder = tempfile.mkdtemp()
    size = 32
    memory = Memory.from_config(
        {
            "llm": {"provider": "openai", "config": {"model": MODEL, "openai_base_url": V1, "api_key": "any"}},
            "embedder": {"provider": "langchain", "config": {"model": DeterministicFakeEmbedding(size=size)}},
            "vector_store": {"provider": "qdrant", "config": {"path": folder, "embedding_model_dims": size}},
            "history_db_path": f"{folder}/history.db",
        }
    )
    told = {"memory": [{"id": "0", "text": "Likes rain", "event": "ADD"}], "facts": ["Likes rain"]}
    made = memory.add([{"role": "user", "content": f"<say>{json.dumps(told)}</say>"}], user_id="ann")
    assert [each["memory"] for each in made["results"]] == ["Likes rain"], made


run(memories)
