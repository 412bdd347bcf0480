"""Readers: every format, every compression, bad lines of every kind, and files that are not traces."""

from __future__ import annotations

import gzip
import io
import json
import lzma
import os
import random
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mainstem.cache.keys import hash_blocks
from mainstem.errors import BackendUnavailable, BadArgument
from mainstem.replay.readers import lines
from mainstem.replay.readers import open as readers
from mainstem.replay.readers.formats import FORMATS
from mainstem.replay.readers.open import open_trace
from mainstem.replay.trace import Batch, Trace, TraceError
from mainstem.settings.replay import TraceOptions

zstandard = pytest.importorskip("zstandard", reason="the package zstandard is not installed")

Line = dict[str, Any]

MOONCAKE: list[Line] = [
    {"timestamp": 27000, "input_length": 1025, "output_length": 52, "hash_ids": [0, 1, 2]},
    {"timestamp": 27500, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 3]},
    {"timestamp": 30001, "input_length": 512, "output_length": 1, "hash_ids": [4]},
]


def write(path: Path, *rows: Line | str | bytes) -> Path:
    """Writes a file of lines."""
    encoded = [json.dumps(row) if isinstance(row, dict) else row for row in rows]
    path.write_bytes(b"".join((row.encode() if isinstance(row, str) else row) + b"\n" for row in encoded))
    return path


def same_paths(trace: Trace, paths: list[list[Any]]) -> bool:
    """Returns whether blocks are equal exactly where the paths to them are."""
    names: dict[tuple[Any, ...], int] = {}
    at = iter(trace.whole.blocks.tolist())
    expected = all(
        names.setdefault(tuple(path[: depth + 1]), name) == name
        for path in paths
        for depth, name in zip(range(len(path)), at, strict=False)
    )
    return expected and len(set(names.values())) == len(names) and next(at, None) is None


# --- formats ------------------------------------------------------------------------------------------------------


def test_mooncake(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "conversation_trace.jsonl", *MOONCAKE))
    assert (trace.name, trace.block_size, len(trace), trace.distinct_blocks) == ("conversation_trace", 512, 3, 5)
    assert trace.whole.time_s.tolist() == pytest.approx([0, 0.5, 3.001])
    assert trace.whole.input_tokens.tolist() == [1025, 1100, 512]
    assert trace.whole.output_tokens.tolist() == [52, 5, 1]
    assert same_paths(trace, [[0, 1, 2], [0, 1, 3], [4]])
    assert trace.whole.chat.tolist() == [-1] * 3


def test_mooncake_of_other_blocks(tmp_path: Path) -> None:
    path = write(tmp_path / "t", {"timestamp": 0, "input_length": 40, "hash_ids": [1, 2, 3]})
    assert open_trace(path, TraceOptions(block_size=16)).whole.tokens(16).tolist() == [16, 16, 8]


def test_the_whole_blocks_alone_are_enough(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "t", {"timestamp": 0, "input_length": 600, "hash_ids": [1]}))
    assert trace.whole.tokens(512).tolist() == [512]


def test_bailian(tmp_path: Path) -> None:
    rows = [
        {"chat_id": 5, "parent_chat_id": -1, "timestamp": 1.5, "input_length": 17, "output_length": 3, "type": "text",
         "turn": 1, "hash_ids": [10, 11]},
        {"chat_id": 6, "parent_chat_id": 5, "timestamp": 2.5, "input_length": 32, "output_length": 3, "type": "text",
         "turn": 2, "hash_ids": [10, 12]},
        {"chat_id": 7, "parent_chat_id": 6, "timestamp": 3.5, "input_length": 16, "output_length": 3, "type": "search",
         "turn": 3, "hash_ids": [12]},
        {"chat_id": 8, "parent_chat_id": 3, "timestamp": 4, "input_length": 0, "output_length": 3, "type": "text",
         "turn": 2, "hash_ids": []},
    ]  # fmt: skip
    trace = open_trace(write(tmp_path / "qwen_traceA_blksz_16.jsonl", *rows))
    assert (trace.block_size, trace.kinds) == (16, ("", "text", "search"))
    assert trace.whole.chat.tolist() == [5, 5, 5, 3]  # the first chat of each conversation
    assert trace.whole.turn.tolist() == [1, 2, 3, 2]
    assert trace.whole.kind.tolist() == [1, 1, 2, 1]
    assert trace.whole.time_s.tolist() == [0, 1, 2, 2.5]
    assert same_paths(trace, [[10, 11], [10, 12], [12], []])  # 12 at the root is not the same block as 12 after 10


