"""The benchmark of edits: sessions of agents, and what a server computes of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import mean, median
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from bench import edits
from bench.agent_traffic import EDITS, Sizes, Step, inputs, steps, turns, written
from bench.client import ServerFailed
from bench.report import Report
from bench.saying import serving, tokenizer
from bench.vllm_tokens import Repeated
from mainstem.errors import BadArgument
from mainstem.prompt_rules.rule_file import read_rules
from mainstem.runtime.text.cuts import common_tokens
from mainstem.settings.engine import EngineConfig
from mainstem.settings.server import ServerConfig

TINY = Sizes(
    sessions=2, turns=5, turns_spread=0.1, system=60, tools=4, tool=40, task=40, new=170, new_spread=0.1, answer=60,
    people=0.4, window=900, summary=60, forking=1.0, forks=1, fork_turns=3, changing=0.5,
)  # fmt: skip


def system_of(step: Step) -> str:
    return str(step.body["messages"][0]["content"])


def tools_of(step: Step) -> list[str]:
    return [tool["function"]["name"] for tool in step.body["tools"]]


# ---------------------------------------------------------------- the sessions


def test_the_published_distributions() -> None:
    sizes = Sizes()
    plans = [turns(sizes, Random(seed)) for seed in range(2000)]
    all_turns = [turn for plan in plans for turn in plan]
    sent = [inputs(sizes, plan) for plan in plans]
    pauses = [turn.pause_s for turn in all_turns if not turn.person]
    assert median(map(len, plans)) == pytest.approx(43, abs=2)
    assert mean(map(len, plans)) == pytest.approx(83.7, rel=0.1)
    assert median(words for session in sent for words, _ in session) == pytest.approx(142_000, rel=0.05)
    assert median(turn.answer for turn in all_turns) == pytest.approx(444, abs=5)
    assert mean(turn.answer for turn in all_turns) == pytest.approx(523, rel=0.02)
    assert mean(pause_s < 1 for pause_s in pauses) == pytest.approx(0.865, abs=0.005)
    assert mean(pause_s < 10 for pause_s in pauses) == pytest.approx(0.951, abs=0.005)
    assert mean(turn.person for turn in all_turns) == pytest.approx(0.107, abs=0.005)
    assert mean(any(full for _, full in session) for session in sent) == pytest.approx(0.097, abs=0.015)


@pytest.mark.parametrize("edit", EDITS)
def test_sessions_follow_from_the_seed_and_have_the_same_words_with_an_edit_and_as_intended(edit: str) -> None:
    sent = steps(TINY, 1, [edit])
    assert sent == steps(TINY, 1, [edit])
    assert [step.body["messages"] for step in sent] != [step.body["messages"] for step in steps(TINY, 2, [edit])]
    kept = steps(TINY, 1, [edit], intended=True)
    assert [written(step.answer) for step in sent] == [written(step.answer) for step in kept]
    assert [step.due_s for step in sent] == sorted(step.due_s for step in kept)
    assert (sent == kept) is (edit == "compaction")  # which is what the client intends


def test_clients_change_what_an_edit_says() -> None:
    times = [system_of(step).split("Current time: ")[1][:19] for step in steps(TINY, 0, ["time"])]
    assert len({*times}) == len(times)
    ids = [system_of(step).splitlines()[1:3] for step in steps(TINY, 0, ["id"])]
    assert len({session for session, _ in ids}) == TINY.sessions and len({request for _, request in ids}) == len(ids)
    lines = [system_of(step).splitlines()[0] for step in steps(TINY, 0, ["attribution"])]
    assert all(line.startswith("x-client-attribution") for line in lines) and len({*lines}) == len(lines)
    orders = [tools_of(step) for step in steps(TINY, 0, ["tools"])]
    assert len({*map(tuple, orders)}) > 1 and len({*map(frozenset, orders)}) == 1
    assert {len(tools_of(step)) for step in steps(TINY, 0, ["flaps"])} == {3, 4}
    roles = {system_of(step).splitlines()[1] for step in steps(TINY, 0, ["fork"]) if "subagent" in system_of(step)}
    assert roles == {"You are the subagent reviewer-0."}
    both = steps(TINY, 0, ["time", "id"])
    assert all("Current time" in system_of(step) and "Request id" in system_of(step) for step in both)


def test_thoughts_leave_the_history_with_the_next_message_of_a_person() -> None:
    thinking = 0
    for step in steps(TINY, 0, ["thoughts"]):
        messages = step.body["messages"]
        last = max(at for at, message in enumerate(messages) if message["role"] == "user")
        thinks = [message["content"].startswith("<think>") for message in messages if message["role"] == "assistant"]
        before = sum(message["role"] == "assistant" for message in messages[:last])
        assert not any(thinks[:before]) and all(thinks[before:])
        thinking += any(thinks)
    assert thinking


def test_a_compaction_keeps_the_front_and_the_summary_alone() -> None:
    sent = steps(replace(TINY, sessions=1), 0, ["compaction"])
    asked = next(at for at, step in enumerate(sent) if "Write down" in step.body["messages"][-1]["content"])
    before, after = sent[asked], sent[asked + 1]
    assert system_of(after) == system_of(before) and after.body["tools"] == before.body["tools"]
    assert len(after.body["messages"]) == 2 and before.answer["content"] in after.body["messages"][1]["content"]


def test_an_edit_that_does_not_exist_is_named() -> None:
    with pytest.raises(BadArgument, match="wether"):
        steps(TINY, 0, ["wether"])


# ---------------------------------------------------------------- what a server computes of them

SETTINGS = edits.Settings(sizes=TINY, page_size=1, vllm=False)


def measured(edit: str, **changes: Any) -> dict[tuple[str, str], Mapping[str, Any]]:
    report = Report("edits", "2026-11-30", quick=True, progress=lambda text: None)
    edits.run(replace(SETTINGS, edits=(edit,), **changes), report)
    assert report.more["goals"] == edits.judge(report.rows)
    console = Console(width=250, record=True)
    report.show(console)
    assert edit in console.export_text()
    return {(row["room"], row["way"]): row for row in report.rows}


def test_pages_of_one_token_find_all_that_is_not_new() -> None:
    row = measured(edits.NONE)["all", "as sent"]
    assert row["ratio"] == pytest.approx(1, abs=0.002)
    assert row["least"] < row["prompt_tokens"] / 2


def test_what_is_rounded_dropped_or_sorted_costs_nothing() -> None:
    edit = "time+id+attribution+tools"
    rows = measured(edit, ways=("as sent", "dropped"))
    assert rows["all", "as sent"]["ratio"] > 3 and not rows["all", "as sent"]["changes"]
    assert rows["all", "dropped"]["ratio"] < 1.02
    assert rows["all", "dropped"]["changes"] >= 4 * rows["all", "dropped"]["requests"]  # a clock, two ids and a line


def test_tools_that_are_gone_for_a_request_are_kept() -> None:
    rows = measured("flaps", ways=("as sent", "moved"))
    kept, sent = rows["all", "moved"], rows["all", "as sent"]
    assert kept["ratio"] < 1.2 < sent["ratio"]  # a session may begin without tools that it has later
    assert kept["prompt_tokens"] > sent["prompt_tokens"]


def test_what_is_moved_costs_the_answer_before_it() -> None:
    rows = measured("time", ways=("as sent", "moved"))
    (asked,) = {row["requests"] for row in rows.values()}
    more = rows["all", "moved"]["computed"] - rows["all", "moved"]["least"]
    answers = sum(len(tokenizer().encode(written(step.answer))) for step in steps(TINY, 0))
    assert 0 < more < answers + 40 * asked
    assert rows["all", "moved"]["ratio"] < rows["all", "as sent"]["ratio"]


def test_a_smaller_cache_computes_more_and_what_is_computed_ahead_is_counted_apart() -> None:
    rows = measured("fork", ways=("as sent", "dropped, turns"), tight=0.3)
    assert [room for room, _ in rows] == ["all", "all", "30%", "30%"]
    assert rows["30%", "as sent"]["computed"] > rows["all", "as sent"]["computed"]
    assert all(row["with_ahead"] >= row["ratio"] for row in rows.values())
    thoughts = measured("thoughts", ways=("as sent", "dropped, turns"))
    assert thoughts["all", "as sent"]["ahead"] == 0 < thoughts["all", "dropped, turns"]["ahead"]


def test_rows_follow_from_the_seed() -> None:
    small = replace(TINY, sessions=1, turns=3)
    one, other = (measured("tools", ways=("as sent",), sizes=small) for _ in range(2))
    assert one == other != measured("tools", ways=("as sent",), sizes=small, seed=1)


def test_goals_are_judged_by_edit_for_all_ways_with_rules() -> None:
    row = {"edit": "time", "room": "all", "way": "moved", "ratio": 1.06}
    rows = [row, {**row, "way": "as sent", "ratio": 9}, {**row, "edit": "fork", "ratio": 1.3}]
    assert [(goal["what"].partition(":")[0], goal["met"]) for goal in edits.judge(rows)] == [
        ("time, moved, a cache for all", False),
        ("fork, moved, a cache for all", True),
    ]


def test_the_model_says_what_it_is_told_and_a_server_that_refuses_is_quoted() -> None:
    step = steps(TINY, 0)[0]
    with serving(ServerConfig(), EngineConfig(pages=4000, page_size=1), 4000) as server:
        usage, prompt, said = server.ask(step)
        assert usage["prompt_tokens"] == len(prompt) and tokenizer().decode(said) == written(step.answer)
        with pytest.raises(ServerFailed, match="400"):
            server.ask(replace(step, body={"messages": []}))


@pytest.mark.parametrize("path", sorted(edits.RULES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_files_of_rules_are_accepted(path: Path) -> None:
    assert len(read_rules([path])) == 7


class Elsewhere:
    """Stands for vLLM: it caches pages of one token, and says so in the form of vLLM's answers."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []

    def post(self, url: str, json: Mapping[str, Any], timeout: float) -> httpx.Response:
        tokens = json["prompt"]
        cached = max((common_tokens(np.array(tokens[:-1]), np.array(other)) for other in self.prompts), default=0)
        self.prompts.append(tokens)
        details = {"cached_tokens": cached} if cached else None
        return httpx.Response(200, json={"usage": {"prompt_tokens": len(tokens), "prompt_tokens_details": details}})


