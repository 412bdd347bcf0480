"""Runs a model over pages: one packed forward for the new tokens of many requests.

A model is rejected if its KV or states do not fit the pools of its `Layout`, or depend on more than the tokens up to a
position. A self-test at construction finds what the configuration does not say.

The runner does not know requests, leases or sampling, and does not check the owners of pages.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial

import torch

from mainstem.runtime.attention.few_rows import PageAttention
from mainstem.runtime.attention.paged import TOLERANCE, Attention, SdpaAttention, install, plain_attention
from mainstem.runtime.kernels import linear
from mainstem.runtime.kernels.linear import Kernels
from mainstem.runtime.kernels.step_graphs import CudaRecorder, Recorder
from mainstem.runtime.memory.kv import KVPool, kv_shapes
from mainstem.runtime.memory.pools import Pools
from mainstem.runtime.memory.states import StatePool, StateShape, prove
from mainstem.runtime.models.adapters import Adapters
from mainstem.runtime.models.exactness import arithmetic, shown
from mainstem.runtime.models.forward import Forward
from mainstem.runtime.models.loading import LoadedModel
from mainstem.runtime.models.refusals import layout_of, own_attention
from mainstem.runtime.models.self_test import SelfTest
from mainstem.runtime.segments import Segment, SegmentRules
from mainstem.runtime.text.vision import Vision

# Pages in 8 bits are tested against keys and values that were rounded in the same way. A number between two steps may
# take the other one, so the least difference is that of some steps, in any dtype.
EIGHT_BITS_TOLERANCE = 1e-2

log = logging.getLogger(__name__)


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
        keep_scores: see `Pools`: `best`.
        exact: whether a model is refused that is not exact. On a GPU, other kernels compute then.

    Attributes:
        vocab_size: tokens that have logits.
        memory: the pages and slots that it reads and writes.
        adapters: of the model.
        vision: encodes images; None: the model takes none.
        arithmetic: by which it computes; see `exactness`.
        computation: how, where another way gives other numbers; see `Pools`.
        exchanged: what kernels compute in place of the model's own code.

    Raises:
        UnsupportedModel: the model cannot run over pages, or is not exact and should be; the message says why. The
            loaded model is unchanged.
        BadArgument: `pages` lacks a component, or names one that the model does not have.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        pages: int | Mapping[str, int],
        page_size: int,
        kv_cache_dtype: str = "auto",
        cuda_graphs: bool = True,
        exact: bool = False,
        keep_scores: int | None = None,
    ) -> None:
        model, ranks = loaded.model, loaded.ranks
        self.layout = layout = layout_of(loaded)
        self.vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)
        self.adapters = Adapters(model)
        counts = {layout.names[0]: pages} if isinstance(pages, int) else pages
        with plain_attention(model):
            limit = TOLERANCE[loaded.dtype]
            kv = kv_shapes(model, layout.kv_layers)
            shape = StateShape.of(model) if layout.state_layers else None
            self._proof = None if shape is None else prove(model, shape, limit, ranks, exact=ranks.size == 1)
            self.vision = None if loaded.processor is None else Vision(loaded)
            like = torch.empty(0, dtype=loaded.dtype, device=model.device)
            make_pools = partial(Pools, layout, kv, shape, like=like, kv_cache_dtype=kv_cache_dtype)
            best = None if keep_scores is None else min(keep_scores, self.vocab_size)
            self.memory = make_pools(counts, page_size, best=best)
            kernels, attention = kernels_for(model.device, exact), attention_for(model.device, kv_cache_dtype, exact)
            how = layout, self.adapters, attention, self._proof, self.vision
            self._forward = forward = Forward(loaded, *how, latent=any(each.latent for each in kv.values()))
            forward.alone = own_attention(model) if layout.places else None
            limit = max(limit, EIGHT_BITS_TOLERANCE if self._rounded else 0)
            what = self._rounded, limit, loaded.name, ranks, kernels, exact
            test = SelfTest(forward, make_pools, page_size, *what)
            self.exchanged = test.run(self.vocab_size, loaded.max_context)
            self._inexact, self.arithmetic = test.inexact, arithmetic(kernels)
        if self.exchanged.refused:
            log.warning(
                "%s: %d modules are not computed by kernels as they could be", loaded.name, self.exchanged.refused
            )
        log.info("%s: %s", loaded.name, self.exchanged)
        log.info("%s: exact: %s", loaded.name, shown(self._inexact, self.arithmetic))
        self.computation = self.memory.computation = self._computation()
        if self._inexact is None:
            self.adapters.watch = test.watched
        sizes = {name: pool.pages for name, pool in self.memory.paged.items()}
        slots = None if self.memory.states is None else self.memory.states.slots
        images, both_ways = self.vision is not None, self.vision is not None and self.vision.both_ways
        bounds = self.vocab_size, loaded.max_context, page_size, layout.attended, sizes, slots
        self._rules = SegmentRules(*bounds, images=images, both_ways=both_ways)
        if forward.alone is None:
            install(model)
        else:
            log.warning("%s: requests do not share a forward: %s", loaded.name, forward.alone)
        if cuda_graphs and ranks.size == 1:
            forward.record(recorder_for, 0.0 if exact else limit)

    @property
    def inexact(self) -> str | None:
        """Why bits may depend on what is computed together, with or without an adapter; None: they never do."""
        return self.adapters.inexact if self._inexact is None else self._inexact

    @property
    def alone(self) -> bool:
        """Whether each request has a forward of its own, because the model attends by code of its own."""
        return self._forward.alone is not None

    @property
    def records_steps(self) -> bool:
        """Whether decode steps of single tokens are recorded; see `step_graphs`."""
        return self._forward.steps is not None

    @property
    def pools(self) -> dict[str, KVPool | StatePool]:
        """Those of `memory`, by component."""
        states = self.memory.states
        return {**self.memory.paged, **({} if states is None else {"state": states})}

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Computes the segments' new tokens, writes their KV and states, and returns the requested logits.

        Returns:
            float32 [rows, vocab_size], each segment's `logits` in order, on the model's device.

        Raises:
            BadArgument: a segment is empty, holds a token outside the vocabulary, is longer than the model's context,
                lacks pages or a slot, or writes to the same page or slot as another one. Nothing is written.
        """
        self._rules.check(segments)
        try:
            return self._forward.run(segments, self.memory)
        finally:
            self._forward.forget()

    def embed(self, segment: Segment) -> None:
        """Runs the encoder for those images of a segment that are not cached yet.

        Raises:
            BadArgument: the number of embeddings of an image is not its number of positions.
        """
        self._forward.embed(segment)

    def _computation(self) -> tuple[str, ...]:
        """Returns how it computes what pages and states hold, where another way gives other numbers: "keys paged"."""
        scan = () if self._proof is None else (f"scan {self._proof.continuation}",)
        keys = (f"keys {'gathered' if self.alone else 'paged'}",) if self.layout.places else ()
        bits = () if self._inexact else (f"arithmetic {self.arithmetic}",)
        whole = (f"whole layers {self.exchanged.layers}",) if bits and self.exchanged.layers else ()  # they round less
        return scan + keys + bits + whole

    @property
    def _rounded(self) -> dict[int, torch.dtype]:
        """The layers whose keys and values are kept in 8 bits, and their dtype."""
        pools = {name: pool.kept for name, pool in self.memory.paged.items() if pool.kept is not pool.dtype}
        return {layer: pools[name] for layer, (name, _) in self.layout.places.items() if name in pools}