def test_tokens(tmp_path: Path) -> None:
    prompts = [list(range(40)), list(range(33)), list(range(40)), [7], []]
    rows = [{"tokens": prompts[0], "timestamp": 9}, {"prompt_token_ids": prompts[1], "tenant": "a", "turn": 2}]
    rows += [{"tokens": prompts[2], "model": "b", "chat_id": "x"}, {"tokens": prompts[3]}, {"tokens": prompts[4]}]
    trace = open_trace(write(tmp_path / "t", *rows))
    cut = [[tuple(prompt[at : at + 16]) for at in range(0, len(prompt), 16)] for prompt in prompts]
    cut[2] = [("b", block) for block in cut[2]]  # different models share no blocks
    assert same_paths(trace, cut)
    assert trace.whole.input_tokens.tolist() == [40, 33, 40, 1, 0]
    assert trace.whole.time_s.tolist() == [0] * 5  # the time of the previous line
    assert trace.notes == ()
    assert trace.whole.tenant.tolist() == [0, 1, 0, 0, 0]
    assert trace.whole.turn.tolist() == [0, 2, 0, 0, 0]
    assert (trace.whole.chat >= 0).tolist() == [False, False, True, False, False]


def test_without_a_first_time_all_requests_arrive_at_once(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "t", {"tokens": [1]}, {"tokens": [2], "timestamp": 1.7e9}, {"tokens": [3]}))
    assert trace.whole.time_s.tolist() == [0, 0, 0]
    assert "no time" in trace.notes[0]


def test_tokens_in_blocks_are_cut_as_block_hashes_are(tmp_path: Path) -> None:
    random_ = random.Random(1)
    prompts = [[random_.randrange(3) for _ in range(random_.randrange(30))] for _ in range(60)]
    trace = open_trace(write(tmp_path / "t", *({"tokens": prompt} for prompt in prompts)), TraceOptions(block_size=4))
    paths = []
    for prompt in prompts:
        whole = hash_blocks(prompt, 4, 8)
        tail = prompt[len(prompt) // 4 * 4 :]
        paths.append([whole[at : at + 8] for at in range(0, len(whole), 8)] + ([tuple(tail)] if tail else []))
    assert same_paths(trace, paths)


CHAT = {"messages": [{"role": "system", "content": "Be kind. " * 9}, {"role": "user", "content": "Hello"}]}


def test_openai_as_bytes(tmp_path: Path) -> None:
    longer = {"messages": [*CHAT["messages"], {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}
    rows: list[Line] = [
        {**CHAT, "timestamp": 5, "model": "m", "user": "u", "usage": {"prompt_tokens": 9, "completion_tokens": 4}},
        {"body": {**longer, "model": "m"}, "custom_id": "2", "response": {"body": {"usage": {"output_tokens": 6}}}},
        {"prompt": "Once upon a time", "created": 7.5},
        {"prompt": [1, 2, 3]},
        {**CHAT, "model": "m", "tools": [{"type": "function"}]},
    ]
    trace = open_trace(write(tmp_path / "t", *rows))
    assert trace.notes == ("Tokens are bytes, not those of a model.",)
    assert trace.whole.output_tokens.tolist() == [4, 6, 0, 0, 0]
    assert trace.whole.input_tokens.tolist()[2:4] == [16, 3]
    assert trace.whole.time_s.tolist() == [0, 0, 2.5, 2.5, 2.5]
    assert trace.tenants == ("", "u")
    first, second, *_, tools = (trace.whole.slice(at, at + 1).blocks.tolist() for at in range(5))
    assert first[:-1] == second[: len(first) - 1]  # all but the partial one
    assert first[0] != tools[0]


def test_a_system_prompt_in_a_field_of_its_own_is_read_as_a_message(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "How?"}]
    chat = {"model": "m", "messages": [{"role": "system", "content": "Be short."}, *said]}
    part = {"type": "text", "text": "Be short."}
    same = [
        {"model": "m", "system": "Be short.", "messages": said},
        {"model": "m", "system": [part], "messages": said},
        {"model": "m", "instructions": "Be short.", "input": "How?"},
        {"model": "m", "instructions": "Be short.", "input": [{**said[0], "content": [{**part, "text": "How?"}]}]},
    ]
    trace = open_trace(write(tmp_path / "t", chat, *same))
    assert len({tuple(trace.whole.slice(at, at + 1).blocks.tolist()) for at in range(5)}) == 1
    alone = open_trace(write(tmp_path / "u", {"model": "m", "input": "How?"}))
    assert alone.whole.input_tokens.tolist() < trace.whole.input_tokens.tolist()[:1]
    with pytest.raises(TraceError, match="previous_response_id"):
        open_trace(write(tmp_path / "v", {"model": "m", "input": "How?", "previous_response_id": "resp_1"}))


def test_null_fields_count_as_absent(tmp_path: Path) -> None:
    bodies = open_trace(write(tmp_path / "t", CHAT, {"prompt": None, "user": None, **CHAT}))
    assert bodies.distinct_blocks * 2 == bodies.whole.lengths.sum()
    tokens = open_trace(write(tmp_path / "t", {"tokens": [1, 2]}, {"tokens": None, "prompt_token_ids": [1, 2]}))
    assert tokens.distinct_blocks == 1 and len(tokens) == 2


def test_no_text_looks_like_the_boundary_of_a_message(tmp_path: Path) -> None:
    rows: list[Line] = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]},
        {"messages": [{"role": "user", "content": "auserb"}]},
        {"messages": [{"role": "user", "content": "a"}]},
        {"messages": [{"role": "use", "content": "ra"}]},
        {"messages": [{"role": "user", "content": "", "a": 1}]},
        {"messages": [{"role": "user", "content": '{"a": 1}'}]},
    ]
    trace = open_trace(write(tmp_path / "t", *rows))
    assert trace.whole.lengths.tolist() == [1] * 6
    assert trace.distinct_blocks == 6


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")
    transformers = pytest.importorskip("transformers", reason="the package transformers is not installed")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "Hello": 1, "you": 2, "user": 3}, unk_token="?"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    made.chat_template = "{% for m in messages %}{{ m.role }} {{ m.content + ' ' }}{% endfor %}"
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return str(folder)


