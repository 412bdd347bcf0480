"""Recordings: what they contain, what they must not contain, and that nothing waits for them."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from machine import eventually, patience
from rigs.fake_engine import FakeEngine
from starlette.testclient import TestClient

from mainstem.cache.namespaces import Namespace
from mainstem.errors import BadArgument
from mainstem.replay.readers.open import open_trace
from mainstem.runtime.request import Delta, ImageInput, Request, Usage
from mainstem.server.app import create_app
from mainstem.server.watch.recording import Recorder, RecordStats
from mainstem.settings.server import RecordConfig, ServerConfig

SECRET = b"a secret of the tests"
SYSTEM = "You are the assistant of a bank that is careful with names. " * 2
USAGE = Usage(40, 32, 2, 0.001, 0.02, 0.04, host_tokens=8, storage_tokens=4)
BARE = Namespace()
LAST = Delta("b", (5,), finish_reason="stop", usage=USAGE)


def decode(tokens: Any) -> str:
    return bytes(tokens).decode()


def recorder(path: Path, secret: bytes | None = SECRET, **options: Any) -> Recorder:
    """A recorder with a clock that does not move."""
    own = {f"record_{name}": options.pop(name) for name in ("text", "block_size") if name in options}
    return Recorder(RecordConfig(path, secret, **own), "base", decode, now=lambda: 1e9, **options)


def lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header, and the lines after it."""
    header, *rest = [json.loads(line) for line in path.read_text().splitlines()]
    return header, rest


def lines_of_requests(path: Path) -> list[dict[str, Any]]:
    """All lines but the headers."""
    return [line for line in map(json.loads, path.read_text().splitlines()) if "format" not in line]


def blocks(line: dict[str, Any]) -> list[str]:
    return re.findall("." * 16, line["blocks"])


def common(left: dict[str, Any], right: dict[str, Any]) -> int:
    """The number of equal blocks at the start of two prompts; no later blocks may be equal."""
    pairs = list(zip(blocks(left), blocks(right), strict=False))
    same = next((at for at, (one, other) in enumerate(pairs) if one != other), len(pairs))
    assert not set(blocks(left)[same:]) & set(blocks(right)[same:])
    return same


def note(
    to: Recorder, tokens: Any, *deltas: Delta, scope: Namespace = BARE, key: str | None = None, **given: Any
) -> None:
    watcher = to.note(Request(tokens, **given), "completion", scope, key)
    for delta in deltas or (LAST,):
        watcher.see(delta)
    watcher.close()


# --- lines --------------------------------------------------------------------------------------------------------


def test_a_line_and_its_header(tmp_path: Path) -> None:
    with recorder(tmp_path / "r") as record:
        note(record, range(40), Delta("a", (4,)), LAST)
    header, [line] = lines(tmp_path / "r")
    assert re.fullmatch("[0-9a-f]{16}", header.pop("key"))
    assert header.pop("server")
    assert header == {
        "format": "mainstem-recording", "version": 1, "block_size": 16, "model": "base", "started": 1e9,
    }  # fmt: skip
    assert len(blocks(line)) == 3
    del line["blocks"]
    assert line == {
        "time": 1e9, "kind": "completion", "model": "base", "tenant": "", "input_tokens": 40, "output_tokens": 2,
        "cached": {"device": 20, "host": 8, "storage": 4}, "ttft_s": 0.02, "e2e_s": 0.04, "finish": "stop",
    }  # fmt: skip


def test_a_request_that_was_cut_off_has_no_usage(tmp_path: Path) -> None:
    with recorder(tmp_path / "r") as record:
        note(record, [1, 2], Delta("a", (4,)))
    line = lines(tmp_path / "r")[1][0]
    assert (line["finish"], line["output_tokens"]) == ("cancelled", 1)
    assert line["cached"] is line["ttft_s"] is line["e2e_s"] is None


