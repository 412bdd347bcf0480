"""Finds what a calibrated codec needs to know of a model, by running it over a text.

The codec is `mainstem.tiers.storage.calibrated`.

    x    keys and values of a position in a group of neighbouring layers, keys turned back, less their mean
    g    the gradient by x of the loss of text that comes after the page
    F    the mean of g g': how much the model notices an error in x, squared and in which direction (Fisher information)

An error e costs about e' F e. So the components are those of F**(1/2) x, where all directions cost the same, and all
have steps of one length: what varies more gets more bits, and what the model does not notice gets none.

The text is read in passages, each as a prompt of its own. Its first half counts as stored, its second half as what
continues from there: what the first half says of itself, and of later layers, was computed before it was stored.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from mainstem._core import EntropyCoder
from mainstem.errors import BadArgument
from mainstem.runtime.memory.kv import KVShape, kv_shapes
from mainstem.runtime.memory.tiers import identity_of
from mainstem.runtime.models.layout import Layout
from mainstem.tiers.storage.calibrated import CLASSES, KEPT, Basis, Calibrated, class_size, turn

if TYPE_CHECKING:
    from mainstem.runtime.models.loading import LoadedModel

PASSAGE = 1024
"""Tokens of a passage, unless the model's context is shorter."""

_SAMPLES = 4096  # positions that sizes and tables are found from
_LEVEL = 64  # of the steps that give the ratio, about
_GROUP = 1152  # numbers of a group at most, unless one layer has more: the time of a page and the file grow with it
_SHRUNK = 0.15  # part of F that is its diagonal, because few gradients leave directions unseen
_FLOOR = 1e-3  # of F's mean diagonal, added to all of it

Float64s = npt.NDArray[np.float64]
Progress = Callable[[str, int, int], None]


