"""Requests that mean the same have the same answer and the same accounts, however they are written and sent.

The bodies are some of those in the table of recorded answers. The accounts are what a request adds to all that
`/metrics` shows.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import anyio
import msgspec
import pytest
from rigs.apis import APIS as CLIENTS
from rigs.scripted_model import ScriptedEngine

from mainstem.server.apis.table import APIS
from mainstem.server.app import create_app
from mainstem.settings.server import ServerConfig
from tests.server.apis.test_api_bodies import ACT, SAY, TABLE, THINK

Pairs = tuple[tuple[bytes, bytes], ...]
CHOSEN = {
    "/v1/completions": (1, 3, 7),
    "/v1/chat/completions": (0, 2),
    "/v1/responses": (4, 8, 15),
    "/v1/messages": (2, 5, 9),
}
"""Bodies of the table, by their places: several prompts and choices, tools and their results, thoughts, marks."""
_IDS = re.compile(r"(?:(?<=[a-z]_)|(?<=[a-z]-))[0-9a-f]{24,32}")
_UNHEARD = (b"content-length", b"x-request-id", b"request-id")
_SAMPLE = re.compile(r"^(?!#)(\S+) (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Sent:
    """A request: where it goes, its body in pieces, and its headers."""

    target: str
    pieces: tuple[bytes, ...]
    headers: Pairs = ((b"content-type", b"application/json"),)


@dataclass(frozen=True)
class Answer:
    """What came back, with its ids numbered, and what it added to the accounts."""

    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    text: str
    accounts: dict[str, float]


def answers(requests: Iterable[Sent], **config: Any) -> list[Answer]:
    """Returns the answers to requests, one after the other, none of which is a hit of one before."""
    engine: Any = ScriptedEngine()
    given = {"embeddings": True, "tool_call_parser": "hermes", "reasoning_parser": "qwen3", **config}
    settings = ServerConfig(**given, precompute_turns=0.0)  # accounts are compared, and next turns come when they may
    app = create_app(engine, settings, clock=lambda: 1.0, now=lambda: 1e9, secret=bytes)

    async def counted() -> Counter[str]:
        _, _, text = await called(app, "GET", Sent("/metrics", (b"",)))
        return Counter({name: float(value) for name, value in _SAMPLE.findall(text) if "_created" not in name})

    async def all_of_them() -> list[Answer]:
        made = []
        for each in requests:
            engine.flush()
            before = await counted()
            status, headers, text = await called(app, "POST", each)
            after, names = await counted(), dict[str, str]()
            added = {name: round(after[name] - before[name], 6) for name in after if after[name] != before[name]}
            plain = _IDS.sub(lambda found, names=names: names.setdefault(found[0], f"#{len(names)}"), text)
            heard = tuple(sorted((name, value) for name, value in headers if name not in _UNHEARD))
            made.append(Answer(status, heard, plain, added))
        return made

    return anyio.run(all_of_them)


async def called(app: Any, method: str, given: Sent) -> tuple[int, list[tuple[bytes, bytes]], str]:
    """Calls the application as a server does; returns status, headers and body."""
    (path, _, query), left, sent = given.target.partition("?"), list(given.pieces), list[Any]()

    async def receive() -> Any:
        if not left:
            await anyio.sleep_forever()
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [*given.headers],
    }
    await app(scope, receive, send)
    start, *rest = sent
    return start["status"], start["headers"], b"".join(each.get("body", b"") for each in rest).decode()


def bodies(path: str) -> list[dict[str, Any]]:
    """Returns the chosen bodies of an API; the last is asked as a stream, too. Each has a letter of two bytes."""
    whole = [
        {"model": "scripted", **TABLE[path][at], "user" if path != "/v1/messages" else "cache_salt": "Ås"}
        for at in CHOSEN[path]
    ]
    return [*whole, {**whole[-1], "stream": True}]


def written(body: Any) -> bytes:
    return json.dumps(body, ensure_ascii=False).encode()


# ---------------------------------------------------------------- the same body in other bytes, and in other pieces


def other_order(body: Any) -> Any:
    """Returns a body whose fields come in the opposite order; schemas stay, since models are shown them."""
    if isinstance(body, list):
        return [other_order(each) for each in body]
    if not isinstance(body, dict):
        return body
    kept = {"parameters", "input_schema", "schema", "chat_template_kwargs"}
    order = reversed(body.items()) if body.get("type") != "tool_use" else body.items()
    return {name: each if name in kept else other_order(each) for name, each in order}


def escaped(body: Any) -> str:
    """Writes JSON with an escape for each letter."""
    if isinstance(body, dict):
        return "{" + ",".join(f"{escaped(name)}:{escaped(value)}" for name, value in body.items()) + "}"
    if isinstance(body, list):
        return "[" + ",".join(map(escaped, body)) + "]"
    if not isinstance(body, str):
        return json.dumps(body)
    units = body.encode("utf-16-be", "surrogatepass")
    return '"' + "".join(f"\\u{units[at]:02X}{units[at + 1]:02x}" for at in range(0, len(units), 2)) + '"'


def halves(data: bytes) -> tuple[bytes, ...]:
    """Cuts a body in the middle of its first letter of two bytes."""
    at = data.index("Å".encode()) + 1
    return data[:at], data[at:]


def with_headers(*given: tuple[str, str]) -> Callable[[Sent], Sent]:
    pairs = tuple((name.encode(), value.encode()) for name, value in given)
    return lambda sent: replace(sent, headers=pairs)


BYTES: dict[str, Callable[[Any], bytes]] = {
    "fields in another order": lambda body: written(other_order(body)),
    "lines and spaces": lambda body: b"\r\n\t " + json.dumps(body, indent=3).replace("\n", "\r\n").encode() + b" \n",
    "no spaces": lambda body: json.dumps(body, separators=(",", ":")).encode(),
    "each letter as an escape": lambda body: escaped(body).encode(),
}
PIECES: dict[str, Callable[[bytes], tuple[bytes, ...]]] = {
    "of one byte": lambda data: tuple(data[at : at + 1] for at in range(len(data))),
    "that cut a letter": halves,
    "some of which are empty": lambda data: (b"", data[:9], b"", b"", data[9:], b""),
}
SENDING: dict[str, Callable[[Sent], Sent]] = {
    "no header": with_headers(),
    "a charset": with_headers(("content-type", "application/json; charset=utf-8"), ("accept", "*/*")),
    "a type in capitals": with_headers(("content-type", 'Application/JSON;Charset="UTF-8"')),
    "another type": with_headers(("content-type", "text/plain"), ("accept", "application/json;q=0.1, */*;q=0")),
    "a header twice": with_headers(("accept", "text/html"), ("accept", "text/event-stream"), ("x-a", ""), ("x-a", "b")),
    "its length": lambda sent: replace(sent, headers=((b"content-length", b"%d" % len(b"".join(sent.pieces))),)),
    "a length in zeros": lambda sent: replace(
        sent, headers=((b"content-length", b"%09d" % len(b"".join(sent.pieces))),)
    ),
    "in chunks": with_headers(("transfer-encoding", "chunked"), ("expect", "100-continue")),
    "keys that nobody asks for": with_headers(("authorization", "Bearer  x "), ("x-api-key", ""), ("cookie", "a=b")),
    "a query": lambda sent: replace(sent, target=f"{sent.target}?beta=true&beta=&%zz"),
}


@pytest.mark.parametrize("path", CHOSEN)
def test_a_body_has_the_same_answer_in_other_bytes_in_other_pieces_and_with_other_headers(path: str) -> None:
    for body in bodies(path):
        data = written(body)
        plain = Sent(path, (data,))
        ways = {"as it is": plain}
        ways |= {way: replace(plain, pieces=(write(body),)) for way, write in BYTES.items()}
        ways |= {f"pieces {way}": replace(plain, pieces=cut(data)) for way, cut in PIECES.items()}
        ways |= {way: change(plain) for way, change in SENDING.items()}
        first, *others = answers(ways.values())
        assert first.status == 200 and first.accounts["mainstem_prompt_tokens_total"] > 0, first.text
        for way, answer in zip([*ways][1:], others, strict=True):
            assert answer == first, way


# ---------------------------------------------------------------- the same said in other words


@pytest.mark.parametrize("path", CHOSEN)
def test_a_default_that_is_written_out_changes_nothing(path: str) -> None:
    """Each field alone; a stream's options need a stream."""
    body = {"model": "scripted", **TABLE[path][0]}
    asked = [body]
    for field in msgspec.structs.fields(APIS[path].request):
        default = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
        if default is not msgspec.NODEFAULT and default is not msgspec.UNSET and field.encode_name not in body:
            asked.append({**body, field.encode_name: json.loads(msgspec.json.encode(default) or b"null")})
    assert len(asked) > 10
    first, *others = answers(Sent(path, (written(each),)) for each in asked)
    assert first.status == 200
    for each, answer in zip(asked[1:], others, strict=True):
        assert answer == first, {name: value for name, value in each.items() if name not in body}