def test_vllm_is_sent_the_same_tokens_and_has_computed_the_answers_before(monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = Elsewhere()
    monkeypatch.setattr("bench.vllm_tokens.httpx.post", elsewhere.post)
    sent = steps(TINY, 0)
    with serving(ServerConfig(), EngineConfig(pages=4000, page_size=1), 4000) as server:
        heard = edits.Transcript(server)
        ours = edits.served(SETTINGS, heard, sent)
    theirs = edits.served(SETTINGS, Repeated("http://vllm", heard.spoken), sent)
    asked, after = elsewhere.prompts[::2], elsewhere.prompts[1::2]
    assert [prompt.tolist() for prompt, _ in heard.spoken] == asked
    assert all(long == [*prompt, *said] for long, prompt, (_, said) in zip(after, asked, heard.spoken, strict=True))
    assert theirs["prompt_tokens"] == ours["prompt_tokens"] and theirs["ahead"] == theirs["changes"] == 0
    assert abs(theirs["computed"] - ours["computed"]) <= len(sent)  # the last token of an answer


def test_a_refusal_of_vllm_is_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.vllm_tokens.httpx.post", lambda *_, **__: httpx.Response(400, text="too long"))
    with pytest.raises(ServerFailed, match="400: too long"):
        Repeated("http://vllm", [(np.arange(3, dtype=np.int32), [1])]).ask(steps(TINY, 0)[0])


def test_without_vllm_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edits, "version", lambda: None)
    report = Report("edits", "2026-11-30", quick=True, progress=lambda text: None)
    edits.run(replace(SETTINGS, edits=(edits.NONE,), vllm=True), report)
    assert [row["way"] for row in report.rows] == ["as sent"]
    assert "vLLM is not installed" in report.notes[0]


def test_another_server_needs_only_an_answer() -> None:
    class Other:
        ahead = 0

        def ask(self, step: Step) -> tuple[Mapping[str, Any], NDArray[np.int32], Sequence[int]]:
            return {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 60}}, np.arange(100), []

    row = edits.served(SETTINGS, Other(), steps(TINY, 0)[:3])
    assert (row["requests"], row["prompt_tokens"], row["computed"]) == (3, 300, 120)
