"""Replies: whole answers and chunks, usage, logprobs and where tokens begin."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from mainstem.cache.retention import Kept
from mainstem.runtime.request import Delta, Prefix, TokenLogprob, Usage
from mainstem.runtime.text.spelling import Spelled
from mainstem.server.apis import completions
from mainstem.server.apis.chat.reply import ChatReply
from mainstem.server.apis.completion_reply import CompletionReply
from mainstem.server.apis.replies import (
    CachedByTier,
    ChunkUsage,
    Extras,
    Head,
    PromptTokensDetails,
    chosen_token,
    usage_body,
)
from mainstem.server.fields.tools import Tool, Tooling
from mainstem.server.parsing.formats import FORMATS

HEAD = Head("id-1", 123, "m")
USAGE = Usage(10, 4, 3, 0.0, 0.1, 0.2)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_usage_counts_a_prompt_once_and_its_least_lucky_choice(order: tuple[int, ...]) -> None:
    short = [Usage(10, 0, 3, 0, 0, 0), Usage(10, 9, 4, 0, 0, 0), Usage(10, 8, 5, 0, 0, 0, 8, 0)]
    long = [Usage(30, 16, 1, 0, 0, 0, 5, 4), Usage(30, 19, 1, 0, 0, 0), Usage(30, 24, 1, 0, 0, 0, 0, 24)]
    usage = usage_body([some[at] for some in (short, long) for at in order], choices=3)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (40, 15, 55)
    assert usage.prompt_tokens_details.cached_tokens == 16
    assert usage.prompt_tokens_details.cached_tokens_by_tier == CachedByTier(7, 5, 4)


def test_what_was_written_counts_once_for_the_longest_time() -> None:
    short, long, end = Prefix(40, 300.0, True, "5m"), Prefix(24, 3600.0, True, "1h"), Prefix(60)
    found = ((short, Kept(32, 32)), (long, Kept(16, 16)), (end, Kept(0, 48)))
    details = usage_body([replace(USAGE, prompt_tokens=60, prefixes=found)], 1).prompt_tokens_details
    assert isinstance(details, PromptTokensDetails)
    assert (details.cache_write_tokens, details.cache_write_tokens_by_ttl) == (44, {"1h": 12, "5m": 16})
    both = usage_body([replace(USAGE, prompt_tokens=60, prefixes=found)] * 2, 1).prompt_tokens_details
    assert isinstance(both, PromptTokensDetails)
    assert (both.cache_write_tokens, both.cache_write_tokens_by_ttl) == (88, {"1h": 24, "5m": 32})
    hit = replace(USAGE, cached_tokens=50, prefixes=found)
    nothing = usage_body([hit], 1).prompt_tokens_details
    assert isinstance(nothing, PromptTokensDetails)
    assert (nothing.cache_write_tokens, nothing.cache_write_tokens_by_ttl) == (0, {"1h": 0, "5m": 0})


def spell(token: int) -> Spelled:
    raw = {1: "Hé".encode(), 2: b" you", 3: b"\xc3", 4: None}[token]
    return Spelled("\ufffd" if raw is None else raw.decode(errors="replace"), raw)


ASKED = completions.read(b'{"model": "m", "prompt": "x", "logprobs": 2}')


def writer(kind: Any, extras: Extras | None = None, usage: ChunkUsage | None = None, **given: Any) -> Any:
    """A writer of the answers to a request."""
    spelling = given.pop("spell", spell)
    return kind(HEAD, spelling, usage or ChunkUsage(False), extras or Extras(ASKED), **given)


LOGPROBS = (TokenLogprob(1, -0.5, ((1, -0.5), (2, float("-inf")))), TokenLogprob(3, -1.0, ()))

ANSWER = (
    Delta("Hé", (1,), LOGPROBS[:1]),
    Delta("", (3,), LOGPROBS[1:]),
    Delta("", (), (), "stop", USAGE),
)


def as_json(body: Any) -> Any:
    return json.loads(msgspec.json.encode(body))


def test_a_whole_chat_answer() -> None:
    reply = writer(ChatReply)
    body = as_json(reply.whole([ANSWER], usage_body([USAGE], 1)))
    assert (body["id"], body["created"], body["model"], body["object"]) == ("id-1", 123, "m", "chat.completion")
    choice = body["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hé"}
    assert choice["finish_reason"] == "stop"
    first, second = choice["logprobs"]["content"]
    assert first["token"] == "Hé"
    assert first["bytes"] == list("Hé".encode())
    assert first["top_logprobs"][1] == {"token": " you", "logprob": -9999.0, "bytes": list(b" you")}
    assert second["bytes"] == [0xC3], "a part of a character"
    unknown = chosen_token(TokenLogprob(4, -1.0, ()), spell)
    assert (unknown.token, unknown.bytes) == ("\ufffd", None)
    by_tier = {"device": 4, "host": 0, "storage": 0}
    details = {"cached_tokens": 4, "cached_tokens_by_tier": by_tier, "cache_write_tokens": 0}
    assert body["usage"]["prompt_tokens_details"] == details


@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
def test_usage_in_chunks_only_when_asked(kind: Any) -> None:
    plain, counted = writer(kind), writer(kind, usage=ChunkUsage(True))
    assert "usage" not in as_json(plain.chunk(0, Delta("a", (1,))))
    assert as_json(counted.chunk(0, Delta("a", (1,))))["usage"] is None
    last = as_json(counted.last(usage_body([USAGE], 1)))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 13


def test_chat_chunks() -> None:
    reply = writer(ChatReply)
    assert reply.chunk(1, Delta("", (1,))) is None, "the role comes with the first text"
    for delta in ({"role": "assistant", "content": "a"}, {"content": "a"}):
        assert as_json(reply.chunk(1, Delta("a", (1,))))["choices"][0] == {
            "index": 1,
            "delta": delta,
            "logprobs": None,
            "finish_reason": None,
        }
    assert as_json(reply.chunk(0, Delta("", (), (), "stop", USAGE)))["choices"][0]["delta"] == {
        "role": "assistant",
        "content": "",
    }
    assert reply.chunk(1, Delta("", (1,))) is None
    assert as_json(reply.chunk(1, Delta("", (), (), "stop", USAGE)))["choices"][0]["finish_reason"] == "stop"


def test_held_text_comes_with_the_end() -> None:
    reply = writer(ChatReply, parser=lambda: FORMATS["hermes"].parser(Tooling((Tool("go"),))))
    assert reply.chunk(0, Delta("<tool", (1,))) is None
    last = as_json(reply.chunk(0, Delta("", (), (), "length", USAGE)))["choices"][0]
    assert (last["delta"], last["finish_reason"]) == ({"role": "assistant", "content": "<tool"}, "length")


def test_offsets_go_on_over_the_chunks_of_a_choice() -> None:
    reply = writer(CompletionReply)
    offsets = []
    for index, entry in ((0, LOGPROBS[0]), (1, LOGPROBS[0]), (0, LOGPROBS[1])):
        chunk = as_json(reply.chunk(index, Delta("x", (entry.token,), (entry,))))
        offsets.append(chunk["choices"][0]["logprobs"]["text_offset"])
    assert offsets == [[0], [0], [1]]


# 'a😀b', where the emoji takes three tokens and its text comes with the last one.
EMOJI = (
    Delta("a", (1,), (TokenLogprob(1, -1.0, ()),)),
    Delta("", (2,), (TokenLogprob(2, -1.0, ()),)),
    Delta("", (3,), (TokenLogprob(3, -1.0, ()),)),
    Delta("😀", (4,), (TokenLogprob(4, -1.0, ()),)),
    Delta("b", (5,), (TokenLogprob(5, -1.0, ()),)),
    Delta("", (), (), "stop", USAGE),
)


def test_offsets_count_characters_that_were_sent() -> None:
    def spelled(token: int) -> Spelled:
        return Spelled({1: "a", 5: "b"}.get(token, "\ufffd"), None)

    whole = as_json(writer(CompletionReply, spell=spelled).whole([EMOJI, EMOJI], usage_body([USAGE], 1)))
    assert whole["choices"][0]["text"] == "a😀b"
    for choice in whole["choices"]:
        assert choice["logprobs"]["text_offset"] == [0, 1, 1, 1, 2]
    reply = writer(CompletionReply, spell=spelled)
    chunks = [as_json(reply.chunk(0, delta))["choices"][0]["logprobs"] for delta in EMOJI[:-1]]
    assert [offset for logprobs in chunks for offset in logprobs["text_offset"]] == [0, 1, 1, 1, 2]


def test_offsets_within_one_event_never_leave_its_text() -> None:
    delta = Delta("Hé you", (1, 3, 2), (TokenLogprob(1, 0, ()), TokenLogprob(3, 0, ()), TokenLogprob(2, 0, ())))
    chunk = as_json(writer(CompletionReply).chunk(0, delta))
    assert chunk["choices"][0]["logprobs"]["text_offset"] == [0, 2, 3]
    short = as_json(writer(CompletionReply).chunk(0, Delta("H", (1, 2), delta.logprobs[::2])))
    assert short["choices"][0]["logprobs"]["text_offset"] == [0, 1]


def test_the_token_itself_is_among_the_likeliest_of_a_completion() -> None:
    """As OpenAI's reference has it: there may be one more than was asked for."""
    entries = (TokenLogprob(1, -0.5, ((1, -0.5), (2, -2.0))), TokenLogprob(3, -7.0, ((1, -0.5), (2, -2.0))))
    last = Delta("Hé", (1, 3), entries, "length", USAGE)
    body = as_json(writer(CompletionReply).whole([[last]], usage_body([USAGE], 1)))
    likeliest = {"Hé": -0.5, " you": -2.0}
    assert body["choices"][0]["logprobs"]["top_logprobs"] == [likeliest, {**likeliest, "\ufffd": -7.0}]
    chat = as_json(writer(ChatReply).whole([[last]], usage_body([USAGE], 1)))
    assert [len(each["top_logprobs"]) for each in chat["choices"][0]["logprobs"]["content"]] == [2, 2]


