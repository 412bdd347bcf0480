"""The runner against plain transformers: however a sequence is cut, cached and packed, its logits are the same."""

from __future__ import annotations

import copy
import functools
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from rigs.slow import slow_but
from transformers import PreTrainedModel

from bench.tiny_models import (
    ALL,
    ALONE,
    CONTEXT,
    FAMILIES,
    GATHERED,
    HYBRIDS,
    LATENT,
    REFUSED,
    RESUMED,
    STEPPED,
    VARIANTS,
    VOCAB,
    WINDOWED,
    loaded,
    tiny,
)
from bench.tiny_vision import picture
from bench.tiny_vision import save as save_with_images
from mainstem.cache.components import Full
from mainstem.errors import BadArgument, ModelNotFound, UnsupportedModel
from mainstem.runtime.attention.latent import Latents
from mainstem.runtime.attention.paged import FULL, PAGED, PackedPositions, SdpaAttention
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.kernels.exchanges import Exchanged
from mainstem.runtime.memory.host import HostPool, Planes
from mainstem.runtime.memory.kv import KVPool
from mainstem.runtime.models.adapters import Adapter, Adapters
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.loading import LoadedModel, load_model
from mainstem.runtime.models.runner import ModelRunner
from mainstem.runtime.request import ImageInput, Request
from mainstem.runtime.segments import Segment
from mainstem.runtime.text.vision import Vision
from mainstem.settings.engine import HostSize
from mainstem.tiers.host.transfer import Move

POSITIONS = 400
SLOTS = 8
RECURRENT = {**HYBRIDS, **RESUMED, **STEPPED, **ALONE}

pytestmark = pytest.mark.usefixtures("one_thread")

# Logits differ from plain ones by rounding only: fp32, logits up to about 10 (tiny models) or 35 (SmolLM2).
ATOL = 2e-4

Plain = Callable[[Sequence[int]], torch.Tensor]


def only_kernel(monkeypatch: pytest.MonkeyPatch, make: Callable[[], SdpaAttention]) -> None:
    """Lets runners have this kernel, and none to fall back to."""
    monkeypatch.setattr("mainstem.runtime.models.runner.attention_for", lambda *_: make())
    monkeypatch.setattr("mainstem.runtime.models.self_test.SdpaAttention", make)


class RunnerRig(NamedTuple):
    """A runner, its page size, and plain logits [tokens, vocab] of a whole sequence."""

    runner: ModelRunner
    plain: Plain
    page_size: int
    page_ids: NDArray[np.int32]  # in scattered order, the same for each component

    def tables(self, count: int, positions: int) -> list[NDArray[np.int32]]:
        """`count` page tables for `positions` positions each, with no page in common."""
        size = -(-positions // self.page_size)
        return [self.page_ids[i * size : (i + 1) * size] for i in range(count)]

    def segment(self, tokens: NDArray[np.int32], start: int, table: NDArray[np.int32], logits: bool) -> Segment:
        """A segment with equal ids in all components; pages before what a query at `start` sees have another owner."""
        tables = []
        for name, row in self.runner.layout.attended.items():
            gone = row.seen_from(start) // self.page_size
            pool = self.runner.pools[name]
            assert isinstance(pool, KVPool)
            pool.k[:, table[:gone]], pool.v[:, table[:gone]] = torch.nan, torch.nan
            tables.append(np.where(np.arange(len(table)) < gone, np.int32(-1), table))
        return Segment(tokens, start, tuple(tables), logits)

    def copy_page(self, source: int, target: int, positions: int) -> None:
        for component in self.runner.layout.kv_layers:
            self.runner.memory.copy_page(source, target, positions, component)

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
    family, changes = ALL[family]
    model = tiny(family, **changes)
    assert model.num_parameters() < 1_000_000, "what its configuration has by default is not tiny"
    return loaded(model), plain_logits(copy.deepcopy(model))


@functools.cache
def smollm2() -> tuple[LoadedModel, Plain] | str:
    try:
        model = load_model(dtype="float32")
    except ModelNotFound as error:
        return str(error)
    return model, plain_logits(copy.deepcopy(model.model))


@functools.cache
def make_rig(family: str, page_size: int) -> RunnerRig:
    pair = smollm2() if family == "SmolLM2" else tiny_pair(family)
    if isinstance(pair, str):
        pytest.skip(pair)
    pages = POSITIONS // page_size
    order = np.random.default_rng(7).permutation(pages).astype(np.int32)
    names = Layout.of(pair[0].model.config, CONTEXT).names
    counts = {name: SLOTS if name == "state" else pages for name in names}
    return RunnerRig(ModelRunner(pair[0], counts, page_size), pair[1], page_size, order)


RIGS = [
    *((family, page_size) for family in FAMILIES for page_size in (1, 3, 16)),
    *((f"{family} windowed", 4) for family in WINDOWED),
    *((name, 4) for name in VARIANTS),
    *((family, 4) for family in (*LATENT, *GATHERED)),
    *(("deepseek_v3", page_size) for page_size in (1, 16)),
    *(
        (f"{family} windowed", page_size)
        for family in ("mistral", "gemma2", "gemma3_text", "gpt_oss")
        for page_size in (1, 16)
    ),
]
QUICK = {
    *(("llama", page_size) for page_size in (1, 3, 16)),
    *(("gpt_neox", 3), ("gpt2", 16), ("mixtral", 3), ("gemma", 16), ("gpt_bigcode", 3)),
    *((f"{family} windowed", 4) for family in ("phi3", "gemma2", "gemma4_text", "mimo_v2_flash")),
    *(("mistral windowed", 1), ("gpt_oss windowed", 16)),
    *((name, 4) for name in (*VARIANTS, "deepseek_v2", "deepseek_v3", "minicpm3", "longcat_flash", "bloom", "gptj")),
}


@pytest.fixture(
    params=[
        *(pytest.param(each, marks=[] if each in QUICK else pytest.mark.slow) for each in RIGS),
        pytest.param(("SmolLM2", 16), marks=[pytest.mark.model, pytest.mark.slow]),
    ],
    ids=lambda param: f"{param[0]}-{param[1]}",
)
def rig(request: pytest.FixtureRequest) -> RunnerRig:
    return make_rig(*request.param)


def tokens_of(seed: int, length: int) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).astype(np.int32)


