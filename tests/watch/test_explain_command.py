"""`mainstem explain`: of a server, and of a cache that has served a trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO, TextIOWrapper
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rigs.answering import answering
from rigs.clients import served
from rigs.fake_engine import FakeEngine

from mainstem.cache.explain import CAUSES, Evicted, Parted, Stretch
from mainstem.cli import main
from mainstem.errors import BadArgument
from mainstem.replay.explain import explain_request
from mainstem.replay.readers.open import open_trace
from mainstem.replay.trace import Batch, Trace
from mainstem.watch.wording import table, why

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
    fake.why = {0: Stretch(0, 0, cause="parted", parted=Parted(1287, other), eviction=gone)}
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


def test_the_admin_asks_about_the_cache_of_a_tenant(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = engine()
    fake.why = {0: Stretch(0, 0, cause="evicted", eviction=Evicted("policy", "device", "lru", 2, 65.0, 7.0, 9, 40))}
    with served(fake, api_key=("k", "l"), admin_key="a") as url:
        asked = ["explain", written(tmp_path, prompt=PROMPT), "--server", url]
        assert main([*asked, "--admin-key", "a", "--api-key", "k"]) == 0
        assert "would have kept it" in capsys.readouterr().out
        monkeypatch.setenv("MAINSTEM_ADMIN_KEY", "a")
        monkeypatch.setenv("MAINSTEM_API_KEY", "k")
        assert main([*asked, "--json"]) == 0
        [prompt] = json.loads(capsys.readouterr().out)["prompts"]
        assert prompt["stretches"][0]["evicted"]["kept_by_tokens"] > 0
        monkeypatch.delenv("MAINSTEM_API_KEY")
        assert main(asked) == 1
        assert "must be the API key of the tenant" in capsys.readouterr().err
        monkeypatch.delenv("MAINSTEM_ADMIN_KEY")
        assert main([*asked, "--api-key", "k"]) == 0
        assert "would have kept it" not in capsys.readouterr().out
        assert main([*asked, "--api-key", "k\n"]) == main([*asked, "--admin-key", "é"]) == 2
        assert "k\n" not in capsys.readouterr().err.splitlines()[0]


def http(body: bytes, length: int | None = None, status: str = "200 OK") -> bytes:
    length = len(body) if length is None else length
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode() + body


def prompts(*stretches: Any, **fields: Any) -> bytes:
    made = {"prompt_tokens": 1, "cached_tokens": 0, "stretches": list(stretches)} | fields
    return http(json.dumps({"prompts": [made]}).encode())


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9\r\n",
        http(b"<html></html>"),
        http(b"\xff\xfe"),
        http(b"[1]"),
        http(b"{}"),
        http(b"[" * 100_000),
        http(b'{"prompts": [1]}'),
        http(b'{"prompts": []}'),
        http(b'{"prompts": {}}'),
        http(b'{"prompts": [', 4000),
        http(b"<html></html>", status="404 Not Found"),
        http(b"<html></html>", 4000, status="502 Bad Gateway"),
        http(b'{"error": "no"}', status="400 Bad Request"),
        prompts(cached_tokens="0"),
        prompts(1),
        prompts({"begin": 0, "end": 1}),
        prompts({"begin": 0, "end": 1, "cause": "parted", "parted": {}}),
        prompts({"begin": 0, "end": 1, "cause": "parted", "parted": 1}),
        prompts({"begin": 0, "end": 1, "cause": "evicted", "evicted": []}),
        prompts({"begin": 0, "end": 1, "cause": [1]}),
        prompts({"begin": 0, "end": 1, "cause": "never_seen", "since_s": "x"}),
    ],
    ids=lambda answer: repr(answer[-50:]),
)
def test_what_does_not_answer_as_a_server_of_ours_is_said(
    answer: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, prompt="x")
    with answering(answer) as address:
        assert main(["explain", path, "--server", address]) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"mainstem: http://{address} does not answer as mainstem serve does")
        assert error.count("\n") == 1
        assert main(["explain", path, "--server", address, "--json"]) == 1
    assert main(["explain", path, "--server", address]) == 1
    assert f"http://{address}" in capsys.readouterr().err


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


def test_offline_every_eviction_is_remembered_however_small_the_cache() -> None:
    paths = [[1, 2, 3, 4], *([100 * i, 100 * i + 1, 100 * i + 2] for i in range(1, 60)), [1, 2, 3, 4]]
    whole = trace(*paths)
    found = explain_request(whole, len(paths), 3)
    causes = [(each.begin, each.end, each.cause) for each in found.stretches]
    assert causes == [(0, 24, "evicted"), (24, 32, "forgotten")]  # the fourth block never fitted
    assert found.stretches[0].eviction is not None and found.stretches[0].eviction.ago_s == pytest.approx(590)


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


def lines(path: Path, *objects: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return str(path)


TEXT = {"messages": [{"role": "user", "content": PROMPT}]}
IDS = {"tokens": list(range(64))}
HASHES = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
SHORT = {**HASHES, "input_length": 20}  # in blocks of 16
RECORDED = (
    {"format": "mainstem-recording", "version": 1, "block_size": 16, "key": "497102366245a986"},
    {"time": 1.0, "input_tokens": 32, "blocks": "f43b93f377f5eec5717314f162e6fd2b", "prompt": PROMPT},
)


UNEQUAL: list[tuple[Sequence[dict[str, Any]], dict[str, Any], str]] = [
    (RECORDED, TEXT, "keyed hashes"),
    (RECORDED, {"prompt": PROMPT}, "keyed hashes"),
    ([HASHES], TEXT, "hash ids"),
    ([IDS], TEXT, "token ids"),
    ([TEXT], SHORT, "text"),
    (RECORDED, IDS, "keyed hashes"),
    ([HASHES], {"prompt": IDS["tokens"]}, "hash ids"),
    ([IDS], SHORT, "token ids"),
]


@pytest.mark.parametrize(
    ("trace", "request_", "said", "converted"),
    # of a converted trace it is known only whether it was text
    [*((*each, False) for each in UNEQUAL), *((trace, own, "", True) for trace, own, _ in UNEQUAL[:5])],
)
def test_a_request_that_can_be_equal_to_nothing_in_a_trace_is_refused(
    trace: Sequence[dict[str, Any]],
    request_: dict[str, Any],
    said: str,
    converted: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, own = lines(tmp_path / "trace.jsonl", *trace), lines(tmp_path / "own.json", request_)
    if converted:
        open_trace(path).save(path := str(tmp_path / "trace.mstrace"))
    assert main(["explain", own, "--trace", path, "--capacity", "100"]) == 2
    error = capsys.readouterr().err
    assert own in error and f"the number of a request of {path}, 1 to 1" in error and said in error


@pytest.mark.parametrize("converted", [False, True])
@pytest.mark.parametrize(
    ("trace", "request_"), [(TEXT, TEXT), (IDS, IDS), (IDS, {"prompt": IDS["tokens"]}), (HASHES, HASHES)]
)
def test_a_request_of_the_same_kind_is_found_in_a_trace(
    trace: dict[str, Any], request_: dict[str, Any], converted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, own = lines(tmp_path / "trace.jsonl", trace), lines(tmp_path / "own.json", request_)
    if converted:
        open_trace(path).save(path := str(tmp_path / "trace.mstrace"))
    assert main(["explain", own, "--trace", path, "--capacity", "100", "--json"]) == 0, capsys.readouterr().err
    assert json.loads(capsys.readouterr().out)["prompts"][0]["cached_tokens"] > 0


@pytest.mark.parametrize(("trace", "code"), [(RECORDED, 2), ([TEXT], 0), ([IDS], 2)])
def test_a_trace_from_standard_input_is_read_once(
    trace: Sequence[dict[str, Any]],
    code: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.stdin", TextIOWrapper(BytesIO("\n".join(map(json.dumps, trace)).encode())))
    asked = ["explain", lines(tmp_path / "own.json", TEXT), "--trace=-", "--capacity", "100"]
    assert main(asked) == code, capsys.readouterr().err


def chained(prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], dict[int, tuple[int, ...]]]:
    """Returns prompts with a name for each block that covers all before it, and what each name covers."""
    names: dict[tuple[int, ...], int] = {}
    paths = [
        [names.setdefault(tuple(prompt[:end]), len(names)) for end in range(1, len(prompt) + 1)] for prompt in prompts
    ]
    return paths, {name: prefix for prefix, name in names.items()}


@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(2, 12), st.sampled_from(["lru", "slru", "fifo"]))
@settings(max_examples=15, deadline=None)
def test_of_a_trace_everything_is_known_however_long_ago(seed: int, capacity: int, alike: int, policy: str) -> None:
    """A slow model: all that earlier requests began with. The memory of evictions knows a few thousand blocks."""
    draw = Random(seed)
    stems = [[draw.randrange(50) for _ in range(draw.randrange(1, 12))] for _ in range(12)]

    def prompt() -> list[int]:
        return draw.choice(stems)[: draw.randrange(1, 12)] + [draw.randrange(alike) for _ in range(draw.randrange(9))]

    prompts = [prompt() for _ in range(900)]
    paths, _ = chained(prompts)
    whole = trace(*paths)
    for number in draw.sample(range(2, len(prompts) + 1), 10):
        seen = {tuple(earlier[:end]) for earlier in prompts[: number - 1] for end in range(1, len(earlier) + 1)}
        own = prompts[number - 1]
        found = explain_request(whole, number, capacity, policy).stretches
        assert [each.begin for each in found] == [0, *(each.end for each in found[:-1])]
        assert found[-1].end == 8 * len(own)
        for part in found:
            for block in range(part.begin // 8, part.end // 8):
                new = tuple(own[: block + 1]) not in seen
                assert new == (part.cause in ("never_seen", "parted")), (part, block)
            if part.parted is not None:
                at = part.parted.at // 8
                assert part.parted.at == part.begin > 0
                assert any(tuple(own[:at]) == each[:at] and len(each) > at for each in seen)


@pytest.mark.parametrize("cause", CAUSES)
def test_every_cause_has_words(cause: str) -> None:
    told = why({"begin": 0, "end": 1, "cause": cause, "detail": "breaker"})
    assert told != cause and "the breaker is open" in told


GONE = {"tier": "host", "policy": "slru", "why": "quota", "uses": 3, "ago_s": None, "idle_s": None}
KNOWN = {**GONE, "why": "policy", "ago_s": 5.0, "idle_s": 120.0, "kept_by_tokens": 4096}
SINCE = "nothing is known of what was more than 90 s ago"


@pytest.mark.parametrize(
    ("stretch", "words"),
    [
        ({"tier": "storage"}, "found in storage"),
        ({"tier": "host"}, "found on the host"),
        ({"cause": "forgotten"}, "evicted or never seen: it is not remembered which"),
        ({"cause": "never_seen", "since_s": 90.0}, f"never seen; {SINCE}"),
        ({"cause": "forgotten", "since_s": 90.0}, f"evicted or never seen: it is not remembered which; {SINCE}"),
        ({"cause": "evicted", "evicted": GONE}, "evicted; left the host by slru, quota"),
        (
            {"cause": "evicted", "evicted": KNOWN},
            "evicted; left the host 5 s ago by slru; unused for 120 s then; room for 4,096 tokens would have kept it",
        ),
    ],
)
def test_a_stretch_is_said_as_far_as_it_is_known(stretch: dict[str, Any], words: str) -> None:
    assert why(stretch) == words


@pytest.mark.parametrize(
    ("text", "instead", "shown"),
    [
        ("May", "June", "'May'\n  where it had 'June'"),
        ("May", None, "'May'"),
        (None, "June", "an earlier prompt had 'June'"),
        (None, None, ""),
    ],
)
def test_what_an_earlier_prompt_had_is_shown_beside_the_text(text: str | None, instead: str | None, shown: str) -> None:
    parted = {"at": 3} | ({} if instead is None else {"instead": instead})
    stretch = {"begin": 0, "end": 9, "cause": "parted", "parted": parted} | ({} if text is None else {"text": text})
    [found] = table([stretch]).columns[3].cells
    assert found == shown