@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
def test_ids_of_tokens_are_shown_if_asked_for(kind: Any) -> None:
    extras = Extras(replace(ASKED, kept=2), prompt_tokens=[[7, 8], [9]])
    body = as_json(writer(kind, extras).whole([ANSWER] * 4, usage_body([USAGE], 1)))
    assert [choice["token_ids"] for choice in body["choices"]] == [[1, 3]] * 4
    if kind is ChatReply:
        assert body["prompt_token_ids"] == [7, 8]
    else:
        assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[7, 8], [7, 8], [9], [9]]
    reply = writer(kind, extras)
    chunks = [as_json(reply.chunk(2, Delta("", (token,)))) for token in (5, 6)]
    assert [chunk["choices"][0]["token_ids"] for chunk in chunks] == [[5], [6]], "also where a text is held back"
    shown = [chunk if kind is ChatReply else chunk["choices"][0] for chunk in chunks]
    assert shown[0]["prompt_token_ids"] == [9] and "prompt_token_ids" not in shown[1]


def test_tokens_can_be_named_by_their_ids() -> None:
    extras, usage = Extras(replace(ASKED, ids_for_names=True)), usage_body([USAGE], 1)
    logprobs = as_json(writer(CompletionReply, extras).whole([ANSWER], usage))
    assert logprobs["choices"][0]["logprobs"]["tokens"] == ["token_id:1", "token_id:3"]
    assert logprobs["choices"][0]["logprobs"]["top_logprobs"][0] == {"token_id:1": -0.5, "token_id:2": -9999.0}
    assert logprobs["choices"][0]["logprobs"]["text_offset"] == [0, 2], "offsets are those of the texts"
    first = as_json(writer(ChatReply, extras).whole([ANSWER], usage))
    first = first["choices"][0]["logprobs"]["content"][0]
    assert (first["token"], first["bytes"]) == ("token_id:1", list("Hé".encode()))
    assert first["top_logprobs"][1]["token"] == "token_id:2"