def test_whole_prompt(rig: RunnerRig) -> None:
    tokens = tokens_of(1, 40)
    rows = rig.runner.forward([rig.segment(tokens, 0, rig.tables(1, 40)[0], True)])
    assert rows.dtype == torch.float32
    assert rows.shape == (1, rig.runner.vocab_size)
    rig.close(rows[0], tokens)


def test_chunked_prefill(rig: RunnerRig) -> None:
    tokens, (table,) = tokens_of(1, 40), rig.tables(1, 40)
    for start, end in ((0, 7), (7, 23), (23, 24), (24, 40)):
        rows = rig.runner.forward([rig.segment(tokens[start:end], start, table, True)])
        rig.close(rows[0], tokens[:end])


def test_append_prefill_after_pages_of_another_request(rig: RunnerRig) -> None:
    """A prefix of 35 positions: whole pages are shared, the tail inside a page is copied."""
    first, second = tokens_of(1, 40), np.concatenate([tokens_of(1, 40)[:35], tokens_of(2, 9)])
    theirs, others = rig.tables(2, 44)
    rig.runner.forward([rig.segment(first, 0, theirs, False)])
    shared, tail = divmod(35, rig.page_size)
    ours = np.concatenate([theirs[:shared], others[shared:]])
    if tail:
        rig.copy_page(int(theirs[shared]), int(ours[shared]), tail)
    rows = rig.runner.forward([rig.segment(second[35:], 35, ours, True)])
    rig.close(rows[0], second)
    again = rig.runner.forward([rig.segment(first[39:], 39, theirs, True)])
    rig.close(again[0], first)


def test_packed_with_other_requests(rig: RunnerRig) -> None:
    """A chunk, a whole prompt, a decode step and a chunk without logits, in one forward."""
    a, b, c, d = tokens_of(1, 40), tokens_of(2, 17), tokens_of(3, 30), tokens_of(4, 12)
    tables = rig.tables(4, 40)
    rig.runner.forward([rig.segment(a[:25], 0, tables[0], False), rig.segment(c[:29], 0, tables[2], False)])
    rows = rig.runner.forward(
        [
            rig.segment(d[:5], 0, tables[3], False),
            rig.segment(a[25:], 25, tables[0], True),
            rig.segment(b, 0, tables[1], True),
            rig.segment(c[29:], 29, tables[2], True),
        ]
    )
    assert rows.shape == (3, rig.runner.vocab_size)
    for row, tokens in zip(rows, (a, b, c), strict=True):
        rig.close(row, tokens)
    rig.close(rig.runner.forward([rig.segment(d[5:], 5, tables[3], True)])[0], d)


