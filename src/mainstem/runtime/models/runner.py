"""Runs a model over pages: one packed forward for the new tokens of many requests.

    one forward     all segments, packed [1, tokens]; with recurrent layers one segment, or single tokens [rows, 1]
    one adapter     segments of different adapters are never in one forward
    images          their embeddings replace those of their tokens
    own attention   a model whose attention cannot be exchanged: one segment, its keys and values gathered from pages

A model is rejected if its KV or states do not fit the pools of its `Layout`, or depend on more than the tokens up to a
position. A self-test at construction finds what the configuration does not say.

The runner does not know requests, leases or sampling, and does not check the owners of pages.
"""

from __future__ import annotations

import inspect
import logging
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.cache.components import Full
from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime.attention.few_rows import PageAttention
from mainstem.runtime.attention.paged import (
    TOLERANCE,
    Attention,
    BatchPlan,
    Extent,
    PackedPositions,
    Paging,
    exchange_attention,
    install,
    plain_attention,
    plan_batch,
)
from mainstem.runtime.attention.tree import TreeAttention
from mainstem.runtime.kernels import linear as kernels
from mainstem.runtime.kernels.decoders import exchange_layers, restore_layers, settle
from mainstem.runtime.kernels.exchanges import Exchanged, exchange, restore, sharing
from mainstem.runtime.kernels.step_graphs import CudaRecorder, Plans, Recorder, StepGraphs, padded_rows
from mainstem.runtime.memory.host import HostPool
from mainstem.runtime.memory.kv import KVPool, kv_shapes
from mainstem.runtime.memory.pools import STATE_LAYER, Pools
from mainstem.runtime.memory.states import StateCache, StatePool, StateShape, prove
from mainstem.runtime.models.adapters import Adapter, Adapters
from mainstem.runtime.models.caches import Gathering, Passing, Rounding
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.places import run
from mainstem.runtime.parallel.ranks import largest
from mainstem.runtime.request import ImageInput
from mainstem.runtime.sampling.pooling import Pooling, last_hidden_states
from mainstem.runtime.text.vision import Vision
from mainstem.settings.engine import HostSize
from mainstem.tiers.host.transfer import LayerTicket

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig, PreTrainedModel

_TEST_TOKENS = 12
# Pages in 8 bits are tested against keys and values that were rounded in the same way. A number between two steps may
# take the other one, so the least difference is that of some steps, in any dtype.
EIGHT_BITS_TOLERANCE = 1e-2
# The self-test's prompts are longer than windows of up to this size; longer windows would take long to test.
_TEST_WINDOW = 128

# Positions after which a self-test tunes the temperature of attention anew.
_TEST_STEP = 4

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Segment:
    """The new tokens of one request in a forward.

    Args:
        tokens: [n] int32 token ids, n >= 1.
        start: position of tokens[0]; the KV of positions [0, start) is already in the pages.
        tables: for each component of pages, in the layout's order, its int32 page ids, for at least start + n
            positions. No other segment may use the pages that this one writes to. Entries before what the query at
            `start` sees are not read.
        logits: of how many of the last tokens to return the logits.
        arriving: the transfer of pages before `start`, if it is under way, layer by layer.
        state: slot of the state at `start`, overwritten by the state at `end`. If start == 0, it is not read.
        images: of the request, in order; those outside the segment are ignored.
        positions: int64 [3, n], the M-RoPE positions of the tokens; None: start, start + 1, ...
        adapter: computes in place of the base model.
        namespace: of the request, encoded; embeddings of images are shared only within it.
        pooling: takes the last hidden states of the tokens; None: nobody does.
    """

    tokens: NDArray[np.int32]
    start: int
    tables: tuple[NDArray[np.int32], ...]
    logits: int
    arriving: LayerTicket | None = None
    state: int = -1
    images: tuple[ImageInput, ...] = ()
    positions: NDArray[np.int64] | None = None
    adapter: Adapter | None = None
    namespace: bytes = b""
    pooling: Pooling | None = None

    @property
    def end(self) -> int:
        """The position after the last new token."""
        return self.start + len(self.tokens)

    @property
    def digest(self) -> tuple[int, ...]:
        """What ranks compare before a forward: where it starts, its tokens and its pages."""
        arrays = (self.tokens, *self.tables)
        return (self.start, self.state, *(zlib.crc32(array.tobytes()) for array in arrays))

    def part(self, begin: int, end: int) -> Segment:
        """Returns the part of the segment at positions [begin, end), with those of the logits that are in it."""
        rows = slice(begin - self.start, end - self.start)
        positions = None if self.positions is None else self.positions[:, rows]
        logits = max(0, end - max(begin, self.end - self.logits))
        return replace(self, tokens=self.tokens[rows], start=begin, positions=positions, logits=logits)


