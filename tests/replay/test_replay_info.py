"""Statistics of a trace, against counting by hand and a slow LRU over leaves; and the commands that print them."""

from __future__ import annotations

import io
import json
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mainstem import cli
from mainstem.errors import BadArgument
from mainstem.replay import trace as trace_module
from mainstem.replay.commands.trace import trace as command
from mainstem.replay.info import TraceInfo, info
from mainstem.replay.trace import Batch, Trace, mix

Path_ = list[int]


def grown(requests: int, seed: int, depth: int = 12) -> list[Path_]:
    """Generates paths through a random tree that extend older ones, recent ones more often; names are well mixed."""
    random_ = random.Random(seed)
    paths: list[Path_] = []
    fresh = 0
    for _ in range(requests):
        old = paths[-min(len(paths), 1 + int(random_.expovariate(0.05)))] if paths and random_.random() < 0.8 else []
        path = old[: random_.randrange(len(old) + 1)]
        more = random_.randrange(1, depth)
        paths.append(path + list(range(fresh, fresh + more)))
        fresh += more
    names = mix(np.arange(fresh, dtype=np.uint64)).tolist()
    return [[names[at] for at in path] for path in paths]


def lru_hits(paths: list[Path_], capacity: int) -> int:
    """Returns the hits of a cache that looks up a path, adds the rest, and then drops the oldest leaves until it fits.

    A block is as old as its last request; within one request, deeper blocks are older.
    """
    used: dict[int, tuple[int, int]] = {}
    hits = 0
    for now, path in enumerate(paths):
        hits += next((at for at, block in enumerate(path) if block not in used), len(path))
        used |= {block: (now, -depth) for depth, block in enumerate(path)}
        for block in sorted(used, key=lambda block: used[block])[: max(len(used) - capacity, 0)]:
            del used[block]
    return hits


def test_reuse_distances_are_the_hits_of_a_slow_lru_at_every_capacity() -> None:
    paths = grown(120, seed=1)
    said = info(Trace.of(Batch.of(paths)))
    assert said.sampled == 1
    for row in said.reuses:
        assert round(row.lru_hit_rate * said.blocks) == lru_hits(paths, row.high)
    assert said.reuses[-1].lru_hit_rate == pytest.approx(said.block_hit_rate)
    assert sum(row.uses for row in said.reuses) == said.blocks - said.distinct_blocks


@pytest.mark.parametrize("requests", [0, 1, 2, 3])
def test_the_smallest_traces(requests: int) -> None:
    paths = [[1, 2], [1, 3], [1, 2]][:requests]
    said = info(Trace.of(Batch.of(paths)))
    assert sum(row.uses for row in said.reuses) == (0, 0, 1, 3)[requests]
    for row in said.reuses:
        assert round(row.lru_hit_rate * said.blocks) == lru_hits(paths, row.high)
    assert (said.chats, said.tenants, said.kinds, said.turns) == (0, (), (), ())


def test_sums_are_those_counted_by_hand() -> None:
    batch = Batch.of(
        [[1, 2, 3], [1, 2, 4], [1, 2, 3], [5], []],
        block_size=16,
        time_s=[0, 10, 13, 13.5, 20],
        input_tokens=[33, 48, 33, 16, 5],
        output_tokens=[1, 2, 3, 4, 0],
        tenant=[1, 0, 1, 2, 0],
        turn=[1, 1, 99, 0, 0],
        chat=[4, 5, 4, -1, -1],
    )
    said = info(Trace.of(batch, block_size=16, name="n", tenants=("", "a", "b"), notes=("Said.",)))
    assert (said.trace, said.block_size, said.requests, said.span_s, said.notes) == ("n", 16, 5, 20, ("Said.",))
    assert (said.input_tokens, said.output_tokens, said.blocks, said.distinct_blocks) == (135, 10, 10, 5)
    assert said.block_hit_rate == 5 / 10
    assert said.token_hit_rate == (32 + 33) / 135  # the partial block counts as one token
    assert [(group.name, group.requests, group.blocks, group.block_hit_rate) for group in said.tenants] == [
        ("a", 2, 6, 3 / 6), ("", 2, 3, 2 / 3), ("b", 1, 1, 0),
    ]  # fmt: skip
    assert said.tenants[0].token_hit_rate == 33 / 66
    assert [(group.name, group.requests) for group in said.turns] == [("", 2), ("1", 2), ("16 and later", 1)]
    assert said.kinds == ()
    assert [(row.low, row.uses, row.distinct_blocks, row.sharing) for row in said.depths] == [
        (0, 4, 2, 2), (1, 3, 1, 3), (2, 3, 2, 1.5),
    ]  # fmt: skip
    assert {row.low_s: row.uses for row in said.waits if row.uses} == {2: 2, 8: 3}
    assert (said.chats, said.chat_requests.max if said.chat_requests else None) == (2, 2)
    assert (said.prompt_tokens.p50, said.prompt_tokens.max, said.prompt_tokens.mean) == (33, 48, 27)