def test_equal_prefixes_have_equal_blocks_and_only_they(tmp_path: Path) -> None:
    prompts = [range(40), [*range(32), 7, 7], range(33), [9, *range(1, 40)], range(40)]
    with recorder(tmp_path / "r", block_size=8) as record:
        for prompt in prompts:
            note(record, prompt)
    header, written = lines(tmp_path / "r")
    assert header["block_size"] == 8
    assert [len(blocks(line)) for line in written] == [5, 5, 5, 5, 5]
    assert [common(written[0], line) for line in written] == [5, 4, 4, 0, 5]


def test_what_could_not_share_looks_apart(tmp_path: Path) -> None:
    scopes = [Namespace(), Namespace("french"), Namespace(salt="french"), Namespace(extra=("french",))]
    askers = [(scope, key) for scope in scopes for key in (None, "french", "other")]
    with recorder(tmp_path / "r") as record:
        for scope, key in askers * 2:
            note(record, range(40), scope=scope, key=key)
    written = lines(tmp_path / "r")[1]
    for at, line in enumerate(written):
        twins = [other for other in written if common(line, other)]
        assert twins == [written[at % len(askers)], written[at % len(askers) + len(askers)]]
    assert [line["model"] for line in written[:6]] == ["base"] * 3 + ["french"] * 3
    assert len({line["tenant"] for line in written}) == 6  # salt or none, by key; adapters are not tenants
    assert written[0]["tenant"] == written[3]["tenant"] == ""


def test_images_are_known_by_their_identity(tmp_path: Path) -> None:
    def image(identity: bytes) -> dict[str, Any]:
        return {"images": (ImageInput(16, 16, identity * 16, {}),)}

    with recorder(tmp_path / "r") as record:
        for pixels, tokens in [(b"a", [3] * 48), (b"a", [3] * 16 + [5] * 16 + [3] * 16), (b"b", [3] * 48)]:
            note(record, tokens, **image(pixels))
        note(record, [3] * 48)
    written = lines(tmp_path / "r")[1]
    assert [common(written[0], line) for line in written] == [3, 3, 1, 1]


def test_recordings_under_one_secret_can_be_joined_and_others_not(tmp_path: Path) -> None:
    for name, secret in [("a", SECRET), ("b", SECRET), ("c", None), ("d", None)]:
        with recorder(tmp_path / name, secret) as record:
            note(record, range(40), key="k")
    files = {name: lines(tmp_path / name) for name in "abcd"}
    assert files["a"] == files["b"]
    for field in ("tenant", "blocks"):
        assert len({body[0][field] for _, body in files.values()}) == 3
    assert len({header["key"] for header, _ in files.values()}) == 3


def test_text_is_written_only_where_asked_for(tmp_path: Path) -> None:
    prompt = list(b"Tell nobody.")
    for name, text in [("with", True), ("without", False)]:
        with recorder(tmp_path / name, text=text) as record:
            note(record, prompt, Delta("so", (1,)), Delta(" be it", (2,), finish_reason="stop", usage=USAGE))
    line = lines(tmp_path / "with")[1][0]
    assert (line["prompt"], line["answer"]) == ("Tell nobody.", "so be it")
    bare = lines(tmp_path / "without")[1][0]
    assert line == {**bare, "prompt": "Tell nobody.", "answer": "so be it"}


@pytest.mark.parametrize("wrong", [{"record_secret": b"short"}, {"record_block_size": 0}])
def test_settings_out_of_range_are_refused_without_showing_a_secret(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadArgument) as error:
        RecordConfig(Path("r"), **wrong)
    assert "short" not in str(error.value)
    assert "a secret" not in repr(RecordConfig(Path("r"), SECRET))


def test_settings_without_a_file_are_refused() -> None:
    assert RecordConfig(record_secret=SECRET).record is None  # the environment may set it for all servers
    for alone in ({"record_text": True}, {"record_block_size": 8}):
        with pytest.raises(BadArgument, match="without --record"):
            RecordConfig(**alone)


# --- the file -----------------------------------------------------------------------------------------------------


def test_a_new_file_is_its_owners(tmp_path: Path) -> None:
    recorder(tmp_path / "r").close()
    assert stat.S_IMODE((tmp_path / "r").stat().st_mode) == 0o600