def test_decode_steps_of_two_requests(rig: RunnerRig) -> None:
    sequences = [list(tokens_of(1, 21)), list(tokens_of(2, 8))]
    tables = rig.tables(2, 30)
    starts = [0, 0]
    for _ in range(4):
        segments = [
            rig.segment(np.array(tokens[start:], dtype=np.int32), start, table, True)
            for tokens, start, table in zip(sequences, starts, tables, strict=True)
        ]
        rows = rig.runner.forward(segments)
        starts = [len(tokens) for tokens in sequences]
        for row, tokens in zip(rows, sequences, strict=True):
            rig.close(row, tokens)
            tokens.append(int(row.argmax()))


@pytest.mark.parametrize("page_size", [4, 16])
@pytest.mark.parametrize("family", ["gemma2 windowed", "gpt_oss windowed", *VARIANTS])
def test_a_hit_at_any_page_boundary_gives_the_same_logits(family: str, page_size: int) -> None:
    """The hit reads another request's pages, but none before what the first query sees; two hits are packed."""
    rig = make_rig(family, page_size)
    first = tokens_of(1, 64)
    theirs, *others = rig.tables(3, 80)
    rig.runner.forward([rig.segment(first, 0, theirs, False)])
    for hit in range(page_size, 64, page_size):
        whole = hit // page_size
        prompts = [np.concatenate([first[:hit], tokens_of(2 + i, 7 - i)]) for i in range(2)]
        tables = [np.concatenate([theirs[:whole], other[whole:]]) for other in others]
        hits = [rig.segment(p[hit:], hit, table, True) for p, table in zip(prompts, tables, strict=True)]
        for row, tokens in zip(rig.runner.forward(hits), prompts, strict=True):
            rig.close(row, tokens)


def test_logits_of_the_last_tokens_are_those_of_single_steps() -> None:
    rig = make_rig("llama", 32)
    tables, first, second = rig.tables(2, 20), tokens_of(1, 12), tokens_of(2, 9)
    rows = rig.runner.forward(
        [Segment(first, 0, (tables[0],), 3), Segment(tokens_of(3, 2), 0, (rig.tables(3, 20)[2],), 0),
         Segment(second, 0, (tables[1],), 2)]
    )  # fmt: skip
    whole = [(first, 10), (first, 11), (first, 12), (second, 8), (second, 9)]
    for row, (tokens, length) in zip(rows, whole, strict=True):
        rig.close(row, tokens[:length])
    with pytest.raises(BadArgument, match=r"segments\[0\].logits"):
        rig.runner.forward([Segment(first, 0, (tables[0],), 13)])


@pytest.mark.parametrize("absorbed", [True, False])
def test_prefixes_of_latents_are_absorbed_or_expanded_to_the_same(
    absorbed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Latents, "can_absorb", absorbed)
    rig = make_rig("deepseek_v3", 4)
    tables, tokens = rig.tables(3, 40), [tokens_of(seed, 40) for seed in range(3)]
    rig.runner.forward([rig.segment(tokens[i][:10], 0, tables[i], False) for i in (0, 1)])
    parts = [(0, 10, 40), (1, 10, 11), (2, 0, 30)]  # many and one after pages, and a beginning
    rows = rig.runner.forward([rig.segment(tokens[i][begin:end], begin, tables[i], True) for i, begin, end in parts])
    for row, (i, _, end) in zip(rows, parts, strict=True):
        rig.close(row, tokens[i][:end])


def full_pool(runner: ModelRunner) -> KVPool:
    pool = runner.pools["full"]
    assert isinstance(pool, KVPool)
    return pool


# ---------------------------------------------------------------- models that keep a state


MOST_UNLIKE = (
    "qwen3_5_text", "mamba2", "lfm2", "nemotron_h", "kimi_linear", "mamba", "minimax", "recurrent_gemma", "rwkv",
)  # fmt: skip


@pytest.fixture(params=slow_but(sorted(RECURRENT), *MOST_UNLIKE))
def hybrid(request: pytest.FixtureRequest) -> RunnerRig:
    return make_rig(request.param, 4)


def test_states_go_on_where_the_last_chunk_ended(hybrid: RunnerRig) -> None:
    tokens, (table,) = tokens_of(1, 40), hybrid.tables(1, 40)
    for start, end in ((0, 1), (1, 7), (7, 23), (23, 24), (24, 40)):
        rows = hybrid.runner.forward([Segment(tokens[start:end], start, (table,), True, state=3)])
        hybrid.close(rows[0], tokens[:end])