@pytest.mark.parametrize("path", CHOSEN)
def test_a_field_that_is_not_known_changes_nothing_but_the_header_that_names_it(path: str) -> None:
    body = {"model": "scripted", **TABLE[path][0]}
    unknown = [body, {**body, "tempreature": 2}, {"tempreature": {"a": [None]}, **body}]
    first, *others = answers((Sent(path, (written(each),)) for each in unknown), unknown_fields="warn")
    for answer in others:
        named = {(b"x-mainstem-unknown-fields", b"tempreature")}
        assert {*answer.headers} - {*first.headers} == named
        ignored = {name for name in answer.accounts if "ignored" in name or "unknown" in name}
        assert {name: value for name, value in answer.accounts.items() if name not in ignored} == first.accounts
        assert (answer.status, answer.text) == (200, first.text)


@pytest.mark.parametrize("name", CLIENTS)
def test_a_stream_says_and_counts_what_a_whole_answer_does(name: str) -> None:
    api = CLIENTS[name]
    for text, most in ((SAY, 400), (ACT, 400), (THINK, 400), (SAY, 5), (THINK, 1)):
        body = {"model": "scripted", **api.body([], most, ["never"], [{"role": "user", "content": text}])}
        whole, stream = answers(Sent(api.path, (written({**body, "stream": each}),)) for each in (False, True))
        events = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
        said, streamed = api.whole(json.loads(whole.text)), api.streamed(events)
        assert (said.text, said.thought, said.calls, said.ended) == (
            streamed.text, streamed.thought, streamed.calls, streamed.ended
        )  # fmt: skip
        assert whole.accounts == stream.accounts


