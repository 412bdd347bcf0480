"""Runs a model over pages: one packed forward for the new tokens of many requests.

A model is refused when its KV is not one entry a position and layer, or depends on more than the tokens up to that
position; what the configuration does not tell, a self-test at construction does.

The runner does not know requests, leases or sampling, and does not check who owns a page.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.errors import BadArgument, UnsupportedModel
from mainstem.runtime import kv
from mainstem.runtime.attention import Attention, Extent, Paging, SdpaAttention, install, plan_batch
from mainstem.runtime.host import HostPool, HostSize, Planes, host_pages
from mainstem.runtime.kv import KVPool
from mainstem.runtime.models import LoadedModel
from mainstem.tiers.transfer import LayerTicket

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

# Largest difference from plain attention that the self-test takes for rounding, as a part of the logits' spread. With
# SmolLM2's 30 layers it is 1.3e-6 in float32, 1.8e-3 in float16 and 1.2e-2 in bfloat16; deeper models round more often.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}

_TEST_TOKENS = 12


@dataclass(frozen=True, slots=True)
class Segment:
    """The new tokens of one request in a packed forward.

    Args:
        tokens: [n] int32 token ids, n >= 1.
        start: position of tokens[0]; the KV of positions [0, start) is already in the pages.
        page_table: int32 page ids, covering at least start + n positions; those written to belong to it alone.
        logits: whether the row of the last token is wanted.
        arriving: the KV before `start` is still on its way, layer by layer.
    """

    tokens: NDArray[np.int32]
    start: int
    page_table: NDArray[np.int32]
    logits: bool
    arriving: LayerTicket | None = None

    @property
    def end(self) -> int:
        """The position behind the last new token."""
        return self.start + len(self.tokens)


class ModelRunner:
    """A model and the KV pages it reads and writes. One thread at a time.

    The loaded model attends through pages from then on and can no longer be called without them.

    Args:
        loaded: the model; its KV has the model's dtype and device.
        pages: pages of the pool.
        page_size: positions a page.

    Raises:
        UnsupportedModel: the model cannot run over pages; the message says why. The loaded model is as it was.
        BadArgument: `pages` or `page_size` is less than 1.
    """

    def __init__(self, loaded: LoadedModel, pages: int, page_size: int) -> None:
        if reasons := list(_refusals(loaded.model)):
            raise UnsupportedModel(f"{loaded.name} cannot run over pages: {'; '.join(reasons)}")
        config = loaded.model.config
        text = config.get_text_config(decoder=True)
        self._model = loaded.model
        self._max_context = loaded.max_context
        self._heads = int(text.num_attention_heads)
        self._attention: Attention = SdpaAttention()
        self.vocab_size = int(text.vocab_size)
        self.bytes_per_page = kv.bytes_per_page(config, page_size, loaded.dtype)
        self._pool = KVPool(config, pages, page_size, loaded.dtype, loaded.model.device)
        self._self_test(loaded)

    @property
    def pool(self) -> KVPool:
        """The pages that it reads and writes."""
        return self._pool

    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Compute the segments' new tokens, write their KV, and return the logits that were asked for.

        Returns:
            float32 [rows, vocab_size], one row for each segment with `logits`, in order, on the model's device.

        Raises:
            BadArgument: a segment is empty, holds a token outside the vocabulary, is longer than the model's context,
                is not covered by its pages, or writes to a page that another one writes to. Nothing is written.
        """
        self._check(segments)
        return self._run(segments, self._pool)

    def host_memory(self, size: HostSize, storage: bool) -> HostPool:
        """Host pages for the pool's.

        Args:
            size: how much.
            storage: whether storage will read and write them.

        Raises:
            BadArgument: the size holds no page, or cannot be had.
        """
        planes = [Planes((self._pool.k, self._pool.v))]
        return HostPool(planes, host_pages(size, planes), storage=storage)

    def copy_page(self, source: int, target: int, positions: int) -> None:
        """Copy the KV of the first `positions` positions of page `source` to page `target`.

        Raises:
            BadArgument: a page or a number of positions that does not exist.
        """
        self._pool.copy_page(source, target, positions)

    def _run(self, segments: Sequence[Segment], pool: KVPool) -> torch.Tensor:
        device = pool.device
        plan = plan_batch([Extent(len(s.tokens), s.start, s.page_table) for s in segments], pool, self._heads)
        tokens = np.concatenate([s.tokens for s in segments]).astype(np.int64)
        positions = np.concatenate([np.arange(s.start, s.end, dtype=np.int64) for s in segments])
        last = np.cumsum([len(s.tokens) for s in segments]) - 1
        rows = last[[s.logits for s in segments]]
        arriving = tuple(dict.fromkeys(s.arriving for s in segments if s.arriving is not None))
        with torch.inference_mode():
            output = self._model(
                input_ids=torch.from_numpy(tokens).unsqueeze(0).to(device),
                position_ids=torch.from_numpy(positions).unsqueeze(0).to(device),
                use_cache=False,
                logits_to_keep=torch.from_numpy(rows).to(device),
                paging=Paging(self._attention, plan, self._max_context, arriving),
            )
            logits: torch.Tensor = output.logits.squeeze(0).float()
        return logits

    def _check(self, segments: Sequence[Segment]) -> None:
        if not segments:
            raise BadArgument("segments", segments, "at least one segment")
        for index, segment in enumerate(segments):
            self._check_segment(f"segments[{index}]", segment)
        page_size = self._pool.page_size
        written = np.concatenate([s.page_table[s.start // page_size : -(-s.end // page_size)] for s in segments])
        ids, counts = np.unique(written, return_counts=True)
        if counts.max() > 1:
            raise BadArgument("segments", f"page {ids[counts.argmax()]} twice", "a page to write for one segment only")

    def _check_segment(self, name: str, segment: Segment) -> None:
        tokens, table = segment.tokens, segment.page_table
        if tokens.ndim != 1 or len(tokens) == 0:
            raise BadArgument(f"{name}.tokens", tokens, "one dimension with at least one token")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise BadArgument(f"{name}.tokens", tokens, f"token ids in [0, {self.vocab_size})")
        if segment.start < 0 or segment.end > self._max_context:
            raise BadArgument(f"{name}.start", segment.start, f"in [0, {self._max_context - len(tokens)}]")
        if table.ndim != 1 or len(table) * self._pool.page_size < segment.end:
            raise BadArgument(f"{name}.page_table", table, f"pages for {segment.end} positions")
        if table.min() < 0 or table.max() >= self._pool.pages:
            raise BadArgument(f"{name}.page_table", table, f"page ids in [0, {self._pool.pages})")

    def _self_test(self, loaded: LoadedModel) -> None:
        """Two short prompts, packed, chunked and over scattered pages, against plain attention on both as a whole."""
        model = loaded.model
        before = model.config._attn_implementation
        length = min(_TEST_TOKENS, loaded.max_context)
        prompts = np.random.default_rng(0).integers(0, self.vocab_size, (2, length)).astype(np.int32)
        supported = False
        try:
            model.set_attn_implementation("eager")
            plain = _plain_logits(model, prompts)
            install(model)
            error = self._paged_error(prompts, plain)
            supported = error <= TOLERANCE[loaded.dtype]
        finally:
            if not supported:
                model.set_attn_implementation(before)
        if not supported:
            limit = TOLERANCE[loaded.dtype]
            raise UnsupportedModel(
                f"{loaded.name}: the self-test failed: over pages logits differ from plain attention by {error:.2g} "
                f"of their spread; {limit:g} is allowed"
            )

    def _paged_error(self, prompts: NDArray[np.int32], plain: torch.Tensor) -> float:
        """Largest difference of paged from plain logits [2, length, vocab], as a part of the plain ones' spread."""
        length = prompts.shape[1]
        cuts = (length // 2, length - 1)
        page_size = min(self._pool.page_size, 4)
        used = -(-length // page_size)
        pool = KVPool(self._model.config, 2 * used, page_size, self._pool.dtype, self._pool.device)
        tables = np.arange(2 * used, dtype=np.int32)[::-1].reshape(used, 2).T
        spread = float(plain.max() - plain.min())
        error = 0.0
        for begins, ends in (((0, 0), cuts), (cuts, (length, length))):
            parts = zip(prompts, tables, begins, ends, strict=True)
            segments = [Segment(prompt[b:e], b, table, True) for prompt, table, b, e in parts if e > b]
            wanted = torch.stack([plain[i, e - 1] for i, (b, e) in enumerate(zip(begins, ends, strict=True)) if e > b])
            difference = (self._run(segments, pool) - wanted).abs().max()
            error = max(error, float(difference) / spread) if difference.isfinite() else float("inf")
        return error


def _plain_logits(model: PreTrainedModel, prompts: NDArray[np.int32]) -> torch.Tensor:
    ids = torch.from_numpy(prompts.astype(np.int64)).to(model.device)
    positions = torch.arange(ids.shape[1], device=model.device).unsqueeze(0).expand_as(ids)
    with torch.inference_mode():
        logits: torch.Tensor = model(input_ids=ids, position_ids=positions, use_cache=False).logits.float()
    return logits


def _refusals(model: PreTrainedModel) -> Iterator[str]:
    """Why `model` cannot run over pages, as far as its class and configuration tell; nothing when it may."""
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        yield "encoder-decoder models keep KV of two kinds"
    if getattr(model, "_is_stateful", False):
        yield "recurrent layers keep a state, not KV for each position"
    if getattr(config, "is_heterogeneous", False):
        yield "its layers have heads of different sizes"
        return
    yield from _layer_refusals(config)
    yield from _rope_refusals(config)
    if not model._can_set_attn_implementation():
        yield "its attention cannot be exchanged"
    arguments = inspect.signature(model.forward).parameters
    if missing := {"position_ids", "logits_to_keep"} - set(arguments):
        yield f"its forward takes no {' and no '.join(sorted(missing))}"
    if all(argument.kind is not inspect.Parameter.VAR_KEYWORD for argument in arguments.values()):
        yield "its forward passes no arguments on to attention"


def _layer_refusals(config: PreTrainedConfig) -> Iterator[str]:
    window = getattr(config, "sliding_window", None)
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if window is not None and window >= config.max_position_embeddings:
        kinds.discard("sliding_attention")
    elif window is not None and getattr(config, "layer_types", None) is None:
        kinds.add("sliding_attention")
    for kind in sorted(kinds - {"full_attention"}):
        detail = f" ({window} positions)" if kind == "sliding_attention" else ""
        yield f"it has layers of the kind {kind}{detail}; only full_attention runs over pages"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        yield "its attention scores are soft-capped"
    if getattr(config, "kv_lora_rank", None) is not None:
        yield "its KV is compressed (multi-head latent attention)"


def _rope_refusals(config: PreTrainedConfig) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None) or {}
    if parameters.get("rope_type") in ("dynamic", "longrope"):
        yield f"its {parameters['rope_type']} position embedding depends on the length of the whole sequence"
