"""Synthetic workloads: the same for the same seed, true to their parameters, and sharing where they should."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mainstem.errors import BadArgument
from mainstem.replay.generate import (
    WORKLOADS,
    Agents,
    BestOfN,
    Chat,
    Documents,
    Mix,
    Prompts,
    Tenants,
    Workload,
    generate,
    parse_workload,
)
from mainstem.replay.trace import Batch, Trace

MIX = Mix(parts=((Chat(), 3.0), (Tenants(), 1.0), (Tenants(prompts=7), 1.0), (BestOfN(), 1.0)))
EVERY: list[Workload] = [*(kind() for kind in WORKLOADS.values()), MIX]


def ids(workload: Workload) -> str:
    return workload.kind


def paths(batch: Batch) -> list[list[int]]:
    return [path.tolist() for path in np.split(batch.blocks, batch.offsets[1:-1])]


def common(left: list[int], right: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def near(value: float, wanted: float, parts: float = 0.1) -> bool:
    return math.isclose(value, wanted, rel_tol=parts)


def columns(trace: Trace) -> list[Any]:
    batch = trace.whole
    return [getattr(batch, name).tobytes() for name in Batch.__slots__]


DEFAULTS = {
    "chat": "rate_per_s=1.0, context_tokens=131072, prompt_tokens=500.0, prompt_sigma=0.5, zipf=1.0, drift_s=inf, "
    "length_sigma=1.0, turns=5.0, think_s=30.0, think_sigma=1.0, question_tokens=80.0, answer_tokens=250.0, prompts=4",
    "agents": "rate_per_s=0.2, context_tokens=131072, prompt_tokens=6000.0, prompt_sigma=0.5, zipf=1.0, drift_s=inf, "
    "length_sigma=1.2, burst=3.0, steps=20.0, tool_s=4.0, tool_sigma=1.0, task_tokens=400.0, result_tokens=500.0, "
    "call_tokens=120.0, prompts=3",
    "documents": "rate_per_s=0.5, context_tokens=131072, documents=500, zipf=0.8, drift_s=inf, document_tokens=6000.0, "
    "document_sigma=1.0, questions=4.0, think_s=20.0, think_sigma=1.0, question_tokens=50.0, answer_tokens=200.0, "
    "length_sigma=0.8, prompt_tokens=200",
    "prompts": "rate_per_s=2.0, context_tokens=131072, prompts=5, zipf=1.0, drift_s=inf, prompt_tokens=4000.0, "
    "prompt_sigma=0.5, question_tokens=150.0, answer_tokens=200.0, length_sigma=1.0",
    "best-of-n": "rate_per_s=0.5, context_tokens=131072, samples=8, prompt_tokens=200, problem_tokens=600.0, "
    "answer_tokens=600.0, length_sigma=0.8",
    "tenants": "rate_per_s=1.0, context_tokens=131072, prompt_tokens=1500.0, prompt_sigma=0.8, zipf=1.0, drift_s=inf, "
    "length_sigma=1.0, turns=3.0, think_s=30.0, think_sigma=1.0, question_tokens=80.0, answer_tokens=250.0, "
    "prompts=100",
}
"""The defaults of the recorded figures: "chat, seed 1" must stay the same trace."""


# --- every workload -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", WORKLOADS)
def test_the_defaults_are_those_of_the_recorded_figures(kind: str) -> None:
    assert repr(WORKLOADS[kind]()) == f"{WORKLOADS[kind].__name__}({DEFAULTS[kind]})"


@pytest.mark.parametrize("workload", EVERY, ids=ids)
def test_a_seed_determines_the_trace(workload: Workload) -> None:
    one, two, other = (generate(workload, 500, seed=seed) for seed in (7, 7, 8))
    assert columns(one) == columns(two)
    assert not set(one.whole.blocks.tolist()) & set(other.whole.blocks.tolist())


@pytest.mark.parametrize("workload", EVERY, ids=ids)
@pytest.mark.parametrize("block_size", [1, 16, 512])
def test_a_block_has_one_parent_one_depth_and_one_length(workload: Workload, block_size: int) -> None:
    if block_size == 1:
        workload = _short(workload)
    trace = generate(workload, 300, seed=1, block_size=block_size)
    batch = trace.whole
    parents = np.concatenate([[0], batch.blocks[:-1]])
    parents[batch.offsets[:-1]] = 0
    known: dict[int, tuple[int, int, int]] = {}
    facts = zip(parents.tolist(), batch.depths.tolist(), batch.tokens(block_size).tolist(), strict=True)
    for block, fact in zip(batch.blocks.tolist(), facts, strict=True):
        assert known.setdefault(block, fact) == fact
    assert (batch.lengths == -(-batch.input_tokens // block_size)).all()


def _short(workload: Workload) -> Workload:
    if isinstance(workload, Mix):
        return replace(workload, parts=tuple((_short(part), weight) for part, weight in workload.parts))
    return replace(workload, context_tokens=3000)  # type: ignore[call-arg]


@pytest.mark.parametrize("workload", EVERY, ids=ids)
def test_numbers_are_in_range_and_names_known(workload: Workload) -> None:
    trace = generate(workload, 2000, seed=2)
    batch = trace.whole
    assert len(trace) == 2000
    assert (np.diff(batch.time_s) >= 0).all()
    assert batch.input_tokens.min() >= 1
    assert batch.output_tokens.min() >= 1
    assert batch.input_tokens.max() <= 131072
    assert set(batch.kind.tolist()) == set(range(1, len(trace.kinds)))
    assert batch.tenant.max() < len(trace.tenants)


@pytest.mark.parametrize("workload", EVERY, ids=ids)
def test_the_context_is_never_overrun(workload: Workload) -> None:
    batch = generate(_short(workload), 1000, seed=3).whole
    assert batch.input_tokens.max() <= 3000


def test_the_size_of_blocks_changes_nothing_else() -> None:
    fine, coarse = (generate(Chat(), 300, seed=4, block_size=size).whole for size in (16, 64))
    for name in ("time_s", "input_tokens", "output_tokens", "chat", "turn"):
        assert (getattr(fine, name) == getattr(coarse, name)).all()
    small, large = paths(fine), paths(coarse)
    for at in range(1, 300):
        assert common(large[0], large[at]) == common(small[0], small[at]) // 4


# --- parameters ---------------------------------------------------------------------------------------------------


def test_chats() -> None:
    chat = Chat(rate_per_s=2.0, turns=4.0, think_s=5.0, think_sigma=0.7, question_tokens=90, answer_tokens=200)
    batch = generate(chat, 40_000, seed=5).whole
    begun = batch.time_s[batch.turn == 1]
    assert near(len(begun) / begun[-1], 2.0, 0.05)
    assert near(np.diff(begun).std(), 0.5, 0.05)  # exponential: equal to the mean
    order = np.lexsort((batch.turn, batch.chat))
    follows = np.flatnonzero(np.diff(batch.chat[order]) == 0)
    pauses = np.diff(batch.time_s[order])[follows]
    assert near(np.median(pauses), 5.0, 0.05)
    assert near(np.log(pauses).std(), 0.7, 0.05)
    assert near(np.median(batch.output_tokens), 200, 0.05)
    assert near(np.log(batch.output_tokens).std(), 1.0, 0.05)
    ended = np.bincount(batch.chat[batch.time_s < begun[-1] - 300])
    assert near(ended[ended > 0].mean(), 4.0, 0.05)
    grown = np.diff(batch.input_tokens[order])[follows] - batch.output_tokens[order][follows]
    assert grown.min() >= 1  # a turn is the previous one, its answer, and a question
    assert near(np.median(grown), 90, 0.05)


def test_sessions_begin_to_the_end_of_a_trace() -> None:
    batch = generate(Chat(turns=20.0, think_s=100.0), 5000, seed=14).whole
    begun = batch.time_s[batch.turn == 1]
    late = begun > batch.time_s[-1] * 0.8
    assert near(late.sum() / (batch.time_s[-1] * 0.2), 1.0, 0.3)


def test_the_turns_of_a_chat_share_all_that_was_said_in_whole_blocks() -> None:
    trace = generate(Chat(), 600, seed=6, block_size=16)
    batch, found = trace.whole, paths(trace.whole)
    last: dict[int, int] = {}
    continued = 0
    for at, chat in enumerate(batch.chat.tolist()):
        if chat in last:
            assert common(found[last[chat]], found[at]) == batch.input_tokens[last[chat]] // 16
            continued += 1
        last[chat] = at
    assert continued > 100
    roots = {path[0] for path in found}
    assert len(roots) == 4  # system prompts


def test_agents_come_in_bursts_and_grow_at_short_intervals() -> None:
    agents = Agents(rate_per_s=1.0, burst=4.0, steps=10.0, tool_s=3.0, result_tokens=300, call_tokens=100)
    batch = generate(agents, 40_000, seed=7, block_size=512).whole
    begun = batch.time_s[batch.turn == 1]
    assert near(len(begun) / begun[-1], 1.0, 0.1)
    assert near(len(begun) / len(np.unique(begun)), 4.0, 0.1)
    order = np.lexsort((batch.turn, batch.chat))
    follows = np.flatnonzero(np.diff(batch.chat[order]) == 0)
    assert near(np.median(np.diff(batch.time_s[order])[follows]), 3.0, 0.05)
    results = np.diff(batch.input_tokens[order])[follows] - batch.output_tokens[order][follows]
    assert near(np.median(results), 300, 0.05)


def test_documents_are_shared_by_visits_and_questions_are_not() -> None:
    documents = Documents(documents=20, zipf=1.0, questions=3.0, document_tokens=2000, document_sigma=0.1)
    trace = generate(documents, 6000, seed=8, block_size=16)
    found = paths(trace.whole)
    opened = [path[20] for path in found]  # after 200 tokens of the system prompt
    uses = sorted((opened.count(block) for block in set(opened)), reverse=True)
    assert len(uses) == 20
    assert near(uses[0] / uses[9], 10.0, 0.4)
    one, two = (found[at] for at in [at for at, block in enumerate(opened) if block == opened[0]][:2])
    assert common(one, two) >= 100
    assert len({path[-1] for path in found}) == len(found)
    assert len({path[0] for path in found}) == 1


def test_few_system_prompts_have_many_users() -> None:
    batch = generate(Prompts(prompts=3, prompt_sigma=0.0), 2000, seed=9, block_size=100).whole
    found = paths(batch)
    assert len({tuple(path[:40]) for path in found}) == 3
    assert len({path[40] for path in found}) == len(found)
    assert (batch.turn == 1).all()
    assert near(len(batch) / batch.time_s[-1], 2.0)


def test_the_samples_of_a_problem_are_equal_and_at_once() -> None:
    batch = generate(BestOfN(samples=5), 1000, seed=10).whole
    found = paths(batch)
    for at in range(0, 1000, 5):
        assert all(path == found[at] for path in found[at : at + 5])
        assert len(set(batch.time_s[at : at + 5].tolist())) == 1
        assert len(set(batch.output_tokens[at : at + 5].tolist())) > 1
    assert len({tuple(path) for path in found}) == 200


def test_tenants_have_prompts_of_their_own_by_zipfs_law() -> None:
    trace = generate(Tenants(prompts=50, zipf=1.0, turns=1.0), 20_000, seed=11)
    batch = trace.whole
    assert trace.tenants[:2] == ("", "tenant 1")
    roots = batch.blocks[batch.offsets[:-1]]
    whole = batch.input_tokens >= 64
    assert len({(tenant, root) for tenant, root in zip(batch.tenant[whole], roots[whole], strict=True)}) < 60
    counts = np.bincount(batch.tenant, minlength=51)[1:]
    wanted = 1 / np.arange(1, 51)
    assert np.abs(counts / counts.sum() - wanted / wanted.sum()).max() < 0.01


@pytest.mark.parametrize("exponent", [0.0, 0.6, 1.0, 1.5])
@pytest.mark.parametrize(
    "make",
    [lambda zipf: Documents(zipf=zipf, documents=50), lambda zipf: Tenants(zipf=zipf, prompts=50)],
    ids=["documents", "tenants"],
)
def test_popularity_has_the_given_exponent(make: Callable[[float], Workload], exponent: float) -> None:
    drawn = make(exponent).requests(np.random.SeedSequence(9), 60_000)
    place = 1 if drawn.contents.shape[1] == 3 else 0
    counts = np.sort(np.unique(drawn.contents[drawn.turn == 1, place], return_counts=True)[1])[::-1]
    ranks = np.log(np.arange(1, len(counts) + 1))
    tried = np.arange(0, 3, 0.01)
    likelihood = [-s * (counts * ranks).sum() - counts.sum() * np.log(np.exp(-s * ranks).sum()) for s in tried]
    assert abs(tried[int(np.argmax(likelihood))] - exponent) < 0.08  # sorting makes counts look less equal


def test_numbers_of_turns_are_geometric() -> None:
    batch = generate(Chat(turns=4.0, think_s=0.1), 40_000, seed=11).whole
    turns = np.bincount(np.unique(batch.chat, return_counts=True)[1], minlength=9)[1:9] / len(np.unique(batch.chat))
    assert np.abs(turns - 0.25 * 0.75 ** np.arange(8)).max() < 0.01


def test_a_trace_says_how_it_was_made() -> None:
    note = generate(Chat(turns=7.0), 50, seed=3).notes[0]
    assert "seed 3" in note and np.__version__ in note
    assert all(f"{field.name}=" in note for field in fields(Chat)) and "turns=7," in note
    mix = Mix(rate_per_s=2.0, parts=((Chat(), 3.0), (Agents(rate_per_s=50.0), 1.0)))
    stated = generate(mix, 50, seed=3).notes[0]
    assert stated.startswith("Generated, not recorded, with seed")
    assert ": chat=3,agents=1 with rate_per_s=2: chat with rate_per_s=1.5, context_tokens=131072, prompt" in stated
    assert "; agents with rate_per_s=0.5, context_tokens=131072, prompt_tokens=6000," in stated, "the effective rates"
    assert "(" not in stated


def test_popularity_drifts() -> None:
    still = generate(Tenants(), 20_000, seed=12).whole
    drifting = generate(Tenants(drift_s=1000.0), 20_000, seed=12).whole

    def moved(batch: Batch) -> float:
        early, late = (np.bincount(batch.tenant[part], minlength=101) for part in (slice(0, 4000), slice(-4000, None)))
        return float(np.abs(early - late).sum() / 8000)

    assert moved(still) < 0.2  # by chance alone
    assert moved(drifting) > 0.4
    counts = np.sort(np.bincount(drifting.tenant[:4000]))[::-1]
    assert counts[0] > 4000 / 20  # at any time some tenants are popular


def test_ranks_change_hands_one_after_another() -> None:
    batch = generate(Tenants(prompts=50, turns=1.0, drift_s=10_000.0), 10_000, seed=15).whole
    early, late = (np.bincount(batch.tenant[part], minlength=51) for part in (slice(0, 2500), slice(-2500, None)))
    assert float(np.abs(early - late).sum() / 5000) > 0.3, "within the time that one item keeps its rank"


def test_parts_of_a_mix_share_no_conversation_however_few_they_are() -> None:
    talk = Mix(rate_per_s=0.001, parts=((Chat(turns=30.0), 1.0), (Agents(steps=30.0), 1.0)))
    both = 0
    for seed in range(20):
        batch = generate(talk, 40, seed=seed).whole
        chats, tasks = (set(batch.chat[batch.kind == kind].tolist()) for kind in (1, 2))
        assert not chats & tasks
        both += bool(chats and tasks)
    assert both > 5


def test_a_mix_has_its_shares_and_shares_nothing_between_parts() -> None:
    trace = generate(replace(MIX, rate_per_s=3.0), 20_000, seed=13)
    batch = trace.whole
    assert trace.kinds == ("", "chat", "tenants", "tenants", "best-of-n")
    assert len(trace.tenants) == 1 + 100 + 7
    begun = np.bincount(batch.kind[batch.turn == 1], minlength=5)[1:]
    assert near(begun[0] / begun[1:3].mean(), 3.0)
    assert near(begun[3] / begun[1:3].mean(), 1.0, 0.2)
    assert near(begun.sum() / batch.time_s[-1], 3.0)
    kinds = batch.kind[batch.owners]
    sets = [set(batch.blocks[kinds == kind].tolist()) for kind in range(1, 5)]
    assert sum(map(len, sets)) == len(set().union(*sets))
    assert {int(t) for t in batch.tenant[batch.kind == 3]} == set(range(101, 108))
    talks = [set(batch.chat[batch.kind == kind].tolist()) for kind in (1, 2, 3)]
    assert not (talks[0] & talks[1]) | (talks[1] & talks[2]) | (talks[0] & talks[2])
    assert set(batch.chat[batch.kind == 4].tolist()) == {-1}


# --- refusals, and the command ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("chats", {}),
        ("chat", {"colour": "1"}),
        ("chat", {"turns": "many"}),
        ("chat", {"turns": "0"}),
        ("chat", {"prompts": "2.5"}),
        ("chat", {"drift_s": "0"}),
        ("chat", {"zipf": "nan"}),
        ("chat=0", {}),
        ("chat=1,chat=2", {}),
        ("chat=1,agents=x", {}),
        ("chat=1,agents=1", {"turns": "3"}),
        ("chat=1,agents=1", {"agents.turns": "3"}),
        ("chat=1,agents=1", {"rate_per_s": "-1"}),
    ],
)
def test_invalid_names_and_values_are_refused(kind: str, settings: dict[str, str]) -> None:
    with pytest.raises(BadArgument):
        parse_workload(kind, settings)


def test_settings_arrive() -> None:
    assert parse_workload("chat", {"turns": "7", "drift_s": "inf"}) == Chat(turns=7.0)
    assert parse_workload("best-of-n", {"samples": "3"}) == BestOfN(samples=3)
    mixed = parse_workload("chat=3,agents", {"chat.turns": "7", "rate_per_s": "2"})
    assert mixed == Mix(rate_per_s=2.0, parts=((Chat(turns=7.0), 3.0), (Agents(), 1.0)))


@pytest.mark.parametrize("wrong", [{"requests": 0}, {"seed": -1}, {"block_size": 0}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(BadArgument):
        generate(Chat(), **{"requests": 10, **wrong})


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from mainstem.replay.commands.trace import trace

    target = tmp_path / "chat.mstrace"
    words = ["generate", "chat", "--requests", "50", "--seed", "3", "--set", "turns=2", "-o", str(target), "--json"]
    trace(words, exit_on_error=False, result_action="return_value")
    facts = json.loads(capsys.readouterr().out)
    made = Trace.open(target)
    assert columns(made) == columns(generate(Chat(turns=2.0), 50, seed=3))
    assert (facts["requests"], facts["distinct_blocks"]) == (50, made.distinct_blocks)
    trace(["kinds"], exit_on_error=False, result_action="return_value")
    shown = capsys.readouterr().out
    assert all(name in shown for name in WORKLOADS)
