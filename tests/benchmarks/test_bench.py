"""The benchmarks: workloads do not change, our own peers are right, scenarios measure what they claim, and the runners
write their measurements."""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rigs.ghost import EOS, VOCAB, GhostTokenizer
from rigs.slow import slow_but
from transformers import LlamaConfig, LlamaForCausalLM

from bench import __main__ as command
from bench import (
    child,
    clock,
    generate,
    goals,
    index,
    install_peers,
    replay,
    scenarios,
    tables,
    throughput,
    tiers,
    ttft,
)
from bench.block_dict import BlockCache
from bench.entries import SYSTEMS, Entry
from bench.python_radix import RadixCache
from bench.report import Report
from bench.scenarios import SCENARIOS, Sizes
from bench.systems import MainstemTree, Make, System
from bench.workers import Worker
from bench.workload import Chats, Documents, digest
from mainstem import Tree
from mainstem.runtime.models.loading import LoadedModel

ROOT = Path(__file__).parents[2]
TINY = Chats(chats=6, turns=3, open_chats=3, systems=2, system_length=64, question_lengths=(3, 30), answer_length=8)
TINY_DOCUMENTS = Documents(documents=4, requests=30, lengths=(1, 2))
TINY_SIZES = Sizes(
    long_pages=(16,), prompt=1024, nodes=(1, 4), calls=5, leaves=40, evictions=20, turns=12, ends=3, namespaces=10,
    chunk=64, chunk_prompts=1, near=128, far=832, steps=3, decode_chunk=40, decode_far=512, busy_prompt=200,
    busy_calls=50, cold_roots=1, cold_calls=20, memory_tokens=65_536, split_prompts=3, budget_s=0.05, limit_s=20.0,
)  # fmt: skip
OURS = ("mainstem", "mainstem-tree", "python", "dict")

FIELDS = {"name", "date", "quick", "seconds", "commit", "machine", "versions", "settings", "rows", "notes"}


