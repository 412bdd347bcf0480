"""The runner against plain transformers: however a sequence is cut, cached and packed, its logits are the same."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_models import CONTEXT, FAMILIES, VOCAB, loaded, tiny
from transformers import PreTrainedModel

from mainstem.errors import BadArgument, ModelNotFound, UnsupportedModel
from mainstem.runtime.attention import PAGED, BatchPlan, SdpaAttention
from mainstem.runtime.host import HostPool, Planes
from mainstem.runtime.models import LoadedModel, load_model
from mainstem.runtime.runner import ModelRunner, Segment
from mainstem.tiers.transfer import Move

POSITIONS = 400

pytestmark = pytest.mark.usefixtures("one_thread")

# Logits differ from plain ones by rounding only: fp32, logits up to about 10 (tiny models) or 35 (SmolLM2).
ATOL = 2e-4

Plain = Callable[[Sequence[int]], torch.Tensor]


class Bench(NamedTuple):
    """A runner, its page size, and plain logits [tokens, vocab] of a whole sequence."""

    runner: ModelRunner
    plain: Plain
    page_size: int
    pages: NDArray[np.int32]  # in scattered order

    def tables(self, count: int, positions: int) -> list[NDArray[np.int32]]:
        """`count` page tables for `positions` positions each, with no page in common."""
        size = -(-positions // self.page_size)
        return [self.pages[i * size : (i + 1) * size] for i in range(count)]

    def close(self, row: torch.Tensor, tokens: Sequence[int]) -> None:
        expected = self.plain(tokens)[-1]
        torch.testing.assert_close(row, expected, atol=ATOL, rtol=0)
        assert row.argmax() == expected.argmax()


def plain_logits(model: PreTrainedModel) -> Plain:
    model.set_attn_implementation("eager")

    @functools.lru_cache(maxsize=64)
    def logits(tokens: tuple[int, ...]) -> torch.Tensor:
        with torch.inference_mode():
            output: torch.Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return output

    return lambda tokens: logits(tuple(int(token) for token in tokens))


@functools.cache
def tiny_pair(family: str) -> tuple[LoadedModel, Plain]:
    model = tiny(family, **FAMILIES[family])
    return loaded(model), plain_logits(copy.deepcopy(model))


@functools.cache
def smollm2() -> tuple[LoadedModel, Plain] | str:
    try:
        model = load_model(dtype="float32")
    except ModelNotFound as error:
        return str(error)
    return model, plain_logits(copy.deepcopy(model.model))


@functools.cache
def make_bench(family: str, page_size: int) -> Bench:
    pair = smollm2() if family == "SmolLM2" else tiny_pair(family)
    if isinstance(pair, str):
        pytest.skip(pair)
    pages = POSITIONS // page_size
    order = np.random.default_rng(7).permutation(pages).astype(np.int32)
    return Bench(ModelRunner(pair[0], pages, page_size), pair[1], page_size, order)


@pytest.fixture(
    params=[
        *((family, page_size) for family in FAMILIES for page_size in (1, 3, 16)),
        pytest.param(("SmolLM2", 16), marks=pytest.mark.model),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def bench(request: pytest.FixtureRequest) -> Bench:
    return make_bench(*request.param)


def prompt(seed: int, length: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def test_whole_prompt(bench: Bench) -> None:
    tokens = prompt(1, 40)
    rows = bench.runner.forward([Segment(tokens, 0, bench.tables(1, 40)[0], True)])
    assert rows.dtype == torch.float32
    assert rows.shape == (1, bench.runner.vocab_size)
    bench.close(rows[0], tokens)


def test_chunked_prefill(bench: Bench) -> None:
    tokens, (table,) = prompt(1, 40), bench.tables(1, 40)
    for start, end in ((0, 7), (7, 23), (23, 24), (24, 40)):
        rows = bench.runner.forward([Segment(tokens[start:end], start, table, True)])
        bench.close(rows[0], tokens[:end])


def test_append_prefill_behind_pages_of_another_request(bench: Bench) -> None:
    """A prefix of 35 positions: whole pages are shared, the tail inside a page is copied."""
    first, second = prompt(1, 40), np.concatenate([prompt(1, 40)[:35], prompt(2, 9)])
    theirs, others = bench.tables(2, 44)
    bench.runner.forward([Segment(first, 0, theirs, False)])
    shared, tail = divmod(35, bench.page_size)
    ours = np.concatenate([theirs[:shared], others[shared:]])
    if tail:
        bench.runner.copy_page(int(theirs[shared]), int(ours[shared]), tail)
    rows = bench.runner.forward([Segment(second[35:], 35, ours, True)])
    bench.close(rows[0], second)
    again = bench.runner.forward([Segment(first[39:], 39, theirs, True)])
    bench.close(again[0], first)


def test_packed_with_other_requests(bench: Bench) -> None:
    """A chunk, a whole prompt, a decode step and a chunk without logits, in one forward."""
    a, b, c, d = prompt(1, 40), prompt(2, 17), prompt(3, 30), prompt(4, 12)
    tables = bench.tables(4, 40)
    bench.runner.forward([Segment(a[:25], 0, tables[0], False), Segment(c[:29], 0, tables[2], False)])
    rows = bench.runner.forward(
        [
            Segment(d[:5], 0, tables[3], False),
            Segment(a[25:], 25, tables[0], True),
            Segment(b, 0, tables[1], True),
            Segment(c[29:], 29, tables[2], True),
        ]
    )
    assert rows.shape == (3, bench.runner.vocab_size)
    for row, tokens in zip(rows, (a, b, c), strict=True):
        bench.close(row, tokens)
    bench.close(bench.runner.forward([Segment(d[5:], 5, tables[3], True)])[0], d)


def test_decode_steps_of_two_requests(bench: Bench) -> None:
    sequences = [list(prompt(1, 21)), list(prompt(2, 8))]
    tables = bench.tables(2, 30)
    starts = [0, 0]
    for _ in range(4):
        segments = [
            Segment(np.array(tokens[start:], dtype=np.int32), start, table, True)
            for tokens, start, table in zip(sequences, starts, tables, strict=True)
        ]
        rows = bench.runner.forward(segments)
        starts = [len(tokens) for tokens in sequences]
        for row, tokens in zip(rows, sequences, strict=True):
            bench.close(row, tokens)
            tokens.append(int(row.argmax()))


def test_no_rows_when_no_logits_are_wanted() -> None:
    bench = make_bench("llama", 16)
    rows = bench.runner.forward([Segment(prompt(1, 5), 0, bench.tables(1, 5)[0], False)])
    assert rows.shape == (0, VOCAB)


def test_a_page_of_the_pool_is_as_large_as_it_says() -> None:
    runner = make_bench("llama", 3).runner
    assert runner.vocab_size == VOCAB
    assert runner.bytes_per_page == 2 * 3 * 3 * 2 * 16 * 4


class _Recorded(SdpaAttention):
    """Writes down which layers were computed."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, plan: BatchPlan
    ) -> torch.Tensor:
        out = super().attend(layer, query, key, value, scale, plan)
        self.log.append(("computed", layer))
        return out


