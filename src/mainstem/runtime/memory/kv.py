"""The KV tensors that page ids index: one tensor of keys and one of values, with all layers of a component.

    k, v:  [layers, pages, page_size, kv_heads, head_dim]         values may have a size of their own
    k:     [layers, pages, page_size, 1, latent | rotary part]    of latent attention (MLA); v is a view of the latent

Numbers are in the model's dtype, or in 8 bits (`eight_bits`), with a scale for each position and head beside the pages:

    scales: float32 [layers, pages, page_size, kv_heads, 1]       of keys, and of values

Beside them may be how likely each token was; see `scores`:

    scores: float32 [1, pages, page_size, 2 + 2 * best]

A page id is the same index in every layer. Consecutive ids are consecutive memory within a layer, so a run of pages is
a view, and a position of a page has the flat index page * page_size + offset.

The pool does not know the owner of a page, nor what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.errors import UnsupportedModel
from mainstem.runtime.memory.eight_bits import SCALE, dequantize, quantize
from mainstem.runtime.memory.scores import KeptScores, row_bytes
from mainstem.runtime.models.places import new_cache, run
from mainstem.runtime.readiness import too_large

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class KVShape(NamedTuple):
    """The size of one position.

    Args:
        layers: of the model that keep keys.
        kv_heads: in each; 1 of a latent, which all heads share.
        head_dim: numbers of a key; of a latent, those of its rotary part included.
        value_dim: numbers of a value.
        latent: whether the first `value_dim` numbers of a key are its value, so that values take no memory.
    """

    layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    latent: bool = False

    @property
    def planes(self) -> tuple[int, ...]:
        """The numbers that a layer keeps per position and head: of a key, and of a value if it is apart."""
        return (self.head_dim,) if self.latent else (self.head_dim, self.value_dim)

    @property
    def given(self) -> list[tuple[int, int]]:
        """The heads and numbers of the two tensors that a layer gives: key and value, or latent and rotary part."""
        sizes = (self.value_dim, self.head_dim - self.value_dim) if self.latent else self.planes
        return [(self.kv_heads, size) for size in sizes]

    def kept(self, dtype: torch.dtype, eight_bits: torch.dtype | None) -> torch.dtype:
        """Returns the dtype of the numbers in pages. A latent is what all heads share, and keeps the model's."""
        return dtype if eight_bits is None or self.latent else eight_bits

    def bytes_per_page(self, page_size: int, kept: torch.dtype, best: int | None = None) -> int:
        """Returns the bytes of a page of `page_size` positions: keys and values of all layers, their scales, scores."""
        scales = len(self.planes) * SCALE.itemsize if kept.itemsize == 1 else 0
        scores = page_size * row_bytes(best) if self.layers else 0
        return self.layers * self.kv_heads * page_size * (sum(self.planes) * kept.itemsize + scales) + scores


def kv_shapes(model: PreTrainedModel, kv_layers: Mapping[str, Sequence[int]]) -> dict[str, KVShape]:
    """Runs one token, and returns the size of a position in each pool: what its layers gave to transformers' cache.

    Configurations have many names for these sizes, and some models compute them. A layer that has a method `expand_kv`
    gives a latent and its rotary part, and expands what the cache returns.

    Args:
        model: with its own attention. It is not run if no layer has keys.
        kv_layers: for each pool, its layers.

    Raises:
        UnsupportedModel: the model does not run with transformers' cache, a layer gave nothing, or layers of a pool
            differ.
    """
    layers = _after_one_token(model) if any(kv_layers.values()) else []
    latent = {getattr(module, "layer_idx", None) for module in model.modules() if hasattr(module, "expand_kv")}
    return {name: _shape(model, name, [_one(layers[i], i in latent) for i in own]) for name, own in kv_layers.items()}


def _after_one_token(model: PreTrainedModel) -> list[Any]:
    cache = new_cache(model.config)
    token = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    try:
        with torch.inference_mode():
            run(model, cache, input_ids=token)
    except Exception as error:  # models raise all kinds
        raise UnsupportedModel(f"{_kind(model)} does not run with transformers' cache: {error}") from error
    return cache.layers


