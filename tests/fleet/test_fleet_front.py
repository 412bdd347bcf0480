"""The front of a fleet over real applications with scripted engines: what is tried again, and what is merged."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from rigs.fake_engine import FakeEngine, FakeTokenizer
from starlette.datastructures import Headers

from mainstem.fleet.front.app import Front, Homes
from mainstem.fleet.front.asking import Ask, Head, Part, ReplicaLost
from mainstem.fleet.front.reading import Reading
from mainstem.fleet.peers import PeerLists
from mainstem.fleet.replica import PEERS, answered
from mainstem.server.app import create_app
from mainstem.settings.fleet import FleetConfig
from mainstem.settings.server import ServerConfig

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "Hi."}]}


class Rig:
    """Replicas in this process. `asked`: who was asked what.

    `dies[name]`: after so many pieces of each answer; `after[name, pieces]`: is called then. `aside`: replicas that
    compute prompts alone.
    """

    def __init__(
        self, names: Sequence[str] = ("a", "b"), *, dies: dict[str, int] | None = None, **options: Any
    ) -> None:
        self.engines: dict[str, Any] = {name: FakeEngine(**options) for name in names}
        self.after: dict[tuple[str, int], Callable[[], None]] = {}
        self.apps = {name: create_app(engine) for name, engine in self.engines.items()}
        self.dies = dies or {}
        self.aside: set[str] = set()
        self.asked: list[tuple[str, Ask]] = []

    def names(self) -> list[str]:
        return [name for name in self.apps if name not in self.aside]

    def everyone(self) -> list[str]:
        return list(self.apps)

    async def ask(self, ask: Ask) -> AsyncGenerator[Part, None]:
        names = [ask.to] if ask.to else [name for name in self.names() if name not in ask.avoid] or self.names()
        home = None if ask.prompt is None else ask.prompt.replica
        name = home if home in names else names[0]
        self.asked.append((name, ask))
        count = 0
        async with aclosing(answered(self.apps[name], ask, name)) as pieces:
            async for piece in pieces:
                if self.dies.get(name) == count:
                    raise ReplicaLost(name)
                count += 1
                self.after.get((name, count), lambda: None)()
                yield piece
        if self.dies.get(name) == count:
            raise ReplicaLost(name)


def front(rig: Rig, **options: Any) -> Front:
    homes = Homes()
    reading = Reading(FleetConfig(), FakeTokenizer(), "fake", 4096, homes.get)  # type: ignore[arg-type]
    given: dict[str, Any] = {"max_body_bytes": 1 << 20, "sleep": _no_sleep, **options}
    return Front(rig, reading.read, homes, **given)


async def _no_sleep(seconds: float) -> None:
    await anyio.sleep(0)


def test_a_request_is_routed_by_the_prompt_that_rules_leave(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    match = "match = 't=\\d+;'\nexample = 't=1;'\n"
    path.write_text(f"[[rule]]\nname = 'x'\naction = 'drop'\nclients = ['agent/*']\n{match}")
    config = FleetConfig(server=ServerConfig(prompt_rules=(str(path),)))
    reading = Reading(config, FakeTokenizer(), "fake", 4096)  # type: ignore[arg-type]

    def tokens(system: str, client: str) -> str:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": "q"}]
        body = json.dumps({"model": "fake", "messages": messages}).encode()
        prompt = reading.read("/v1/chat/completions", Headers({"user-agent": client}), body)
        assert prompt is not None
        return FakeTokenizer().decode(prompt.tokens)

    assert tokens("t=5;Hi", "agent/1") == tokens("Hi", "agent/1") != tokens("t=5;Hi", "other")


def test_rules_of_a_tenant_route_its_requests_and_the_front_remembers_none(tmp_path: Path) -> None:
    rules, tenants = tmp_path / "rules.toml", tmp_path / "tenants.toml"
    tenants.write_text('[tenants.research]\napi_key = "one"\n[tenants.sales]\napi_key = "two"\n')
    match = "match = 't=(?P<value>\\d+);'\nexample = 't=1;'\n"
    rules.write_text(f"[[rule]]\nname = 'x'\naction = 'move'\ntenants = ['research']\nnote = '<{{value}}>'\n{match}")
    config = FleetConfig(server=ServerConfig(prompt_rules=(str(rules),), tenants=tenants))
    reading = Reading(config, FakeTokenizer(), "fake", 4096)  # type: ignore[arg-type]

    def text(key: str, *users: str) -> str:
        said = [{"role": "system", "content": "t=5;"}, *({"role": "user", "content": each} for each in users)]
        headers = Headers({"authorization": f"Bearer {key}"})
        prompt = reading.read("/v1/chat/completions", headers, json.dumps({"model": "fake", "messages": said}).encode())
        assert prompt is not None
        return FakeTokenizer().decode(prompt.tokens)

    assert "<5>" in text("one", "q") and "<5>" not in text("two", "q")
    assert "q<5>" not in (later := text("one", "q", "r")) and "r<5>" in later


def calls(made: Any, use: Callable[[httpx.AsyncClient], Any]) -> Any:
    async def run() -> Any:
        transport = httpx.ASGITransport(made)
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await use(client)

    return anyio.run(run)


def post(made: Front, path: str, body: Any) -> httpx.Response:
    reply: httpx.Response = calls(made, lambda client: client.post(path, json=body))
    return reply


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_request_whose_replica_dies_before_its_first_token_is_sent_again(path: str, stream: bool) -> None:
    made = front(Rig(dies={"a": 2 if stream and path == "/v1/messages" else 1}))  # the head, and what opens a stream
    reply = post(made, path, {**CHAT, "max_tokens": 50, "stream": stream})
    assert reply.status_code == 200
    assert reply.headers["x-mainstem-replica"] == "b"
    assert "Hello" in reply.text or "H" in reply.text
    assert (made.counts.again, made.counts.broken) == (1, 0)


@pytest.mark.parametrize("stream", [False, True])
def test_the_front_passes_on_what_a_replica_names_as_ignored(stream: bool) -> None:
    made = front(Rig())
    reply = post(made, "/v1/messages", {**CHAT, "max_tokens": 5, "thinking": {"type": "enabled"}, "stream": stream})
    assert (reply.status_code, reply.headers["X-Mainstem-Ignored"]) == (200, "thinking")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_an_answer_is_whole_though_its_replica_dies_before_it_has_said_that_it_is(path: str) -> None:
    made = front(Rig(dies={"a": 2}))  # the head, and the body
    reply = post(made, path, {**CHAT, "max_tokens": 50})
    assert reply.headers["x-mainstem-replica"] == "a"
    assert reply.json()["id"]  # and nothing follows it
    assert (made.counts.again, made.counts.broken) == (0, 0)


BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "completions": ("/v1/completions", {"prompt": "Hi.", "logprobs": 2, "echo": False}),
    "two prompts, two answers": ("/v1/completions", {"prompt": ["Hi.", "Ho."], "n": 2, "seed": 3}),
    "chat": ("/v1/chat/completions", {**CHAT, "logprobs": True, "stream_options": {"include_usage": True}}),
    "token ids": ("/v1/chat/completions", {**CHAT, "return_token_ids": True, "n": 2}),
    "messages": ("/v1/messages", {**CHAT, "max_tokens": 50}),
    "stop": ("/v1/messages", {**CHAT, "max_tokens": 50, "stop_sequences": ["ld"]}),
    "responses": ("/v1/responses", {"input": "Hi.", "include": ["message.output_text.logprobs"], "top_logprobs": 1}),
    "calls": ("/v1/responses", {"input": "call", "tools": [{"type": "function", "name": "f", "parameters": {}}]}),
    "chat calls": ("/v1/chat/completions", {**CHAT, "tools": [{"type": "function", "function": {"name": "f"}}]}),
    "stop beside tools": (
        "/v1/messages",
        {**CHAT, "max_tokens": 60, "tools": [{"name": "f", "input_schema": {}}], "stop_sequences": ["nd o"]},
    ),
}


def scripted(prompt: str) -> str:
    return (
        'Well: {"name": "f", "arguments": {"x": [1, 2]}} and on' if "call" in prompt or "tool" in prompt else "Hello."
    )


def events(text: str) -> list[str]:
    """Returns the events of a stream, with what differs between two runs named alike: ids and times."""
    ids: dict[str, str] = {}
    for pattern in (r"(?:cmpl|chatcmpl|resp|msg)[-_][0-9a-f]{32}", r"call_[0-9a-f]{24}"):
        for found in re.findall(pattern, text):
            ids.setdefault(found.partition("_")[2] or found.partition("-")[2], f"id{len(ids)}")
    for id, name in ids.items():
        text = text.replace(id, name)
    return re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":0', text).split("\n\n")


@pytest.mark.parametrize("kind", BODIES)
def test_a_stream_whose_replica_dies_goes_on_elsewhere_as_it_would_have_gone_on(kind: str) -> None:
    path, given = BODIES[kind]
    body = {"model": "fake", **given, "stream": True}
    rig = Rig(answer=scripted)
    whole = events(post(front(rig), path, body).text)
    held = 2 if path in ("/v1/messages", "/v1/responses") else 1
    continued = 0
    ends = len(whole) + 1
    for dies in {*range(1, 5), *range(5, ends, max(1, ends // 12)), ends}:
        made = front(Rig(answer=scripted, dies={"a": dies}))
        reply = post(made, path, body)
        assert reply.status_code == 200
        by_choice(events(reply.text), whole)
        assert made.counts.broken == 0
        assert made.counts.again == (dies <= held)
        continued += made.counts.continued
        assert reply.headers["x-mainstem-replica"] == ("b" if dies <= held else "a")
        assert not {name for name in reply.headers if "progress" in name or "sent" in name}
    assert continued > 5


def by_choice(got: list[str], wanted: list[str]) -> None:
    """Checks that streams are equal, but for the order of what belongs to different choices."""

    def sorted_by_choice(all_events: list[str]) -> list[str]:
        return sorted(all_events, key=lambda event: ('"choices":[]' in event or "DONE" in event, choice(event)))

    assert sorted_by_choice(got) == sorted_by_choice(wanted)


def choice(event: str) -> str:
    found = re.search(r'"choices":\[\{"index":(\d+)', event)
    return found[1] if found else ""


def test_a_stream_goes_on_from_one_replica_to_the_next_and_ends_with_one_error_event_after_the_third() -> None:
    rig = Rig(("a", "b", "c", "d"), dies={"a": 5, "b": 3, "c": 100})
    made = front(rig)
    assert said(post(made, "/v1/chat/completions", {**CHAT, "stream": True}).text) == "Hello, world."
    assert (made.counts.continued, made.counts.broken) == (2, 0)
    rig.dies = {"a": 5, "b": 2, "c": 2}
    made = front(rig)
    text = post(made, "/v1/chat/completions", {**CHAT, "stream": True}).text
    assert said(text) == "Hello,"
    assert text.count("has ended") == 1
    assert (made.counts.continued, made.counts.broken) == (2, 1)


def test_a_stream_that_has_run_for_an_hour_goes_on_elsewhere_as_well() -> None:
    now_s = [0.0]
    rig = Rig(dies={"a": 5})
    rig.after[("a", 4)] = lambda: now_s.__setitem__(0, 3600.0)
    made = front(rig, wait_s=120.0, clock=lambda: now_s[0])
    assert said(post(made, "/v1/chat/completions", {**CHAT, "stream": True}).text) == "Hello, world."
    assert (made.counts.continued, made.counts.broken) == (1, 0)


def said(text: str) -> str:
    """Returns the text of a chat's stream."""
    chunks = [json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event.startswith("data: {")]
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk.get("choices"))