def test_chunks_prompts_and_steps_of_many_states_in_one_call(hybrid: RunnerRig) -> None:
    a, b, c, d = tokens_of(1, 40), tokens_of(2, 17), tokens_of(3, 30), tokens_of(4, 12)
    tables = hybrid.tables(4, 44)
    forward = hybrid.runner.forward
    forward([Segment(a[:25], 0, (tables[0],), False, state=0), Segment(c[:29], 0, (tables[2],), False, state=2)])
    forward([Segment(d[:11], 0, (tables[3],), False, state=5)])
    rows = forward(
        [
            Segment(c[29:], 29, (tables[2],), True, state=2),
            Segment(a[25:], 25, (tables[0],), True, state=0),
            Segment(b, 0, (tables[1],), True, state=1),
            Segment(d[11:], 11, (tables[3],), True, state=5),
        ]
    )
    for row, tokens in zip(rows, (c, a, b, d), strict=True):
        hybrid.close(row, tokens)
    following = [np.append(tokens, np.int32(9)) for tokens in (c, a, b, d)]
    steps = zip(following, (tables[i] for i in (2, 0, 1, 3)), (2, 0, 1, 5), strict=True)
    rows = forward(
        [Segment(tokens[-1:], len(tokens) - 1, (table,), slot != 1, state=slot) for tokens, table, slot in steps]
    )
    for row, tokens in zip(rows, (following[0], following[1], following[3]), strict=True):
        hybrid.close(row, tokens)


def test_a_copied_state_is_a_start_for_another_request(hybrid: RunnerRig) -> None:
    """A prefix of 24 positions whose pages are shared and whose state was copied."""
    first, second = tokens_of(1, 40), np.concatenate([tokens_of(1, 24), tokens_of(2, 9)])
    theirs, others = hybrid.tables(2, 44)
    hybrid.runner.forward([Segment(first[:24], 0, (theirs,), False, state=0)])
    hybrid.runner.memory.copy_state(0, 6)
    hybrid.runner.forward([Segment(first[24:30], 24, (theirs,), False, state=0)])
    hybrid.runner.memory.copy_state(6, 1)
    ours = np.concatenate([theirs[:6], others[6:]])
    rows = hybrid.runner.forward(
        [Segment(second[24:], 24, (ours,), True, state=1), Segment(first[30:], 30, (theirs,), True, state=0)]
    )
    hybrid.close(rows[0], second)
    hybrid.close(rows[1], first)


@pytest.mark.parametrize(
    ("states", "name"), [((8, 1), "segments[0].state"), ((0, -1), "segments[1].state"), ((2, 2), "segments")]
)
def test_slots_that_do_not_exist_or_are_another_s_are_refused(states: tuple[int, int], name: str) -> None:
    rig = make_rig("lfm2", 4)
    tables = rig.tables(2, 8)
    segments = [Segment(tokens_of(1, 5), 0, (t,), True, state=state) for t, state in zip(tables, states, strict=True)]
    with pytest.raises(BadArgument) as caught:
        rig.runner.forward(segments)
    assert caught.value.name == name


@pytest.mark.parametrize(
    "family",
    [
        "llama", "gpt_oss windowed", "mistral windowed", "mimo_v2_flash windowed", "llama, windows", "gemma3n_text",
        "llama4_text", "falcon_h1", "mamba2", "deepseek_v3", "kimi_linear", "bloom",
    ],
)  # fmt: skip
def test_everything_that_is_kept_goes_to_the_host_and_back(family: str) -> None:
    rig = make_rig.__wrapped__(family, 4)
    tokens, (table,) = tokens_of(1, 40), rig.tables(1, 40)
    segment = rig.segment(tokens[32:], 32, table, True)
    rig.runner.forward([replace(rig.segment(tokens[:32], 0, table, False), state=3)])
    count = len(rig.runner.layout.components)
    page_ids, states = np.arange(8, dtype=np.int32), np.array([3], dtype=np.int32)
    ids = [(states, states) if name == "state" else (table[:8], page_ids) for name in rig.runner.layout.names]
    host = rig.runner.memory.host_memory(HostSize(host_ratio=1.0), storage=False)
    host.down([Move(i, device, there) for i, (device, there) in enumerate(ids)]).wait()
    for pool in rig.runner.pools.values():
        for tensor in pool.planes if isinstance(pool, KVPool) else pool.tensors:
            tensor.fill_(torch.nan)
    ticket = host.up([Move(i, there, device) for i, (device, there) in enumerate(ids)])
    rows = rig.runner.forward([replace(segment, arriving=ticket, state=3)])
    rig.close(rows[0], tokens)
    assert count == len(rig.runner.pools)
    host.close()


# ---------------------------------------------------------------- images, and adapters


class Album(NamedTuple):
    """A model that takes images, a prompt with two, and plain logits of the whole prompt and two more tokens."""

    rig: RunnerRig
    tokens: NDArray[np.int32]
    images: tuple[ImageInput, ...]
    positions: NDArray[np.int64] | None
    plain: torch.Tensor

    def segment(self, begin: int, end: int, table: NDArray[np.int32]) -> Segment:
        positions = None if self.positions is None else self.positions[:, begin:end]
        segment = self.rig.segment(self.tokens[begin:end], begin, table, True)
        return replace(segment, images=self.images, positions=positions)