def test_openai_with_a_tokenizer(tokenizer: str, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "Hello you"}]},
        {"prompt": "user Hello you"},
        {"prompt": "you"},
        {"messages": [{"role": "user", "content": 5}]},
    ]
    trace = open_trace(write(tmp_path / "t", *rows), TraceOptions(tokenizer=tokenizer, on_bad="skip"))
    assert trace.whole.input_tokens.tolist() == [3, 3, 1]
    assert same_paths(trace, [[1], [1], [2]])
    assert trace.notes[0] == f"Tokens are those of {tokenizer}."
    assert "line 4: it cannot be tokenized" in trace.notes[-1]


def test_parts_of_text_are_one_text(tokenizer: str, tmp_path: Path) -> None:
    def row(content: object) -> Line:
        return {"messages": [{"role": "user", "content": content}]}

    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "you"}]
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    path = write(
        tmp_path / "t", row("Hello\nyou"), row(parts), row([*parts, image]), row([{"type": "text", "text": 5}])
    )
    as_bytes = open_trace(path, TraceOptions(on_bad="skip"))
    one, same, other = (as_bytes.whole.slice(at, at + 1).blocks.tolist() for at in range(3))
    assert one == same and one[0] != other[0]
    assert "line 4: text is not a string: 5" in as_bytes.notes[-1]
    tokens = open_trace(path, TraceOptions(tokenizer=tokenizer, on_bad="skip"))
    assert tokens.whole.input_tokens.tolist() == [3, 3]


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="the package transformers is not installed")
    with pytest.raises(BadArgument, match="tokenizer"):
        open_trace(write(tmp_path / "t", CHAT), TraceOptions(tokenizer=str(tmp_path)))


def test_a_tokenizer_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(BackendUnavailable, match="transformers"):
        open_trace(write(tmp_path / "t", CHAT), TraceOptions(tokenizer="any"))


HEADER = {"format": "mainstem-recording", "version": 1, "block_size": 16, "server": "0.1.0", "model": "m", "key": "00"}