class _Arriving:
    """Layer i arrives only when layer i - 1 was computed: whoever waits for more has waited for ever."""

    error = None

    def __init__(self, log: list[tuple[str, int]], arrive: Callable[[int], None]) -> None:
        self._log = log
        self._arrive = arrive

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("only layers are waited for")

    def wait_layer(self, layer: int) -> None:
        assert layer == 0 or ("computed", layer - 1) in self._log
        assert ("computed", layer) not in self._log
        self._arrive(layer)
        self._log.append(("arrived", layer))


def test_layers_are_computed_while_the_next_ones_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests whose prefix comes layer by layer beside one without: each layer is awaited, then read."""
    attention = _Recorded()
    monkeypatch.setattr("mainstem.runtime.runner.SdpaAttention", lambda: attention)
    bench = make_bench.__wrapped__("llama", 3)
    tokens, other = prompt(1, 40), prompt(2, 9)
    tables = bench.tables(3, 40)
    bench.runner.forward([Segment(tokens[:33], 0, tables[0], False)])
    pool, pages = bench.runner.pool, torch.from_numpy(tables[0][:11])
    kept = [(keys[pages].clone(), values[pages].clone()) for keys, values in map(pool.layer, range(3))]
    attention.log.clear()
    pool.k[:, pages], pool.v[:, pages] = torch.nan, torch.nan

    def arrive(layer: int) -> None:
        keys, values = pool.layer(layer)
        keys[pages], values[pages] = kept[layer]

    ticket = _Arriving(attention.log, arrive)
    follower = np.concatenate([tables[0][:11], tables[1][:5]])
    rows = bench.runner.forward(
        [
            Segment(other, 0, tables[2], True),
            Segment(tokens[33:], 33, tables[0], True, ticket),
            Segment(tokens[33:38], 33, follower, True, ticket),
        ]
    )
    assert attention.log == [(what, layer) for layer in range(3) for what in ("arrived", "computed")]
    for row, sequence in zip(rows, (other, tokens, tokens[:38]), strict=True):
        bench.close(row, sequence)


def test_what_comes_up_from_the_host_is_waited_for() -> None:
    """With the real copies, on their own thread."""
    bench = make_bench("llama", 16)
    tokens, (table,) = prompt(1, 40), bench.tables(1, 40)
    bench.runner.forward([Segment(tokens[:32], 0, table, False)])
    pool, slots = bench.runner.pool, np.arange(2, dtype=np.int32)
    host = HostPool([Planes((pool.k, pool.v))], [2])
    host.down([Move(0, table[:2], slots)]).wait()
    for _ in range(5):
        pool.k.fill_(torch.nan)
        pool.v.fill_(torch.nan)
        ticket = host.up([Move(0, slots, table[:2])])
        bench.close(bench.runner.forward([Segment(tokens[32:], 32, table, True, ticket)])[0], tokens)
        assert ticket.done()
        assert ticket.error is None
    host.close()


TABLE = np.arange(4, dtype=np.int32)
GOOD = Segment(prompt(1, 5), 0, TABLE, True)


@pytest.mark.parametrize(
    ("segments", "name"),
    [
        ([], "segments"),
        ([Segment(prompt(1, 0), 0, TABLE, True)], "segments[0].tokens"),
        ([GOOD, Segment(np.array([3, VOCAB], dtype=np.int32), 0, TABLE + 4, True)], "segments[1].tokens"),
        ([Segment(np.array([-1], dtype=np.int32), 0, TABLE, True)], "segments[0].tokens"),
        ([Segment(prompt(1, 5), -1, TABLE, True)], "segments[0].start"),
        ([Segment(prompt(1, 5), CONTEXT - 4, np.arange(20, dtype=np.int32), True)], "segments[0].start"),
        ([Segment(prompt(1, 5), 60, TABLE, True)], "segments[0].page_table"),
        ([Segment(prompt(1, 5), 0, np.array([25], dtype=np.int32), True)], "segments[0].page_table"),
        ([Segment(prompt(1, 5), 0, np.array([-1], dtype=np.int32), True)], "segments[0].page_table"),
        ([GOOD, Segment(prompt(1, 5), 0, TABLE, True)], "segments"),
    ],
)
def test_bad_segments_are_refused_and_write_nothing(segments: list[Segment], name: str) -> None:
    bench = make_bench("llama", 16)
    bench.runner.forward([Segment(prompt(9, 10), 0, TABLE, False)])
    with pytest.raises(BadArgument) as caught:
        bench.runner.forward(segments)
    assert caught.value.name == name
    tokens = np.append(prompt(9, 10), np.int32(5))
    bench.close(bench.runner.forward([Segment(tokens[10:], 10, TABLE, True)])[0], tokens)


ROPE = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("mistral", {"sliding_window": 32}, r"sliding_attention \(32 positions\)"),
        ("phi3", {"sliding_window": CONTEXT - 1}, "sliding_attention"),
        ("gemma3_text", {"sliding_window": 32}, "sliding_attention"),
        ("gemma2", {"sliding_window": CONTEXT}, "soft-capped"),
        ("llama4_text", {}, "chunked_attention"),
        ("bamba", {}, "recurrent"),
        ("qwen3_next", {}, "recurrent"),
        ("deepseek_v3", {}, "latent"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}, "dynamic position embedding"),
        ("bloom", {"intermediate_size": ...}, "cannot be exchanged"),
        ("stablelm", {}, "does not pass arguments on"),
        ("diffllama", {}, "self-test failed"),
    ],
)
def test_models_that_cannot_run_over_pages_are_refused(family: str, changes: dict[str, Any], message: str) -> None:
    model = tiny(family, **changes)
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=message):
        ModelRunner(loaded(model), 8, 16)
    assert model.config._attn_implementation == before != PAGED


def test_a_window_as_long_as_the_context_is_no_window() -> None:
    ModelRunner(loaded(tiny("mistral", sliding_window=CONTEXT)), 8, 16)


class _Shifted(SdpaAttention):
    """Gives every position its neighbour's value."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, plan: BatchPlan
    ) -> torch.Tensor:
        return super().attend(layer, query, key, value.roll(1, 0), scale, plan)


def test_the_self_test_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mainstem.runtime.runner.SdpaAttention", _Shifted)
    with pytest.raises(UnsupportedModel, match="self-test failed"):
        ModelRunner(loaded(tiny("llama")), 8, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_self_test(dtype: torch.dtype) -> None:
    model = tiny("llama").to(dtype)  # type: ignore[call-arg, arg-type]
    runner = ModelRunner(LoadedModel(model, None, "tiny", dtype, CONTEXT), 8, 16)  # type: ignore[arg-type]
    rows = runner.forward([Segment(prompt(1, 5), 0, TABLE, True)])
    assert rows.dtype == torch.float32
    assert rows.isfinite().all()


@pytest.mark.parametrize(("pages", "page_size"), [(0, 16), (8, 0)])
def test_an_empty_pool_is_refused(pages: int, page_size: int) -> None:
    with pytest.raises(BadArgument):
        ModelRunner(loaded(tiny("llama")), pages, page_size)