@functools.cache
def make_album(family: str, window: int) -> Album:
    types = ["sliding_attention", "sliding_attention", "full_attention"]
    changes = {"sliding_window": window, "layer_types": types} if window else {}
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(str(save_with_images(family, Path(folder), **changes)), dtype="float32")
    vision = Vision(model)
    pictures = [picture(1), picture(2, 30, 30)]
    between = {"type": "text", "text": "and then"}
    parts = [{"type": "image", "image": pictures[0]}, between, {"type": "image", "image": pictures[1]}]
    prepared = vision.prepare([{"role": "user", "content": [*parts, {"type": "text", "text": "?"}]}])
    tokens = np.append(prepared.tokens, np.array([70, 80], dtype=np.int32))
    plain = with_pixels(model, pictures, parts)
    request = Request(prepared.tokens, images=prepared.images, positions=prepared.positions)
    counts = {c.name: 40 for c in Layout.of(model.model.config, model.max_context).components}
    runner = ModelRunner(model, counts, 4)
    order = np.random.default_rng(7).permutation(40).astype(np.int32)
    rig = RunnerRig(runner, lambda tokens: plain, 4, order)
    return Album(rig, tokens, prepared.images, request.positions_of(0, len(tokens)), plain)


def with_pixels(model: LoadedModel, pictures: list[Any], parts: list[dict[str, Any]]) -> torch.Tensor:
    """Plain logits from pixels, with the model and its processor alone."""
    processor: Any = model.processor
    shown = [{key: value for key, value in part.items() if key != "image"} for part in parts]
    message = {"role": "user", "content": [*shown, {"type": "text", "text": "?"}]}
    text = processor.apply_chat_template([message], add_generation_prompt=True)
    inputs = processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
    more = torch.tensor([[70, 80]])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], more], 1)
    for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
        if name in inputs:
            inputs[name] = torch.cat([inputs[name], torch.full_like(more, int(name == "attention_mask"))], 1)
    with torch.inference_mode():
        logits: torch.Tensor = copy.deepcopy(model.model)(**inputs, use_cache=False).logits[0]
    return logits


ALBUMS = [("gemma3", 0), ("gemma3", 20), ("gemma3", 6), ("llava", 0), ("qwen2_vl", 0)]


@pytest.fixture(params=ALBUMS, ids=lambda param: f"{param[0]}-{param[1]}")
def album(request: pytest.FixtureRequest) -> Album:
    return make_album(*request.param)


def test_a_prompt_with_images_in_one_piece_in_chunks_and_in_steps(album: Album) -> None:
    end, (first, second) = len(album.tokens) - 2, album.images
    tables = album.rig.tables(2, len(album.tokens))
    cuts = [0, first.start, first.end, second.start - 1, second.end + 2, end]
    if album.rig.runner.vision is not None and not album.rig.runner.vision.both_ways:
        cuts = [0, first.start + 2, first.end - 1, second.start + 3, end]
    steps = [(0, end), (end, end + 1), (end + 1, end + 2)]
    for table, spans in zip(tables, (steps, [*itertools.pairwise(cuts), *steps[1:]]), strict=True):
        for begin, stop in spans:
            row = album.rig.runner.forward([album.segment(begin, stop, table)])[0]
            torch.testing.assert_close(row, album.plain[stop - 1], atol=ATOL, rtol=0)


def test_images_together_with_requests_without(album: Album) -> None:
    tokens, (ours, theirs) = tokens_of(3, 30) + 8, album.rig.tables(2, len(album.tokens))
    alone = album.rig.runner.forward([album.rig.segment(tokens, 0, theirs, True)])[0]
    begin, end = album.images[1].start, len(album.tokens) - 2
    album.rig.runner.forward([album.segment(0, begin, ours)])
    rows = album.rig.runner.forward([album.rig.segment(tokens, 0, theirs, True), album.segment(begin, end, ours)])
    torch.testing.assert_close(rows[0], alone, atol=ATOL, rtol=0)
    torch.testing.assert_close(rows[1], album.plain[end - 1], atol=ATOL, rtol=0)


def test_an_image_that_is_attended_both_ways_is_never_cut() -> None:
    album = make_album("gemma3", 0)
    (table,) = album.rig.tables(1, len(album.tokens))
    for begin, end in ((0, album.images[0].start + 3), (album.images[0].start + 3, len(album.tokens))):
        with pytest.raises(BadArgument) as caught:
            album.rig.runner.forward([album.segment(begin, end, table)])
        assert caught.value.name == "segments[0].images"


