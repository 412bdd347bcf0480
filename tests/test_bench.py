"""The benchmarks: the workload is what it was, the peer in Python is right, and the runners write what they say."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from ghost import EOS, VOCAB, GhostTokenizer
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # bench/ is no part of the package

from bench import index, replay, throughput, ttft  # noqa: E402
from bench.python_radix import RadixCache  # noqa: E402
from bench.report import Report  # noqa: E402
from bench.workload import Chats, digest  # noqa: E402
from mainstem import Tree  # noqa: E402
from mainstem.runtime.models import LoadedModel  # noqa: E402

TINY = Chats(chats=6, turns=3, open_chats=3, systems=2, system_length=64, question_lengths=(3, 30), answer_length=8)


FIELDS = {"name", "date", "quick", "commit", "machine", "versions", "settings", "rows", "notes"}


class Tokenizer(GhostTokenizer):
    eos_token_id = EOS


@pytest.fixture
def tiny_model() -> Iterator[LoadedModel]:
    """Random weights, on one thread: threads that wait for a busy core cost more than they give."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, bos_token_id=0, eos_token_id=EOS,
    )  # fmt: skip
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    model = LlamaForCausalLM(config).eval()
    yield LoadedModel(model, Tokenizer(), "tiny", torch.float32, 128)  # type: ignore[arg-type]
    torch.set_num_threads(before)


def _report(name: str = "index") -> Report:
    return Report(name, "2026-01-02T03:04:05+00:00", quick=True, progress=lambda line: None)


def _written(report: Report, folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(report.write(folder).read_text())
    return loaded


def test_the_workload_never_changes() -> None:
    prompts = list(Chats().prompts())
    assert (len(prompts), sum(map(len, prompts))) == (2400, 8_095_792)
    assert digest(prompts) == "99987e8fe5f75eb8613e3b6d25902f9eeb3ef45414d21e3079a1682b65bb90f5"


def test_the_digest_tells_where_prompts_end() -> None:
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
        assert found[::page_size].tolist() == (match.pages * page_size).tolist()
        ours.lock(match.node)
        theirs.lock(node)
        if held > 150:
            want = chance.randrange(1, 60 // page_size)
            (freed,) = ours.evict(want)
            assert _pages(theirs.evict(want * page_size), page_size) == sorted(freed.tolist())
            held -= len(freed) * page_size
        whole = len(key) // page_size - len(match.pages)
        new = np.arange(slots, slots + whole * page_size, dtype=np.int32)
        slots += len(new)
        held += len(new)
        pages = np.concatenate([match.pages, new[::page_size] // page_size])
        assert ours.insert(key, pages).existing == theirs.insert(key, np.concatenate([found, new])) == match.length
        ours.unlock(match.node)
        theirs.unlock(node)
    assert held > 100


def _pages(freed: list[Any], page_size: int) -> list[int]:
    return sorted(np.concatenate([*freed, np.empty(0, np.int32)])[::page_size].astype(int) // page_size)


def test_the_index_benchmark_writes_rows(tmp_path: Path) -> None:
    settings = index.Settings(
        TINY, capacity_tokens=300, page_sizes=(1, 16), rounds=3, systems=("mainstem", "mainstem-tree", "python", "vllm")
    )
    report = _report()
    index.run(settings, report)
    written = _written(report, tmp_path)
    assert set(written) == FIELDS
    assert written["settings"]["digest"] == digest(TINY.prompts())
    assert set(written["machine"]) == {"cpu", "cores", "load", "system", "python"}
    assert written["notes"] == []
    assert [(row["page_size"], row["system"]) for row in written["rows"]] == [
        (page_size, system) for page_size in (1, 16) for system in settings.systems
    ]
    for row in written["rows"]:
        if row["system"] != "vllm":
            assert 0 < row["hit_rate"] < 1
            for mode in ("prepared", "lists"):
                assert set(row[mode]) == {"us", "least_us", "most_us", "cpu_us", "ratio", "cpu_ratio"}
            assert set(row["parts_us"]) == {"match", "insert", "evict"}
        elif find_spec("vllm") is None:
            assert row["note"].startswith("not installed: ")


def test_a_peer_that_is_not_installed_is_a_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A name that no process knows stands for it: the process ends before it is ready."""
    missing = replay.Entry("a peer", "bench.peers:Missing", peer=True)
    monkeypatch.setitem(replay.SYSTEMS, "missing", missing)
    report = _report()
    index.run(index.Settings(TINY, 300, (16,), 1, ("mainstem", "missing")), report)
    ours, theirs = _written(report, tmp_path)["rows"]
    assert "prepared" in ours and "prepared" not in theirs
    assert theirs["label"] == "a peer" and theirs["note"].startswith("failed: KeyError")


def test_hit_rates_that_differ_are_said() -> None:
    rows = [{"label": name, "page_size": 1, "hit_rate": rate} for name, rate in (("a", 0.5), ("b", 0.5), ("c", 0.4))]
    assert list(index._disagreements(rows)) == ["c, page 1: hit rate 0.4000, not 0.5000"]


def test_all_of_ours_are_driven_alike() -> None:
    prompts = list(TINY.prompts())
    for page_size in (1, 16):
        rates = {
            replay.measure(entry.make(), prompts, 300, page_size, mode)["hit_rate"]
            for entry in replay.SYSTEMS.values()
            if not entry.peer
            for mode in replay.MODES
        }
        assert len(rates) == 1


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