def test_a_stream_that_its_engine_cannot_end_goes_on_elsewhere() -> None:
    rig = Rig()
    rig.engines["a"].step_s = 0.001
    rig.after[("a", 4)] = rig.engines["a"].close  # as an engine ends whose time to drain is over
    made = front(rig)
    assert said(post(made, "/v1/chat/completions", {**CHAT, "stream": True}).text) == "Hello, world."
    assert (made.counts.continued, made.counts.broken) == (1, 0)


@pytest.mark.parametrize(
    ("path", "last"),
    [("/v1/chat/completions", "data: [DONE]"), ("/v1/messages", "event: error"), ("/v1/responses", "event: error")],
)
def test_a_stream_that_nobody_can_go_on_with_ends_with_one_error_event(path: str, last: str) -> None:
    rig = Rig(("a",), dies={"a": 5})
    made = front(rig)
    body = {"model": "fake", "input": "Hi.", "stream": True} if path == "/v1/responses" else {**CHAT, "stream": True}
    reply = post(made, path, {**body, "max_tokens": 50} if path == "/v1/messages" else body)
    rig.dies = {}
    assert reply.status_code == 200
    assert last in reply.text[-400:]
    assert reply.text.count("has ended") == 1
    assert made.counts.broken == 1


def test_what_only_the_lost_replica_knew_ends_a_stream() -> None:
    rig = Rig()
    made = front(rig)
    first = post(made, "/v1/responses", {"model": "fake", "input": "Hi."}).json()
    rig.dies = {"a": 5}
    after = {"model": "fake", "input": "And?", "previous_response_id": first["id"], "stream": True}
    text = post(made, "/v1/responses", after).text
    assert text.count("has ended") == 1
    rig.dies = {"a": 5}
    scored = {"model": "fake", "prompt": "Hi.", "echo": True, "logprobs": 1, "stream": True}
    assert post(made, "/v1/completions", scored).text.count("has ended") == 1
    assert (made.counts.continued, made.counts.broken) == (0, 2)


