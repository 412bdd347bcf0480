"""Forward: computes segments with a model: which of them together, its inputs, and its call.

    one forward     all segments, packed [1, tokens]; with recurrent layers one segment, or single tokens [rows, 1]
    one adapter     segments of different adapters are never in one forward
    images          their embeddings replace those of their tokens
    own attention   a model whose attention cannot be exchanged: one segment, its keys and values gathered from pages

It checks nothing, and owns no pages.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.errors import BadArgument
from mainstem.runtime.attention.paged import Attention, BatchPlan, Extent, PackedPositions, Paging, plan_batch
from mainstem.runtime.kernels.step_graphs import Plans, Recorder, StepGraphs, padded_rows
from mainstem.runtime.memory.pools import STATE_LAYER, Pools
from mainstem.runtime.memory.states import Proof, StateCache
from mainstem.runtime.models.adapters import Adapter, Adapters
from mainstem.runtime.models.caches import Gathering, Passing
from mainstem.runtime.models.layout import Layout
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.places import run
from mainstem.runtime.sampling.pooling import last_hidden_states
from mainstem.runtime.segments import Segment
from mainstem.runtime.text.vision import Vision
from mainstem.tiers.host.transfer import LayerTicket

if TYPE_CHECKING:
    from transformers import Cache


class Forward:
    """Computes segments over any pools of the model's layout.

    Args:
        loaded: the model.
        layout: of the model.
        adapters: of the model.
        attention: the kernel.
        proof: how the model goes on from a state; None: it keeps none.
        vision: encodes images; None: the model takes none.
        latent: whether it caches latents in place of keys and values.

    Attributes:
        max_context: positions of the longest prompt and its answer.
        alone: why each request has a forward of its own; None: they share one.
        steps: repeats decode steps that are recorded; None: nothing does.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        layout: Layout,
        adapters: Adapters,
        attention: Attention,
        proof: Proof | None,
        vision: Vision | None,
        *,
        latent: bool,
    ) -> None:
        self.model, self.layout, self.attention = loaded.model, layout, attention
        self.alone: str | None = None
        self.steps: StepGraphs | None = None
        self._adapters, self._proof, self._vision, self._latent = adapters, proof, vision, latent
        self.max_context, self._device = loaded.max_context, loaded.model.device
        self._places, self._attended = layout.places, layout.attended
        text = loaded.model.config.get_text_config(decoder=True)
        self._is_tuned = bool(getattr(text, "attn_temperature_tuning", None))
        self._takes_positions = "position_ids" in inspect.signature(loaded.model.forward).parameters
        self._embedded: dict[tuple[bytes, bytes, Adapter | None], torch.Tensor] = {}  # of the next forward

    def run(self, segments: Sequence[Segment], pools: Pools) -> torch.Tensor:
        """Returns the logits that the segments ask for, float32 [rows, vocab], and writes their KV and states."""
        rows: list[int] = []
        parts = []
        for batch in self._batches(segments):
            parts.append(self._compute([segment for _, segment in batch], pools))
            rows += [index for index, segment in batch for _ in range(segment.logits)]
        if len(parts) == 1:
            return parts[0]
        order = torch.from_numpy(np.argsort(np.array(rows, dtype=np.int64), stable=True))
        return torch.cat(parts)[order.to(self._device)]

    def embed(self, segment: Segment) -> None:
        """Encodes the images of a segment of the next forward that are not cached yet; raises BadArgument."""
        if self._vision is None:
            return
        with torch.inference_mode(), self._adapters.select(segment.adapter):
            for image in segment.inside:
                rows = self._vision.embed(image, segment.namespace)
                if len(rows) != image.length:
                    allowed = f"{len(rows)}, the number of its embeddings"
                    raise BadArgument("images", f"{image.length} positions", allowed)
                self._embedded[image.identity, segment.namespace, segment.adapter] = rows

    def record(self, recorder_for: Callable[[torch.device], Recorder | None], limit: float) -> None:
        """Records decode steps of single tokens from now on, where the model, its attention and the device can."""
        is_plain = self._places and self.alone is None and self._proof is None and not self._latent
        if is_plain and self.attention.repeats and (recorder := recorder_for(self._device)) is not None:
            self.steps = StepGraphs(self.step, self.attention, recorder, self._device, limit)

    @property
    def takes_images(self) -> bool:
        """Whether segments may have images."""
        return self._vision is not None

    def forget(self) -> None:
        """Drops the embeddings of the forward that has ended."""
        self._embedded.clear()

    def _batches(self, segments: Sequence[Segment]) -> Iterator[list[tuple[int, Segment]]]:
        """Yields the segments that can be computed together, each with its index among all."""
        groups: dict[Adapter | None, list[tuple[int, Segment]]] = {}
        for index, segment in enumerate(segments):
            groups.setdefault(segment.adapter, []).append((index, segment))
        for group in groups.values():
            if self.alone is not None:
                yield from ([pair] for pair in group)
                continue
            if self._proof is None:
                yield group
                continue
            steps = [(index, s) for index, s in group if s.start > 0 and len(s.tokens) == 1]
            for index, segment in group:
                if segment.start == 0 or len(segment.tokens) > 1:
                    yield from ([(index, part)] for part in self._parts(segment))
            if not self._proof.stacked:
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

    def _step(self, segments: Sequence[Segment], pools: Pools) -> torch.Tensor | None:
        """Computes a decode step that is recorded; returns None if this one is computed as other forwards are."""
        if self.steps is None or not all(s.is_step for s in segments) or not self.steps.takes(len(segments)):
            return None
        tokens = np.concatenate([s.tokens for s in segments])
        positions = np.array([s.start for s in segments], dtype=np.int64)
        with torch.inference_mode(), self._adapters.select(None):
            plans = self._plans(segments, pools, padded_rows(len(segments)))
            return self.steps.compute(tokens, positions, plans).to(torch.float32, copy=True)

    def step(self, tokens: torch.Tensor, positions: torch.Tensor, plans: Plans) -> torch.Tensor:
        """See `step_graphs.Forward`."""
        paging = Paging(self.attention, plans, self._places, self.max_context)
        cache = {"past_key_values": PackedPositions(positions)} if self._is_tuned else {}
        output = self.model(
            input_ids=tokens, position_ids=positions, logits_to_keep=0, paging=paging, use_cache=False, **cache
        )
        logits: torch.Tensor = output.logits.flatten(0, 1)
        return logits

    def _compute(self, segments: Sequence[Segment], pools: Pools) -> torch.Tensor:
        """Runs one forward. Without states, all tokens are one row; with states, each segment is, all equally long."""
        if (repeated := self._step(segments, pools)) is not None:
            return repeated
        rows = 1 if pools.states is None else len(segments)
        ends = np.cumsum([len(s.tokens) for s in segments])
        asked = [np.arange(end - s.logits, end) for s, end in zip(segments, ends, strict=True)]
        wanted = self._tensor(np.concatenate(asked))
        arriving = tuple(dict.fromkeys(s.arriving for s in segments if s.arriving is not None))
        with torch.inference_mode(), self._adapters.select(segments[0].adapter):
            inputs = self.inputs(segments, rows)
            inputs["logits_to_keep"] = wanted if rows == 1 else self._tensor(np.zeros(1, dtype=np.int64))
            cache: Cache | None = None
            plans = self._plans(segments, pools) if self._places else {}
            paging = Paging(self.attention, plans, self._places, self.max_context, arriving)
            paging = replace(paging, adapted=segments[0].adapter is not None)
            if self.alone is not None:
                cache = Gathering(self.model.config, paging, segments[0].start)
            elif (passing := self._cache(segments, pools, arriving)) is not None:
                cache, paging = passing, replace(paging, given=passing.given)
            if self._places and self.alone is None:
                inputs["paging"] = paging
            with self._pooled(segments):
                if cache is not None:
                    output = run(self.model, cache, **inputs)
                elif self._is_tuned:
                    positions = PackedPositions(inputs["position_ids"])
                    output = self.model(**inputs, past_key_values=positions, use_cache=False)
                else:
                    output = self.model(**inputs, use_cache=False)
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
        with last_hidden_states(self.model) as found:
            yield
        parts = torch.split(found[-1].flatten(0, 1), [len(segment.tokens) for segment in segments])
        for segment, hidden in zip(segments, parts, strict=True):
            if segment.pooling is not None:
                segment.pooling.add(segment.start, hidden)

    def inputs(self, segments: Sequence[Segment], rows: int) -> dict[str, Any]:
        """Returns the arguments of the model for tokens and positions, each [rows, n]."""
        tokens = self._tensor(np.concatenate([s.tokens for s in segments]).astype(np.int64)).view(rows, -1)
        has_images = any(segment.inside for segment in segments)
        inputs = {"inputs_embeds": self._embeddings(segments, tokens)} if has_images else {"input_ids": tokens}
        if self._takes_positions:
            inputs["position_ids"] = self._positions(segments, rows)
        return inputs

    def _embeddings(self, segments: Sequence[Segment], tokens: torch.Tensor) -> torch.Tensor:
        """Returns the embeddings of tokens [rows, n] and of the images in them: [rows, n, hidden]."""
        assert self._vision is not None
        embeddings: torch.Tensor = self.model.get_input_embeddings()(tokens)
        flat, row = embeddings.view(-1, embeddings.shape[-1]), 0
        for segment in segments:
            for image in segment.inside:
                begin, end = max(image.start, segment.start), min(image.end, segment.end)
                shift = row - segment.start
                rows = self._embedded.get((image.identity, segment.namespace, segment.adapter))
                rows = self._vision.embed(image, segment.namespace) if rows is None else rows
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
        plans, both_ways = {}, self._vision is not None and self._vision.both_ways
        for i, (name, pool) in enumerate(pools.paged.items()):
            extents = [Extent(len(s.tokens), s.start, s.tables[i], s.spans(both_ways)) for s in segments]
            plans[name] = plan_batch(extents, pool, self._attended[name], repeated)
        return plans

    def _cache(self, segments: Sequence[Segment], pools: Pools, arriving: Sequence[LayerTicket]) -> Passing | None:
        """Returns the model's cache, with the states at the segments' starts; None if it needs none."""
        if pools.states is None:
            return Passing(self.model.config) if self._latent else None
        cache = StateCache(self.model.config, pools.states)
        if segments[0].start == 0:
            cache.start(len(segments))
            return cache
        for ticket in arriving:
            ticket.wait_layer(STATE_LAYER)
        cache.load([s.state for s in segments])
        return cache

    def _tensor(self, values: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device)