def test_a_recording_is_resumed_after_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "r"
    with recorder(path) as record:
        note(record, range(40))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"time": 3')  # as a killed server leaves it
    with recorder(path) as record:
        note(record, range(40))
    assert path.read_bytes() == whole * 2


@pytest.mark.parametrize(
    "held", [b"precious\n", b"{}\n", b'{"format":"another"}\n', b'{"format":"mainstem-recording"}\n']
)
def test_other_files_are_left_alone(tmp_path: Path, held: bytes) -> None:
    (tmp_path / "r").write_bytes(held)
    with pytest.raises(BadArgument, match="a new file, or a recording"):
        recorder(tmp_path / "r")
    assert (tmp_path / "r").read_bytes() == held


def test_a_recording_keeps_its_size_of_blocks(tmp_path: Path) -> None:
    recorder(tmp_path / "r").close()
    with pytest.raises(BadArgument, match="blocks of 16 tokens"):
        recorder(tmp_path / "r", block_size=32)


def test_a_file_is_one_servers_at_a_time(tmp_path: Path) -> None:
    with recorder(tmp_path / "r"), pytest.raises(BadArgument, match="no other server"):
        recorder(tmp_path / "r")
    recorder(tmp_path / "r").close()
    with pytest.raises(BadArgument, match="a regular file"):
        recorder(Path("/dev/null"))
    with pytest.raises(BadArgument, match="a file in a folder that exists"):
        recorder(tmp_path / "missing" / "r")