def test_a_response_that_went_on_elsewhere_is_found_there() -> None:
    made = front(Rig(dies={"a": 5}))
    text = post(made, "/v1/responses", {"model": "fake", "input": "Hi.", "stream": True}).text
    found = re.search(r"resp_[0-9a-f]{32}", text)
    assert found is not None
    got = calls(made, lambda client: client.get(f"/v1/responses/{found[0]}"))
    assert got.headers["x-mainstem-replica"] == "b"
    assert got.json()["output"][0]["content"][0]["text"] == "Hello, world."


def test_one_that_drains_or_is_full_is_passed_over() -> None:
    rig = Rig()
    rig.apps["a"].state.draining = True
    assert post(front(rig), "/v1/chat/completions", CHAT).headers["x-mainstem-replica"] == "b"
    rig = Rig()
    rig.engines["a"].max_waiting = 0
    assert post(front(rig), "/v1/chat/completions", CHAT).headers["x-mainstem-replica"] == "b"
    rig.engines["b"].max_waiting = 0
    assert post(front(rig), "/v1/chat/completions", CHAT).status_code == 429


def test_a_request_that_kills_every_replica_is_given_up() -> None:
    rig = Rig(dies={"a": 0, "b": 0})
    reply = post(front(rig), "/v1/completions", {"model": "fake", "prompt": "Hi."})
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "no_replica")
    assert len(rig.asked) == 3


