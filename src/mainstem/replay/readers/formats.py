"""Formats of traces: the fields of a JSON line that describes a request. Each format is a row of `FORMATS`.

    mooncake    timestamp (ms), input_length, output_length, hash_ids: one per 512 tokens
    bailian     chat_id, parent_chat_id, timestamp (s), input_length, output_length, type, turn,
                hash_ids: one per 16 tokens
    tokens      tokens or prompt_token_ids; timestamp (s), output_length, tenant, type, chat_id, turn, model where known
    openai      messages, input or prompt: the body of a request, bare or under "body"; timestamp or created (s), user,
                model, usage or response.usage where known; Anthropic's, too
    recording   written by `mainstem serve --record`; see `mainstem.server.watch.recording`

Mooncake: github.com/kvcache-ai/Mooncake, FAST25-release. Bailian: github.com/alibaba-edu/qwen-bailian-usagetraces-anon.

A line is bad if a field is missing, of the wrong type, negative or too large, or if the number of ids differs from the
number of blocks of the prompt: ceil(input_length / block_size), or only the whole ones. Ids may be strings or integers
of any size; anything outside 0 to 2**64 - 1 is hashed.

Knows lines, not files. The caller supplies the tokenizer.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from mainstem.cache.keys import hash_blocks
from mainstem.errors import BadTokens
from mainstem.replay.trace import MAX_TOKENS

RECORDING = "mainstem-recording"
BYTES_NOTE = "Tokens are bytes, not those of a model."
"""The note of a trace of texts that were read without a tokenizer."""

Line = dict[str, Any]
Tokenize = Callable[[Line], list[int]]
Rewrite = Callable[[Line, object], Line]

_SHOWN_VALUE = 40
_MAX_TIME = 2.0**53
_MAX_TURN = 2**31 - 1
_TIMES = ("timestamp", "created", "time")


class BadLine(Exception):
    """A line is bad; the message says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """A parsed line. Blocks have the names from the line, not yet chained."""

    input_tokens: int
    blocks: array[int]
    time_s: float | None
    output_tokens: int = 0
    tenant: str = ""
    kind: str = ""
    chat: int = -1
    turn: int = 0
    model: str = ""


@dataclass(slots=True)
class Reading:
    """State that a format uses while it reads.

    Args:
        block_size: tokens per block.
        tokenize: turns the body of a request into tokens.
        rewrite: returns a body as rules of prompts leave it, given the URL of its line.
        roots: for each chat seen, the first chat of its conversation.
        keys: names of the secrets under which the trace was recorded.
    """

    block_size: int
    tokenize: Tokenize
    rewrite: Rewrite = lambda body, url: body
    roots: dict[int, int] = field(default_factory=dict)
    keys: set[str] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class Format:
    """How to detect and read one format.

    Args:
        name: its name for `--format`.
        keys: a line has this format if it has all keys of one of these sets.
        block_size: default tokens per block; 0: the first line gives it.
        read: parses a line into a request; None for a good line without one. Raises BadLine.
        expected: an example line, for error messages.
    """

    name: str
    keys: tuple[frozenset[str], ...]
    block_size: int
    read: Callable[[Line, Reading], Request | None]
    expected: str

    def fits(self, line: Line) -> bool:
        """Returns whether a line looks like this format."""
        return any(keys <= line.keys() for keys in self.keys)


def _mooncake(line: Line, reading: Reading) -> Request:
    tokens = _count(line, "input_length")
    return Request(
        tokens,
        _ids(line, "hash_ids", tokens, reading.block_size),
        _needed_seconds(line, "timestamp", 1000),
        _count(line, "output_length", 0),
    )


def _bailian(line: Line, reading: Reading) -> Request:
    tokens, chat, parent = _count(line, "input_length"), _chat(line, "chat_id"), _chat(line, "parent_chat_id")
    request = Request(
        tokens,
        _ids(line, "hash_ids", tokens, reading.block_size),
        _needed_seconds(line, "timestamp"),
        _count(line, "output_length", 0),
        kind=text_of(line, "type"),
        chat=chat if parent < 0 else reading.roots.get(parent, parent),
        turn=_count(line, "turn", 0, _MAX_TURN),
    )
    reading.roots[chat] = request.chat
    return request


