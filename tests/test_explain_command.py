"""`mainstem explain`: of a server, and of a cache that has served a trace."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rigs.clients import served
from rigs.fake_engine import FakeEngine

from mainstem.cli import main
from mainstem.errors import BadArgument
from mainstem.explain import Evicted, Parted
from mainstem.replay.explain import explain_request
from mainstem.replay.trace import Batch, Trace
from mainstem.runtime.explaining import CAUSES, Stretch
from mainstem.watch.wording import why

PROMPT = "A prompt that is longer than some pages of sixteen letters each."


def engine(explains: bool = True) -> FakeEngine:
    made = FakeEngine()
    made.config = replace(made.config, explain=explains)
    return made


def written(folder: Path, **body: Any) -> str:
    path = folder / "request.json"
    path.write_text(json.dumps({"model": "fake", **body}))
    return str(path)


@pytest.mark.deadline
def test_a_server_is_asked_by_the_route_that_the_fields_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fake = engine()
    other = b"".join(letter.to_bytes(4, "little") for letter in b"[of pages]")
    gone = Evicted("policy", "device", "lru", 2, 65.0, 7.0, 9, 40)
    fake.why = {0: Stretch(0, 0, cause="parted", parted=Parted(1287, other), evicted=gone)}
    turns = [{"role": "user", "content": PROMPT}]
    bodies: list[dict[str, Any]] = [
        {"prompt": PROMPT},
        {"messages": turns},
        {"input": PROMPT},
        {"system": "Be kind.", "messages": turns, "max_tokens": 4},
    ]
    with served(fake, api_key=("k", "l")) as url:
        for body in bodies:
            asked = ["explain", written(tmp_path, **body), "--server", url, "--api-key", "k"]
            assert main([*asked, "--json"]) == 0, capsys.readouterr().err
            [prompt] = json.loads(capsys.readouterr().out)["prompts"]
            assert prompt["stretches"][0]["parted"] == {"at": 1287, "instead": "[of pages]"}
            assert main(asked) == 0
            shown = capsys.readouterr().out
            assert "0 of " in shown and "parts from an earlier prompt at token 1,287" in shown
            assert "[of pages]" in shown and "left the device 65 s ago by lru" in shown


@pytest.mark.deadline
def test_what_goes_wrong_is_said_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, prompt="x")
    with served(engine(explains=False)) as url:
        assert main(["explain", path, "--server", url]) == 1
        assert "start it with --explain" in capsys.readouterr().err
    with served(engine()) as url:
        assert main(["explain", written(tmp_path, prompt="x", wrong=1), "--server", url]) == 1
        assert "wrong: unknown field" in capsys.readouterr().err
    assert main(["explain", path, "--server", "127.0.0.1:1"]) == 1
    assert main(["explain", str(tmp_path / "none.json")]) == 1
    (tmp_path / "bad.json").write_text("[1]")
    assert main(["explain", str(tmp_path / "bad.json")]) == 1
    assert "not a JSON object" in capsys.readouterr().err


def trace(*paths: list[int]) -> Trace:
    return Trace.of(Batch.of(paths, block_size=8, time_s=[10.0 * i for i in range(len(paths))]), block_size=8)


def test_a_request_of_a_trace_is_explained_by_a_cache_that_has_served_those_before_it() -> None:
    whole = trace([1, 2, 3, 4], [1, 2, 5, 6], [7, 8, 9, 10], [1, 2, 3, 4])
    second = explain_request(whole, 2, 100)
    assert (second.number, second.tokens) == (2, 32)
    assert [(each.begin, each.end, each.tier or each.cause) for each in second.stretches] == [
        (0, 16, "device"),
        (16, 32, "parted"),
    ]
    assert second.stretches[1].parted is not None and second.stretches[1].parted.at == 16
    small = explain_request(whole, 4, 5)
    gone = next(each for each in small.stretches if each.cause == "evicted")
    assert gone.eviction is not None
    assert gone.eviction.why == "policy" and gone.eviction.distance_pages is not None
    assert gone.eviction.ago_s is not None and 0 <= gone.eviction.ago_s <= 30
    later = explain_request(whole, None, 100, request=trace([7, 8, 11]))
    assert [(each.begin, each.end, each.tier or each.cause) for each in later.stretches] == [
        (0, 16, "device"),
        (16, 24, "parted"),
    ]
    for number in (0, 5):
        with pytest.raises(BadArgument, match="from 1 to 4"):
            explain_request(whole, number, 100)
    with pytest.raises(BadArgument, match="blocks of 8 tokens"):
        explain_request(whole, None, 100, request=Trace.of(Batch.of([[1]], block_size=4), block_size=4))


def test_a_trace_and_a_request_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "prompts.jsonl"
    prompts = [list(range(100)), [*range(60), *range(200, 240)], list(range(100))]
    path.write_text("".join(json.dumps({"tokens": tokens, "timestamp": i}) + "\n" for i, tokens in enumerate(prompts)))
    assert main(["explain", "2", "--trace", str(path), "--capacity", "100", "--json"]) == 0, capsys.readouterr().err
    [found] = json.loads(capsys.readouterr().out)["prompts"]
    assert (found["request"], found["prompt_tokens"], found["cached_tokens"]) == (2, 100, 48)
    assert found["stretches"][1] == {"begin": 48, "end": 100, "cause": "parted", "parted": {"at": 48}}
    own = tmp_path / "request.json"
    own.write_text(json.dumps({"tokens": prompts[0][:90], "timestamp": 9}))
    assert main(["explain", str(own), "--trace", str(path), "--capacity", "100"]) == 0, capsys.readouterr().err
    assert "80 of 90 tokens are cached" in capsys.readouterr().out
    assert main(["explain", "9", "--trace", str(path)]) == 2
    assert main(["explain", "1", "--trace", str(path), "--capacity", "1,2"]) == 2
    assert "one capacity" in capsys.readouterr().err


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_has_words(cause: str) -> None:
    told = why({"begin": 0, "end": 1, "cause": cause, "detail": "breaker"})
    assert told != cause and "the breaker is open" in told


def test_what_was_evicted_is_said_as_far_as_it_is_known() -> None:
    gone = {"tier": "host", "policy": "slru", "why": "quota", "uses": 3, "ago_s": None, "idle_s": None}
    assert why({"cause": "evicted", "evicted": gone}) == "evicted; left the host by slru, quota"
    known = {**gone, "why": "policy", "ago_s": 5.0, "idle_s": 120.0, "kept_by_tokens": 4096}
    told = why({"cause": "evicted", "evicted": known})
    parts = ["evicted", "left the host 5 s ago by slru", "unused for 120 s then"]
    assert told == "; ".join([*parts, "room for 4,096 tokens would have kept it"])
    assert why({"tier": "storage"}) == "found in storage" and why({"tier": "host"}) == "found on the host"