def test_errors_of_a_client_are_the_replicas_and_are_not_tried_again() -> None:
    rig = Rig()
    assert post(front(rig), "/v1/completions", {"model": "other", "prompt": "Hi."}).status_code == 404
    assert post(front(rig), "/v1/completions", {"prompt": 3}).status_code == 400
    assert len(rig.asked) == 2


def test_a_body_that_is_too_large_is_refused() -> None:
    reply = post(front(Rig(), max_body_bytes=10), "/v1/messages", CHAT)
    assert reply.status_code == 413
    assert reply.json()["type"] == "error"


def test_prompts_are_read_with_their_namespace() -> None:
    rig = Rig()
    post(front(rig), "/v1/completions", {"model": "fake", "prompt": "Hi.", "cache_salt": "s", "prompt_cache_key": "k"})
    prompt = rig.asked[0][1].prompt
    assert prompt is not None
    assert bytes(prompt.tokens.tolist()) == b"Hi."
    assert prompt.namespace is not None and prompt.namespace.salt == "s"
    assert prompt.session == "k"


def test_requests_about_a_response_go_to_its_replica_and_a_count_to_one() -> None:
    rig = Rig(dies={"a": 0})
    made = front(rig)
    first = post(made, "/v1/responses", {"model": "fake", "input": "Hi."})
    assert first.headers.get("x-mainstem-replica") == "b", first.text
    rig.dies = {}
    id_ = first.json()["id"]
    got = calls(made, lambda client: client.get(f"/v1/responses/{id_}"))
    assert (got.status_code, got.headers["x-mainstem-replica"]) == (200, "b")
    after = post(made, "/v1/responses", {"model": "fake", "input": "And?", "previous_response_id": id_})
    assert (after.status_code, after.headers["x-mainstem-replica"]) == (200, "b")
    assert calls(front(rig), lambda client: client.get(f"/v1/responses/{id_}")).status_code == 200  # asks all

    rig.asked.clear()
    listed = calls(made, lambda client: client.get(f"/v1/responses/{id_}/input_items"))
    assert (listed.status_code, listed.headers["x-mainstem-replica"]) == (200, "b")
    assert post(made, f"/v1/responses/{id_}/cancel", {}).status_code == 400
    assert post(made, "/v1/responses/input_tokens", {"input": "Hi."}).status_code == 200
    assert len(rig.asked) == 3, "one replica each"


