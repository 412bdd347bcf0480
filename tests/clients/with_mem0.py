"""mem0: facts of a conversation, which the model tells as JSON, and embeddings of them, all from one server."""

from __future__ import annotations

import json
import os
import tempfile

os.environ["MEM0_TELEMETRY"] = "False"
os.environ["MEM0_DIR"] = tempfile.mkdtemp()

from mem0 import Memory
from openai import OpenAI
from task import MODEL, V1, run


def memories() -> None:
    folder = tempfile.mkdtemp()
    size = len(OpenAI(base_url=V1, api_key="any").embeddings.create(model=MODEL, input="a").data[0].embedding)
    one = {"model": MODEL, "openai_base_url": V1, "api_key": "any"}
    memory = Memory.from_config(
        {
            "llm": {"provider": "openai", "config": one},
            "embedder": {"provider": "openai", "config": {**one, "embedding_dims": size}},
            "vector_store": {"provider": "qdrant", "config": {"path": folder, "embedding_model_dims": size}},
            "history_db_path": f"{folder}/history.db",
        }
    )
    facts = {"memory": [{"id": "0", "text": "Likes rain", "event": "ADD"}], "facts": ["Likes rain"]}
    made = memory.add([{"role": "user", "content": f"<say>{json.dumps(facts)}</say>"}], user_id="ann")
    assert [each["memory"] for each in made["results"]] == ["Likes rain"], made
    found = memory.search("Likes rain", filters={"user_id": "ann"})
    assert [each["memory"] for each in found["results"]] == ["Likes rain"], found


run(memories)