def recorded(time: float, blocks: list[int], **more: object) -> Line:
    return {"time": time, "kind": "chat", "model": "m", "tenant": "", "input_tokens": 16 * len(blocks) - 1,
            "output_tokens": 3, "cached": None, "finish": "stop", "blocks": "".join(f"{b:016x}" for b in blocks),
            **more}  # fmt: skip


def test_a_recording(tmp_path: Path) -> None:
    rows = [HEADER, recorded(1760000002.5, [1, 2]), recorded(1760000001.5, [1, 2, 3], tenant="ab"), HEADER]
    rows += [recorded(1760000003.5, [2**64 - 1], kind="completion")]
    trace = open_trace(write(tmp_path / "t", *rows))
    assert trace.block_size == 16
    assert same_paths(trace, [[1, 2, 3], [1, 2], [2**64 - 1]])
    assert trace.whole.time_s.tolist() == [0, 1, 2]
    assert [trace.tenants[at] for at in trace.whole.tenant] == ["ab", "", ""]
    assert [trace.kinds[at] for at in trace.whole.kind] == ["chat", "chat", "completion"]
    assert "sorted by time: 1" in trace.notes[0]


def test_recordings_under_several_secrets_say_so(tmp_path: Path) -> None:
    rows = [HEADER, recorded(1, [1]), {**HEADER, "key": "01"}, recorded(2, [2]), HEADER, recorded(3, [1])]
    (note,) = open_trace(write(tmp_path / "t", *rows)).notes
    assert note.startswith("Recorded under 2 secrets")
    assert open_trace(write(tmp_path / "t", *rows[:2])).notes == ()


def test_a_recording_cannot_go_on_with_another_block_size_or_version(tmp_path: Path) -> None:
    for header in ({**HEADER, "block_size": 32}, {**HEADER, "version": 2}):
        path = write(tmp_path / "t", HEADER, recorded(1, [1]), header)
        with pytest.raises(TraceError, match="line 3"):
            open_trace(path)


@pytest.mark.parametrize("size", [None, 0, "16", 2**31])
def test_a_recording_needs_its_header(size: object, tmp_path: Path) -> None:
    for rows in ([recorded(1, [1])], [{**HEADER, "block_size": size}, recorded(1, [1])]):
        with pytest.raises(TraceError, match="header of a recording"):
            open_trace(write(tmp_path / "t", *rows), TraceOptions(format="recording"))


@pytest.mark.parametrize("row", FORMATS, ids=lambda row: row.name)
def test_the_expected_line_is_detected_as_its_format(row: readers.Format, tmp_path: Path) -> None:
    shown = row.expected.partition(" and then ")[0].replace(", ...", "")
    assert next(other for other in FORMATS if other.fits(json.loads(shown))) is row


# --- files --------------------------------------------------------------------------------------------------------

PACKED: dict[str, Callable[[bytes], bytes]] = {
    "plain": bytes,
    "gzip": gzip.compress,
    "xz": lzma.compress,
    "zstd": lambda data: zstandard.ZstdCompressor().compress(data),
    "two gzip members": lambda data: gzip.compress(data[:100]) + gzip.compress(data[100:]),
    "two xz streams": lambda data: lzma.compress(data[:100]) + lzma.compress(data[100:]),
    "xz with padding": lambda data: lzma.compress(data[:100]) + bytes(4) + lzma.compress(data[100:]) + bytes(8),
    "two zstd frames": lambda data: b"".join(zstandard.ZstdCompressor().compress(d) for d in (data[:99], data[99:])),
}


@pytest.mark.parametrize("pack", PACKED.values(), ids=list(PACKED))
@pytest.mark.parametrize("ready", [False, True], ids=["jsonl", "mstrace"])
@pytest.mark.parametrize("stdin", [False, True], ids=["file", "stdin"])
def test_any_compression(
    pack: Callable[[bytes], bytes], ready: bool, stdin: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "plain", *MOONCAKE)
    expected = open_trace(path)
    if ready:
        expected.save(path)
    packed = tmp_path / "t.gz"  # the name says nothing
    packed.write_bytes(pack(path.read_bytes()))
    if stdin:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(packed.read_bytes())))
    trace = open_trace("-" if stdin else packed)
    for name in Batch.__slots__:
        assert np.array_equal(getattr(trace.whole, name), getattr(expected.whole, name))
    for _ in range(2):  # the file is read once, the batches any number of times
        assert sum(len(batch) for batch in trace.batches()) == 3


