"""Damaged bodies on every route: refused with a typed error or answered, no fault of the server, and nothing stays.

Bodies begin as valid ones, and are changed at random: values of other types and sizes in random places, fields of other
routes, slips in names, missing and repeated fields, cut and changed bytes.
"""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import random
import resource
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from machine import eventually
from rigs.serving import tiny_folder
from starlette.applications import Starlette

from mainstem.prompt_rules.rule_file import own_files
from mainstem.runtime.engine import Engine
from mainstem.runtime.models.loading import load_model
from mainstem.server.apis.chat.request import ChatRequest
from mainstem.server.apis.completions import CompletionRequest
from mainstem.server.apis.embeddings import EmbeddingRequest
from mainstem.server.apis.messages.request import ContentBlock, MessageRequest
from mainstem.server.apis.responses.items import Item
from mainstem.server.apis.responses.request import ResponseRequest
from mainstem.server.app import create_app
from mainstem.server.fields.rules import OPENAI
from mainstem.settings.engine import EngineConfig
from mainstem.settings.server import BatchConfig, ServerConfig

AT_ONCE = 16
RULES = """
[[rule]]
name = "drop"
action = "drop"
places = ["system", "user", "tool", "assistant", "tools", "prompt"]
match = "w6"
example = "w6"
[[rule]]
name = "move"
action = "move"
places = ["system", "user", "tool", "tools"]
match = "w3|w5"
example = "w5"
[[rule]]
name = "sort"
action = "sort"
lists = ["tools", "keys"]
[[rule]]
name = "keep"
action = "keep"
"""
MOST_GROWTH = 64 << 20  # bytes
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["w5"]}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
CALLED = [
    {"role": "user", "content": "w5"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "1", "content": "w6"},
]
BLOCKS = [{"role": "user", "content": [{"type": "text", "text": "w5"}]}]
MARKED = {"type": "text", "text": "w5 w6", "prompt_cache_breakpoint": {"mode": "explicit", "ttl": "30m"}}
KEPT = {"type": "ephemeral", "ttl": "5m"}
DOCUMENT = {
    "type": "document",
    "source": {"type": "content", "content": [{"type": "text", "text": "w5"}]},
    "title": "w6",
}
CHAT = [{"role": "system", "content": "w3"}, {"role": "user", "content": [{"type": "text", "text": "w5 w6"}]}]
# By route; what follows a question mark tells several of a route apart.
BASES: Mapping[str, Mapping[str, Any]] = {
    "/v1/completions": {"model": "tiny", "prompt": "w5 w6 w7", "max_tokens": 3, "stop": ["w9"], "logprobs": 2},
    "/v1/chat/completions": {"model": "tiny", "messages": CHAT, "max_tokens": 3, "stream": True, "seed": 4},
    "/v1/chat/completions?tools": {"model": "tiny", "messages": CALLED, "tools": [TOOL], "max_tokens": 3},
    "/v1/chat/completions?form": {
        "model": "tiny",
        "messages": CHAT,
        "max_tokens": 3,
        "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
    },
    "/v1/chat/completions?kept": {
        "model": "tiny",
        "messages": [{"role": "user", "content": [MARKED, MARKED]}, *CALLED],
        "tools": [{**TOOL, "prompt_cache_breakpoint": {"mode": "explicit"}}],
        "max_tokens": 3,
        "prompt_cache_options": {"mode": "implicit", "ttl": "12h"},
    },
    "/v1/score": {"model": "tiny", "text_1": "w5", "text_2": ["w6", "w7 w8"], "labels": ["w1", "w2 w3"]},
    "/score": {"model": "tiny", "text_1": ["w5"], "text_2": "w6", "template": "w4 {text_2} w3 {text_1}"},
    "/v1/rerank": {"model": "tiny", "query": "w5", "documents": ["w6", "w7"], "top_n": 1, "return_documents": False},
    "/v2/rerank": {"model": "tiny", "query": "w5", "documents": ["w6"], "cache_salt": "s"},
    "/rerank": {"model": "tiny", "query": "w5", "documents": ["w6"], "prompt_cache_key": "k"},
    "/v1/responses?kept": {
        "model": "tiny",
        "input": [{"role": "user", "content": [{**MARKED, "type": "input_text"}]}],
        "max_output_tokens": 3,
        "prompt_cache_key": "k",
        "prompt_cache_options": {"ttl": "30m", "prewarm": True, "comparison_response_id": "resp_1"},
    },
    "/v1/messages?kept": {
        "model": "tiny",
        "messages": [{"role": "user", "content": [{"type": "text", "text": "w5", "cache_control": KEPT}]}, *BLOCKS],
        "max_tokens": 3,
        "system": [{"type": "text", "text": "w7", "cache_control": {"type": "ephemeral"}}],
        "tools": [{"name": "f", "input_schema": SCHEMA, "cache_control": KEPT}],
        "cache_control": {"type": "ephemeral", "ttl": "1h"},
        "diagnostics": {"previous_message_id": None},
    },
    "/v1/responses?items": {
        "model": "tiny",
        "instructions": "w7",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "w5"}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "w5"}]},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c", "output": "w5"},
            {"type": "custom_tool_call", "call_id": "d", "name": "patch", "input": "w5"},
            {"type": "custom_tool_call_output", "call_id": "d", "output": [{"type": "input_text", "text": "w5"}]},
            {"type": "web_search_call", "status": "completed"},
            {"type": "shell_call", "call_id": "e", "action": {"commands": ["ls"]}},
            {"type": "shell_call_output", "call_id": "e", "output": [{"stdout": "w5", "outcome": {"type": "timeout"}}]},
            {"type": "additional_tools", "role": "developer", "tools": [{"type": "custom", "name": "more"}]},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": SCHEMA},
            {"type": "custom", "name": "patch", "format": {"type": "text"}},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
            {"type": "web_search"},
        ],
        "tool_choice": "auto",
        "text": {"format": {"type": "text"}},
        "include": ["message.output_text.logprobs"],
        "max_output_tokens": 3,
    },
    "/v1/messages?blocks": {
        "model": "tiny",
        "max_tokens": 3,
        "messages": [
            *BLOCKS,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "w5", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "u", "name": "f", "input": {"a": "w5"}},
                ],
            },
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "u", "content": [DOCUMENT]}, DOCUMENT]},
        ],
        "tools": [{"name": "f", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": "auto"},
        "thinking": {"type": "adaptive"},
        "output_config": {},
        "stop_sequences": ["w9"],
    },
    "/v1/responses": {"model": "tiny", "input": [{"role": "user", "content": "w5"}], "max_output_tokens": 3},
    "/v1/responses/input_tokens": {"model": "tiny", "input": [{"role": "user", "content": "w5"}], "tools": []},
    "/v1/responses/{id}/cancel": {},
    "/v1/chat/completions/{id}": {"metadata": {"a": "b"}},
    "/v1/messages": {"model": "tiny", "messages": BLOCKS, "max_tokens": 3, "system": "w7"},
    "/v1/embeddings": {"model": "tiny", "input": ["w5 w6", "w7"], "encoding_format": "base64"},
    "/v1/messages/count_tokens": {"model": "tiny", "messages": BLOCKS},
    "/tokenize": {"model": "tiny", "messages": CHAT},
    "/detokenize": {"tokens": [5, 6]},
    "/v1/cache/remove": {"model": "tiny", "prompt": "w5 w6"},
    "/v1/cache/hints": {"action": "retain", "prompt": "w5 w6", "ttl_s": 5},
    "/v1/cache/explain?route=/v1/completions": {"model": "tiny", "prompt": "w5 w6"},
    "/v1/files": {"purpose": "batch"},
    "/v1/batches": {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/v1/batches/{id}/cancel": {},
    "/v1/cache/flush": {},
    "/ping": {},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/v1/update_weights": {"path": "/nowhere", "mode": "lag", "lag": 1},
}
TYPES = (CompletionRequest, ChatRequest, EmbeddingRequest, ResponseRequest, MessageRequest, Item, ContentBlock)
FIELDS = sorted({name for each in TYPES for name in each.__struct_fields__} | {*OPENAI.advice} | {*OPENAI.refused})
VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 20, 129, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, -(2**63) - 1, 2**64),
    *(0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, "", "a", "w5", "\x00", "\ud800", "\uffff", "é" * 500, "auto", "none"),
    *([], [[]], [None], [1, "a"], ["w5"] * 300, [0.5], {}, {"": {}}, {"a": [{}]}, {"5": 1}, {"type": "text"}),
    [[[[[[[[1]]]]]]]],
    *(
        "tool_use",
        "tool_result",
        "image",
        "function_call",
        "item_reference",
        "reasoning",
        "allowed_tools",
        "any",
        "resp_1",
    ),
]