def test_stored_chats_are_found_wherever_they_are() -> None:
    rig = Rig()
    ids = []
    for dead in ("a", "b"):
        rig.dies = {dead: 0}
        ids.append(post(front(rig), "/v1/chat/completions", {**CHAT, "store": True}).json()["id"])
    rig.dies = {}
    made = front(rig)
    page = calls(made, lambda client: client.get("/v1/chat/completions")).json()
    assert {each["id"] for each in page["data"]} >= {*ids}, "one that was lost on its way may be there, too"
    assert (page["first_id"], page["last_id"], page["has_more"]) == (
        page["data"][0]["id"],
        page["data"][-1]["id"],
        False,
    )
    for id_ in ids:
        got = calls(made, lambda client, id_=id_: client.get(f"/v1/chat/completions/{id_}/messages"))
        assert (got.status_code, got.json()["data"][0]["role"]) == (200, "user")


def test_what_concerns_every_cache_goes_to_all() -> None:
    made = front(Rig())
    flushed = post(made, "/v1/cache/flush", {})
    assert flushed.json() == {"freed_pages": 0, "freed_tokens": 0}
    assert set(calls(made, lambda client: client.get("/v1/cache/stats")).json()["replicas"]) == {"a", "b"}
    tree = calls(made, lambda client: client.get("/v1/cache/tree")).text
    assert "replica a:" in tree and "replica b:" in tree
    metrics = calls(made, lambda client: client.get("/metrics")).text
    assert metrics.count("# TYPE mainstem_requests_total") <= 1
    assert 'replica="a"' in metrics and 'replica="b"' in metrics
    for line in metrics.splitlines():
        assert line.startswith("#") or "replica=" in line, line


def test_those_that_compute_prompts_alone_answer_no_request_but_what_concerns_every_cache() -> None:
    rig = Rig()
    rig.aside = {"a"}
    made = front(rig)
    assert post(made, "/v1/completions", {"model": "fake", "prompt": "Hi."}).headers["x-mainstem-replica"] == "b"
    rig.asked.clear()
    assert post(made, "/v1/cache/flush", {}).status_code == 200
    assert sorted(name for name, _ in rig.asked) == ["a", "b"]
    rig.aside = {"a", "b"}
    assert calls(made, lambda client: client.get("/health")).json() == {"status": "failed"}


def test_a_front_that_drains_refuses_generations_alone() -> None:
    made = front(Rig())
    assert anyio.run(made.drain, 1.0)
    assert post(made, "/v1/completions", {"model": "fake", "prompt": "Hi."}).json()["error"]["code"] == "draining"
    assert calls(made, lambda client: client.get("/health")).status_code == 503
    assert calls(made, lambda client: client.post("/ping")).status_code == 503
    assert calls(made, lambda client: client.get("/v1/models")).status_code == 200


PATHS = sorted({re.sub(r"\{\w+(:\w+)?\}", "x", route.path) for route in Rig().apps["a"].routes})