def calibrate(
    loaded: LoadedModel, tokens: npt.NDArray[np.int64], ratio: float, progress: Progress = lambda *_: None
) -> Calibrated:
    """Calibrates a codec for a model.

    Args:
        loaded: the model, whole in this process, with its own attention; its parameters are frozen.
        tokens: of a text like those to be stored; ten thousand or more.
        ratio: how many times smaller a page is to become.
        progress: called with a stage, what is done and the total.

    Raises:
        BadArgument: the text is shorter than a passage, or the ratio is not 1 to 1000.
        UnsupportedModel: the model cannot run over pages, or has no attention.
    """
    layout = Layout.of(loaded.model.config, loaded.max_context)
    passage = min(PASSAGE, loaded.max_context)
    if len(tokens) < passage:
        raise BadArgument("text", f"{len(tokens)} tokens", f"{passage} or more; 24,576 are enough")
    shapes = kv_shapes(loaded.model, layout.kv_layers)
    found = {name: _Found(layers, shapes[name]) for name, layers in layout.kv_layers.items() if layers}
    rotaries = _rotaries(loaded.model)
    passages = len(tokens) // passage
    for number, (kept, gradients) in enumerate(_passages(loaded, tokens, passage)):
        progress("calibrate", number, passages)
        for each in found.values():
            each.add(kept, gradients, rotaries, _SAMPLES // passages)
    progress("calibrate", passages, passages)
    bases, magnitudes = {}, []
    for name, each in found.items():
        bases[name], relative = each.basis(ratio)
        magnitudes.append(relative)
    weights = identity_of(loaded, 1, "").weights
    return Calibrated(ratio, bases, _tables(np.concatenate(magnitudes)), weights)


def tokens_of(loaded: LoadedModel, text: str) -> npt.NDArray[np.int64]:
    """Returns the tokens of a text of any length.

    Raises:
        BadArgument: the model has no tokenizer.
    """
    if loaded.tokenizer is None:
        raise BadArgument("model", loaded.name, "one with a tokenizer")
    return np.array(loaded.tokenizer(text, verbose=False)["input_ids"], np.int64)


class _Record(DynamicCache):
    """A cache that keeps what each layer gives, cut off from the graph that computed it."""

    def __init__(self, config: Any, stored: int) -> None:
        super().__init__(config=config)
        self.kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._stored = stored

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keeps keys and values, and returns them."""
        pairs = []
        for states in (key_states, value_states):
            stored, rest = states[:, :, : self._stored], states[:, :, self._stored :]
            pairs.append((stored.detach().requires_grad_(), rest))
        self.kept[layer_idx] = pairs
        keys, values = (torch.cat(pair, 2) for pair in pairs)
        return keys, values


By = Mapping[int, npt.NDArray[np.float32]]
"""By layer: [positions, width]."""


def _passages(loaded: LoadedModel, tokens: npt.NDArray[np.int64], passage: int) -> Iterator[tuple[By, By]]:
    """Yields what the layers keep of each passage, and the gradients of the passage's loss by that."""
    model = loaded.model
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    embed = model.get_input_embeddings()
    for begin in range(0, len(tokens) - passage + 1, passage):
        ids = torch.from_numpy(tokens[begin : begin + passage]).to(model.device)[None]
        stored = passage // 2
        cache = _Record(model.config.get_text_config(decoder=True), stored)
        logits = model(inputs_embeds=embed(ids).detach(), past_key_values=cache, use_cache=True).logits[0, stored:-1]
        loss = torch.nn.functional.cross_entropy(logits.float(), ids[0, stored + 1 :], reduction="sum")
        torch.autograd.backward(loss)
        yield (
            {layer: _rows(map(torch.cat, pairs, (2, 2))) for layer, pairs in cache.kept.items()},
            {layer: _rows(kept.grad for kept, _ in pairs) for layer, pairs in cache.kept.items()},
        )


def _rows(pair: Iterable[torch.Tensor | None]) -> npt.NDArray[np.float32]:
    """Returns keys and values [1, heads, positions, numbers] as rows of positions."""
    parts = [each.detach()[0].transpose(0, 1).flatten(1) for each in pair if each is not None]
    return torch.cat(parts, 1).float().cpu().numpy()


def _rotaries(model: torch.nn.Module) -> list[Float64s]:
    """Returns the angles by which the model may turn keys, none of them included."""
    found = {tuple(buffer.double().tolist()) for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    return [np.zeros(0), *(np.array(angles) for angles in sorted(found))]


@dataclass
class _Found:
    """The sums of one component so far."""

    layers: Sequence[int]
    shape: KVShape
    rotary: Float64s = field(default_factory=lambda: np.zeros(0))
    positions: int = 0
    passages: int = 0

    def add(self, kept: By, gradients: By, rotaries: Sequence[Float64s], samples: int) -> None:
        """Adds one passage."""
        x, g = (np.stack([of[layer] for layer in self.layers], 1) for of in (kept, gradients))
        if not self.positions:
            self.rotary = min(rotaries, key=lambda rotary: self._spread(x, rotary))
            layers, width = x.shape[1:]
            ends = [*range(0, layers, max(_GROUP // width, 1)), layers]
            self._parts = [slice(begin * width, end * width) for begin, end in itertools.pairwise(ends)]
            self._sum, self._first = np.zeros((2, layers, width))
            sizes = [part.stop - part.start for part in self._parts]
            self._squares, self._noticed = ([np.zeros((size, size)) for size in sizes] for _ in range(2))
            self._samples: list[npt.NDArray[np.float32]] = []
        for each in (x, g):
            turn(each, self._planes[0], self.rotary, 0, -1)
        rest = x[1:]
        self._first += x[0]
        self._sum += rest.sum(0)
        for sums, each in ((self._squares, rest), (self._noticed, g)):
            rows = each.reshape(len(each), -1)
            for part, total in zip(self._parts, sums, strict=True):
                total += rows[:, part].T @ rows[:, part]
        self._samples.append(rest[:: max(1, -(-len(rest) // max(samples, 1)))].copy())
        self.positions += len(rest)
        self.passages += 1

    def basis(self, ratio: float) -> tuple[Basis, npt.NDArray[np.float32]]:
        """Returns the basis, and magnitudes of components, each relative to the mean of its own."""
        means, first = (of.astype(np.float32) for of in (self._sum / self.positions, self._first / self.passages))
        flat = self._sum.reshape(-1) / self.positions
        found = [
            _components(squares / self.positions - np.outer(flat[part], flat[part]), noticed)
            for part, squares, noticed in zip(self._parts, self._squares, self._noticed, strict=True)
        ]
        step = _step(np.concatenate([variances for _, variances in found]), 16 / ratio) * 2 ** (-_LEVEL / 8)
        decode = [components * step for components, _ in found]
        x = (np.concatenate(self._samples) - means).reshape(-1, means.size)
        y = [
            x[:, part] @ np.linalg.inv(each).astype(np.float32) for part, each in zip(self._parts, decode, strict=True)
        ]
        magnitudes = np.abs(np.concatenate(y, axis=1))
        mean = np.maximum(magnitudes.mean(0), 2.0**-20)
        sizes = np.clip(np.rint(8 * np.log2(mean)), -30000, 30000).astype(np.int16)
        basis = Basis(
            self._planes, means, first, tuple(each.astype(np.float32) for each in decode), sizes, self.rotary, _LEVEL
        )
        return basis, (magnitudes / mean)[::16].reshape(-1)

    @property
    def _planes(self) -> tuple[tuple[int, int], ...]:
        return tuple((self.shape.kv_heads, numbers) for numbers in self.shape.planes)

    def _spread(self, x: npt.NDArray[np.float32], rotary: Float64s) -> float:
        """Returns how many bits keys take, up to a constant, if they are turned back by these angles."""
        if self.shape.latent or 2 * len(rotary) > self.shape.head_dim:
            return 0.0 if not len(rotary) else np.inf
        turned = x.copy()
        turn(turned, self._planes[0], rotary, 0, -1)
        heads, size = self._planes[0]
        keys = turned[1:, :, : heads * size].astype(np.float64)
        scatter = np.stack([np.cov(each.T) for each in keys.transpose(1, 0, 2)])
        return float(np.log(np.maximum(np.linalg.eigvalsh(scatter), 1e-9)).sum())


def _components(scatter: Float64s, noticed: Float64s) -> tuple[Float64s, Float64s]:
    """Returns the basis of a group, a component a row, those of greater variance first, and the variances."""
    diagonal = noticed.diagonal()
    noticed = noticed * (1 - _SHRUNK) + np.diag(_SHRUNK * diagonal + _FLOOR * diagonal.mean() + 1e-30)
    values, vectors = np.linalg.eigh(noticed)
    roots = np.sqrt(values)
    root = (vectors * roots) @ vectors.T
    variances, turned = np.linalg.eigh(root @ scatter @ root)
    return turned[:, ::-1].T @ ((vectors / roots) @ vectors.T), np.maximum(variances[::-1], 0)


def _step(variances: Float64s, bits: float) -> float:
    """Returns the length of the steps that take so many bits a number, about, if numbers are normal."""
    low, high = -100.0, 100.0  # its logarithm
    for _ in range(60):
        middle = (low + high) / 2
        taken = 0.5 * np.log2(1 + variances * (2 * np.pi * np.e) * 4.0**-middle).mean()
        low, high = (middle, high) if taken > bits else (low, middle)
    return float(2**high)


def _tables(magnitudes: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Returns how often each token comes in each class, of 4096, from magnitudes relative to their mean."""
    tokens = EntropyCoder.TOKENS
    tables = np.empty((CLASSES, tokens), np.uint16)
    for each in range(CLASSES):
        steps = np.minimum(magnitudes * class_size(each) + KEPT, 32767).astype(np.int64)
        exponent = np.frexp(steps.astype(np.float64))[1] - 1
        greater = 16 + 2 * (exponent - 4) + (steps >> np.maximum(exponent - 1, 0) & 1)
        counts = np.bincount(np.where(steps < 16, steps, greater), minlength=tokens)
        shares = 1 + np.floor(counts / counts.sum() * (4096 - tokens))
        shares[shares.argmax()] += 4096 - shares.sum()
        tables[each] = shares
    return tables