class Fuzzer:
    """Makes bodies, the same for the same seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def body(self, base: Mapping[str, Any]) -> bytes:
        """Returns a changed body."""
        changed: Any = copy.deepcopy(dict(base))
        for _ in range(self._random.randrange(1, 4)):
            changed = self._changed(changed)
        text = json.dumps(changed).encode()
        if self._random.random() < 0.1:
            at = self._random.randrange(len(text))
            text = text[:at] + bytes([self._random.randrange(256)]) * self._random.randrange(2) + text[at + 1 :]
        return text

    def _changed(self, body: Any) -> Any:
        draw = self._random
        if not isinstance(body, dict) or draw.random() < 0.02:
            return copy.deepcopy(draw.choice(VALUES))
        kind = draw.randrange(5)
        if kind == 0:
            body[draw.choice(FIELDS)] = copy.deepcopy(draw.choice(VALUES))
        elif kind == 1 and body:
            del body[draw.choice([*body])]
        elif kind == 2 and body:
            name = draw.choice([*body])
            body[name + draw.choice(["s", "_", " ", "\x00"])] = body[name]
        else:
            holder, key = draw.choice([*_places(body)] or [(body, "model")])
            holder[key] = copy.deepcopy(draw.choice(VALUES))
        return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every place of a value, however deep, as its container and key."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield value, key
        yield from _places(inner)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tiny_folder("llama", tmp_path_factory.mktemp("fuzz") / "tiny", max_position_embeddings=512)
    loaded = load_model(str(folder), dtype="float32")
    with Engine(loaded, EngineConfig(kv_bytes=1 << 20)) as running:
        yield running


async def _post(app: Starlette, bodies: list[tuple[str, bytes]], seen: Counter[int]) -> None:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://here", timeout=None) as http:
        waiting = iter(bodies)

        async def client() -> None:
            for path, body in waiting:
                answer = await http.post(path, content=body)
                assert answer.status_code < 500 and b'"server_error"' not in answer.content, (path, body, answer.text)
                if answer.status_code >= 400:
                    assert answer.json()["error"]["message"], (path, body)
                seen[answer.status_code] += 1

        await asyncio.gather(*(client() for _ in range(AT_ONCE)))


def test_every_route_that_takes_a_body_is_here(engine: Engine) -> None:
    routes = {route.path for route in create_app(engine).routes if "POST" in getattr(route, "methods", ())}
    assert routes == {path.partition("?")[0] for path in BASES}


def is_free(engine: Engine) -> bool:
    """Whether nobody uses a page, once what is retained is flushed; next turns may still be computed."""
    engine.flush()
    stats = engine.stats()
    pools = {(pool.private, pool.locked) for pool in stats.cache.pools.values()}
    return not (stats.running or stats.waiting) and pools == {(0, 0)}


@pytest.mark.parametrize("bodies", [400, pytest.param(100_000, marks=pytest.mark.slow)])
@pytest.mark.timeout(1800)
def test_damaged_bodies(engine: Engine, tmp_path: Path, bodies: int) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    rules, batch = (str(tmp_path / "rules.toml"), *own_files()), BatchConfig(batch_folder=tmp_path / "batches")
    config = ServerConfig(embeddings=True, prompt_rules=rules, batch=batch)
    fuzzer, paths, app = Fuzzer(bodies), [*BASES], create_app(engine, config)
    made = [(path, fuzzer.body(BASES[path])) for path in (paths[n % len(paths)] for n in range(bodies))]
    seen: Counter[int] = Counter()
    grown = 0
    for half in (made[: bodies // 2], made[bodies // 2 :]):
        before = _most_memory()
        asyncio.run(_post(app, half, seen))
        gc.collect()
        grown = _most_memory() - before
    assert grown < MOST_GROWTH, "of the second half: the first one fills caches"
    assert seen[200] > bodies // 100 and seen[400] > bodies // 4, seen
    eventually(lambda: is_free(engine))


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