@pytest.mark.parametrize("ready", [False, True], ids=["jsonl", "mstrace"])
def test_a_pipe_is_read_once(ready: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "plain", *MOONCAKE)
    expected = open_trace(path)
    if ready:
        expected.save(path)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=lambda: pipe.write_bytes(path.read_bytes()))
    writer.start()
    trace = open_trace(pipe)
    writer.join()
    assert np.array_equal(trace.whole.blocks, expected.whole.blocks)


def test_standard_input_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(TraceError, match="standard input is closed"):
        open_trace("-")


@pytest.mark.parametrize("pack", list(PACKED.values())[1:4], ids=list(PACKED)[1:4])
def test_compressed_data_that_is_cut_short_or_damaged_is_refused(
    pack: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    random_ = random.Random(2)
    rows = [{**MOONCAKE[0], "hash_ids": [random_.getrandbits(63) for _ in range(3)]} for _ in range(200)]
    data = pack(write(tmp_path / "plain", *rows).read_bytes())
    path = tmp_path / "t"
    for cut in (7, 20, len(data) // 2, len(data) - 1):
        path.write_bytes(data[:cut])
        with pytest.raises(TraceError, match="damaged or cut short"):
            open_trace(path, TraceOptions(on_bad="skip"))
    path.write_bytes(data[:50] + bytes(200) + data[250:])
    with pytest.raises(TraceError):
        open_trace(path)


@pytest.mark.parametrize("pack", list(PACKED.values())[1:4], ids=list(PACKED)[1:4])
def test_data_after_compressed_data_is_not_ignored(pack: Callable[[bytes], bytes], tmp_path: Path) -> None:
    path = write(tmp_path / "t", *MOONCAKE)
    path.write_bytes(pack(path.read_bytes()) + b'{"timestamp": 9, "input_length": 0, "hash_ids": []}')
    with pytest.raises(TraceError, match="damaged or cut short"):
        open_trace(path)


def test_zstd_without_its_package_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t"
    path.write_bytes(PACKED["zstd"](b"{}"))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(BackendUnavailable, match="zstandard"):
        open_trace(path)


def test_progress_is_reported_in_bytes_of_the_file(tmp_path: Path) -> None:
    path = write(tmp_path / "t", *MOONCAKE)
    reported: list[tuple[int, int]] = []
    open_trace(path, progress=lambda done, total: reported.append((done, total)))
    assert reported[-1] == (path.stat().st_size, path.stat().st_size)
    assert sorted(reported) == reported


def test_blank_lines_and_a_byte_order_mark_are_ignored(tmp_path: Path) -> None:
    first = b"\xef\xbb\xbf" + json.dumps(MOONCAKE[0]).encode()
    assert len(open_trace(write(tmp_path / "t", b"", first, b"  \r", MOONCAKE[1]))) == 2


def test_many_batches_are_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_ = random.Random(4)
    paths = [[random_.randrange(3) for _ in range(random_.randrange(12))] for _ in range(400)]
    rows = [{"timestamp": at, "input_length": 512 * len(path), "hash_ids": path} for at, path in enumerate(paths)]
    file = write(tmp_path / "t", *rows)
    monkeypatch.setattr(readers, "_BATCH", 20)
    trace = open_trace(file)
    assert same_paths(trace, paths)
    assert trace.distinct_blocks == len({tuple(path[:depth]) for path in paths for depth in range(1, len(path) + 1)})


def test_a_missing_file_raises_file_not_found(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_trace(tmp_path / "none")


# --- bad lines ----------------------------------------------------------------------------------------------------

GOOD: Line = {"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1, 2]}
TOKENS: Line = {"tokens": [1, 2]}
BAD: list[tuple[Line, Line | bytes, str]] = [
    (GOOD, b"{", "not JSON"),
    (GOOD, b"[" * 100000, "not JSON"),
    (GOOD, b'"\xff"', "not JSON"),
    (GOOD, b'{"timestamp": NaN}', "not JSON"),
    (GOOD, b"[1]", "not a JSON object"),
    (GOOD, b"null", "not a JSON object"),
    (GOOD, {}, "input_length is missing"),
    (GOOD, {**GOOD, "input_length": "600"}, "input_length is not an integer: '600'"),
    (GOOD, {**GOOD, "input_length": True}, "input_length is not an integer"),
    (GOOD, {**GOOD, "input_length": 600.5}, "input_length is not an integer"),
    (GOOD, {**GOOD, "input_length": -600}, "input_length = -600 is not from 0"),
    (GOOD, {**GOOD, "input_length": 2**70}, "is not from 0"),
    (GOOD, {**GOOD, "output_length": -1}, "output_length = -1 is not from 0"),
    (GOOD, {**GOOD, "timestamp": None}, "timestamp is missing"),
    (GOOD, {**GOOD, "timestamp": -1}, "timestamp = -1 is not a time"),
    (GOOD, {**GOOD, "timestamp": "now"}, "timestamp = 'now' is not a time"),
    (GOOD, {**GOOD, "timestamp": 10**400}, "is not a time"),
    (GOOD, {**GOOD, "hash_ids": None}, "hash_ids is missing"),
    (GOOD, {**GOOD, "hash_ids": 3}, "hash_ids is not a list: 3"),
    (
        GOOD,
        {**GOOD, "hash_ids": [1]} | {"input_length": 1537},
        "hash_ids has 1 ids for 1537 tokens, which are 4 blocks of 512",
    ),
    (GOOD, {**GOOD, "hash_ids": [1, 2, 3]}, "hash_ids has 3 ids"),
    (GOOD, {**GOOD, "hash_ids": [1, 2.5]}, "an id is neither an integer nor a string: 2.5"),
    (GOOD, {**GOOD, "hash_ids": [1, None]}, "an id is neither"),
    (GOOD, {**GOOD, "hash_ids": "xyz"}, "hash_ids is not 16 hex digits"),
    (GOOD, {**GOOD, "hash_ids": "abcd"}, "hash_ids is not 16 hex digits"),
    (TOKENS, {}, "neither tokens nor prompt_token_ids"),
    (TOKENS, {"tokens": "abc"}, "neither tokens nor prompt_token_ids"),
    (TOKENS, {"tokens": [1, -1]}, "position 1"),
    (TOKENS, {"tokens": [2**31]}, "position 0"),
    (TOKENS, {"tokens": [1, "2"]}, "position 1"),
    (TOKENS, {"tokens": [1], "turn": -1}, "turn = -1"),
    (TOKENS, {"tokens": [1], "tenant": 5}, "tenant is not a string: 5"),
    (TOKENS, {"tokens": [1], "chat_id": [1]}, "an id is neither"),
    (CHAT, {}, "neither prompt nor messages"),
    (CHAT, {"messages": "Hello"}, "neither prompt nor messages"),
    (CHAT, {"messages": ["Hello"]}, "neither prompt nor messages"),
    (CHAT, {"messages": [{"role": 5, "content": "a"}]}, "role is not a string: 5"),
    (CHAT, {"prompt": ["a", "b"]}, "prompt is neither"),
    (CHAT, {"prompt": [2**40]}, "position 0"),
    (CHAT, b'{"prompt": "\\ud800"}', "not "),
    (CHAT, {**CHAT, "usage": {"completion_tokens": -4}}, "completion_tokens = -4"),
]


@pytest.mark.parametrize("slow", [False, True], ids=["msgspec", "json"])
@pytest.mark.parametrize(("good", "bad", "why"), BAD, ids=[f"{at}: {why}" for at, (_, _, why) in enumerate(BAD)])
def test_a_bad_line_is_named_and_stops_or_is_left_out(
    good: Line, bad: Line | bytes, why: str, slow: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if slow:
        monkeypatch.setitem(sys.modules, "msgspec", None)
        monkeypatch.setitem(sys.modules, "msgspec.json", None)
    path = write(tmp_path / "t", good, b"", bad, good)
    with pytest.raises(TraceError) as caught:
        open_trace(path)
    message = str(caught.value)
    assert caught.value.line == 3
    assert "line 3: " in message and why in message
    assert "Expected for " in message and " The line: " in message
    assert len(message) < 900
    trace = open_trace(path, TraceOptions(on_bad="skip"))
    assert len(trace) == 2
    assert f"Bad lines, left out: 1 (line 3: {why[:5]}" in trace.notes[-1] or why in trace.notes[-1]


def test_all_bad_lines_are_counted_and_the_first_are_named(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "t", GOOD, *["?"] * 50), TraceOptions(on_bad="skip"))
    assert trace.notes[0].startswith("Bad lines, left out: 50 (line 2: not JSON")
    assert trace.notes[0].count("line ") == 20
    assert trace.notes[0].endswith(", and more).")


def test_a_line_that_is_too_long_is_bad_and_the_next_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (lines, readers):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 100)
    trace = open_trace(write(tmp_path / "t", GOOD, {**GOOD, "x": "y" * 1000}, GOOD), TraceOptions(on_bad="skip"))
    assert len(trace) == 2
    assert trace.notes == ("Bad lines, left out: 1 (line 2: it is longer than 100 bytes).",)


def test_strings_and_integers_of_any_size_are_ids(tmp_path: Path) -> None:
    ids: list[Any] = [0, 2**63, 2**64 - 1, 2**64, 2**200, -1, -(2**64), "a", "0", "2", 10**300]
    rows = [{**GOOD, "input_length": 512, "hash_ids": [name]} for name in ids * 2]
    trace = open_trace(write(tmp_path / "t", *rows))
    assert trace.distinct_blocks == len(ids)
    assert same_paths(trace, [[name] for name in ids * 2])


def test_names_are_the_same_in_every_run(tmp_path: Path) -> None:
    trace = open_trace(write(tmp_path / "t", {**GOOD, "hash_ids": [1, "a"]}))
    assert trace.whole.blocks.tolist() == [5030171812741402187, 12524449253283317834]


# --- files that are not traces ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "shown"),
    [(b"", "It is empty"), (b"\n \n", "It is empty"), (b"hello\n" * 99, "Line 1 is: hello"),
     (b'\n[{"timestamp": 1}]\n', "Line 2 is: [{"), (b'{"a": 1}\n' * 30, 'Line 1 is: {"a": 1}'),
     (bytes(range(256)) * 9, "Line 1 is: \\x00\\x01")],
)  # fmt: skip
@pytest.mark.parametrize("on_bad", ["stop", "skip"])
def test_the_error_for_a_foreign_file_says_what_was_expected(
    data: bytes, shown: str, on_bad: Any, tmp_path: Path
) -> None:
    path = tmp_path / "t"
    path.write_bytes(data)
    with pytest.raises(TraceError) as caught:
        open_trace(path, TraceOptions(on_bad=on_bad))
    assert shown in str(caught.value)
    assert all(f"{row.name}: " in str(caught.value) for row in FORMATS)


def test_a_trace_of_only_bad_lines_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="has no request"):
        open_trace(write(tmp_path / "t", {**GOOD, "input_length": -1}), TraceOptions(on_bad="skip"))


def test_a_given_format_is_not_detected_from_the_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "t", TOKENS)
    with pytest.raises(TraceError, match="line 1: input_length is missing"):
        open_trace(path, TraceOptions(format="mooncake"))
    with pytest.raises(TraceError, match="begins with"):
        open_trace(write(tmp_path / "t", *MOONCAKE), TraceOptions(format="mstrace"))


@pytest.mark.parametrize(
    ("arguments", "name"),
    [({"format": "csv"}, "format"), ({"block_size": 0}, "block_size"), ({"on_bad": "ask"}, "on_bad"),
     ({"tokenizer": "any"}, "tokenizer")],
)  # fmt: skip
def test_arguments_are_checked(arguments: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(BadArgument, match=name):
        open_trace(write(tmp_path / "t", *MOONCAKE), TraceOptions(**arguments))


def test_a_ready_made_trace_has_its_blocks_and_no_text(tmp_path: Path) -> None:
    path = tmp_path / "t.mstrace"
    open_trace(write(tmp_path / "t", *MOONCAKE)).save(path)
    assert len(open_trace(path, TraceOptions(block_size=512))) == 3
    with pytest.raises(BadArgument, match="block_size = 16: must be 512"):
        open_trace(path, TraceOptions(block_size=16))
    with pytest.raises(BadArgument, match="tokenizer"):
        open_trace(path, TraceOptions(tokenizer="any"))