def _tokens(line: Line, reading: Reading) -> Request:
    tokens = next((line[key] for key in ("tokens", "prompt_token_ids") if line.get(key) is not None), None)
    if not isinstance(tokens, list):
        raise BadLine("neither tokens nor prompt_token_ids is a list")
    return Request(
        len(tokens),
        _hashed_blocks(tokens, reading.block_size),
        _seconds(line, ["timestamp"]),
        _count(line, "output_length", 0),
        tenant=text_of(line, "tenant"),
        kind=text_of(line, "type"),
        chat=_chat(line, "chat_id"),
        turn=_count(line, "turn", 0, _MAX_TURN),
        model=text_of(line, "model"),
    )


def _hashed_blocks(tokens: list[int], block_size: int) -> array[int]:
    """Returns the names of the whole blocks, and one more for the remaining tokens."""
    try:
        names = hash_blocks(tokens, block_size, 8)
        if tail := tokens[len(names) // 8 * block_size :]:
            names += hash_blocks(tail, len(tail), 8)
    except BadTokens as error:
        raise BadLine(str(error)) from error
    return array("Q", names)


def _openai(line: Line, reading: Reading) -> Request:
    body = _dict(line, "body") or line
    usage = _usage(line, body)
    tokens = reading.tokenize(reading.rewrite(body, line.get("url")))
    return Request(
        len(tokens),
        _hashed_blocks(tokens, reading.block_size),
        _seconds({**body, **line}, _TIMES),
        _count(usage, "completion_tokens", _count(usage, "output_tokens", 0)),
        tenant=text_of(line, "tenant") or text_of(body, "user"),
        kind=text_of(line, "type"),
        model=text_of(body, "model"),
    )


def _usage(line: Line, body: Line) -> Line:
    """Returns the server's token counts, from any of the places where logs keep them."""
    response = _dict(line, "response") or _dict(body, "response") or {}
    places = (line, body, response, _dict(response, "body") or {})
    return next((usage for place in places if (usage := _dict(place, "usage"))), {})


def _dict(line: Line, key: str) -> Line | None:
    found = line.get(key)
    return found if isinstance(found, dict) else None


def _recording(line: Line, reading: Reading) -> Request | None:
    if "format" in line:
        _check_header(line, reading)
        return None
    tokens = _count(line, "input_tokens")
    return Request(
        tokens,
        _ids(line, "blocks", tokens, reading.block_size),
        _needed_seconds(line, "time"),
        _count(line, "output_tokens", 0),
        tenant=text_of(line, "tenant"),
        kind=text_of(line, "kind"),
    )


def _check_header(line: Line, reading: Reading) -> None:
    if line["format"] != RECORDING or line.get("version") != 1:
        raise BadLine(f"format {short(line['format'])}, version {short(line.get('version'))} cannot be read")
    if line.get("block_size") != reading.block_size:
        raise BadLine(
            f"blocks of {short(line.get('block_size'))} tokens in a trace with blocks of {reading.block_size}"
        )
    reading.keys.add(text_of(line, "key"))


FORMATS = (
    Format(
        "recording",
        (frozenset({"format", "version", "block_size"}),),
        0,
        _recording,
        f'{{"format": "{RECORDING}", "version": 1, "block_size": 16, ...}} and then {{"time": 1760000000.5, '
        '"input_tokens": 20, "blocks": "16 hex digits each", ...}',
    ),
    Format(
        "bailian",
        (frozenset({"chat_id", "hash_ids"}),),
        16,
        _bailian,
        '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.1, "input_length": 20, "output_length": 13, '
        '"type": "text", "turn": 1, "hash_ids": [1, 2]}',
    ),
    Format(
        "mooncake",
        (frozenset({"input_length", "hash_ids"}),),
        512,
        _mooncake,
        '{"timestamp": 0, "input_length": 600, "output_length": 13, "hash_ids": [1, 2]}',
    ),
    Format(
        "tokens",
        (frozenset({"tokens"}), frozenset({"prompt_token_ids"})),
        16,
        _tokens,
        '{"timestamp": 0.5, "tokens": [101, 7592, ...]}',
    ),
    Format(
        "openai",
        (frozenset({"messages"}), frozenset({"prompt"}), frozenset({"body"}), frozenset({"input", "model"})),
        16,
        _openai,
        '{"timestamp": 0.5, "messages": [{"role": "user", "content": "..."}]}',
    ),
)
"""All formats; those with more specific keys come first."""


# --- fields of a line -------------------------------------------------------------------------------------------------


def _count(line: Line, key: str, default: int | None = None, high: int = MAX_TOKENS) -> int:
    value = line.get(key, default)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int:
        raise BadLine(f"{key} is missing" if value is None else f"{key} is not an integer: {short(value)}")
    if not 0 <= value <= high:
        raise BadLine(f"{key} = {short(value)} is not from 0 to {high}")
    return value


def _seconds(line: Line, keys: Sequence[str], per_s: int = 1) -> float | None:
    """Returns the time under the first of the keys that is present, in seconds; None without one."""
    key = next((key for key in keys if line.get(key) is not None), None)
    if key is None:
        return None
    value = line[key]
    if type(value) not in (int, float) or not 0 <= value <= _MAX_TIME:
        raise BadLine(f"{key} = {short(value)} is not a time")
    return float(value / per_s)


def _needed_seconds(line: Line, key: str, per_s: int = 1) -> float:
    value = _seconds(line, [key], per_s)
    if value is None:
        raise BadLine(f"{key} is missing")
    return value


def text_of(line: Line, *keys: str) -> str:
    """Returns the text under the first of the keys that is present; "" without one. Raises BadLine."""
    value = next((line[key] for key in keys if line.get(key) is not None), "")
    if not isinstance(value, str):
        raise BadLine(f"{keys[0]} is not a string: {short(value)}")
    return value


def _ids(line: Line, key: str, input_tokens: int, block_size: int) -> array[int]:
    """Returns the names of the prompt's blocks, after checking their number."""
    given = line.get(key)
    if isinstance(given, str):
        ids = _from_hex(key, given)
    elif isinstance(given, list):
        ids = _integers(given)
    else:
        raise BadLine(f"{key} is missing" if given is None else f"{key} is not a list: {short(given)}")
    whole, rest = divmod(input_tokens, block_size)
    if len(ids) not in (whole, whole + bool(rest)):
        raise BadLine(
            f"{key} has {len(ids)} ids for {input_tokens} tokens, which are {whole + bool(rest)} blocks of {block_size}"
        )
    return ids


def _from_hex(key: str, text: str) -> array[int]:
    try:
        return array("Q", bytes.fromhex(text))
    except ValueError as error:
        raise BadLine(f"{key} is not 16 hex digits per block") from error


def _integers(given: list[Any]) -> array[int]:
    ids = array("Q")
    try:
        ids.fromlist(given)
    except (TypeError, OverflowError):
        return array("Q", map(_integer, given))
    return ids


def _integer(value: object) -> int:
    if type(value) is int and 0 <= value < 2**64:
        return value
    if isinstance(value, str) or type(value) is int:
        return hashed(value)
    raise BadLine(f"an id is neither an integer nor a string: {short(value)}")


@lru_cache(1024)
def hashed(value: int | str) -> int:
    """Hashes a string, or an integer of any size, to 64 bits."""
    text = f"text {value}" if isinstance(value, str) else f"{value:x}"
    data = text.encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _chat(line: Line, key: str) -> int:
    """Returns the number of a conversation; -1 without one."""
    value = line.get(key)
    if value is None or value == -1:
        return -1
    return _integer(value) & (2**63 - 1)


def short(value: object) -> str:
    """Returns a value's repr, shortened for a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python writes
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else type(value).__name__
    return text if len(text) <= _SHOWN_VALUE else text[:_SHOWN_VALUE] + "..."