def test_a_model_without_vision_refuses_images() -> None:
    image = ImageInput(0, 5, b"0123456789abcdef", {})
    with pytest.raises(BadArgument, match="reads no images"):
        make_rig("llama", 16).runner.forward([replace(GOOD, images=(image,))])


class _Negating:
    """Adapters that all do the same: they flip the sign of one layer's weights."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    @contextmanager
    def select(self, adapter: Adapter | None) -> Iterator[None]:
        sign = 1 if adapter is None else -1
        self._weight.mul_(sign)
        yield
        self._weight.mul_(sign)


def test_adapters_compute_apart_and_rows_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig.__wrapped__("llama", 4)
    runner, tables = rig.runner, rig.tables(3, 20)
    weight = tiny_pair("llama")[0].model.get_decoder().layers[1].mlp.up_proj.weight.data
    monkeypatch.setattr(Adapters, "select", _Negating(weight).select)
    adapter = Adapter("negating", "0" * 64, ())
    segments = [Segment(tokens_of(i, 12), 0, (table,), True) for i, table in enumerate(tables)]
    plain = runner.forward(segments)
    alone = runner.forward([replace(segments[1], adapter=adapter)])
    rows = runner.forward([segments[0], replace(segments[1], adapter=adapter), segments[2]])
    torch.testing.assert_close(rows, torch.stack([plain[0], alone[0], plain[2]]), atol=ATOL, rtol=0)
    assert (alone[0] - plain[1]).abs().max() > 0.1


# ---------------------------------------------------------------- loading while computing


class _Recorded(SdpaAttention):
    """Records which layers were computed."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def attend(self, layer: int, *given: Any) -> torch.Tensor:
        out = super().attend(layer, *given)
        self.log.append(("computed", layer))
        return out


class _Arriving:
    """Layer i arrives only after layer i - 1 was computed: a forward that waits for more never ends."""

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
    """Two requests whose prefix arrives layer by layer, and one without: each layer is awaited, then read."""
    attention = _Recorded()
    monkeypatch.setattr("mainstem.runtime.models.runner.attention_for", lambda *_: attention)
    rig = make_rig.__wrapped__("llama", 3)
    tokens, other = tokens_of(1, 40), tokens_of(2, 9)
    tables = rig.tables(3, 40)
    rig.runner.forward([Segment(tokens[:33], 0, (tables[0],), False)])
    pool, page_ids = full_pool(rig.runner), torch.from_numpy(tables[0][:11])
    kept = [[plane.numbers[page_ids].clone() for plane in pool.layer(layer)] for layer in range(3)]
    attention.log.clear()
    pool.k[:, page_ids], pool.v[:, page_ids] = torch.nan, torch.nan

    def arrive(layer: int) -> None:
        for plane, numbers in zip(pool.layer(layer), kept[layer], strict=True):
            plane.numbers[page_ids] = numbers

    ticket = _Arriving(attention.log, arrive)
    follower = np.concatenate([tables[0][:11], tables[1][:5]])
    rows = rig.runner.forward(
        [
            Segment(other, 0, (tables[2],), True),
            Segment(tokens[33:], 33, (tables[0],), True, ticket),
            Segment(tokens[33:38], 33, (follower,), True, ticket),
        ]
    )
    assert attention.log == [(what, layer) for layer in range(3) for what in ("arrived", "computed")]
    for row, sequence in zip(rows, (other, tokens, tokens[:38]), strict=True):
        rig.close(row, sequence)


def test_what_comes_up_from_the_host_is_waited_for() -> None:
    """With the real copies, on their own thread."""
    rig = make_rig("llama", 16)
    tokens, (table,) = tokens_of(1, 40), rig.tables(1, 40)
    rig.runner.forward([Segment(tokens[:32], 0, (table,), False)])
    pool, slots = full_pool(rig.runner), np.arange(2, dtype=np.int32)
    host = HostPool([Planes((pool.k, pool.v))], [2])
    host.down([Move(0, table[:2], slots)]).wait()
    for _ in range(5):
        pool.k.fill_(torch.nan)
        pool.v.fill_(torch.nan)
        ticket = host.up([Move(0, slots, table[:2])])
        rig.close(rig.runner.forward([Segment(tokens[32:], 32, (table,), True, ticket)])[0], tokens)
        assert ticket.done()
        assert ticket.error is None
    host.close()


TABLE = np.arange(4, dtype=np.int32)
GOOD = Segment(tokens_of(1, 5), 0, (TABLE,), True)