def test_prompts_of_one_body_are_answered_and_counted_as_those_of_several() -> None:
    prompts = [f"<say>{word * (at + 1)}</say>" for at, word in enumerate(("a", "bc", "d" * 40))]

    def body(prompt: Any) -> bytes:
        return written({"model": "scripted", "prompt": prompt, "max_tokens": 30, "logprobs": 1, "echo": True, "n": 2})

    together, *alone = answers(
        Sent("/v1/completions", (body(each),)) for each in (prompts, *([one] for one in prompts))
    )
    one, several = json.loads(together.text), [json.loads(each.text) for each in alone]
    plain = [{**choice, "index": 0} for choice in one["choices"]]
    assert plain == [{**choice, "index": 0} for each in several for choice in each["choices"]]
    assert [choice["index"] for choice in one["choices"]] == [*range(6)]
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert one["usage"][count] == sum(each["usage"][count] for each in several)
    sums: Counter[str] = sum((Counter(each.accounts) for each in alone), Counter())
    assert {name: pytest.approx(value, abs=1e-5) for name, value in sums.items()} == together.accounts


@pytest.mark.parametrize("path", CHOSEN)
def test_keys_are_known_however_they_are_written(path: str) -> None:
    data = written({"model": "scripted", **TABLE[path][0]})
    good = [
        [("authorization", "Bearer a-key")], [("authorization", "bearer  a-key ")], [("authorization", "BEARER a-key")],
        [("x-api-key", "a-key")], [("authorization", "Basic YTpi"), ("x-api-key", "a-key")],
        [("authorization", "Bearer wrong"), ("x-api-key", "a-key")],
    ]  # fmt: skip
    bad = [[], [("authorization", "a-key")], [("authorization", "Bearer a-key b")], [("authorization", "Bearer A-KEY")],
           [("authorization", "Bearer")], [("x-api-key", "")]]  # fmt: skip
    sent = [with_headers(*each)(Sent(path, (data,))) for each in (*good, *bad)]
    found = answers(sent, api_key=("a-key", "other"))
    assert [answer.status for answer in found] == [200] * len(good) + [401] * len(bad)
    assert all(answer == found[0] for answer in found[: len(good)])
    assert all(answer.accounts == {'mainstem_requests_total{outcome="refused"}': 1.0} for answer in found[len(good) :])