@pytest.fixture
def tiny_model() -> Iterator[LoadedModel]:
    """Random weights, on one thread: threads that wait for a busy core cost more than they gain."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=EOS,
    )  # fmt: skip
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = LlamaForCausalLM(config).eval()
    yield LoadedModel(model, GhostTokenizer(), "tiny", torch.float32, 128)  # type: ignore[arg-type]
    torch.set_num_threads(before)


def _report(name: str = "index") -> Report:
    return Report(name, "2026-01-02T03:04:05+00:00", quick=True, progress=lambda line: None)


def _written(report: Report, folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(report.write(folder).read_text())
    return loaded


@pytest.mark.slow
def test_the_workload_never_changes() -> None:
    prompts = list(Chats().prompts())
    assert (len(prompts), sum(map(len, prompts))) == (2400, 8_095_792)
    assert digest(prompts) == "99987e8fe5f75eb8613e3b6d25902f9eeb3ef45414d21e3079a1682b65bb90f5"


def test_the_digest_depends_on_where_prompts_end() -> None:
    assert digest([[1, 2], [3]]) != digest([[1], [2, 3]])


@pytest.mark.parametrize("page_size", [1, 4])
def test_python_radix_agrees_with_the_tree(page_size: int) -> None:
    """Same hits, and under pressure the same pages in the same order."""
    chance = random.Random(page_size)
    ours, theirs = Tree(page_size), RadixCache(page_size)
    slots, held = 0, 0
    for _ in range(600):
        key = np.array([chance.randrange(3) for _ in range(chance.randrange(40))], np.int32)
        match = ours.match(key)
        found, node = theirs.match(key)
        assert len(found) == match.length
        assert found[::page_size].tolist() == (match.page_ids * page_size).tolist()
        ours.lock(match.node)
        theirs.lock(node)
        if held > 150:
            want = chance.randrange(1, 60 // page_size)
            (freed,) = ours.evict(want)
            assert _page_ids(theirs.evict(want * page_size), page_size) == sorted(freed.tolist())
            held -= len(freed) * page_size
        whole = len(key) // page_size - len(match.page_ids)
        new = np.arange(slots, slots + whole * page_size, dtype=np.int32)
        slots += len(new)
        held += len(new)
        page_ids = np.concatenate([match.page_ids, new[::page_size] // page_size])
        assert ours.insert(key, page_ids).existing == theirs.insert(key, np.concatenate([found, new])) == match.length
        ours.unlock(match.node)
        theirs.unlock(node)
    assert held > 100


def _page_ids(freed: list[Any], page_size: int) -> list[int]:
    return sorted(np.concatenate([*freed, np.empty(0, np.int32)])[::page_size].astype(int) // page_size)


def test_a_dict_of_hashes_finds_what_the_tree_finds() -> None:
    """The same hits while there is room, and separate prefixes for each namespace."""
    chance = random.Random(0)
    ours, theirs = Tree(4), BlockCache(4, 10_000)
    for count in range(300):
        key = np.array([chance.randrange(3) for _ in range(chance.randrange(40))], np.int32)
        name = chance.choice([None, "a", "b"])
        found, page_ids = theirs.match(key.tobytes(), name)
        assert 4 * len(found) == 4 * len(page_ids) == ours.match(key, name).length, count
        theirs.lock(found)
        hashes, page_ids = theirs.insert(key.tobytes(), found, page_ids, name)
        ours.insert(key, page_ids, name)
        theirs.unlock(hashes)


def test_a_dict_of_hashes_evicts_ends_first_and_nothing_locked() -> None:
    cache = BlockCache(1, 4)
    first, _ = cache.insert(np.array([1, 2, 3], np.int32).tobytes(), [], [])
    assert cache.evict(1) == 0  # all are locked
    cache.unlock(first)
    kept, _ = cache.match(np.array([1], np.int32).tobytes())
    cache.lock(kept)
    cache.insert(np.array([7, 8], np.int32).tobytes(), [], [])  # takes the free page and the page of the end
    assert cache.match(np.array([1, 2, 3], np.int32).tobytes())[0] == first[:2]
    assert cache.evict(9) == 1  # the middle; the beginning is locked


def test_documents_are_read_again_and_never_grow() -> None:
    shape = Documents(documents=5, requests=200)
    prompts = list(shape.prompts())
    assert digest(prompts) == digest(shape.prompts())
    counts: dict[tuple[int, ...], int] = {}
    for prompt in prompts:
        text = len(prompt) // 64 * 64
        assert 1 <= len(prompt) - text <= 8
        counts[tuple(prompt[:text])] = counts.get(tuple(prompt[:text]), 0) + 1
    assert len(counts) == 5
    assert max(counts.values()) > 2 * min(counts.values())


def test_policies_differ_where_documents_are_read_again() -> None:
    prompts = list(Documents(documents=40, requests=400, lengths=(1, 4)).prompts())
    make: Callable[..., System] = SYSTEMS["mainstem"].find()
    rates = {
        policy: replay.measure(make(16, 2000, policy=policy), prompts, "prepared")["hit_rate"]
        for policy in ("lru", "lfu", "fifo")
    }
    assert rates["lfu"] > rates["lru"] > rates["fifo"] > 0


def test_the_clock_subtracts_its_own_overhead() -> None:
    def wait(n: int) -> int:
        time.sleep(n / 1000)
        return n

    timed = clock.sample(wait, [(2,), (0,)])
    assert timed.results == [2, 0]
    assert 2000 <= timed.us[0] < 200_000
    nothing = clock.sample(lambda n: n, ((n,) for n in range(1000)))
    assert 0 <= 1000 * sorted(nothing.us)[500] < clock._overhead_ns() / 2
    assert len(clock.sample(time.sleep, [(0.01,)] * 50, budget_s=0.001).us) == 3


def test_percentiles() -> None:
    values = list(range(100, 0, -1))
    assert [clock.percentile(values, part) for part in (0, 0.5, 0.99, 1)] == [1, 50, 99, 100]
    assert clock.percentile([7.0], 0.99) == 7


MEASURES = {
    "long": {"page 16, 1 node, µs", "page 16, 4 nodes, µs"},
    "lists": {"µs"},
    "miss": {"µs"},
    "leaves": {f"{state}, {part} µs" for state in ("all free", "half locked") for part in ("p50", "p99")},
    "session": {"first 3 turns, µs", "last 3 turns, µs"},
    "namespaces": {f"{visit} visit, {part} µs" for visit in ("first", "second") for part in ("p50", "p99")},
    "chunks": {"near, µs", "far, µs", "far / near", "before the first, µs"},
    "decode": {"near, µs", "far, µs", "far / near"},
    "busy": {"p50 µs", "p99 µs"},
    "cold": {"p50 µs", "p99 µs"},
    "memory-4096": {"bytes a token", "with its pool, bytes a token"},
    "memory-256": {"bytes a token", "with its pool, bytes a token"},
    "memory-64": {"bytes a token", "with its pool, bytes a token"},
    "split": {"look-up that splits, µs", "held, bytes a prompt"},
}
REPORTED = {"as it says itself, bytes a token", "held / the same without the rest"}


@pytest.fixture
def thawed() -> Iterator[None]:
    """Scenarios freeze their inputs, because their process ends with them."""
    yield
    gc.unfreeze()


@pytest.mark.parametrize("system", slow_but(OURS, "mainstem", "mainstem-tree"))
def test_scenarios_of_ours(system: str) -> None:
    """Each scenario checks its own hits and evictions, and raises if they are wrong."""
    lacks = SYSTEMS[system].find().lacks
    with Worker(system, sys.executable) as worker:
        for name in SCENARIOS:
            task = {"task": "scenario", "name": name, "sizes": asdict(TINY_SIZES), "small": False}
            answer = worker.ask(task)
            if name in lacks:
                assert answer == {"error": lacks[name]}
            else:
                _check_scenario(system, name, answer)


def _check_scenario(system: str, name: str, answer: dict[str, Any]) -> None:
    expected = MEASURES[name] - ({"page 16, 4 nodes, µs"} if system == "dict" else set())
    assert answer["measures"].keys() - REPORTED == expected, answer
    assert all(value > 0 for measure, value in answer["measures"].items() if "µs" in measure)
    if name == "leaves":
        assert answer["facts"]["all free, pages freed"] == answer["facts"]["all free, calls"] > 2
        assert [answer["facts"][f"{state}, free leaves"] for state in ("all free", "half locked")] == [40, 20]
    if name == "cold":
        assert (answer["facts"]["nodes"], answer["facts"]["tokens in the tree"]) == (255, 255 * 64)
    if name == "split" and system.startswith("mainstem"):
        assert answer["measures"]["held / the same without the rest"] < 2


@pytest.mark.usefixtures("thawed")
def test_a_scenario_refuses_a_system_that_finds_too_little() -> None:
    class Forgetful(MainstemTree):
        def look_up(self, key: Any) -> int:
            return max(super().look_up(key) - 16, 0)

        def evict(self, pages: int) -> int:
            return 0

    for name in ("long", "lists", "leaves", "chunks", "decode", "busy", "cold", "split"):
        with pytest.raises(scenarios.WrongAnswer):
            SCENARIOS[name](Forgetful, TINY_SIZES, False)


def test_a_prompt_is_cut_into_nodes_that_cannot_be_joined() -> None:
    system = MainstemTree(16, 8192)
    prompt = np.arange(1024, dtype=np.int32)
    scenarios.cut(system, prompt, 8, 16)
    assert system.tree.stats().nodes == 8 + 7
    assert system.look_up(prompt) == 1024


def test_a_forest_has_two_branches_at_each_node() -> None:
    forest = scenarios.Forest(2, 16)
    tree = Tree(16)
    for prompt in forest.prompts(np.arange(forest.leaves)):
        tree.insert(prompt, range(32))
    assert tree.stats().nodes == forest.nodes == 2 * 255
    assert tree.stats().cached_pages * 16 == forest.tokens
    assert {view.children for view in tree.nodes()} == {0, 2}


def test_memory_is_that_of_the_index() -> None:
    """In its own process: it grows by what the tree reports, and no less."""
    with Worker("mainstem", sys.executable) as worker:
        sizes = {"memory_tokens": 1_000_000}
        for name in ("memory-256", "memory-64"):
            answer = worker.ask({"task": "scenario", "name": name, "sizes": sizes, "small": False})
            reported = answer["measures"]["as it says itself, bytes a token"]
            assert 4 < reported < 16
            assert 0.9 * reported < answer["measures"]["bytes a token"] < 1.5 * reported + 1


def test_a_scenario_runs_apart() -> None:
    def end() -> dict[str, Any]:
        os.kill(os.getpid(), 9)
        return {}

    def wait() -> dict[str, Any]:
        time.sleep(30)
        return {}

    assert child.run_apart(lambda: {"pid": os.getpid()}, 10)["pid"] != os.getpid()
    assert child.run_apart(lambda: {"a": [1][2]}, 10) == {"error": "IndexError: list index out of range"}
    assert child.run_apart(wait, 0.1) == {"error": "took more than 0.1 s"}
    assert child.run_apart(end, 10) == {"error": "ended by signal 9"}


def test_a_record_has_a_name_of_its_own_and_says_how_long_it_took(tmp_path: Path) -> None:
    path = _report("core").write(tmp_path, recorded=True)
    assert path == tmp_path / "recorded-core.json"
    kind = replace(_report("core"), kind="amx").write(tmp_path, recorded=True)
    assert kind == tmp_path / "recorded-core-amx.json"
    assert json.loads(path.read_text())["seconds"] >= 0


@pytest.mark.parametrize("part", [["--quick"], ["--only", "miss"], ["--systems", "python"], ["--trace", "file"]])
def test_a_part_of_a_run_is_not_recorded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: list[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "core", "--record", *part])
    with pytest.raises(SystemExit):
        command.main()
    assert "only whole runs are recorded" in capsys.readouterr().err


def test_a_benchmark_that_is_terminated_ends_what_it_has_started(tmp_path: Path) -> None:
    program = """if True:
        import os, pathlib, signal, sys, time
        from bench import __main__ as command

        def wait(*_):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
            finally:
                pathlib.Path(ended).touch()

        command._run = wait
        ended, sys.argv = sys.argv[1], ["bench", "core", "--quick"]
        command.run()
    """
    ended = tmp_path / "ended"
    done = subprocess.run([sys.executable, "-c", program, str(ended)], cwd=Path(__file__).parents[2], timeout=120)
    assert done.returncode == 128 + signal.SIGTERM and ended.exists()


def test_the_index_benchmark_writes_rows(tmp_path: Path) -> None:
    settings = index.Settings(
        TINY, capacity_tokens=300, page_sizes=(1, 16), rounds=2, systems=("mainstem", "python", "dict", "vllm"),
        documents=TINY_DOCUMENTS, hit_capacities=(300,), sizes=TINY_SIZES, scenario_rounds=2,
        parts=("requests", "hits", "miss", "leaves", "namespaces"),
    )  # fmt: skip
    report = _report()
    index.run(settings, report)
    written = _written(report, tmp_path)
    assert set(written) == FIELDS | {"hit_rates", "scenarios", "goals"}
    assert written["settings"]["digest"] == digest(TINY.prompts())
    assert set(written["machine"]) == {"cpu", "cores", "load", "system", "python"}
    absent = [] if find_spec("vllm") else [note for note in written["notes"] if note.startswith("vLLM, sha256: not ")]
    assert written["notes"] == absent
    assert [(row["page_size"], row["system"]) for row in written["rows"]] == [
        (page_size, system) for page_size in (1, 16) for system in settings.systems
    ]
    for row in written["rows"]:
        if (row["page_size"], row["system"]) == (1, "dict"):
            assert row["note"] == "not run: a hash for each token: not how it is used"
        elif row["system"] != "vllm":
            assert 0 < row["hit_rate"] < 1
            for mode in ("prepared", "lists"):
                assert set(row[mode]) == {"us", "least_us", "most_us", "cpu_us", "ratio", "cpu_ratio"}
            assert set(row["parts_us"]) == {"match", "insert", "evict"}
        elif find_spec("vllm") is None:
            assert row["note"].startswith("not installed: ")
    _check_hit_rates(written["hit_rates"])
    _check_scenarios(written["scenarios"])
    assert {goal["what"] for goal in written["goals"] if goal["met"] is not None} == {
        *(f"a request of the chats, over plain Python, page {page}" for page in (1, 16)),
        *(f"eviction of a page, leaves {s}, {p}" for s in ("all free", "half locked") for p in ("p50", "p99")),
    }
    assert len(report.tables) == 6


def _check_hit_rates(rows: list[dict[str, Any]]) -> None:
    assert {row["workload"] for row in rows} == {"chats", "reread"}
    assert {row["policy"] for row in rows if row["system"] == "mainstem"} >= {"lru", "lfu", "fifo", "slru"}
    ours = {row["workload"]: row["hit_rate"] for row in rows if row["system"] == "mainstem" and row["policy"] == "lru"}
    assert all(0 < rate < 1 for rate in ours.values())
    for row in rows:
        if row["system"] in ("python", "dict"):
            assert row["hit_rate"] == pytest.approx(ours[row["workload"]], abs=0.05)


def _check_scenarios(rows: list[dict[str, Any]]) -> None:
    found = {(row["scenario"], row["system"]): row for row in rows}
    assert len(found) == 3 * 4
    assert found["namespaces", "python"]["note"] == "it has no namespaces"
    for scenario in ("miss", "leaves", "namespaces"):
        row = found[scenario, "mainstem"]
        assert row["measures"].keys() == MEASURES[scenario] and row["facts"]["rounds"] == 2
        assert all(0 < v["least"] <= v["median"] <= v["most"] for v in row["measures"].values())
        if find_spec("vllm") is None:
            assert found[scenario, "vllm"]["note"].startswith("not installed: ")


def test_a_slow_or_failed_scenario_is_not_repeated() -> None:
    settings = index.Settings(repeat_below_s=1)
    assert index._worth_repeating({"measures": {}, "took_s": 0.9}, settings)
    assert not index._worth_repeating({"measures": {}, "took_s": 1.1}, settings)
    assert not index._worth_repeating({"error": "no", "took_s": 0.1}, settings)


def test_a_peer_that_is_not_installed_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name that no process knows takes its place: the process ends before it is ready."""
    monkeypatch.setitem(SYSTEMS, "missing", Entry("a peer", "peer", "bench.peers:Missing", peer=True))
    report = _report()
    settings = index.Settings(
        TINY, 300, (16,), 1, ("mainstem", "missing"), sizes=TINY_SIZES, scenario_rounds=1, parts=("requests", "miss")
    )
    index.run(settings, report)
    written = _written(report, tmp_path)
    ours, theirs = written["rows"]
    assert "prepared" in ours and "prepared" not in theirs
    assert theirs["label"] == "a peer" and theirs["note"].startswith("failed: KeyError")
    assert written["notes"] == ["a peer: failed: KeyError: 'missing'"]
    assert [row["note"][:6] for row in written["scenarios"]] == ["", "failed"]