@pytest.mark.parametrize(
    ("segments", "name"),
    [
        ([], "segments"),
        ([Segment(tokens_of(1, 0), 0, (TABLE,), True)], "segments[0].tokens"),
        ([GOOD, Segment(np.array([3, VOCAB], dtype=np.int32), 0, (TABLE + 4,), True)], "segments[1].tokens"),
        ([Segment(np.array([-1], dtype=np.int32), 0, (TABLE,), True)], "segments[0].tokens"),
        ([Segment(tokens_of(1, 5), -1, (TABLE,), True)], "segments[0].start"),
        ([Segment(tokens_of(1, 5), CONTEXT - 4, (np.arange(20, dtype=np.int32),), True)], "segments[0].start"),
        ([Segment(tokens_of(1, 5), 60, (TABLE,), True)], "segments[0].tables[0]"),
        ([Segment(tokens_of(1, 5), 0, (np.array([25], dtype=np.int32),), True)], "segments[0].tables[0]"),
        ([Segment(tokens_of(1, 5), 0, (np.array([-1], dtype=np.int32),), True)], "segments[0].tables[0]"),
        ([GOOD, Segment(tokens_of(1, 5), 0, (TABLE,), True)], "segments"),
    ],
)
def test_bad_segments_are_refused_and_write_nothing(segments: list[Segment], name: str) -> None:
    rig = make_rig("llama", 16)
    rig.runner.forward([Segment(tokens_of(9, 10), 0, (TABLE,), False)])
    with pytest.raises(BadArgument) as caught:
        rig.runner.forward(segments)
    assert caught.value.name == name
    tokens = np.append(tokens_of(9, 10), np.int32(5))
    rig.close(rig.runner.forward([Segment(tokens[10:], 10, (TABLE,), True)])[0], tokens)


ROPE = {"rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        (*REFUSED["xlstm"], "keeps its state in a cache class of its own"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", **ROPE}}, "dynamic position embedding"),
        ("openai-gpt", {"num_key_value_heads": ..., "intermediate_size": ...}, "its attention cannot be exchanged"),
        ("bert", {"num_key_value_heads": ..., "is_decoder": False}, "is not causal"),
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
    assert ModelRunner(loaded(tiny("mistral", sliding_window=CONTEXT)), 8, 16).layout.components == (Full(),)


@pytest.mark.parametrize("pages", [8, {"full": 8}, {"full": 8, "window": 8, "state": 8}])
def test_pages_are_given_for_each_component(pages: int | dict[str, int]) -> None:
    with pytest.raises(BadArgument, match="a number for each of full, window"):
        ModelRunner(loaded(tiny("gpt_oss", **WINDOWED["gpt_oss"])), pages, 4)


WINDOW = np.array([-1, -1, 3, 1], dtype=np.int32)


@pytest.mark.parametrize(
    ("table", "start", "refused"),
    [
        (WINDOW, 15, False),  # sees positions 8 to 15
        (WINDOW, 14, True),
        (np.array([-1, 99, 3, 1], dtype=np.int32), 15, False),
        (np.array([-1, -1, 3], dtype=np.int32), 15, True),
        (np.array([-1, -1, 3, 100], dtype=np.int32), 15, True),
    ],
)
def test_the_window_s_pages_must_be_there_but_no_others(table: NDArray[np.int32], start: int, refused: bool) -> None:
    rig = make_rig("gpt_oss windowed", 4)
    segment = Segment(tokens_of(1, 1), start, (TABLE, table), True)
    if not refused:
        assert rig.runner.forward([segment]).shape == (1, VOCAB)
        return
    with pytest.raises(BadArgument) as caught:
        rig.runner.forward([segment])
    assert caught.value.name == "segments[0].tables[1]"


def test_a_segment_has_a_table_for_each_component() -> None:
    rig = make_rig("gpt_oss windowed", 4)
    with pytest.raises(BadArgument, match="one for each of full, window") as caught:
        rig.runner.forward([Segment(tokens_of(1, 5), 0, (TABLE,), True)])
    assert caught.value.name == "segments[0].tables"


def test_two_requests_never_write_to_one_window_page() -> None:
    rig = make_rig("gpt_oss windowed", 4)
    segments = [Segment(tokens_of(1, 5), 0, (TABLE + shift, TABLE), True) for shift in (0, 4)]
    with pytest.raises(BadArgument, match="twice"):
        rig.runner.forward(segments)