@pytest.mark.parametrize("path", PATHS)
def test_each_route_takes_the_methods_that_it_takes_at_a_server(path: str) -> None:
    """The front looks like a server where it answers itself, merges or relays, to those who use it wrongly as well."""
    server = Rig(("a",)).apps["a"]
    endless = path == "/cache/events"
    for method in ("POST", "PUT", "PATCH", "DELETE", *(() if endless else ("GET", "HEAD"))):

        async def ask(client: httpx.AsyncClient, method: str = method) -> httpx.Response:
            return await client.request(method, path)

        alone, whole = calls(server, ask), calls(front(Rig(("a",)), wait_s=0.0), ask)
        assert (whole.status_code, whole.headers.get("allow")) == (alone.status_code, alone.headers.get("allow")), (
            method
        )
        if alone.status_code == 405:
            assert whole.text == alone.text, method


# ---------------------------------------------------------------- peers


class Told:
    """Replicas that note what they hear; `gone`: those that cannot be reached."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, list[str]]] = []
        self.gone: set[str] = set()

    def names(self) -> list[str]:
        return []

    everyone = names

    async def ask(self, ask: Ask) -> AsyncGenerator[Part, None]:
        assert ask.method == PEERS and ask.to is not None
        if ask.to in self.gone:
            raise ReplicaLost(ask.to)
        self.heard.append((ask.to, json.loads(ask.body)))
        yield Head(200, (), ask.to)


def test_each_answer_counts_once_for_the_replica_that_gave_it_and_no_refusal_does() -> None:
    rig = Rig(("a", "b", "c"))
    made = front(rig)
    rig.engines["a"].max_waiting = 0
    for asked in range(1, 4):
        assert post(made, "/v1/chat/completions", CHAT).headers["x-mainstem-replica"] == "b"
        assert made.counts.served == {"b": asked} and made.counts.again == asked, "a refused each"
    rig.dies["b"] = 1
    assert post(made, "/v1/chat/completions", CHAT).headers["x-mainstem-replica"] == "c"
    assert made.counts.served.total() == 4 + 1, "b gave a head, and c the answer"
    assert (made.counts.again, made.counts.continued, made.counts.broken, made.running) == (5, 0, 0, 0)
    for engine in rig.engines.values():
        engine.max_waiting = 0
    assert post(made, "/v1/chat/completions", CHAT).status_code == 429
    assert made.counts.served.total() == 5, "nobody served what all refused"


def test_each_replica_is_told_of_the_others_once() -> None:
    told = Told()
    lists = PeerLists(told)

    def tell(**stats: Any) -> list[tuple[str, list[str]]]:
        told.heard.clear()
        anyio.run(lists.update, {name: {"peer": peer} for name, peer in stats.items()})
        return told.heard

    assert tell(a="h:1") == []
    assert tell(a="h:1", b="h:2", c=None) == [("a", ["h:2"]), ("b", ["h:1"])]
    assert tell(a="h:1", b="h:2") == []
    told.gone = {"a"}
    assert tell(a="h:1", b="h:2", c="h:3") == [("b", ["h:1", "h:3"]), ("c", ["h:1", "h:2"])]
    told.gone = set()
    assert tell(a="h:1", b="h:2", c="h:3") == [("a", ["h:2", "h:3"])]
    assert tell(a="h:1") == [("a", [])]
    for _ in range(2):  # one that comes back knows nothing of what it was told before
        assert tell(a="h:1", b="h:2") == [("a", ["h:2"]), ("b", ["h:1"])]
        assert tell(a="h:1") == [("a", [])]


def test_replicas_of_different_models_or_layouts_are_no_peers_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    told = Told()
    lists = PeerLists(told)
    stats = {name: {"peer": f"h:{name}", "identity": identity} for name, identity in zip("abc", "xyx", strict=True)}
    for _ in range(2):
        anyio.run(lists.update, stats)
    assert told.heard == [("a", ["h:c"]), ("c", ["h:a"])]
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "replicas have different models or layouts, and share no pages"
    ]


def test_without_a_replica_a_request_is_refused_in_one_line() -> None:
    class Nobody(Told):
        async def ask(self, ask: Ask) -> AsyncGenerator[Part, None]:
            raise ReplicaLost
            yield b""

    made = front(Nobody())  # type: ignore[arg-type]
    reply = post(made, "/v1/completions", {"model": "fake", "prompt": "Hi."})
    assert (reply.status_code, reply.json()["error"]["message"]) == (503, "No engine can answer at the moment.")
    assert calls(made, lambda client: client.get("/health")).json() == {"status": "failed"}