def test_parts_and_systems_can_be_chosen() -> None:
    chosen = index.Settings().only(["miss"], ["python"])
    assert (chosen.parts, chosen.systems) == (("miss",), ("mainstem", "python"))
    assert index.Settings().only(None, None) == index.Settings()


def test_different_hit_rates_are_reported() -> None:
    rows = [{"label": name, "page_size": 1, "hit_rate": rate} for name, rate in (("a", 0.5), ("b", 0.5), ("c", 0.4))]
    assert list(index._disagreements(rows)) == ["c, page 1: hit rate 0.4000, not 0.5000"]


def test_goals_are_judged_by_the_rows() -> None:
    requests = [{"system": "sglang-rust", "page_size": 16, "prepared": {"ratio": 20.0}, "lists": {"ratio": 4.0}}]
    cells = [{"system": "mainstem", "scenario": "decode", "measures": {"far, µs": {"median": 1.0}}}]
    judged = {goal["what"]: goal for goal in goals.judge(goals.Rows(requests, cells))}
    assert len(judged) == len(goals.GOALS)
    fast, slow = "a request of the chats, over SGLang's Rust core", "the same from lists, over SGLang's Rust core"
    assert judged[f"{fast}, page 16"]["measured"] == 0.05 and judged[f"{fast}, page 16"]["met"] is True
    assert judged[f"{slow}, page 16"]["measured"] == 0.25 and judged[f"{slow}, page 16"]["met"] is False
    assert judged[f"{fast}, page 1"]["measured"] is None and judged[f"{fast}, page 1"]["met"] is None
    assert judged["16 decoded tokens far behind"] == {
        "what": "16 decoded tokens far behind", "goal": 1, "unit": "µs", "measured": 1.0, "met": True,
    }  # fmt: skip
    assert tables.goals_table(list(judged.values())).row_count == len(judged)


