"""The self-test: whether a model computes over pages what it computes without them.

It finds what a model's class and configuration do not say: a kernel that computes something else, attention that
ignores its masks. What fails is replaced by what is slower, as far as there is such a thing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.errors import UnsupportedModel
from mainstem.runtime.attention.paged import SdpaAttention, exchange_attention, install, spread_error
from mainstem.runtime.kernels import linear as core
from mainstem.runtime.kernels.decoders import exchange_layers, restore_layers, settle
from mainstem.runtime.kernels.exchanges import Exchanged, compute_by_row, exchange, restore, restore_module, sharing
from mainstem.runtime.kernels.linear import Kernels
from mainstem.runtime.memory.pools import Pools
from mainstem.runtime.models import gpu_exactness
from mainstem.runtime.models.adapters import Adapter
from mainstem.runtime.models.caches import Rounding
from mainstem.runtime.models.exactness import reason, watching
from mainstem.runtime.models.forward import Forward
from mainstem.runtime.models.places import run
from mainstem.runtime.models.refusals import gathers
from mainstem.runtime.parallel.ranks import Ranks, largest
from mainstem.runtime.segments import Segment

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TOKENS = 12
_MANY = 36  # more rows than a kernel of few rows takes
# The prompts are longer than windows of up to this size; longer windows would take long to test.
_WINDOW = 128
# Positions after which the temperature of attention is tuned anew.
_STEP = 4
_MOST_PAGE = 4  # positions of a page

log = logging.getLogger(__name__)


class SelfTest:
    """Compares two short prompts, packed, chunked and over scattered pages, with plain attention on whole ones.

    Args:
        forward: computes; the test may exchange its attention, and what the modules of its model compute.
        make_pools: makes pools of a number of pages or slots of each component, and a page size.
        page_size: of the pools that will be served.
        rounded: the layers whose keys and values have 8 bits, and their dtype.
        limit: the largest difference of logits that is allowed, of their spread.
        name: of the model.
        ranks: that hold the model together.
        kernels: of the device.
        exact: whether a model is refused that is not.

    Attributes:
        exchanged: what kernels compute in place of the model's own code.
        inexact: why bits may depend on what is computed together; None: they do not.
    """

    def __init__(
        self,
        forward: Forward,
        make_pools: Callable[[Mapping[str, int], int], Pools],
        page_size: int,
        rounded: Mapping[int, torch.dtype],
        limit: float,
        name: str,
        ranks: Ranks,
        kernels: Kernels,
        exact: bool,
    ) -> None:
        self._forward, self._model, self._layout = forward, forward.model, forward.layout
        self._make_pools, self._page_size = make_pools, min(page_size, _MOST_PAGE)
        self._rounded, self._limit, self._name, self._ranks = rounded, limit, name, ranks
        self._kernels, self._exact = kernels, exact
        self.exchanged = Exchanged()
        self.inexact: str | None = None

    def run(self, vocab_size: int, max_context: int) -> Exchanged:
        """Tests prompts of random tokens, and returns what kernels compute afterwards.

        Raises:
            UnsupportedModel: the logits differ, or the model is not exact and should be. It computes by its own code
                again.
        """
        shape = 2, min(self._length(), max_context)
        self._prompts = np.random.default_rng(0).integers(0, vocab_size, shape).astype(np.int32)
        self._restore()  # another runner may have exchanged its modules
        try:
            with _frequent_steps(self._model):
                error = self._exchange()
            if error > self._limit:
                alone = self._forward.alone
                raise UnsupportedModel(
                    f"{self._name}: the self-test failed: over pages, logits differ from plain attention by {error:.2g}"
                    f" of their spread; {self._limit:g} is allowed" + ("" if alone is None else f" ({alone})")
                )
            self.inexact = self.watched()
            if self._exact and self.inexact is not None:
                raise UnsupportedModel(f"{self._name} is not exact: {self.inexact}. Without --exact it is served")
        except BaseException:
            self._restore()
            raise
        return self.exchanged

    def _exchange(self) -> float:
        """Lets kernels compute as far as they are right; returns the error."""
        with sharing(self._model) as shared:
            self._plain = self._plain_logits()
        self.exchanged = exchange(self._model, shared, self._kernels)
        if not self._rounded and self._kernels is core:
            exchange_layers(self._model)
        error = self._tested_error()
        layers, refused = settle(self._model)
        self.exchanged = replace(self.exchanged, layers=layers, refused=self.exchanged.refused + refused)
        if largest(self._ranks, layers):
            error = max(error, self._tested_error())
        if error > self._limit and largest(self._ranks, self.exchanged.any):
            log.warning("%s: with kernels, logits differ by %.2g of their spread: its own code runs", self._name, error)
            self._restore()
            error = self._tested_error()
        return error

    def _restore(self) -> None:
        """Makes the model compute by its own code."""
        restore_layers(self._model)
        restore(self._model)
        self.exchanged = Exchanged()

    def _length(self) -> int:
        seen = [row.tokens for row in self._layout.local.values()]
        return _TOKENS + max((tokens for tokens in seen if tokens <= _WINDOW), default=0)

    def _plain_logits(self) -> torch.Tensor:
        segments = [Segment(prompt, 0, (prompt,), True) for prompt in self._prompts]
        inputs = self._forward.inputs(segments, len(segments))
        with torch.inference_mode():
            if self._rounded:
                output = run(self._model, Rounding(self._model.config, self._rounded), **inputs)
            else:
                output = self._model(**inputs, use_cache=False)
            logits: torch.Tensor = output.logits.float()
        return logits

    def _tested_error(self) -> float:
        """Returns `_paged_error` of packed prompts; of each alone if the model does not attend through pages."""
        if self._forward.alone is None:
            install(self._model)
            try:
                return self._packed_error()
            except UnsupportedModel as refusal:
                if not gathers(self._model, self._layout) or self._forward.takes_images:
                    raise
                exchange_attention(self._model, "eager")
                self._forward.alone = str(refusal)
        try:
            return self._paged_error()
        except Exception as error:  # models raise all kinds
            raise UnsupportedModel(f"{self._forward.alone}; nor does it run over gathered keys: {error}") from error

    def _packed_error(self) -> float:
        """Returns `_paged_error` with the device's own kernel, or with PyTorch's if that one does not compute it."""
        name, other = type(self._forward.attention).__name__, SdpaAttention()
        if type(self._forward.attention) is not type(other):
            try:
                error = self._paged_error()
            except UnsupportedModel:
                raise
            except Exception:  # compilers and drivers raise all kinds
                log.warning("%s fails; attention is computed by PyTorch", name, exc_info=True)
            else:
                if error <= self._limit:
                    return error
                text = "by %s, logits differ by %.2g of their spread; attention is computed by PyTorch"
                log.warning(text, name, error)
            self._forward.attention = other
        return self._paged_error()

    def _paged_error(self) -> float:
        """Returns the largest difference of paged from plain logits [2, length, vocab], relative to their spread."""
        length = self._prompts.shape[1]
        first, last = (length // 2, length - 1), (length, length - 1)
        used = -(-length // self._page_size)
        pools = self._make_pools(dict.fromkeys(self._layout.names, 2 * used), self._page_size)
        tables = np.arange(2 * used, dtype=np.int32)[::-1].reshape(used, 2).T
        error = 0.0
        for begins, ends in (((0, 0), first), (first, last), (last, (length, length))):
            parts = [(i, b, e) for i, (b, e) in enumerate(zip(begins, ends, strict=True)) if e > b]
            segments = [self._segment(i, b, e, tables[i]) for i, b, e in parts]
            wanted = torch.stack([self._plain[i, e - 1] for i, _, e in parts])
            error = max(error, spread_error(self._forward.run(segments, pools), wanted, self._plain))
        return largest(self._ranks, error)

    def watched(self, adapter: Adapter | None = None) -> str | None:
        """Watches a prompt and a step after it; returns why their bits may depend on what is computed together.

        Where the core can compute what does, it does so afterwards.

        Args:
            adapter: that is selected meanwhile.
        """
        if self._kernels is not core:
            with gpu_exactness.watching() as without_rule:
                self._run_watched(adapter)
            return gpu_exactness.reason(without_rule)
        adapted = [module for place in (adapter.places if adapter else ()) for module in place.adapted.modules()]
        modules = dict.fromkeys([*self._model.modules(), *adapted])
        with watching(modules) as found:
            self._run_watched(adapter)
        if not found.kinds or self._model.device.type != "cpu":
            return reason(found)
        exchanged = [module for module in found.modules if compute_by_row(module)]
        with watching(modules) as left:
            self._run_watched(adapter)
        for module in exchanged if left.kinds else ():
            restore_module(module)
        return reason(left)

    def _run_watched(self, adapter: Adapter | None) -> None:
        prompt = np.resize(self._prompts[0], min(_MANY, self._forward.max_context))
        pages = -(-len(prompt) // self._page_size)
        pools = self._make_pools(dict.fromkeys(self._layout.names, pages), self._page_size)
        tables = (np.arange(pages, dtype=np.int32),) * len(self._layout.attended)
        if self._forward.alone is None:
            install(self._model)
        for begin, end in ((0, len(prompt) - 1), (len(prompt) - 1, len(prompt))):
            self._forward.run([Segment(prompt[begin:end], begin, tables, True, state=0, adapter=adapter)], pools)

    def _segment(self, prompt: int, begin: int, end: int, table: NDArray[np.int32]) -> Segment:
        """Returns [begin, end) of a prompt, without the pages before the window."""
        tables = [table.copy() for _ in self._layout.attended]
        for own, component in zip(tables, self._layout.attended.values(), strict=True):
            own[: component.seen_from(begin) // self._page_size] = -1
        return Segment(self._prompts[prompt][begin:end], begin, tuple(tables), True, state=prompt)


@contextmanager
def _frequent_steps(model: PreTrainedModel) -> Iterator[None]:
    """Tunes the temperature of attention anew every few positions, not thousands, so that a short test sees it."""
    tuned: list[Any] = [module for module in model.modules() if hasattr(module, "floor_scale")]
    before = [module.floor_scale for module in tuned]
    for module in tuned:
        module.floor_scale = _STEP
    try:
        yield
    finally:
        for module, step in zip(tuned, before, strict=True):
            module.floor_scale = step