class ModelRunner:
    """A model, and the pages and slots that it reads and writes. One thread at a time.

    Afterwards the loaded model attends through pages and can no longer be called without them.

    Args:
        loaded: the model; its KV has the model's dtype and device.
        pages: pages or slots of each component's pool, by the names of the layout; a single number for a model with
            one component.
        page_size: positions per page.
        kv_cache_dtype: of the keys and values in pages: `auto` is the model's, `int8` and `fp8` have 8 bits.
        cuda_graphs: whether decode steps are recorded, on a device that can; see `step_graphs`.

    Attributes:
        exchanged: what kernels compute in place of the model's own code.

    Raises:
        UnsupportedModel: the model cannot run over pages; the message says why. The loaded model is unchanged.
        BadArgument: a component has less than one page, or `page_size` is less than 1.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pages: int | Mapping[str, int],
        page_size: int,
        kv_cache_dtype: str = "auto",
        cuda_graphs: bool = True,
    ) -> None:
        model = loaded.model
        text = model.config.get_text_config(decoder=True)
        self._model = model
        self._max_context, self._ranks = loaded.max_context, loaded.ranks
        self._kv_cache_dtype = kv_cache_dtype
        self._attention = attention_for(model.device, kv_cache_dtype)
        self.layout = _layout(loaded)
        self.vocab_size = int(text.vocab_size)
        self.adapters = Adapters(model)
        counts = {self.layout.names[0]: pages} if isinstance(pages, int) else pages
        self._places = self.layout.places
        self._is_tuned = bool(getattr(text, "attn_temperature_tuning", None))
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        self._like = torch.empty(0, dtype=loaded.dtype, device=model.device)
        self._page_size = page_size
        self._embedded: dict[tuple[bytes, bytes, Adapter | None], torch.Tensor] = {}  # of the next forward
        self._attended = self.layout.attended
        self._alone = _own_attention(model) if self._places else None
        self.exchanged = Exchanged()
        with plain_attention(model):
            limit = self._limit = TOLERANCE[loaded.dtype]
            self._kv = kv_shapes(model, self.layout.kv_layers)
            self._shape = StateShape.of(model) if self.layout.state_layers else None
            self._proof = None if self._shape is None else prove(model, self._shape, limit, loaded.ranks)
            self.vision = None if loaded.processor is None else Vision(loaded)
            self._pools = self._make_pools(counts, page_size)
            with _frequent_steps(model):
                self._limit = max(limit, EIGHT_BITS_TOLERANCE if self._rounded else 0)
                self._self_test(loaded.name, self._limit)
        if self.exchanged.refused:
            log.warning("%s: kernels compute something else than %d modules", loaded.name, self.exchanged.refused)
        log.info("%s: %s", loaded.name, self.exchanged)
        self._steps = self._recorded_steps() if cuda_graphs else None
        if self._alone is None:
            install(model)
        else:
            log.warning("%s: requests do not share a forward: %s", loaded.name, self._alone)

    @property
    def alone(self) -> bool:
        """Whether each request has a forward of its own, because the model attends by code of its own."""
        return self._alone is not None

    @property
    def records_steps(self) -> bool:
        """Whether decode steps of single tokens are recorded; see `step_graphs`."""
        return self._steps is not None

    @property
    def computation(self) -> tuple[str, ...]:
        """How it computes what pages and states hold, where another way gives other numbers: "keys paged"."""
        scan = () if self._proof is None else (f"scan {self._proof.continuation}",)
        keys = (f"keys {'gathered' if self.alone else 'paged'}",) if self._places else ()
        return scan + keys

    @property
    def pools(self) -> dict[str, KVPool | StatePool]:
        """The pages and slots that it reads and writes, by component."""
        states = self._pools.states
        return {**self._pools.paged, **({} if states is None else {"state": states})}

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Computes the segments' new tokens, writes their KV and states, and returns the requested logits.

        Returns:
            float32 [rows, vocab_size], each segment's `logits` in order, on the model's device.

        Raises:
            BadArgument: a segment is empty, holds a token outside the vocabulary, is longer than the model's context,
                lacks pages or a slot, or writes to the same page or slot as another one. Nothing is written.
        """
        self._check(segments)
        try:
            return self._run(segments, self._pools)
        finally:
            self._embedded.clear()

    def embed(self, segment: Segment) -> None:
        """Runs the encoder for those images of a segment that are not cached yet.

        Raises:
            BadArgument: the number of embeddings of an image is not its number of positions.
        """
        if self.vision is None:
            return
        with torch.inference_mode(), self.adapters.select(segment.adapter):
            for image in _inside(segment):
                rows = self.vision.embed(image, segment.namespace)
                if len(rows) != image.length:
                    allowed = f"{len(rows)}, the number of its embeddings"
                    raise BadArgument("images", f"{image.length} positions", allowed)
                self._embedded[image.identity, segment.namespace, segment.adapter] = rows

    def host_memory(self, size: HostSize, storage: bool) -> HostPool:
        """Allocates host pages for the pools, with the components in the same order.

        Args:
            size: of the host memory.
            storage: whether storage will read and write them.

        Raises:
            BadArgument: the size holds no page, or cannot be allocated.
        """
        return self._pools.host_memory(size, storage)

    def copy_page(self, source: int, target: int, positions: int, component: str | None = None) -> None:
        """Copies the KV of the first `positions` positions of page `source` to page `target`.

        Args:
            source: the page to read.
            target: the page to write.
            positions: the number of positions.
            component: the component of the pages; by default the first.

        Raises:
            BadArgument: a page id or the number of positions is out of range.
        """
        self._pools.copy_page(source, target, positions, component)

    def copy_state(self, source: int, target: int) -> None:
        """Copies the state in slot `source` to slot `target`.

        Raises:
            BadArgument: a slot does not exist, or the model keeps no state.
        """
        self._pools.copy_state(source, target)

    def clear(self, component: str, ids: NDArray[np.int32]) -> None:
        """Overwrites pages of a component, or states, with zeros."""
        self._pools.clear(component, ids)

    def _make_pools(self, counts: Mapping[str, int], page_size: int) -> Pools:
        kv = self._kv, self._shape
        return Pools(self.layout, *kv, counts, page_size, self._like, kv_cache_dtype=self._kv_cache_dtype)

    @property
    def _rounded(self) -> dict[int, torch.dtype]:
        """The layers whose keys and values are kept in 8 bits, and their dtype."""
        pools = {name: pool.kept for name, pool in self._pools.paged.items() if pool.kept is not pool.dtype}
        return {layer: pools[name] for layer, (name, _) in self._places.items() if name in pools}

    def _recorded_steps(self) -> StepGraphs | None:
        """Returns what computes decode steps of single tokens; None: nothing else than a forward."""
        is_plain = self._places and not self.alone and self._shape is None and self._ranks.size == 1
        if not is_plain or not self._attention.repeats or any(shape.latent for shape in self._kv.values()):
            return None
        recorder = recorder_for(self._like.device)
        if recorder is None:
            return None
        return StepGraphs(self._forward_step, self._attention, recorder, self._like.device, self._limit)

    # ------------------------------------------------------------ computing

    def _run(self, segments: Sequence[Segment], pools: Pools) -> torch.Tensor:
        rows: list[int] = []
        parts = []
        for batch in self._batches(segments):
            parts.append(self._compute([segment for _, segment in batch], pools))
            rows += [index for index, segment in batch for _ in range(segment.logits)]
        if len(parts) == 1:
            return parts[0]
        order = torch.from_numpy(np.argsort(np.array(rows, dtype=np.int64), stable=True))
        return torch.cat(parts)[order.to(self._like.device)]

    def _batches(self, segments: Sequence[Segment]) -> Iterator[list[tuple[int, Segment]]]:
        """Yields the segments that can be computed together, each with its index among all."""
        groups: dict[Adapter | None, list[tuple[int, Segment]]] = {}
        for index, segment in enumerate(segments):
            groups.setdefault(segment.adapter, []).append((index, segment))
        for group in groups.values():
            if self.alone:
                yield from ([pair] for pair in group)
                continue
            if self._shape is None:
                yield group
                continue
            steps = [(index, s) for index, s in group if s.start > 0 and len(s.tokens) == 1]
            for index, segment in group:
                if segment.start == 0 or len(segment.tokens) > 1:
                    yield from ([(index, part)] for part in self._parts(segment))
            if self._proof is not None and not self._proof.stacked:
                yield from ([step] for step in steps)
            elif steps:
                yield steps

    def _parts(self, segment: Segment) -> Iterator[Segment]:
        """Yields the parts in which a model with states computes a segment: some models go on only token by token."""
        if segment.start == 0 or self._proof is None or self._proof.continuation != "stepped":
            yield segment
            return
        for position in range(segment.start, segment.end):
            yield segment.part(position, position + 1)

    def _step(self, segments: Sequence[Segment]) -> torch.Tensor | None:
        """Computes a decode step that is recorded; returns None if this one is computed as other forwards are."""
        if self._steps is None or not all(_is_step(s) for s in segments) or not self._steps.takes(len(segments)):
            return None
        tokens = np.concatenate([s.tokens for s in segments])
        positions = np.array([s.start for s in segments], dtype=np.int64)
        with torch.inference_mode(), self.adapters.select(None):
            plans = self._plans(segments, self._pools, padded_rows(len(segments)))
            return self._steps.compute(tokens, positions, plans).to(torch.float32, copy=True)

    def _forward_step(self, tokens: torch.Tensor, positions: torch.Tensor, plans: Plans) -> torch.Tensor:
        """See `step_graphs.Forward`."""
        paging = Paging(self._attention, plans, self._places, self._max_context)
        cache = {"past_key_values": PackedPositions(positions)} if self._is_tuned else {}
        output = self._model(
            input_ids=tokens, position_ids=positions, logits_to_keep=0, paging=paging, use_cache=False, **cache
        )
        logits: torch.Tensor = output.logits.flatten(0, 1)
        return logits

    def _compute(self, segments: Sequence[Segment], pools: Pools) -> torch.Tensor:
        """Runs one forward. Without states, all tokens are one row; with states, each segment is, all equally long."""
        if pools is self._pools and (repeated := self._step(segments)) is not None:
            return repeated
        rows = 1 if pools.states is None else len(segments)
        ends = np.cumsum([len(s.tokens) for s in segments])
        asked = [np.arange(end - s.logits, end) for s, end in zip(segments, ends, strict=True)]
        wanted = self._tensor(np.concatenate(asked))
        arriving = tuple(dict.fromkeys(s.arriving for s in segments if s.arriving is not None))
        with torch.inference_mode(), self.adapters.select(segments[0].adapter):
            inputs = self._inputs(segments, rows)
            inputs["logits_to_keep"] = wanted if rows == 1 else self._tensor(np.zeros(1, dtype=np.int64))
            cache: Cache | None = None
            plans = self._plans(segments, pools) if self._places else {}
            paging = Paging(self._attention, plans, self._places, self._max_context, arriving)
            paging = replace(paging, adapted=segments[0].adapter is not None)
            if self.alone:
                cache = Gathering(self._model.config, paging, segments[0].start)
            elif (passing := self._cache(segments, pools, arriving)) is not None:
                cache, paging = passing, replace(paging, given=passing.given)
            if self._places and not self.alone:
                inputs["paging"] = paging
            with self._pooled(segments):
                if cache is not None:
                    output = run(self._model, cache, **inputs)
                elif self._is_tuned:
                    positions = PackedPositions(inputs["position_ids"])
                    output = self._model(**inputs, past_key_values=positions, use_cache=False)
                else:
                    output = self._model(**inputs, use_cache=False)
            if isinstance(cache, StateCache):
                cache.store([s.state for s in segments])
            logits: torch.Tensor = output.logits.flatten(0, 1).float()
        return logits if rows == 1 else logits[wanted]

    @contextmanager
    def _pooled(self, segments: Sequence[Segment]) -> Iterator[None]:
        """Passes the last hidden states of the forward within on to those segments that take them."""
        if all(segment.pooling is None for segment in segments):
            yield
            return
        with last_hidden_states(self._model) as found:
            yield
        parts = torch.split(found[-1].flatten(0, 1), [len(segment.tokens) for segment in segments])
        for segment, hidden in zip(segments, parts, strict=True):
            if segment.pooling is not None:
                segment.pooling.add(segment.start, hidden)

    def _inputs(self, segments: Sequence[Segment], rows: int) -> dict[str, Any]:
        tokens = self._tensor(np.concatenate([s.tokens for s in segments]).astype(np.int64)).view(rows, -1)
        has_images = any(_inside(segment) for segment in segments)
        inputs = {"inputs_embeds": self._embeddings(segments, tokens)} if has_images else {"input_ids": tokens}
        if self._takes_positions:
            inputs["position_ids"] = self._positions(segments, rows)
        return inputs

    def _embeddings(self, segments: Sequence[Segment], tokens: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of tokens [rows, n] and of the images in them: [rows, n, hidden]."""
        assert self.vision is not None
        embeddings: torch.Tensor = self._model.get_input_embeddings()(tokens)
        flat, row = embeddings.view(-1, embeddings.shape[-1]), 0
        for segment in segments:
            for image in _inside(segment):
                begin, end = max(image.start, segment.start), min(image.end, segment.end)
                shift = row - segment.start
                rows = self._embedded.get((image.identity, segment.namespace, segment.adapter))
                rows = self.vision.embed(image, segment.namespace) if rows is None else rows
                flat[begin + shift : end + shift] = rows[begin - image.start : end - image.start]
            row += len(segment.tokens)
        return embeddings

    def _positions(self, segments: Sequence[Segment], rows: int) -> torch.Tensor:
        """Returns the positions, [rows, n], or [3, rows, n] if a segment has M-RoPE positions."""
        axes = (3,) if any(s.positions is not None for s in segments) else ()
        parts = []
        for segment in segments:
            given = np.arange(segment.start, segment.end) if segment.positions is None else segment.positions
            parts.append(np.broadcast_to(given, (*axes, len(segment.tokens))))
        return self._tensor(np.concatenate(parts, axis=-1).astype(np.int64)).view(*axes, rows, -1)

    def _plans(self, segments: Sequence[Segment], pools: Pools, repeated: int | None = None) -> dict[str, BatchPlan]:
        plans = {}
        for i, (name, pool) in enumerate(pools.paged.items()):
            extents = [Extent(len(s.tokens), s.start, s.tables[i], self._regions(s)) for s in segments]
            plans[name] = plan_batch(extents, pool, self._attended[name], repeated)
        return plans

    def _regions(self, segment: Segment) -> tuple[tuple[int, int], ...]:
        if self.vision is None or not self.vision.both_ways:
            return ()
        return tuple((image.start, image.end) for image in _inside(segment))

    def _cache(self, segments: Sequence[Segment], pools: Pools, arriving: Sequence[LayerTicket]) -> Passing | None:
        """Returns the model's cache, with the states at the segments' starts; None if it needs none."""
        if pools.states is None:
            return Passing(self._model.config) if any(shape.latent for shape in self._kv.values()) else None
        cache = StateCache(self._model.config, pools.states)
        if segments[0].start == 0:
            cache.start(len(segments))
            return cache
        for ticket in arriving:
            ticket.wait_layer(STATE_LAYER)
        cache.load([s.state for s in segments])
        return cache

    def _tensor(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._like.device)

    # ------------------------------------------------------------ checking

    def _check(self, segments: Sequence[Segment]) -> None:
        if not segments:
            raise BadArgument("segments", segments, "at least one segment")
        for index, segment in enumerate(segments):
            self._check_segment(f"segments[{index}]", segment)
        for i in range(len(self._attended)):
            self._check_disjoint("page", [self._written(segment, i) for segment in segments])
        if self._pools.states is not None:
            self._check_disjoint("slot", [np.array([segment.state]) for segment in segments])

    def _check_disjoint(self, what: str, written: Sequence[NDArray[Any]]) -> None:
        ids, counts = np.unique(np.concatenate(written), return_counts=True)
        if counts.max() > 1:
            raise BadArgument("segments", f"{what} {ids[counts.argmax()]} twice", f"one segment per written {what}")

    def _written(self, segment: Segment, component: int) -> NDArray[np.int32]:
        size = self._page_size
        return segment.tables[component][segment.start // size : -(-segment.end // size)]

    def _check_segment(self, name: str, segment: Segment) -> None:
        tokens = segment.tokens
        if tokens.ndim != 1 or len(tokens) == 0:
            raise BadArgument(f"{name}.tokens", tokens, "one dimension with at least one token")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise BadArgument(f"{name}.tokens", tokens, f"token ids in [0, {self.vocab_size})")
        if not 0 <= segment.logits <= len(tokens):
            raise BadArgument(f"{name}.logits", segment.logits, f"in [0, {len(tokens)}]")
        if segment.start < 0 or segment.end > self._max_context:
            raise BadArgument(f"{name}.start", segment.start, f"in [0, {self._max_context - len(tokens)}]")
        if len(segment.tables) < len(self._attended):
            raise BadArgument(f"{name}.tables", len(segment.tables), f"one for each of {', '.join(self._attended)}")
        for i, component in enumerate(self._attended):
            self._check_table(f"{name}.tables[{i}]", segment, segment.tables[i], component)
        self._check_images(name, segment)
        states = self._pools.states
        if states is not None and not 0 <= segment.state < states.slots:
            raise BadArgument(f"{name}.state", segment.state, f"in [0, {states.slots})")

    def _check_images(self, name: str, segment: Segment) -> None:
        images = _inside(segment)
        if images and self.vision is None:
            raise BadArgument(f"{name}.images", len(images), "none: the model reads no images")
        for low, high in self._regions(segment):
            if low < segment.start or high > segment.end:
                raise BadArgument(f"{name}.images", (low, high), f"whole in [{segment.start}, {segment.end})")
        given = segment.positions
        if given is not None and given.shape != (3, len(segment.tokens)):
            raise BadArgument(f"{name}.positions", given.shape, f"of shape (3, {len(segment.tokens)})")

    def _check_table(self, name: str, segment: Segment, table: NDArray[np.int32], component: str) -> None:
        pool = self._pools.paged[component]
        if table.ndim != 1 or len(table) * pool.page_size < segment.end:
            raise BadArgument(name, table, f"pages for {segment.end} positions")
        read = table[self._attended[component].seen_from(segment.start) // pool.page_size :]
        if read.min() < 0 or read.max() >= pool.pages:
            raise BadArgument(name, table, f"page ids in [0, {pool.pages})")

    # ------------------------------------------------------------ the self-test

    def _self_test(self, name: str, limit: float) -> None:
        """Compares two short prompts, packed, chunked and over scattered pages, with plain attention on whole ones."""
        length = min(self._test_length(), self._max_context)
        prompts = np.random.default_rng(0).integers(0, self.vocab_size, (2, length)).astype(np.int32)
        self._restore()  # another runner may have exchanged its modules
        with sharing(self._model) as given:
            plain = self._plain_logits(prompts)
        self.exchanged = exchange(self._model, given)
        try:
            if not self._rounded:
                exchange_layers(self._model)
            error = self._tested_error(prompts, plain)
            layers, refused = settle(self._model)
            self.exchanged = replace(self.exchanged, layers=layers, refused=self.exchanged.refused + refused)
            if largest(self._ranks, layers):
                error = max(error, self._tested_error(prompts, plain))
            if error > limit and largest(self._ranks, self.exchanged.any):
                log.warning("%s: with kernels, logits differ by %.2g of their spread: its own code runs", name, error)
                self._restore()
                error = self._tested_error(prompts, plain)
        except BaseException:
            self._restore()
            raise
        if error > limit:
            self._restore()
            raise UnsupportedModel(
                f"{name}: the self-test failed: over pages, logits differ from plain attention by {error:.2g} "
                f"of their spread; {limit:g} is allowed" + (f" ({self._alone})" if self.alone else "")
            )

    def _restore(self) -> None:
        """Makes the model compute by its own code."""
        restore_layers(self._model)
        restore(self._model)
        self.exchanged = Exchanged()

    def _test_length(self) -> int:
        seen = [row.tokens for row in self.layout.local.values()]
        return _TEST_TOKENS + max((tokens for tokens in seen if tokens <= _TEST_WINDOW), default=0)

    def _plain_logits(self, prompts: NDArray[np.int32]) -> torch.Tensor:
        inputs = self._inputs([Segment(prompt, 0, (prompt,), True) for prompt in prompts], len(prompts))
        with torch.inference_mode():
            if self._rounded:
                output = run(self._model, Rounding(self._model.config, self._rounded), **inputs)
            else:
                output = self._model(**inputs, use_cache=False)
            logits: torch.Tensor = output.logits.float()
        return logits

    def _tested_error(self, prompts: NDArray[np.int32], plain: torch.Tensor) -> float:
        """Returns `_paged_error` of packed prompts; of each alone if the model does not attend through pages."""
        if not self.alone:
            install(self._model)
            try:
                return self._packed_error(prompts, plain)
            except UnsupportedModel as refusal:
                if not _gathers(self._model, self.layout) or self.vision is not None:
                    raise
                exchange_attention(self._model, "eager")
                self._alone = str(refusal)
        try:
            return self._paged_error(prompts, plain)
        except Exception as error:  # models raise all kinds
            raise UnsupportedModel(f"{self._alone}; nor does it run over gathered keys: {error}") from error

    def _packed_error(self, prompts: NDArray[np.int32], plain: torch.Tensor) -> float:
        """Returns `_paged_error` with the device's own kernel, or with PyTorch's if that one does not compute it."""
        kernel, other = self._attention, TreeAttention()
        if type(kernel) is not type(other):
            try:
                error = self._paged_error(prompts, plain)
            except UnsupportedModel:
                raise
            except Exception:  # compilers and drivers raise all kinds
                log.warning("%s fails; attention is computed by PyTorch", type(kernel).__name__, exc_info=True)
            else:
                if error <= self._limit:
                    return error
                log.warning(
                    "by %s, logits differ by %.2g of their spread; attention is computed by PyTorch",
                    type(kernel).__name__,
                    error,
                )
            self._attention = other
        return self._paged_error(prompts, plain)

    def _paged_error(self, prompts: NDArray[np.int32], plain: torch.Tensor) -> float:
        """Returns the largest difference of paged from plain logits [2, length, vocab], relative to their spread."""
        length = prompts.shape[1]
        first, last = (length // 2, length - 1), (length, length - 1)
        page_size = min(self._page_size, 4)
        used = -(-length // page_size)
        counts = dict.fromkeys(self.layout.names, 2 * used)
        pools = self._make_pools(counts, page_size)
        tables = np.arange(2 * used, dtype=np.int32)[::-1].reshape(used, 2).T
        spread = float(plain.max() - plain.min())
        error = 0.0
        for begins, ends in (((0, 0), first), (first, last), (last, (length, length))):
            parts = [(i, b, e) for i, (b, e) in enumerate(zip(begins, ends, strict=True)) if e > b]
            segments = [self._test_segment(prompts[i], b, e, tables[i], page_size, i) for i, b, e in parts]
            wanted = torch.stack([plain[i, e - 1] for i, _, e in parts])
            difference = (self._run(segments, pools) - wanted).abs().max()
            error = max(error, float(difference) / spread) if difference.isfinite() else float("inf")
        return largest(self._ranks, error)

    def _test_segment(
        self, prompt: NDArray[np.int32], begin: int, end: int, table: NDArray[np.int32], page_size: int, slot: int
    ) -> Segment:
        """Returns [begin, end) of a prompt, without the pages before the window."""
        tables = [table.copy() for _ in self._attended]
        for own, component in zip(tables, self._attended.values(), strict=True):
            own[: component.seen_from(begin) // page_size] = -1
        return Segment(prompt[begin:end], begin, tuple(tables), True, state=slot)


def attention_for(device: torch.device, kv_cache_dtype: str = "auto") -> Attention:
    """Returns the attention kernel for a device: the core's on a CPU, that in Triton on a GPU, if installed.

    Neither reads pages in 8 bits: PyTorch's does.
    """
    if kv_cache_dtype != "auto":
        log.warning("KV in %s: attention is computed by PyTorch, and layers by their own code", kv_cache_dtype)
        return TreeAttention()
    if device.type == "cpu" and kernels.instructions():
        return PageAttention()
    if device.type == "cuda":
        try:
            from mainstem.runtime.attention.triton_attention import TritonAttention
        except ImportError as error:
            log.warning("attention is computed by PyTorch, since Triton cannot be imported: %s", error)
        else:
            return TritonAttention()
    return TreeAttention()


def recorder_for(device: torch.device) -> Recorder | None:
    """Returns what records the launches of a device; None: nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None


@contextmanager
def _frequent_steps(model: PreTrainedModel) -> Iterator[None]:
    """Tunes the temperature of attention anew every few positions, not thousands, so that a short test sees it."""
    tuned: list[Any] = [module for module in model.modules() if hasattr(module, "floor_scale")]
    before = [module.floor_scale for module in tuned]
    for module in tuned:
        module.floor_scale = _TEST_STEP
    try:
        yield
    finally:
        for module, step in zip(tuned, before, strict=True):
            module.floor_scale = step


def _is_step(segment: Segment) -> bool:
    """Returns whether a segment is one token of the base model, with logits, and nothing before it is on its way."""
    is_plain = all(each is None for each in (segment.adapter, segment.arriving, segment.positions, segment.pooling))
    return is_plain and len(segment.tokens) == segment.logits == 1 and segment.start > 0 and not _inside(segment)


def _inside(segment: Segment) -> list[ImageInput]:
    """Returns the images that have positions in the segment."""
    return [image for image in segment.images if image.start < segment.end and image.end > segment.start]


def _layout(loaded: LoadedModel) -> Layout:
    """Returns the layout of a model that can run over pages, by its class and configuration.

    Raises:
        UnsupportedModel: it cannot run over pages; the message says why.
    """
    try:
        layout = Layout.of(loaded.model.config, loaded.max_context, loaded.ranks.size)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{loaded.name} cannot run over pages: {error}") from error
    if reasons := list(_refusals(loaded.model, layout)):
        raise UnsupportedModel(f"{loaded.name} cannot run over pages: {'; '.join(reasons)}")
    return layout


def prefix_refusals(model: PreTrainedModel, layout: Layout) -> Iterator[str]:
    """Yields the reasons why what `layout` keeps of a prefix is not all that `model` needs of it; none if it is."""
    if model.config.is_encoder_decoder:
        yield "encoder-decoder models keep KV of two kinds"
    if getattr(model, "_is_stateful", False) and not layout.state_layers:
        yield "it keeps a state that its configuration does not mention"
    yield from _rope_refusals(model.config.get_text_config(decoder=True))


def _refusals(model: PreTrainedModel, layout: Layout) -> Iterator[str]:
    """Yields the reasons why `model` cannot run over pages; none if it can."""
    yield from prefix_refusals(model, layout)
    tuned = getattr(model.config.get_text_config(decoder=True), "attn_temperature_tuning", None)
    if tuned and not any(hasattr(module, "floor_scale") for module in model.modules()):
        yield "the temperature of its attention follows no known rule"
    arguments = inspect.signature(model.forward).parameters
    needed = {"logits_to_keep"}
    if layout.places and not _gathers(model, layout) and (reason := _own_attention(model)) is not None:
        yield reason
    if missing := needed - set(arguments):
        yield f"its forward takes no {' and no '.join(sorted(missing))}"


def _own_attention(model: PreTrainedModel) -> str | None:
    """Returns why `model` cannot attend through pages, many requests in a forward; None if it can."""
    arguments = inspect.signature(model.forward).parameters
    if not model._can_set_attn_implementation():
        return "its attention cannot be exchanged"
    if all(argument.kind is not inspect.Parameter.VAR_KEYWORD for argument in arguments.values()):
        return "its forward does not pass arguments on to attention"
    return None if "position_ids" in arguments else "its forward takes no position_ids"


def _gathers(model: PreTrainedModel, layout: Layout) -> bool:
    """Returns whether `model` can attend by its own code to keys and values that are gathered from pages for it."""
    return layout.components == (Full(),) and "past_key_values" in inspect.signature(model.forward).parameters


def _rope_refusals(config: PreTrainedConfig) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    for kind in sorted(_rope_types(parameters) & {"dynamic", "longrope"}):
        yield f"its {kind} position embedding depends on the length of the whole sequence"


def _rope_types(parameters: Mapping[str, Any]) -> set[str]:
    """Returns the types of all layers, whose parameters may differ by kind of layer."""
    kinds = [parameters, *(given for given in parameters.values() if isinstance(given, dict))]
    return {str(given["rope_type"]) for given in kinds if "rope_type" in given}
