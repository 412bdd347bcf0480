"""Next turns: when they are computed, and what they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest
from machine import eventually
from rigs.families import spelled, tokenizer_of, unusual
from rigs.scripted_model import ScriptedEngine
from starlette.testclient import TestClient

from mainstem.cache.namespaces import Namespace
from mainstem.errors import EngineFull
from mainstem.runtime.request import Delta, Request
from mainstem.runtime.text.prompts import ANSWER, Prompts, Template
from mainstem.server.app import create_app
from mainstem.server.kept.answers import Answers, Turn
from mainstem.server.kept.precompute import Precompute
from mainstem.server.parsing.output import Call, NoCall, OutputParser, Piece, PlainText, Reasoning, Text
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
    cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class Engine:
    """Takes requests, and says how many run and wait."""

    running = waiting = 0
    full = False
    config = EngineConfig(page_size=16)

    def __init__(self) -> None:
        self.asked: list[Request] = []
        self.streams: list[Stream] = []

    def stats(self) -> Engine:
        return self

    def submit(self, request: Request) -> Stream:
        if self.full:
            raise EngineFull("full")
        self.asked.append(request)
        self.streams.append(Stream())
        return self.streams[-1]


class Server:
    """One turn of a chat, and the next."""

    def __init__(self, remember: int = 1 << 20, parser: Callable[[], OutputParser] = PlainText) -> None:
        self.engine = Engine()
        self.prompts = Prompts(TOKENIZER, 4096)
        self.answers = Answers(self.prompts, TOKENIZER, remember)
        self.precompute, self.parser = Precompute(self.engine, self.prompts), parser  # type: ignore[arg-type]

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
        stats = self.precompute.stats()
        return asdict(stats)

    def settles(self, **counts: int) -> None:
        expected = {"started": 0, "unchanged": 0, "skipped": 0, "used": 0, "unused": 0, **counts}
        eventually(lambda: self.counts() == expected, 10.0)


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
    client = TestClient(create_app(ScriptedEngine(), ServerConfig(precompute_turns=True)))  # type: ignore[arg-type]
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


@pytest.mark.parametrize("said", ["", "I look. "])
def test_the_result_of_a_call_finds_its_turn(said: str) -> None:
    """The template writes arguments in another form than the model, so the call is computed as it comes back."""
    engine = ScriptedEngine()
    client = TestClient(create_app(engine, ServerConfig(precompute_turns=True)))  # type: ignore[arg-type]
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
