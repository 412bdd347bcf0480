"""The greatest numbers that a replay, a plan and a generated trace take, and how many lines are looked at or shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mainstem.errors import BadArgument
from mainstem.replay.explain import _kind
from mainstem.replay.generate import _check_range, _lengths
from mainstem.replay.grow import grow
from mainstem.replay.plan.configs import read_shape
from mainstem.replay.readers.lines import Source
from mainstem.replay.readers.open import BadLine, _Reader, open_trace
from mainstem.replay.report.series import merged
from mainstem.replay.simulate.rows import _Spans
from mainstem.replay.trace import Batch, Trace, TraceError
from mainstem.settings.fleet import FleetSize
from mainstem.settings.replay import Assumptions, Setup, TraceOptions


@pytest.mark.parametrize(
    ("make", "greatest"),
    [
        (lambda n: Setup(replicas=n), 4096),
        (lambda n: Setup(host_blocks=n), 2**62),
        (lambda n: Assumptions(replicas=n), 4096),
        (lambda n: Assumptions(gpus=n), 1024),
        (lambda n: FleetSize(replicas=n), 1024),
        (lambda n: _check_range("prompts", n, whole=True), 10**6),
    ],
)
def test_counts_have_a_greatest_value(make: Callable[[int], Any], greatest: int) -> None:
    make(greatest)
    for more in (greatest + 1, greatest * 1000):
        with pytest.raises(BadArgument):
            make(more)


@pytest.mark.parametrize(("flops", "taken"), [(1e-3, True), (0.9e-3, False), (1e24, True), (1.1e24, False)])
def test_an_amount_that_is_a_typo_is_refused(flops: float, taken: bool) -> None:
    if taken:
        assert Assumptions(flops=flops).flops == flops
    else:
        with pytest.raises(BadArgument):
            Assumptions(flops=flops)


def test_a_trace_is_grown_a_million_times_at_most() -> None:
    nothing = Trace.of(Batch.of([], time_s=[]))
    with pytest.raises(BadArgument, match="1 request or more"):
        grow(nothing, 10**6)
    with pytest.raises(BadArgument, match="times"):
        grow(nothing, 10**6 + 1)


def test_no_generated_length_overflows_a_sum() -> None:
    lengths = _lengths(np.random.default_rng(1), 1e300, 1.0, 100)
    assert set(lengths.tolist()) == {2**30}


def test_a_timeline_has_256_spans_whose_width_doubles() -> None:
    spans, one = _Spans(), np.ones(1, np.int64)
    for second in range(256):
        spans.add(np.array([float(second)]), one, one)
    assert (spans.timeline().width_s, len(spans.timeline().block_accesses)) == (1.0, 256)
    spans.add(np.array([256.0]), one, one)
    assert (spans.timeline().width_s, spans.timeline().block_accesses) == (2.0, (2,) * 128 + (1,))
    spans.add(np.array([256.0 * 2**20]), one, one)
    found = spans.timeline()
    assert found.width_s == 2.0**21 and sum(found.block_accesses) == sum(found.block_hits) == 258
    assert len(merged(found).block_accesses) <= 60


@pytest.mark.parametrize(("spans", "shown"), [(59, 59), (60, 60), (61, 31), (256, 52)])
def test_sixty_spans_are_drawn_at_most(spans: int, shown: int) -> None:
    made, one = _Spans(), np.ones(1, np.int64)
    for second in range(spans):
        made.add(np.array([float(second)]), one, one)
    found = merged(made.timeline())
    assert len(found.block_accesses) == shown and sum(found.block_accesses) == spans


@pytest.mark.parametrize(("before", "read"), [(15, True), (16, False), (16_000, False)])
def test_the_first_sixteen_lines_say_what_a_file_is(before: int, read: bool, tmp_path: Path) -> None:
    line = json.dumps({"timestamp": 1, "input_length": 512, "output_length": 1, "hash_ids": [4]})
    path = tmp_path / "trace.jsonl"
    path.write_text("[]\n" * before + line + "\n")
    if read:
        assert open_trace(str(path), TraceOptions(on_bad="skip")).whole.blocks.size == 1
    else:
        with pytest.raises(TraceError):
            open_trace(str(path), TraceOptions(on_bad="skip"))
    assert (_kind(str(path)) is not None) == read


@pytest.mark.parametrize(("count", "taken"), [(10_000, True), (10_001, False), (10_000_000, False)])
def test_a_model_has_10000_layers_at_most(count: int, taken: bool) -> None:
    config = {"model_type": "llama", "num_hidden_layers": count, "hidden_size": 64, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 97}  # fmt: skip
    if taken:
        assert len(read_shape(config).layers) == count
    else:
        with pytest.raises(BadArgument, match="10000 layers at most"):
            read_shape(config)


@pytest.mark.parametrize(("size", "taken"), [(2**32 - 1, True), (2**32, False), (2**42, False)])
def test_a_size_of_a_model_has_32_bits(size: int, taken: bool) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4,
              "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": size}  # fmt: skip
    if taken:
        assert read_shape(config).layers
    else:
        with pytest.raises(BadArgument, match="sizes are whole numbers"):
            read_shape(config)


@pytest.mark.parametrize(("length", "taken"), [((64 << 20) - 1, True), (64 << 20, True), ((64 << 20) + 1, False)])
def test_a_line_has_64_mebibytes_at_most(length: int, taken: bool, tmp_path: Path) -> None:
    path = tmp_path / "long"
    with path.open("wb") as file:
        file.write(b"x" * length + b"\nnext\n")
    with Source(str(path)) as source:
        found = [(number, len(line)) for number, line in source.lines()]
    assert found == [(1, length), (2, 4)], "the line after it is found, too"
    reader: Any = SimpleNamespace(_decode=lambda line: {})
    if taken:
        assert _Reader._object(reader, b"x" * length) == {}
    else:
        with pytest.raises(BadLine, match="longer than 67108864 bytes"):
            _Reader._object(reader, b"x" * length)
