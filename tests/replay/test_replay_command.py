"""`mainstem replay`: rows as JSON and CSV, the tables, and refused arguments."""

from __future__ import annotations

import csv
import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from mainstem import cli
from mainstem.replay.readers.formats import BadLine
from mainstem.replay.readers.rewrites import Rewrites
from mainstem.replay.simulate.sweep import replay
from mainstem.replay.trace import Batch, Trace


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    starts = [100 * (turn % 29) for turn in range(200)]
    paths = [list(range(start, start + 1 + turn % 11)) for turn, start in enumerate(starts)]
    path = tmp_path_factory.mktemp("traces") / "small.mstrace"
    batch = Batch.of(paths, block_size=16, tenant=[1 + turn % 2 for turn in range(200)])
    Trace.of(batch, block_size=16, tenants=["", "a", "b"], name="small").save(path)
    return path


def rows_of(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> list[dict[str, Any]]:
    assert cli.main(["replay", *map(str, arguments), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_a_row_a_policy_and_capacity(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, trace, "--capacity", "10%,30,480tok", "--policy", "lru,slru,opt")
    distinct = Trace.open(trace).distinct_blocks
    assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [
        (policy, blocks) for policy in ("lru", "slru", "opt") for blocks in (distinct // 10, 30, 30)
    ]
    for row in rows:
        assert row["trace"] == "small"
        assert 0 <= row["block_hit_rate"] <= 1
        assert 0 <= row["token_hit_rate"] <= 1
        assert [tenant["name"] for tenant in row["tenants"]] == ["a", "b"]
    assert rows[1]["block_hits"] == replay(Trace.open(trace), "lru", 30).block_hits


def test_a_custom_policy_in_the_working_directory_is_replayed(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "policy_beside.py").write_text(
        "class Oldest:\n    name = 'oldest'\n    def rank(self, node):\n        return node.created, 0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])  # as for a console script
    policies = ["policy_beside:Oldest", "fifo", "slru:3"]
    rows = rows_of(capsys, trace, "--capacity", "30,60", "--policy", ",".join(policies))
    assert [row["policy"] for row in rows] == ["oldest", "oldest", "fifo", "fifo", "slru:3", "slru:3"]
    assert [row["block_hits"] for row in rows[:2]] == [row["block_hits"] for row in rows[2:4]]
    assert [row["block_hits"] for row in rows[4:]] == [
        replay(Trace.open(trace), "slru:3", capacity).block_hits for capacity in (30, 60)
    ]
    refused = {"absent_one:Rule": "no module absent_one", "slru:0": "slru:N with N", "lru:2": "lru; slru"}
    for wrong, says in refused.items():
        assert cli.main(["replay", str(trace), "--policy", wrong]) == 2
        shown = capsys.readouterr().err
        assert f"mainstem: --policy {wrong}: must be" in shown and says in shown and shown.count("\n") == 1


def test_a_custom_policy_that_fails_is_named_with_its_method(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "policy_that_fails.py").write_text(
        "class Misspelled:\n    name = 'mine'\n    def rank(self, node):\n        return node.last_acess, 0\n"
    )
    monkeypatch.chdir(tmp_path)
    assert cli.main(["replay", str(trace), "--capacity", "30", "--policy", "policy_that_fails:Misspelled"]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("mainstem: --policy mine: must be able to rank every leaf: Misspelled.rank raised Attri")
    assert "'last_acess'" in shown and shown.count("\n") == 1


def test_without_options(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = rows_of(capsys, trace)
    assert [row["policy"] for row in rows] == ["lru"] * 5 + ["opt"] * 5
    assert [row["policy"] for row in rows_of(capsys, trace, "--ttl", "5s")] == ["lru"] * 5


def test_tiers_replicas_and_a_model(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--tiers", "device=5,host=20,storage=10GB", "--model", "llama-3.1-8b", "--ttl", "2m"]
    (row,) = rows_of(capsys, trace, *options, "--replicas", "2", "--routing", "hash")
    assert [tier["name"] for tier in row["tiers"]] == ["device", "host", "storage"]
    assert row["tiers"][2]["capacity_blocks"] == 10**10 // (131_072 * 16)
    assert row["tiers"][0]["written_bytes"] == row["tiers"][0]["written_blocks"] * 131_072 * 16
    assert 0 < row["saved_flops"] < row["prefill_flops"]
    assert (row["replicas"], row["routing"], row["ttl_s"]) == (2, "hash", 120.0)
    (cheap,) = rows_of(capsys, trace, "--capacity", "10MB", "--bytes-per-token", "1000", "--policy", "fifo")
    assert cheap["capacity_blocks"] == 625


def test_standard_input(trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(trace.read_bytes())))
    (row,) = rows_of(capsys, "-", "--capacity", "5", "--policy", "lru")
    assert row["block_hits"] == replay(Trace.open(trace), "lru", 5).block_hits


def test_a_small_trace_needs_no_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n, paths in enumerate([[[]], [[1]], [[1, 2], [1, 2, 3]]]):
        Trace.of(Batch.of(paths), name="tiny").save(tmp_path / f"{n}.mstrace")
        rows = rows_of(capsys, tmp_path / f"{n}.mstrace")
        assert [(row["policy"], row["capacity_blocks"]) for row in rows] == [("lru", 1), ("opt", 1)]


def test_times_and_tiers_may_have_spaces(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows_of(capsys, trace, "--ttl", "2d", "--tiers", " device = 5, host =20 ")
    assert row["ttl_s"] == 172_800
    assert [tier["capacity_blocks"] for tier in row["tiers"]] == [5, 20]


def test_control_characters_in_names_are_not_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = tmp_path / "evil.mstrace"
    batch = Batch.of([[1], [1]], tenant=[1, 2])
    Trace.of(batch, tenants=["", "\x1b[31m[bold]", "b"], name="a\x1b[2J\udcff", notes=["\x1b[1m"]).save(evil)
    assert cli.main(["replay", str(evil), "--capacity", "1"]) == 0
    shown = capsys.readouterr()
    assert "\x1b" not in shown.out + shown.err
    assert "a?[2J?: 2 requests" in shown.out
    assert "?[31m[bold]" in shown.out
    assert rows_of(capsys, evil, "--csv", tmp_path / "rows.csv")[0]["trace"] == "a\x1b[2J\udcff"
    assert (tmp_path / "rows.csv").read_text(encoding="utf-8").count("\\udcff") == 2
    assert cli.main(["replay", str(evil), "--json"]) == 0
    assert capsys.readouterr().out.isascii()


def test_tables_are_wide_without_a_terminal(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "llama-3.1-8b", "--ttl", "3s", "--tiers", "host=50%,storage=80TB"]
    assert cli.main(["replay", str(trace), "--capacity", "5", "--policy", "priority", *options]) == 0
    shown = capsys.readouterr().out
    assert "priority" in shown
    assert "median idle" in shown
    assert "…" not in shown


def test_tenants_are_counted_apart(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = rows_of(capsys, trace, "--capacity", "9", "--policy", "lru")
    assert cli.main(["replay", str(trace), "--capacity", "9", "--policy", "lru"]) == 0
    shown = capsys.readouterr().out
    for tenant in row["tenants"]:
        assert f"{tenant['block_hits'] / tenant['block_accesses']:.2%}" in shown
    assert cli.main(["replay", str(trace), "--policy", "lru,slru,fifo,opt,lfu"]) == 0
    assert "and 10 more lines; --json has all" in capsys.readouterr().out


def test_csv(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.csv"
    rows = rows_of(capsys, trace, "--capacity", "5,9", "--policy", "lru", "--tiers", "host=20", "--csv", path)
    with open(path, newline="") as file:
        lines = list(csv.DictReader(file))
    assert [int(line["block_hits"]) for line in lines] == [row["block_hits"] for row in rows]
    assert [int(line["host_block_hits"]) for line in lines] == [row["tiers"][1]["block_hits"] for row in rows]
    assert not any("age" in name for name in lines[0])


def test_tables(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", str(trace), "--capacity", "5%,20%", "--policy", "lru,opt"]) == 0
    shown = capsys.readouterr()
    assert "small: 200 requests" in shown.out
    assert "100.0%" in shown.out
    assert shown.err == ""
    assert cli.main(["replay", str(trace), "--tiers", "device=5,host=9", "--ttl", "3"]) == 0
    words = capsys.readouterr().out.split()
    assert {"device", "host", "expired"} <= set(words)
    assert cli.main(["replay", str(trace), "--capacity", "5", "--replicas", "3", "--routing", "hash"]) == 0
    assert "3 replicas of each capacity, routing by hash" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--policy", "nonsense"], "--policy nonsense: must be opt (the offline optimum), one of lru,"),
        (["--policy", "lru,"], "--policy (empty)"),
        (["--capacity", ""], "--capacity (empty)"),
        (["--policy", "opt", "--replicas", "2"], "--policy opt"),
        (["--capacity", "10k"], "--capacity 10k"),
        (["--capacity", "1GB"], "--bytes-per-token"),
        (["--capacity", "5", "--tiers", "device=5"], "--capacity 5"),
        (["--capacity", "50", "--tiers", "host=20"], "--tiers host=20"),
        (["--tiers", "disk=20"], "--tiers disk=20"),
        (["--ttl", "soon"], "--ttl soon"),
        (["--replicas", "0"], "--replicas 0"),
        (["--bytes-per-token", "0"], "--bytes-per-token 0.0"),
        (["--model", "llama-3.1-8b", "--kv-dtype", "q4"], "--kv-dtype q4"),
        (["--workers", "0"], "--workers 0"),
        (["--routing", "random"], "--routing"),
    ],
)
def test_invalid_arguments_are_refused(
    trace: Path, arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(trace), *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert says in shown.err
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--csv", "--report"])
def test_files_that_cannot_be_written_are_refused_before_the_trace_is_read(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "absent.png"
    for target, says in ((tmp_path / "no" / "out.png", "a folder that exists"), (trace, "a file that is neither read")):
        assert cli.main(["replay", str(trace), option, str(target)]) == 2
        assert says in capsys.readouterr().err
    folder = tmp_path / "folder.png"
    folder.mkdir()
    assert cli.main(["replay", str(trace), option, str(folder)]) == 2
    assert f"{option} {folder}: must be a file, not a folder" in capsys.readouterr().err


def test_two_results_are_two_files(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "out.html")
    assert cli.main(["replay", str(trace), "--csv", out, "--report", out]) == 2
    assert "--report" in capsys.readouterr().err


def test_a_folder_without_write_permission_is_refused(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").mkdir()
    monkeypatch.setattr(
        os, "access", lambda path, mode: path != tmp_path / "theirs"
    )  # because root may write everywhere
    assert cli.main(["replay", str(trace), "--csv", str(tmp_path / "theirs" / "rows.csv")]) == 2
    assert "may be written" in capsys.readouterr().err


@pytest.mark.parametrize("options", [["--policy", "nonsense"], ["--ttl", "soon"], ["--replicas", "0"]])
def test_options_that_need_no_trace_are_checked_before_it_is_read(
    options: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["replay", str(tmp_path / "absent"), *options]) == 2
    assert " ".join(options) in capsys.readouterr().err


RULES = """[[rule]]
name = "clock"
action = "move"
match = 'It is (?P<value>[0-9:]+)'
example = "It is 12:30"
"""


@pytest.fixture
def bodies(tmp_path: Path) -> Path:
    path, text = tmp_path / "requests.jsonl", "You answer in one word, without a reason. " * 10
    rows = [
        {"timestamp": minute, "body": {"model": "m", "system": f"It is 12:{minute}. {text}", "messages": [
            {"role": "user", "content": f"Question {minute}?"}]}}
        for minute in range(10, 40)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rules.toml").write_text(RULES)
    return path


def test_bodies_are_replayed_as_they_came_and_as_rules_leave_them(
    bodies: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rules = tmp_path / "rules.toml"
    given: list[str | Path] = ["--prompt-rules", rules, "--policy", "lru", "--capacity", "50%,200"]
    before, _, after, more = rows_of(capsys, bodies, *given, "--csv", tmp_path / "rows.csv")
    assert [before["trace"], after["trace"]] == ["requests", "requests, after rules"]
    assert before["capacity_blocks"] == after["capacity_blocks"] and more["capacity_blocks"] == 200
    assert before["token_hit_rate"] < 0.2 and after["token_hit_rate"] > 0.8
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 5
    assert before == rows_of(capsys, bodies, "--policy", "lru", "--capacity", "50%")[0]
    assert cli.main(["replay", str(bodies), *map(str, given)]) == 0
    shown = capsys.readouterr()
    assert "requests, after rules: 30 requests" in shown.out
    assert shown.err.count("Tokens are bytes") == 1 and "Rules changed 30 of 30 requests: clock 30 times." in shown.err


def test_notes_of_earlier_turns_are_replayed(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES)
    rewrites = Rewrites([str(tmp_path / "rules.toml")])

    def turn(*said: str) -> list[str]:
        roles = ("user", "assistant", "user")
        messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
        body = rewrites({"system": "It is 12:30.", "max_tokens": 1, "messages": messages}, "/v1/messages")
        return [message["content"] for message in body["messages"]]

    [first] = turn("q")
    assert first.startswith("q\n\n[It is 12:30")
    assert turn("q", "a", "r") == [first, "a", "r"]
    rewrites({"messages": [{"role": "user", "content": "It is 12:30."}]}, None)
    assert rewrites.said == "Rules changed 2 of 3 requests: clock 2 times."


def test_rules_need_bodies_of_requests(
    bodies: Path, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rules, tokens = str(tmp_path / "rules.toml"), tmp_path / "tokens.jsonl"
    tokens.write_text('{"tokens": [1, 2]}\n')
    for path in (trace, tokens):
        assert cli.main(["replay", str(path), "--prompt-rules", rules]) == 2
        assert "has no messages; rules apply to bodies of requests" in capsys.readouterr().err
    assert cli.main(["replay", "-", "--prompt-rules", rules]) == 2
    assert "given with a file, which is read twice" in capsys.readouterr().err
    assert cli.main(["replay", str(bodies), "--prompt-rules", str(tmp_path / "absent.toml")]) != 0
    assert "absent.toml" in capsys.readouterr().err


def test_a_body_that_rules_cannot_read_is_a_bad_line(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(RULES + "[[rule]]\nname = 'keys'\naction = 'sort'\nlists = ['keys']\n")
    rewrites, deep = Rewrites([str(tmp_path / "rules.toml")]), dict[str, Any]()
    for _ in range(2000):
        deep = {"items": deep}
    with pytest.raises(BadLine, match="not valid Unicode"):
        rewrites({"messages": [], "system": "It is 12:30. \ud800"}, None)
    with pytest.raises(BadLine, match="nested too deeply"):
        rewrites({"messages": [], "tools": [{"name": "open", "input_schema": deep}]}, None)
    assert rewrites.said == "Rules changed 0 of 0 requests: clock 0 times, keys 0 times."