def _one(layer: Any, latent: bool) -> KVShape:
    """Returns the shape of one layer that has seen one token; without heads if it keeps nothing."""
    keys, values = (getattr(layer, name, None) for name in ("keys", "values"))
    if keys is None or values is None or keys.dim() != 4 or values.shape[:2] != keys.shape[:2]:
        return KVShape(1, 0, 0, 0)
    key, value = keys.shape[-1], values.shape[-1]
    return KVShape(1, keys.shape[1], key + value, key, latent=True) if latent else KVShape(1, keys.shape[1], key, value)


def _shape(model: PreTrainedModel, name: str, shapes: Sequence[KVShape]) -> KVShape:
    if not shapes:
        return KVShape(0, 0, 0, 0)
    if len({*shapes}) > 1:
        raise UnsupportedModel(f"{_kind(model)}: its {name} attention layers have heads of different sizes")
    if not shapes[0].kv_heads:
        raise UnsupportedModel(f"{_kind(model)}: its {name} attention layers keep nothing in transformers' cache")
    return shapes[0]._replace(layers=len(shapes))


def _kind(model: PreTrainedModel) -> str:
    return str(model.config.get_text_config(decoder=True).model_type)


def run_of(ids: NDArray[np.int64], device: torch.device) -> slice | torch.Tensor:
    """Returns consecutive ids as a slice, for a view instead of a copy; others as an index tensor."""
    first = int(ids[0]) if len(ids) else 0
    if np.array_equal(ids, np.arange(first, first + len(ids))):
        return slice(first, first + len(ids))
    return torch.from_numpy(ids).to(device, non_blocking=True)


