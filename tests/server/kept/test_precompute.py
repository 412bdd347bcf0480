"""Next turns: when they are computed, and what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import uvicorn
from machine import eventually
from rigs.families import spelled, tokenizer_of, unusual
from rigs.hand_driven import Clock
from rigs.scripted_model import ScriptedEngine
from starlette.testclient import TestClient

from mainstem.cache.namespaces import Namespace
from mainstem.errors import BadArgument, EngineFull
from mainstem.runtime.request import Delta, Request
from mainstem.runtime.text.prompts import ANSWER, Prompts, Template
from mainstem.server.app import create_app
from mainstem.server.kept.answers import Answers, Turn
from mainstem.server.kept.precompute import Precompute
from mainstem.server.parsing.output import Call, NoCall, OutputParser, Piece, PlainText, Reasoning, Text
from mainstem.server.serving import _DrainingServer
from mainstem.settings.engine import EngineConfig, SamplingParams
from mainstem.settings.server import ServerConfig

TOKENIZER = tokenizer_of("qwen")
SAID = unusual(TOKENIZER, 40, 1)
THINKING = [
    *TOKENIZER.encode("<think>\nA long thought about it\n</think>\n\n", add_special_tokens=False),
    *SAID,
    TOKENIZER.eos_token_id,
]
CHAT = [{"role": "user", "content": "Who is it?"}]


class Stream:
    """A next turn that takes as long as its test says, or until it is cancelled."""

    cancelled = False

    def __init__(self, engine: Engine, tokens: int) -> None:
        self._engine, self._tokens = engine, tokens

    def cancel(self) -> None:
        self.cancelled = True

    def result(self) -> Any:
        self._engine.clock.now_s += self._engine.takes_s
        self._engine.ended += 1
        return SimpleNamespace(usage=SimpleNamespace(prompt_tokens=self._tokens, cached_tokens=3))


class Engine:
    """Takes requests, and says how many run and wait."""

    running = waiting = 0
    full = False
    config = EngineConfig(page_size=16)

    takes_s = 0.0

    def __init__(self, clock: Clock) -> None:
        self.clock, self.ended = clock, 0
        self.asked: list[Request] = []
        self.streams: list[Stream] = []

    def stats(self) -> Engine:
        return self

    def submit(self, request: Request) -> Stream:
        if self.full:
            raise EngineFull("full")
        self.asked.append(request)
        self.streams.append(Stream(self, len(request.tokens)))
        return self.streams[-1]


class Server:
    """One turn of a chat, and the next."""

    def __init__(
        self, remember: int = 1 << 20, parser: Callable[[], OutputParser] = PlainText, share: float = 1.0
    ) -> None:
        self.clock = Clock()
        self.engine = Engine(self.clock)
        self.prompts = Prompts(TOKENIZER, 4096)
        self.answers = Answers(self.prompts, TOKENIZER, remember)
        self.precompute = Precompute(self.engine, self.prompts, share, clock=self.clock)  # type: ignore[arg-type]
        self.parser = parser

    def answer(
        self, tokens: Sequence[int], reason: str = "stop", template: Template = ANSWER, namespace: Any = None
    ) -> None:
        """Answers the chat, and waits for what becomes of its next turn."""
        turn = Turn(self.answers, self.prompts, namespace)
        request = Request(turn.prepare(CHAT, template).tokens, SamplingParams(), namespace)
        watchers = [*turn.watchers(), *self.precompute.watchers(turn, request, self.parser)]
        text = TOKENIZER.decode(list(tokens), skip_special_tokens=True)
        for watcher in watchers:
            watcher.see(Delta(text, tuple(tokens)))
            watcher.see(Delta("", (), finish_reason=reason))
            watcher.close()

    def counts(self) -> dict[str, int]:
        counts = asdict(self.precompute.stats())
        return {name: count for name, count in counts.items() if not name.endswith("_tokens")}

    def settles(self, **counts: int) -> None:
        expected = {**dict.fromkeys(self.counts(), 0), **counts}
        eventually(lambda: self.counts() == expected and self.engine.ended == counts.get("started", 0), 10.0)


@pytest.mark.parametrize("remember", [0, 1 << 20])
def test_the_next_turn_is_computed_up_to_the_text_of_the_user(remember: int) -> None:
    server, space = Server(remember), Namespace(salt="s")
    server.answer(THINKING, namespace=space)
    server.settles(started=1)
    (request,) = server.engine.asked
    assert request.namespace == space and request.params.max_tokens == 0
    assert request.priority == -(2**31 - 1), "the lowest there is"
    said = TOKENIZER.decode(SAID)
    next_turn = [*CHAT, {"role": "assistant", "content": said}, {"role": "user", "content": "And why?"}]
    text = server.prompts.render(next_turn, ANSWER)
    assert TOKENIZER.decode(request.tokens.tolist()) == text[: text.index("And why?")]
    assert server.prompts.conversation(next_turn)[: len(request.tokens)].tolist() == request.tokens.tolist()


@pytest.mark.parametrize("remember", [0, 1 << 20])
def test_an_answer_that_spells_special_tokens_is_computed_as_it_comes_back(remember: int) -> None:
    server = Server(remember)
    words = spelled(TOKENIZER, ["<|im_end|>", "<|im_start|>"])
    server.answer([*THINKING[:-1], *words, *SAID, TOKENIZER.eos_token_id])
    server.settles(started=1)
    (request,) = server.engine.asked
    said = {"role": "assistant", "content": TOKENIZER.decode([*SAID, *words, *SAID])}
    next_turn = [*CHAT, said, {"role": "user", "content": "And why?"}]
    computed = request.tokens.tolist()
    assert server.prompts.conversation(next_turn)[: len(computed)].tolist() == computed
    assert computed.count(TOKENIZER.eos_token_id) == 2
    assert "<|im_end|><|im_start|>" in TOKENIZER.decode(computed)


def test_nothing_is_computed_if_the_template_keeps_the_answer() -> None:
    server = Server()
    server.answer([*SAID, TOKENIZER.eos_token_id])
    server.settles(unchanged=1)
    assert not server.engine.asked


@pytest.mark.parametrize("busy", ["running", "waiting", "full"])
def test_nothing_is_computed_while_others_run_or_wait(busy: str) -> None:
    server = Server()
    setattr(server.engine, busy, 1)
    server.answer(THINKING)
    server.settles(skipped=1)
    assert not server.engine.asked


def test_a_request_that_comes_ends_it() -> None:
    server = Server()
    server.answer(THINKING)
    server.settles(started=1)
    server.precompute.give_way()
    server.precompute.give_way()
    assert [stream.cancelled for stream in server.engine.streams] == [True]


def test_a_request_that_comes_while_it_begins_ends_it() -> None:
    server = Server()
    submit = server.engine.submit

    def submitted(request: Request) -> Stream:
        stream = submit(request)
        server.precompute.give_way()
        return stream

    server.engine.submit = submitted  # type: ignore[method-assign]
    server.answer(THINKING)
    server.settles(skipped=1)
    assert [stream.cancelled for stream in server.engine.streams] == [True]
    turn, asked = Turn(server.answers, server.prompts, None), server.engine.asked[0]
    server.precompute.watchers(turn, Request(asked.tokens, SamplingParams()))
    server.settles(skipped=1)  # what was not computed is not used


@pytest.mark.parametrize("reason", ["cancelled", "error"])
def test_an_answer_without_an_end_has_no_next_turn(reason: str) -> None:
    server = Server()
    server.answer(THINKING, reason)
    server.answer(THINKING)
    server.settles(started=1)


@pytest.mark.parametrize("template", [Template(generation_prompt=False), Template(False, continues=True)])
def test_only_an_answer_to_a_prompt_for_one_has_a_next_turn(template: Template) -> None:
    server = Server()
    turn = Turn(server.answers, server.prompts, None)
    request = Request(turn.prepare(CHAT, template).tokens, SamplingParams())
    assert server.precompute.watchers(turn, request) == []
    no_chat = Turn(server.answers, server.prompts, None)
    assert server.precompute.watchers(no_chat, Request(np.array([1]), SamplingParams())) == []


def test_less_than_a_page_is_not_computed() -> None:
    thought = TOKENIZER.encode("<think>\nSo.\n</think>\n\n", add_special_tokens=False)
    for size, started in ((16, True), (4096, False)):
        server = Server()
        server.engine.config = EngineConfig(page_size=size)
        server.answer([*thought, *SAID, TOKENIZER.eos_token_id])
        server.settles(started=started, unchanged=not started)


def test_a_call_that_was_none_is_text() -> None:
    class Takes(Parser):
        def feed(self, text: str) -> list[Piece]:
            return [Reasoning("a thought"), Call(0, "id", "name"), NoCall(0), Text("{1} and " * 20)]

    server = Server(parser=Takes)
    server.answer([*THINKING[:-1], *SAID])
    server.settles(started=1)
    assert "{1}" in TOKENIZER.decode(server.engine.asked[0].tokens.tolist())
    assert TOKENIZER.decode(server.engine.asked[0].tokens.tolist()).endswith("<|im_start|>user\n")


@pytest.mark.parametrize(
    ("fields", "computed"), [({}, True), ({"n": 2}, False), ({"truncate_prompt_tokens": 4000}, False)]
)
def test_only_a_whole_prompt_with_one_answer_has_a_next_turn(fields: dict[str, Any], computed: bool) -> None:
    client = TestClient(create_app(ScriptedEngine(), ServerConfig()))  # type: ignore[arg-type]
    body = {"model": "scripted", "messages": [{"role": "user", "content": "<say>Hello.</say>"}], **fields}
    watched: list[Any] = []
    real = Precompute.watchers

    def watchers(self: Precompute, *given: Any) -> Any:
        watched.append(given)
        return real(self, *given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Precompute, "watchers", watchers)
        assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert bool(watched) == computed


class Parser:
    """Takes all before a blank line as reasoning, and an answer in braces as a call."""

    def feed(self, text: str) -> list[Piece]:
        thought, _, answer = text.rpartition("\n\n")
        return [Reasoning(thought), Call(0, "id", "name") if answer.startswith("{") else Text(answer)]

    def close(self, cut: bool = False) -> list[Piece]:
        return []


def test_what_comes_back_is_what_the_reply_shows() -> None:
    """A client sends the text of an answer back, without what the reply has shown as reasoning."""
    thought = TOKENIZER.encode("Some thought of the model, shown apart\n\n", add_special_tokens=False)
    server = Server(parser=Parser)
    server.answer([*thought, *SAID, TOKENIZER.eos_token_id])
    server.settles(started=1)
    text = TOKENIZER.decode(server.engine.asked[0].tokens.tolist())
    assert "Some thought" not in text and TOKENIZER.decode(SAID) in text
    server.precompute._said = lambda message: None  # a template without calls
    server.answer([*thought, *TOKENIZER.encode("{1}", add_special_tokens=False)])
    server.settles(started=1, unchanged=1)


def test_a_template_that_fails_is_no_failure_of_the_server(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()

    def fail(*arguments: Any) -> str:
        raise RuntimeError("a template")

    server.prompts.before_next = fail  # type: ignore[method-assign]
    server.answer(THINKING)
    server.settles(skipped=1)
    assert "cannot be computed" in caplog.text


def test_a_next_turn_that_comes_is_used_and_one_that_does_not_is_in_vain() -> None:
    server, space = Server(), Namespace(salt="s")
    server.answer(THINKING, namespace=space)
    server.settles(started=1)
    (computed,) = server.engine.asked
    longer = np.append(computed.tokens, computed.tokens[:3])
    turn = Turn(server.answers, server.prompts, space)

    def comes(tokens: Any, namespace: Namespace | None) -> None:
        server.precompute.watchers(turn, Request(tokens, SamplingParams(), namespace))

    for tokens, namespace in ((longer, None), (longer[1:], space), (computed.tokens[:-1], space)):
        comes(tokens, namespace)
        server.settles(started=1)
    comes(longer, space)
    comes(longer, space)  # used once
    server.settles(started=1, used=1)


@pytest.mark.parametrize("turns", [64, 65, 67])
def test_sixty_four_next_turns_may_still_come(turns: int) -> None:
    server = Server()
    for number in range(turns):
        server.answer([*THINKING, *SAID[: number % 30]], namespace=Namespace(salt=str(number)))
        eventually(lambda: server.counts()["started"] == number + 1, 10.0)  # noqa: B023
    server.settles(started=turns, unused=max(turns - 64, 0))


# ---------------------------------------------------------------- the share


class Sessions(Server):
    """Sessions whose next turns take a time by a clock of the test."""

    def __init__(self, share: float, takes_s: float) -> None:
        super().__init__(share=share)
        self.engine.takes_s = takes_s
        self.begun_s = self.clock()

    @property
    def passed_s(self) -> float:
        return self.clock() - self.begun_s

    @property
    def spent_s(self) -> float:
        return self.engine.ended * self.engine.takes_s

    def turn(self, salt: str = "s", *, comes: bool) -> bool:
        """Answers a turn; returns whether the next one was computed, which comes or does not."""
        space, before = Namespace(salt=salt), self.counts()
        self.answer(THINKING, namespace=space)
        self._idle()
        computed = self.counts()["started"] > before["started"]
        assert computed or self.counts()["over_share"] == before["over_share"] + 1
        if computed and comes:
            turn = Turn(self.answers, self.prompts, space)
            self.precompute.watchers(turn, Request(self.engine.asked[-1].tokens, SamplingParams(), space))
        return computed

    def _idle(self) -> None:
        """Waits for the thread that computes."""
        self.precompute._worker.submit(lambda: None).result(60)


@pytest.mark.parametrize("share", [0.02, 0.1, 1.0])
def test_what_is_in_vain_takes_a_share_of_the_time_at_most(share: float) -> None:
    sessions, random = Sessions(share, takes_s=7.0), Random(0)
    for number in range(300):
        sessions.clock.now_s += random.random() * 20
        sessions.turn(str(number), comes=False)
        assert sessions.spent_s <= share * (600 + sessions.passed_s) + 7.0
    assert sessions.counts()["over_share"]


def test_a_next_turn_that_comes_costs_nothing() -> None:
    sessions = Sessions(0.01, takes_s=5.0)
    assert all(sessions.turn(comes=True) for _ in range(100))
    assert sessions.spent_s > 0.9 * sessions.passed_s


def test_a_turn_that_comes_while_its_end_is_computed_costs_nothing() -> None:
    sessions = Sessions(0.01, takes_s=5.0)
    result = Stream.result

    def late(stream: Stream) -> Any:
        space, asked = Namespace(salt="s"), sessions.engine.asked[-1]
        turn = Turn(sessions.answers, sessions.prompts, space)
        sessions.precompute.watchers(turn, Request(asked.tokens, SamplingParams(), space))
        return result(stream)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stream, "result", late)
        assert all(sessions.turn(comes=False) for _ in range(20))


def test_a_server_whose_clients_do_not_come_back_soon_does_next_to_nothing() -> None:
    sessions = Sessions(0.1, takes_s=2.0)
    spent_s = []
    for hour in range(24):
        before_s = sessions.spent_s
        for minute in range(60):
            sessions.turn(f"{hour} {minute}", comes=False)
            sessions.clock.now_s = sessions.begun_s + 3600 * hour + 60 * (minute + 1)
        spent_s.append(sessions.spent_s - before_s)
    assert spent_s[0] > 20
    assert sum(spent_s[12:]) < 12 * 3600 * 0.1 / 60, "a 64th of the share, after 64 that did not come"
    while not sessions.turn("another client", comes=True):
        sessions.clock.now_s += 60
    assert all(sessions.turn("another client", comes=True) for _ in range(10)), "but it learns"


def test_one_in_vain_costs_as_many_times_its_time_as_were_begun_for_each_that_came() -> None:
    sessions = Sessions(1.0, takes_s=1.0)
    for number in range(8):
        sessions.turn(str(number), comes=number % 2 == 0)
    costs = [ahead.cost_s for ahead in sessions.precompute._latest]
    assert costs == pytest.approx([begun / (1 + begun // 2) for begun in range(1, 9)])


@pytest.mark.parametrize(("takes_s", "goes_on"), [(66.6, True), (66.7, False)])
def test_no_more_than_the_share_of_ten_minutes_is_saved_up(takes_s: float, goes_on: bool) -> None:
    sessions = Sessions(0.1, takes_s)  # of which a tenth comes while it computes
    sessions.clock.now_s += 1e6
    assert [sessions.turn(str(number), comes=False) for number in range(2)] == [True, goes_on]


def test_what_is_not_computed_costs_its_rendering() -> None:
    server = Server(share=0.1)
    before_next = server.prompts.before_next

    def slowly(*arguments: Any) -> Any:
        server.clock.now_s += 100.0
        return before_next(*arguments)

    server.prompts.before_next = slowly  # type: ignore[method-assign]
    server.answer([*SAID, TOKENIZER.eos_token_id])
    server.settles(unchanged=1)
    server.answer([*SAID, TOKENIZER.eos_token_id])
    server.settles(unchanged=1, over_share=1)


def test_tokens_that_are_computed_ahead_are_counted() -> None:
    server = Server()
    server.answer(THINKING)
    server.settles(started=1)
    stats = server.precompute.stats()
    assert (stats.cached_tokens, stats.computed_tokens) == (3, len(server.engine.asked[0].tokens) - 3)


@pytest.mark.parametrize("wrong", [True, -0.1, 1.1, float("nan")])
def test_a_share_is_a_number_up_to_1(wrong: float) -> None:
    with pytest.raises(BadArgument, match="precompute_turns"):
        ServerConfig(precompute_turns=wrong)


@pytest.mark.parametrize("share", [0.1, 0.0])
def test_a_server_that_drains_stops_computing_first(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    app = create_app(ScriptedEngine(), ServerConfig(precompute_turns=share))  # type: ignore[arg-type]
    done: list[str] = []
    monkeypatch.setattr(Precompute, "give_way", lambda self: done.append("gives way"))
    engine: Any = SimpleNamespace(drain=lambda timeout_s: done.append("drains") or True)
    _DrainingServer(uvicorn.Config(app), engine, app.state, 30.0)._drain()
    assert done == ["gives way"] * bool(share) + ["drains"]


@pytest.mark.parametrize("said", ["", "I look. "])
def test_the_result_of_a_call_finds_its_turn(said: str) -> None:
    """The template writes arguments in another form than the model, so the call is computed as it comes back."""
    engine = ScriptedEngine()
    client = TestClient(create_app(engine, ServerConfig()))  # type: ignore[arg-type]
    tool = {"type": "function", "function": {"name": "f"}}
    body = {
        "model": "scripted",
        "tools": [tool],
        "messages": [{"role": "user", "content": '<call name="f">{"a":1}</call>'}],
    }
    if said:
        engine.answer_to = lambda request, answer=engine.answer_to: said + answer(request)  # type: ignore[method-assign]
    answer = client.post("/v1/chat/completions", json=body).json()["choices"][0]["message"]
    eventually(lambda: len(engine.streams) == 2, 10.0)
    computed = engine.streams[1].request
    result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "{{RESULT}}"}
    client.post("/v1/chat/completions", json={**body, "messages": [*body["messages"], answer, result]})
    following = engine.tokenizer.decode(engine.streams[2].request.tokens)
    text = engine.tokenizer.decode(computed.tokens)
    assert following.partition("{{RESULT}}")[0] == text
    assert '{"a": 1}' in text and said.strip() in text
    assert 'outcome="used"} 1.0' in client.get("/metrics").text