def test_a_full_disk_is_counted_and_logged_once_and_leaves_whole_lines(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = [10**6]

    def write(fd: int, data: bytes) -> int:
        if not room[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        room[0] -= (some := min(room[0], len(data)))
        return os.write(fd, data[:some])

    path = tmp_path / "r"
    with recorder(path, write=write) as record:
        note(record, range(40))
        _until(record, 1)
        room[0] = 30  # a part of a line
        for _ in range(3):
            note(record, range(40))
        _until(record, 4)
        room[0] = 10**6
        note(record, range(16))
    assert record.stats() == RecordStats(written=2, dropped=0, failed=3)
    assert [line["input_tokens"] for line in lines(path)[1]] == [40, 16]
    assert len(caplog.records) == 1
    assert "No space left" in caplog.text


@pytest.mark.deadline
def test_a_full_queue_drops_and_never_waits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    go_on, writing = threading.Event(), threading.Event()

    def write(fd: int, data: bytes) -> int:
        if data.startswith(b'{"time"'):
            writing.set()
            go_on.wait(patience(10))
        return os.write(fd, data)

    with recorder(tmp_path / "r", write=write, queued_tokens=1000) as record:
        note(record, range(100))
        assert writing.wait(patience(10))
        for _ in range(4):  # only one more fits, in addition to the one that is being written
            note(record, range(100))
        assert record.stats().dropped == 3
        go_on.set()
    assert record.stats() == RecordStats(written=2, dropped=3, failed=0)
    assert len(caplog.records) == 1
    note(record, range(100))
    assert record.stats().dropped == 4  # also after its end


def test_what_is_written_makes_room(tmp_path: Path) -> None:
    with recorder(tmp_path / "r", queued_tokens=400) as record:
        for count in range(1, 5):
            note(record, range(100))
            _until(record, count)
    assert record.stats() == RecordStats(written=4, dropped=0, failed=0)


@pytest.mark.parametrize(("more", "dropped"), [(0, 0), (1, 1), (16 << 20, 1)])
def test_a_queue_has_room_for_so_many_tokens_and_256_of_each_line(tmp_path: Path, more: int, dropped: int) -> None:
    """Prompts are never read here: what is queued is its size."""
    record = recorder(tmp_path / "r")
    record._lines = SimpleNamespace(line=lambda *_: b"{}\n")  # type: ignore[assignment]
    whole = (16 << 20) - 256 + more
    tokens = np.broadcast_to(np.int32(7), (whole,))
    note(record, tokens)
    assert record.stats().dropped == dropped
    _until(record, 1 - dropped)
    note(record, range(10))  # all room is there again
    _until(record, 2 - dropped)
    record.close()
    assert record.stats() == RecordStats(written=2 - dropped, dropped=dropped, failed=0)


def test_the_end_waits_ten_seconds_for_the_queue(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record, waited = recorder(tmp_path / "r"), list[float]()
    writer = record._writer
    record._writer = SimpleNamespace(join=waited.append, is_alive=lambda: True)  # type: ignore[assignment]
    for count in (1, 2):
        record.close()
        assert waited == [10.0] * count and "0 queued lines were not written in time" in caplog.text
    writer.join()


def _until(record: Recorder, count: int) -> None:
    """Waits until `count` lines were written or failed."""
    eventually(lambda: record.stats().written + record.stats().failed == count)


# --- a server -----------------------------------------------------------------------------------------------------


@contextmanager
def recording(path: Path, engine: FakeEngine | None = None, **config: Any) -> Iterator[TestClient]:
    engine = engine or FakeEngine()
    record = Recorder(RecordConfig(path, SECRET), engine.name, decode)
    with record:
        yield TestClient(create_app(engine, ServerConfig(**config), recorder=record))


def ask(server: TestClient, question: str, key: str = "", **fields: Any) -> Any:
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    body = {"model": "fake", "messages": messages, **fields}
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return server.post("/v1/chat/completions", json=body, headers=headers)


def test_chats_share_in_the_recording_what_they_share(tmp_path: Path) -> None:
    with recording(tmp_path / "r") as server:
        for question in ("Who owes Ms. Featherstonehaugh?", "What is a loan?"):
            assert ask(server, question).status_code == 200
        assert ask(server, "What is a loan?", cache_salt="other").status_code == 200
        assert ask(server, "What is a loan?", stream=True).text.endswith("[DONE]\n\n")
    written = lines(tmp_path / "r")[1]
    shared = len(f"<system>{SYSTEM}\n<user>Wh") // 16
    assert [common(written[0], line) for line in written[1:]] == [shared, 0, shared]
    assert common(written[1], written[3]) == len(blocks(written[1]))
    assert [line["cached"]["device"] for line in written] == [
        0,
        shared * 16,
        0,
        (written[1]["input_tokens"] - 1) // 16 * 16,
    ]
    assert {line["kind"] for line in written} == {"chat"}
    assert [line["tenant"] == "" for line in written] == [True, True, False, True]


def test_other_apis_are_recorded_as_chats(tmp_path: Path) -> None:
    question = "Who owes Ms. Featherstonehaugh?"
    messages = [{"role": "user", "content": question}]
    with recording(tmp_path / "r", api_key=("swordfish", "herring")) as server:
        assert ask(server, question, "swordfish").status_code == 200
        for path, fields in (
            ("/v1/responses", {"instructions": SYSTEM, "input": question}),
            ("/v1/messages", {"system": SYSTEM, "messages": messages, "max_tokens": 5}),
        ):
            reply = server.post(path, json={"model": "fake", **fields}, headers={"x-api-key": "swordfish"})
            assert reply.status_code == 200, reply.text
    written = lines(tmp_path / "r")[1]
    assert [line["kind"] for line in written] == ["chat"] * 3
    assert len({line["tenant"] for line in written}) == len({line["blocks"] for line in written}) == 1
    assert [line["finish"] for line in written] == ["stop", "stop", "length"]


def test_a_recording_is_a_trace(tmp_path: Path) -> None:
    for _ in range(2):  # the second server resumes the file of the first
        with recording(tmp_path / "r", api_key=("swordfish", "herring")) as server:
            for key in ("swordfish", "herring"):
                assert ask(server, "Who owes Ms. Featherstonehaugh?", key).status_code == 200
                assert ask(server, "What is a loan?", key).status_code == 200
    trace = open_trace(tmp_path / "r")
    written = lines_of_requests(tmp_path / "r")
    assert (len(trace), trace.block_size, len(trace.tenants)) == (8, 16, 3)
    assert trace.whole.input_tokens.tolist() == [line["input_tokens"] for line in written]
    assert trace.whole.output_tokens.tolist() == [13] * 8
    assert trace.distinct_blocks == len({block for line in written for block in blocks(line)})
    shared, lengths = len(f"<system>{SYSTEM}\n<user>Wh") // 16, trace.whole.lengths.tolist()
    assert trace.distinct_blocks == 2 * (lengths[0] + lengths[1] - shared)


def test_no_prompt_no_token_no_key_and_no_salt_is_in_the_file(tmp_path: Path) -> None:
    with recording(tmp_path / "r", api_key=("swordfish", "herring")) as server:
        assert ask(server, "Who owes Ms. Featherstonehaugh?", "swordfish", cache_salt="pepper").status_code == 200
    text = (tmp_path / "r").read_text()
    for secret in ("Featherstonehaugh", "assistant", "Hello", "swordfish", "pepper", SECRET.decode()):
        assert secret not in text
    tokens = list(SYSTEM.encode())
    for width in (1, 2, 4):  # as ids are written in hex, or in a list
        assert b"".join(token.to_bytes(width, "little") for token in tokens[:4]).hex() not in text
    assert ",".join(map(str, tokens[:3])) not in text.replace(" ", "")


def test_a_cache_key_is_hashed_with_its_tenant(tmp_path: Path) -> None:
    with recording(tmp_path / "r", api_key=("swordfish", "herring")) as server:
        for key in ("swordfish", "herring"):
            for name in ("agents", "others", None):
                assert ask(server, "Hi", key, prompt_cache_key=name).status_code == 200
        headers = {"x-api-key": "swordfish"}
        body = {"model": "fake", "input": "Hi", "prompt_cache_key": "agents"}
        assert server.post("/v1/responses", json=body, headers=headers).status_code == 200
    written = lines(tmp_path / "r")[1]
    assert "agents" not in (tmp_path / "r").read_text()
    keys = [line.get("cache_key") for line in written]
    assert keys[2] is keys[5] is None and keys[6] == keys[0]
    assert len({*keys}) == 5


def test_every_choice_has_a_line_and_refused_requests_have_none(tmp_path: Path) -> None:
    with recording(tmp_path / "r") as server:
        assert server.post("/v1/completions", json={"model": "fake", "prompt": ["ab", "cd"], "n": 2}).status_code == 200
        assert server.post("/v1/completions", json={"model": "fake", "prompt": "a" * 9999}).status_code == 400
        assert server.post("/v1/completions", json={"model": "fake", "prompt": "fail!"}).status_code == 500
    written = lines(tmp_path / "r")[1]
    assert sorted((line["input_tokens"], line["finish"]) for line in written) == [(2, "stop")] * 4 + [(5, "error")]
    assert {line["kind"] for line in written} == {"completion"}
    assert len({line["blocks"] for line in written}) == 3


def test_an_adapter_is_named_and_apart(tmp_path: Path) -> None:
    engine = FakeEngine()
    engine.adapters = ("french",)
    with recording(tmp_path / "r", engine) as server:
        assert ask(server, "Hi").status_code == 200
        assert ask(server, "Hi", model="french").status_code == 200
    one, two = lines(tmp_path / "r")[1]
    assert (one["model"], two["model"]) == ("fake", "french")
    assert common(one, two) == 0


def test_counts_are_in_the_metrics(tmp_path: Path) -> None:
    with recording(tmp_path / "r") as server:
        ask(server, "Hi")
    text = server.get("/metrics").text
    found = re.findall(r'^mainstem_recorded_requests_total{outcome="(\w+)"} (\S+)$', text, re.MULTILINE)
    assert found == [("written", "1.0"), ("dropped", "0.0"), ("failed", "0.0")]
    assert "recorded" not in TestClient(create_app(FakeEngine())).get("/metrics").text  # type: ignore[arg-type]