class _Deaf(SdpaAttention):
    """Ignores windows, sinks or soft caps."""

    def __init__(self, what: str) -> None:
        self._what = what

    def attend(self, *given: Any) -> torch.Tensor:
        *tensors, plan, sinks, softcap = given
        if self._what != "windows":
            sinks, softcap = (None, softcap) if self._what == "sinks" else (sinks, None)
        elif all(extent.start == 0 for extent in plan.extents):  # others have no pages before their windows
            plan = replace(plan, component=FULL)
        return super().attend(*tensors, plan, sinks, softcap)


@pytest.mark.parametrize(("family", "what"), [("gpt_oss", "sinks"), ("gemma2", "soft caps"), ("mistral", "windows")])
def test_the_self_test_minds_what_a_kernel_ignores(family: str, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only_kernel(monkeypatch, lambda: _Deaf(what))
    model = loaded(tiny(family, **WINDOWED[family]))
    counts = dict.fromkeys(Layout.of(model.model.config, CONTEXT).names, 8)
    with pytest.raises(UnsupportedModel, match="self-test failed"):
        ModelRunner(model, counts, 16)


class _ByPlace(PackedPositions):
    """Gives a token its place in the batch as its position."""

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        return torch.zeros_like(super().get_seq_length())


@pytest.mark.parametrize("step", [6, 8192])
def test_the_self_test_minds_the_temperature_of_each_position(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the temperature changes only after more positions than are tested."""
    family, changes = VARIANTS["llama4_text"]
    model = tiny(family, **{**changes, "floor_scale": step})
    ModelRunner(loaded(copy.deepcopy(model)), {"full": 8, "chunked": 8}, 4)
    monkeypatch.setattr("mainstem.runtime.models.forward.PackedPositions", _ByPlace)
    with pytest.raises(UnsupportedModel, match="self-test failed"):
        ModelRunner(loaded(model), {"full": 8, "chunked": 8}, 4)
    assert {module.floor_scale for module in model.modules() if hasattr(module, "floor_scale")} == {step}


class _Shifted(SdpaAttention):
    """Gives every position its neighbour's value."""

    def attend(self, *given: Any) -> torch.Tensor:
        layer, query, key, value, *more = given
        return super().attend(layer, query, key, value.roll(1, 0), *more)


def test_the_self_test_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    only_kernel(monkeypatch, _Shifted)
    with pytest.raises(UnsupportedModel, match="self-test failed"):
        ModelRunner(loaded(tiny("llama")), 8, 16)


class _Failing(_Shifted):
    """Cannot be compiled."""

    def attend(self, *arguments: Any, **others: Any) -> torch.Tensor:
        raise ArithmeticError("out of shared memory")


@pytest.mark.parametrize(("kernel", "says"), [(_Shifted, "logits differ"), (_Failing, "out of shared memory")])
def test_a_kernel_for_gpus_that_fails_the_self_test_is_replaced(
    kernel: type[SdpaAttention], says: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("mainstem.runtime.models.runner.attention_for", lambda *_: kernel())
    runner = ModelRunner(loaded(tiny("llama")), 8, 16)
    assert says in caplog.text and "attention is computed by PyTorch" in caplog.text
    assert runner.forward([Segment(tokens_of(1, 5), 0, (TABLE,), True)]).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_self_test(dtype: torch.dtype) -> None:
    model = tiny("llama").to(dtype)  # type: ignore[call-arg, arg-type]
    runner = ModelRunner(LoadedModel(model, None, "tiny", dtype, CONTEXT), 8, 16)  # type: ignore[arg-type]
    rows = runner.forward([Segment(tokens_of(1, 5), 0, (TABLE,), True)])
    assert rows.dtype == torch.float32
    assert rows.isfinite().all()


def test_the_runner_exchanges_modules_for_kernels_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mainstem.runtime.models.runner")
    runner = ModelRunner(loaded(tiny("llama")), 8, 16)
    assert runner.exchanged == Exchanged(22, 7, 9, 0)
    assert "kernels compute 22 linear layers in 13 calls, and 7 norms" in caplog.text


def test_a_model_that_kernels_would_change_too_much_runs_by_its_own_code(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    own = kernels.products
    monkeypatch.setattr(kernels, "products", lambda *given, **named: [each * 1.01 for each in own(*given, **named)])
    model = tiny("llama")
    assert ModelRunner(loaded(model), 8, 16).exchanged == Exchanged()
    assert "its own code runs" in caplog.text
    assert not any("forward" in vars(module) for module in model.modules())


def test_a_model_that_is_refused_computes_by_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    only_kernel(monkeypatch, _Shifted)
    model = tiny("llama")
    with pytest.raises(UnsupportedModel, match="self-test failed"):
        ModelRunner(loaded(model), 8, 16)
    assert not any("forward" in vars(module) for module in model.modules())