def kernels_for(device: torch.device, exact: bool = False) -> Kernels:
    """Returns the kernels of linear layers and norms for a device: the core's, which compute nothing on a GPU.

    If they should be exact, an NVIDIA GPU has others.
    """
    if exact and device.type == "cuda" and torch.version.hip is None:
        try:
            from mainstem.runtime.kernels import triton_linear
        except ImportError as error:
            log.warning("linear layers are computed by PyTorch, since Triton cannot be imported: %s", error)
        else:
            return triton_linear
    return linear


def attention_for(device: torch.device, kv_cache_dtype: str = "auto", exact: bool = False) -> Attention:
    """Returns the attention kernel for a device: the core's on a CPU, that in Triton on a GPU, if installed.

    That in Triton does not read pages in 8 bits: PyTorch's does. On a GPU, an exact one is slower.
    """
    is_cpu = device.type == "cpu"
    if kv_cache_dtype != "auto":
        name = "the core" if is_cpu else "PyTorch"
        log.warning("KV in %s: attention is computed by %s, and layers by their own code", kv_cache_dtype, name)
    if is_cpu:
        return PageAttention()
    if kv_cache_dtype != "auto":
        return SdpaAttention()
    if device.type == "cuda":
        try:
            from mainstem.runtime.attention.triton_attention import TritonAttention
            from mainstem.runtime.attention.triton_spans import SpanAttention
        except ImportError as error:
            log.warning("attention is computed by PyTorch, since Triton cannot be imported: %s", error)
        else:
            return SpanAttention() if exact else TritonAttention()
    return SdpaAttention()


def recorder_for(device: torch.device) -> Recorder | None:
    """Returns what records the launches of a device; None: nothing does."""
    return CudaRecorder(device) if device.type == "cuda" else None