class Plane(NamedTuple):
    """Keys or values of one layer, in pages.

    Args:
        numbers: [pages, page_size, kv_heads, numbers].
        scales: float32 [pages, page_size, kv_heads, 1], of numbers in 8 bits; None: they are in the model's dtype.
    """

    numbers: torch.Tensor
    scales: torch.Tensor | None = None

    def read(self, page_ids: slice | torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Returns the positions of some pages, [positions, kv_heads, numbers], in the model's dtype.

        They are a view if the pages are consecutive and the numbers are in this dtype.
        """

        def of(kept: torch.Tensor) -> torch.Tensor:  # page by page: four times as fast as position by position
            return (kept[page_ids] if isinstance(page_ids, slice) else kept.index_select(0, page_ids)).flatten(0, 1)

        return of(self.numbers) if self.scales is None else dequantize(of(self.numbers), of(self.scales), dtype)

    def write(self, rows: slice | torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        """Writes [tokens, kv_heads, numbers] to positions with these flat indices; returns what reading them gives."""
        if self.scales is None:
            _put(self.numbers, rows, given)
            return given
        numbers, scales = quantize(given, self.numbers.dtype)
        _put(self.numbers, rows, numbers)
        _put(self.scales, rows, scales)
        return dequantize(numbers, scales, given.dtype)


def _put(kept: torch.Tensor, rows: slice | torch.Tensor, values: torch.Tensor) -> None:
    flat, values = kept.flatten(0, 1), values.to(kept.dtype)
    if kept.itemsize == 1:  # PyTorch cannot scatter floats of 8 bits
        flat, values = flat.view(torch.uint8), values.view(torch.uint8)
    if isinstance(rows, slice):
        flat[rows] = values
    else:
        flat.index_copy_(0, rows, values)


class KVPool:
    """Keys and values of `pages` pages, not initialised: only positions that were written may be read.

    Args:
        shape: of a position. Without layers, pages hold nothing, and only mark which prefixes are known.
        pages: the number of pages.
        page_size: positions per page.
        dtype: of the keys and values that are written and read, the same as the model's.
        device: of the tensors.
        eight_bits: the dtype of the numbers in pages, int8 or float8_e4m3fn; None: the same.
        best: see `KeptScores`; None: pages have no scores.

    Attributes:
        kept: the dtype of the numbers in pages. Those of latents are in the model's.
        planes: the tensors that page ids index: numbers, scales, scores.
        scores: how likely the tokens of pages were; None without `best`, or without layers.

    Raises:
        BadArgument: the memory cannot be allocated.
    """

    def __init__(
        self,
        shape: KVShape,
        pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        eight_bits: torch.dtype | None = None,
        best: int | None = None,
    ) -> None:
        self.shape = shape
        self.pages = pages
        self.page_size = page_size
        self.dtype = dtype
        self.kept = shape.kept(dtype, eight_bits)
        size = (shape.layers, pages, page_size, shape.kv_heads)
        try:
            numbers = [torch.empty((*size, count), dtype=self.kept, device=device) for count in shape.planes]
            scales = [torch.empty((*size, 1), dtype=SCALE, device=device) for _ in numbers if self.kept is not dtype]
            self.scores = None if best is None or not shape.layers else KeptScores(pages, page_size, best, device)
        except RuntimeError as error:  # PyTorch's error for a failed allocation
            needed = pages * shape.bytes_per_page(page_size, self.kept, best)
            raise too_large("kv_bytes", needed, device) from error
        self._computed = (*numbers, *scales)
        self.planes = self._computed if self.scores is None else (*self._computed, self.scores.plane)
        self.k = numbers[0]
        self.v = self.k[..., : shape.value_dim] if shape.latent else numbers[1]
        parts = [*zip(numbers, scales, strict=True)] if scales else [(each,) for each in numbers]
        self._layers = [tuple(Plane(*(of[i] for of in part)) for part in parts) for i in range(shape.layers)]

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.k.device

    def layer(self, index: int) -> tuple[Plane, ...]:
        """Returns keys and values of one layer, or latents, as views."""
        return self._layers[index]

    def slots(self, table: NDArray[np.int32], begin: int, end: int) -> NDArray[np.int64]:
        """Returns the flat indices of positions [begin, end) of a page table."""
        positions = np.arange(begin, end, dtype=np.int64)
        return table[positions // self.page_size].astype(np.int64) * self.page_size + positions % self.page_size

    def read(self, table: NDArray[np.int32], begin: int, end: int) -> list[list[torch.Tensor]]:
        """Returns for each layer what it gave at positions [begin, end): two tensors, [positions, kv_heads, numbers].

        They are keys and values, or latents and rotary parts; views of the pool if the pages are consecutive.
        """
        first = begin // self.page_size
        pages = run_of(table[first : -(-end // self.page_size)].astype(np.int64), self.device)
        columns = slice(begin - first * self.page_size, end - first * self.page_size)
        layers = [[plane.read(pages, self.dtype)[columns] for plane in planes] for planes in self._layers]
        rank = self.shape.value_dim
        return [[kept[..., :rank], kept[..., rank:]] for (kept,) in layers] if self.shape.latent else layers

    def write(self, table: NDArray[np.int32], begin: int, given: Sequence[Sequence[torch.Tensor]]) -> None:
        """Writes from position `begin` on what each layer gave, as `read` returns it."""
        if not given:
            return
        rows = run_of(self.slots(table, begin, begin + len(given[0][0])), self.device)
        for layer, parts in enumerate(given):
            kept = [torch.cat(list(parts), -1)] if self.shape.latent else parts
            for plane, part in zip(self._layers[layer], kept, strict=True):
                plane.write(rows, part)

    def clear(self, page_ids: NDArray[np.int32]) -> None:
        """Overwrites pages with zeros, and forgets their scores."""
        rows = run_of(page_ids.astype(np.int64), self.device)
        with torch.inference_mode():
            for plane in self._computed:
                plane.view(torch.uint8)[:, rows] = 0  # PyTorch cannot index floats of 8 bits
        if self.scores is not None:
            self.scores.forget(page_ids)

    def copy_page(self, source: int, target: int, positions: int) -> None:
        """Copies the first `positions` positions of page `source` to page `target`, in every layer."""
        for plane in self.planes:
            plane[:, target, :positions] = plane[:, source, :positions]