def test_quantiles_are_those_of_a_hundred_requests_and_one() -> None:
    batch = Batch.of([[]] * 101, input_tokens=range(101), output_tokens=[0] * 100 + [101], chat=[0, 0, *[-1] * 99])
    said = info(Trace.of(batch))
    prompt, answer = said.prompt_tokens, said.answer_tokens
    assert (prompt.mean, prompt.p50, prompt.p90, prompt.p99, prompt.max) == (50, 50, 90, 99, 100)
    assert (answer.mean, answer.p99, answer.max) == (1, 0, 101)
    assert said.chats == 1 and said.chat_requests is not None and said.chat_requests.mean == 2


@pytest.fixture(scope="module")
def large() -> Trace:
    return Trace.of(Batch.of(grown(4000, seed=2, depth=40), tenant=[0, 1, 2, 1] * 1000), tenants=("", "a", "b"))


def test_batches_do_not_show(large: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    said = info(large)
    monkeypatch.setattr(trace_module, "_BATCH_BLOCKS", 1000)
    assert info(large) == said


def test_a_sample_of_blocks_is_close_and_the_rest_is_exact(large: Trace) -> None:
    said, sampled = info(large), info(large, sample=len(large.whole.blocks) // 4)
    assert sampled.sampled == 0.25
    exact = {name: value for name, value in asdict(said).items() if name not in ("sampled", "reuses", "waits")}
    assert exact.items() <= asdict(sampled).items()
    rates = {row.high: row.lru_hit_rate for row in sampled.reuses}
    for row in said.reuses[6:]:
        assert rates[row.high] == pytest.approx(row.lru_hit_rate, abs=0.03)
    assert sum(row.uses for row in sampled.reuses) == pytest.approx(sum(row.uses for row in said.reuses), rel=0.1)
    assert sum(row.uses for row in sampled.waits) == pytest.approx(sum(row.uses for row in said.waits), rel=0.1)


def test_blocks_that_are_not_paths_do_no_harm() -> None:
    said = info(Trace.of(Batch.of([[1, 1, 1], [2, 1], [1, 2], [2, 2, 1]])))
    assert said.distinct_blocks == 2
    assert all(row.uses >= 0 for row in said.reuses)


def test_a_sample_of_nothing_is_refused() -> None:
    with pytest.raises(BadArgument, match="sample"):
        info(Trace.of([]), sample=0)


# --- commands -----------------------------------------------------------------------------------------------------


@pytest.fixture
def requests(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    rows = [
        {"tokens": list(range(40)), "timestamp": 5, "tenant": "[bold]\x1b[2Ja", "turn": 1, "chat_id": 3},
        {"tokens": list(range(64)), "timestamp": 9.5, "tenant": "b", "turn": 2, "chat_id": 3},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments: object) -> None:
    command([str(argument) for argument in arguments], result_action="return_value")


def said_by(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_info_as_json_has_all_fields(requests: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("info", requests, "--json")
    said = said_by(capsys)
    assert list(said) == list(TraceInfo.__dataclass_fields__)
    assert (said["trace"], said["blocks"], said["distinct_blocks"], said["span_s"]) == ("requests", 7, 5, 4.5)


def test_standard_input_is_a_trace_too(requests: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(requests.read_bytes())))
    run("info", "-", "--json")
    assert said_by(capsys)["trace"] == "-"


def test_info_as_tables_names_what_was_found(
    requests: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    run("info", requests)
    out = capsys.readouterr().out
    for part in ("28.57% of blocks", "Reuse distances", "Sharing by depth", "[bold]?[2Ja", "Turn", "16 tokens"):
        assert part in out


def test_info_of_a_sample_says_so(requests: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    monkeypatch.setattr("mainstem.replay.info.info.__kwdefaults__", {"sample": 2})
    run("info", requests)
    assert "(sampled: 1 block in 4)" in capsys.readouterr().out


def test_convert_writes_what_info_reads_alike(
    requests: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("info", requests, "--json", "--block-size", "8")
    expected = said_by(capsys)
    target = tmp_path / "requests.mstrace"
    run("convert", requests, target, "--json", "--block-size", "8")
    assert said_by(capsys) == {
        "trace": "requests", "requests": 2, "blocks": 13, "bytes": target.stat().st_size, "notes": [],
    }  # fmt: skip
    run("info", target, "--json")
    assert said_by(capsys) == expected
    with requests.open("a") as file:
        file.write("?\n")
    run("convert", requests, target, "--on-bad", "skip")
    assert "Bad lines, left out: 1 (line 3" in capsys.readouterr().out


def test_a_file_in_no_folder_is_refused_before_the_trace_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "no" / "out.mstrace"
    for arguments in (
        ["convert", str(tmp_path / "absent"), str(target)],
        ["generate", "chat", "--requests", "1", "-o", str(target)],
    ):
        with pytest.raises(BadArgument, match="a folder that exists"):
            command(arguments, exit_on_error=False)


def test_convert_writes_no_other_kind_of_file(requests: Path, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=r"\.mstrace"):
        run("convert", requests, tmp_path / "t.jsonl")


@pytest.mark.parametrize(("arguments", "code"), [(["--block-size", "0"], 2), (["--format", "csv"], 2), ([], 0)])
def test_the_main_command_has_it(
    arguments: list[str], code: int, requests: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["trace", "info", str(requests), *arguments]) == code
    assert capsys.readouterr().err.startswith("mainstem: ") == (code > 0)
