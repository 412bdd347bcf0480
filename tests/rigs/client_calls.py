"""What clients send: heard by a server, written down without what differs from run to run, and sent again.

Of a text, only what tells the scripted model what to do is written down, and what Mainstem's rules for the client find:
a sentence is its author's. Ids are numbered in the order in which they are seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from starlette.datastructures import Headers
from starlette.testclient import TestClient
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mainstem.prompt_rules.rule_file import own_files, read_rules

RECORDED = Path(__file__).parents[1] / "recorded" / "clients"

_IGNORED = "x-mainstem-ignored"
_KEPT_HEADERS = ("accept", "anthropic-beta", "anthropic-version", "content-type", "openai-beta", "user-agent")
_WORDS, _LONG = 4, 120  # a text with as many blanks, or characters, may be somebody's sentence
_STEPS = re.compile(r"<(?:call name=\"[^\"]*\"|say)>.*</(?:call|say)>", re.DOTALL)
_RULED = [rule.pattern for rule in read_rules(own_files()) if rule.pattern is not None]
_ANY_GRAMMAR = r"start: /(.|\n)*/"
_ID = re.compile(
    r"(?<![A-Za-z0-9])(?:(?:resp|msg|call|fc|rs|chatcmpl|cmpl|toolu|ctc|item|at|ses)[_-](?=[A-Za-z_-]*\d)[A-Za-z0-9_-]{8,}"
    r"|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32,})(?![A-Za-z0-9])"
)


@dataclass(frozen=True)
class Call:
    """One request of a client, and what the server made of it.

    Args:
        method, path: as in HTTP; the path has its query.
        headers: those that say what the client wants.
        body: JSON, or None.
        status: of the reply.
        ignored: the header of the reply that names fields which were accepted and have no effect.
        ids: those of the reply that later calls name, and their places among all ids of the reply.
        reply: its text, which is not kept.
    """

    method: str
    path: str
    status: int
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    ignored: str = ""
    ids: Mapping[str, int] = field(default_factory=dict)
    reply: str = ""


class Listening:
    """An application that notes each call of the one inside it.

    Args:
        app: answers.

    Attributes:
        calls: in the order in which their replies ended.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self.calls: list[Call] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        body, reply, begun = bytearray(), bytearray(), dict[str, Any]()

        async def heard() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def said(message: Message) -> None:
            begun.update(message if message["type"] == "http.response.start" else {})
            reply.extend(message.get("body", b""))
            await send(message)

        try:
            await self._app(scope, heard, said)
        finally:
            query, headers = scope["query_string"].decode(), Headers(scope=scope)
            kept = {name: headers[name] for name in _KEPT_HEADERS if name in headers}
            path, ignored = scope["path"], Headers(raw=begun.get("headers", [])).get(_IGNORED, "")
            text = reply.decode(errors="replace")
            call = Call(
                scope["method"], f"{path}?{query}" if query else path, begun.get("status", 0), kept,
                json.loads(body) if body else None, ignored, _ids(text), text,
            )  # fmt: skip
            self.calls.append(call)


def _ids(text: str) -> dict[str, int]:
    return {id: place for place, id in enumerate(dict.fromkeys(_ID.findall(text)))}


def anonymous(calls: Sequence[Call], places: Mapping[str, str]) -> list[Call]:
    """Returns calls as they are kept.

    Args:
        calls: in order.
        places: by a regular expression, what stands for a folder or an address of this machine.
    """
    numbers: dict[str, str] = {}

    def plain(text: str) -> str:
        for pattern, name in places.items():
            text = re.sub(pattern, name, text)
        return _ID.sub(lambda found: numbers.setdefault(found[0], _numbered(found[0], len(numbers) + 1)), text)

    made = []
    for call in calls:
        body, headers = _without_texts(call.body, plain), {name: plain(text) for name, text in call.headers.items()}
        ids = {plain(id): place for id, place in call.ids.items()}
        made.append(replace(call, path=plain(call.path), headers=headers, body=body, ids=ids, reply=""))
    sent = [call.path + json.dumps(call.body) for call in made]
    return [
        replace(call, ids={id: at for id, at in call.ids.items() if any(id in later for later in sent[i + 1 :])})
        for i, call in enumerate(made)
    ]


def _numbered(id: str, number: int) -> str:
    kind = re.match(r"[a-z]+[_-]", id)
    return f"{kind[0] if kind else 'id_'}{number:010d}"


def _without_texts(value: Any, plain: Callable[[str], str], name: str = "") -> Any:
    if isinstance(value, dict):
        return {plain(key): _without_texts(each, plain, key) for key, each in value.items()}
    if isinstance(value, list):
        return [_without_texts(each, plain) for each in value]
    if not isinstance(value, str):
        return value
    text = plain(value)
    if name == "description":
        return f"({len(text)} characters)"
    if name == "pattern" or (text.count(" ") < _WORDS and len(text) <= _LONG):
        return text
    if name == "definition":
        return _ANY_GRAMMAR
    if steps := _STEPS.search(text):
        return steps[0]
    if text.startswith("{"):
        try:
            return json.dumps(_without_texts(json.loads(value), plain))
        except ValueError:
            pass
    found = [each[0] for pattern in _RULED for each in pattern.finditer(text)]
    return "\n".join((f"({len(text)} characters)", *found))


def keep(name: str, calls: Iterable[Call]) -> None:
    """Writes down the calls of a client, each in a line."""
    kept = [{key: value for key, value in asdict(call).items() if value not in ("", {}, None)} for call in calls]
    RECORDED.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(each) for each in kept)
    (RECORDED / f"{name}.json").write_text(f"[\n{lines}\n]\n")


def kept(name: str) -> list[Call]:
    """Returns the calls of a client that are written down."""
    return [Call(**each) for each in json.loads((RECORDED / f"{name}.json").read_text())]


def sent_again(calls: Iterable[Call], app: ASGIApp) -> Iterator[tuple[Call, Call]]:
    """Sends calls to an application; yields each with what came of it. New ids stand where old ones were named."""
    named: dict[str, str] = {}
    listening = Listening(app)
    http = TestClient(listening, base_url="http://127.0.0.1:8000")
    for call in calls:
        text, path = json.dumps(call.body), call.path
        for before, now in named.items():
            text, path = text.replace(before, now), path.replace(before, now)
        http.request(
            call.method, path, content=None if call.body is None else text.encode(), headers=dict(call.headers)
        )
        made = listening.calls[-1]
        ids = list(made.ids)
        named |= {id: ids[place] for id, place in call.ids.items() if place < len(ids)}
        yield call, made