def test_goals_name_measures_that_exist() -> None:
    """A goal with a wrong measure name would never be judged."""
    asked: set[tuple[str, str]] = set()

    class Spy(goals.Rows):
        def measure(self, system: str, scenario: str, name: str) -> float | None:
            asked.add((scenario, name))
            return None

    goals.judge(Spy([], []))
    known = MEASURES | {"long": {"page 16, 1 node, µs", "page 16, 64 nodes, µs"}}
    assert [pair for pair in asked if pair[1] not in known[pair[0]] | REPORTED] == []


@pytest.mark.slow
def test_all_of_ours_are_driven_alike() -> None:
    prompts = list(TINY.prompts())[:8]
    for page_size in (1, 16):
        makes: list[Make] = [SYSTEMS[name].find() for name in OURS if page_size in SYSTEMS[name].page_sizes]
        rates = {
            replay.measure(make(page_size, 300), prompts, mode)["hit_rate"] for make in makes for mode in replay.MODES
        }
        assert len(rates) == 1


def test_peers_are_pinned_and_installed_part_by_part() -> None:
    found = install_peers.parts(install_peers.LIST.read_text())
    assert len(found) == 5
    assert all("==" in line for lines in found.values() for line in lines)
    called: list[list[str]] = []

    def pip(arguments: list[str]) -> int:
        called.append(arguments)
        return "b==2" in arguments

    text = "# part: one\na==1  # without its needs\nb==2\n\n# part: two\n# a remark\nc==3\n"
    assert install_peers.install(text, pip) == ["one"]
    wanted = [["--no-deps", "a==1"], ["b==2"], ["c==3"]]
    assert [[word for word in call if "==" in word or word == "--no-deps"] for call in called] == wanted


