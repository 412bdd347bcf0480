"""Bodies of requests that are valid but for one or two changes at random places."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

WORDS = (
    *("user", "assistant", "system", "developer", "tool", "text", "input_text", "output_text", "input_image", "image"),
    *("tool_use", "tool_result", "thinking", "function", "function_call", "function_call_output", "reasoning"),
    *("message", "item_reference", "auto", "any", "none", "required", "allowed_tools", "json_schema", "json_object"),
    *("base64", "url", "data:image/png;base64,AAAA", "x", "", "resp_1", "msg_a_0", "fake", "\ud800", "\x00", "{}"),
    "a" * 300,
)
NUMBERS = (0, 1, -1, 2**31, 2**63, 2**70, 1.5, -0.0, 1e308)


def changed(body: dict[str, Any], fields: Sequence[str], rng: random.Random) -> bytes:
    """Returns the JSON of a body with one or two changes: a value, a field that is gone, a field too much.

    Args:
        body: a valid one.
        fields: names of fields, some of which it may have.
        rng: makes the changes.
    """
    made = copy.deepcopy(body)
    for _ in range(rng.randint(1, 2)):
        parent, key = rng.choice(list(_places(made)))
        kind = rng.random()
        if kind < 0.6 or isinstance(parent, list):
            parent[key] = _value(rng, fields)
        elif kind < 0.8:
            del parent[key]
        else:
            parent[rng.choice(fields)] = _value(rng, fields)
        if not made:
            break
    return json.dumps(made).encode()


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields the places of all values inside of a value: an object or a list, and a name or an index."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield value, key
        yield from _places(each)


def _value(rng: random.Random, fields: Sequence[str], depth: int = 0) -> Any:
    kind = rng.random()
    if depth > 3 or kind < 0.4:
        return rng.choice(WORDS)
    if kind < 0.55:
        return rng.choice((*NUMBERS, None, True, False))
    if kind < 0.7:
        return [_value(rng, fields, depth + 1) for _ in range(rng.randint(0, 3))]
    return {rng.choice(fields): _value(rng, fields, depth + 1) for _ in range(rng.randint(0, 4))}