def test_a_benchmark_that_does_not_exist_is_refused() -> None:
    done = subprocess.run([sys.executable, "-m", "bench", "nothing"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "no such benchmark: nothing" in done.stderr


def test_time_to_first_token_reuses_the_prefix(tiny_model: LoadedModel, tmp_path: Path) -> None:
    report = _report("ttft")
    ttft.run(ttft.Settings((32, 64, 512), suffix_length=5, token_budget=64, repeats=(2, 1)), report, tiny_model)
    written = _written(report, tmp_path)
    assert set(written) == FIELDS
    fields = ("dtype", "prefix", "repeats", "prompt_tokens", "reused_tokens", "reused_cold")
    assert [tuple(row[field] for field in fields) for row in written["rows"]] == [
        ("float32", 32, 2, 37, 32, 0),
        ("float32", 64, 1, 69, 64, 0),
        ("float32", 122, 1, 127, 112, 0),  # shortened to the context of 128; whole pages are shared
    ]
    assert all(row["ratio"] == row["cold_s"] / row["warm_s"] > 0 for row in written["rows"])
    assert ttft.table(report.rows).row_count == 3


def test_generate_with_and_without_a_cache(tiny_model: LoadedModel, tmp_path: Path) -> None:
    report = _report("generate")
    settings = generate.Settings(prefix_length=80, question_length=4, new_tokens=(1, 5), rounds=2)
    tiny_model.model.eval()
    generate.run(settings, report, tiny_model)
    written = _written(report, tmp_path)
    assert [(row["new_tokens"], row["rounds"], row["equal"]) for row in written["rows"]] == [(1, 2, True), (5, 2, True)]
    assert all(row["ratio"] > 0 for row in written["rows"])
    assert written["hits"] == [{"prompt_tokens": 80 + 4 * 84, "cached_tokens": 4 * 80}]
    (goal,) = written["goals"]
    assert goal["met"] == (goal["measured"] <= goal["goal"])
    assert not report.failures


def test_throughput_with_and_without_reuse(tiny_model: LoadedModel, tmp_path: Path) -> None:
    report = _report("throughput")
    settings = throughput.Settings((1, 3), prefix_length=60, question_length=4, new_tokens=5)
    throughput.run(settings, report, tiny_model)
    written = _written(report, tmp_path)
    assert set(written) == FIELDS
    assert [row["concurrent"] for row in written["rows"]] == [1, 3]
    for row in written["rows"]:
        assert row["reuse"]["tokens_per_s"] == pytest.approx(5 * row["reuse"]["requests_per_s"])
        assert row["ratio"] == pytest.approx(row["reuse"]["requests_per_s"] / row["no_reuse"]["requests_per_s"])


def test_tiers_are_compared_with_their_floors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store that cannot be started, and one that loses values, are reported and stop nothing."""

    @contextmanager
    def missing(folder: Path, settings: tiers.Settings) -> Iterator[str]:
        raise FileNotFoundError("no such server")
        yield ""

    @contextmanager
    def small(folder: Path, settings: tiers.Settings) -> Iterator[str]:
        yield "memory:?capacity=10KB"

    monkeypatch.setattr(tiers, "STORES", {**tiers.STORES, "redis": missing, "s3": small})
    settings = tiers.Settings(
        page_sizes=(16, 64), dtypes=("float32",), layers=3, kv_heads=2, head_dim=16, copied_bytes=1 << 18,
        stored_bytes=1 << 18, batch_bytes=1 << 15, rounds=2, stores=("memory", "file", "redis", "s3"),
        folder=str(tmp_path),
    )  # fmt: skip
    report = _report("tiers")
    tiers.run(settings, report)
    written = _written(report, tmp_path)
    assert set(written) == FIELDS | {"goals"}
    floors = {tiers.MEMCPY, tiers.SYNCED, tiers.UNSYNCED}
    for page_size in (16, 64):
        own = {row["what"]: row for row in written["rows"] if row["page_size"] == page_size}
        assert set(own) == floors | {*tiers.HOST.values(), "memory", "file"}
        assert all(0 < row[way]["least"] <= row[way]["median"] for row in own.values() for way in ("down", "up"))
        assert {name for name, row in own.items() if "of" not in row} == floors
    assert [note.partition(":")[0] for note in written["notes"]] == ["redis is left out", "s3 failed"]
    assert [goal["met"] is None for goal in written["goals"]] == [False] * 3
    assert list(tmp_path.iterdir()) == [tmp_path / "tiers.json"]
    assert tiers.table(report.rows).row_count == 14
    assert tiers.goals_table(report.more["goals"]).row_count == 3


def test_goals_of_the_tiers_are_judged_by_pages_of_16() -> None:
    goal = tiers.Goal("what", "file", "up", tiers.SYNCED, 0.7)
    rows = [
        {"what": "file", "page_size": size, "dtype": "float32", "of": {tiers.SYNCED: {"up": part}}}
        for size, part in ((1, 0.1), (16, 0.7), (64, 0.2))
    ]
    (judged,) = tiers.judge(rows, [goal])
    assert judged["measured"] == 0.7
    assert judged["met"]
    rows[1]["of"] = {tiers.SYNCED: {"up": 0.69}}
    assert not tiers.judge(rows, [goal])[0]["met"]
    assert tiers.judge(rows[:1], [goal])[0]["met"] is None
