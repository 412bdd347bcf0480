"""A tiny model that points, over the runtime's pages: it writes coordinates and sizes as tokens, and reads them back.

    prompt   BOS | image, 7 positions | text, points and boxes
             `--- see each other both ways ---'  so BOS depends on the image, which is therefore in the namespace

A point or a box is one position. Its embedding is computed from its value; its key is the value's bin. What the model
generates has the value in the middle of a bin, and is fed back as that value.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mainstem.cache.keys import BINS, Coordinate, Image, Size, Text, TypedKeys, TypedToken
from mainstem.cache.namespaces import Namespace
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.runtime.attention.paged import Extent, SdpaAttention, plan_batch
from mainstem.runtime.memory.kv import KVPool, KVShape
from mainstem.runtime.text.vision import image_identity

VOCAB, BOS, IMAGE_LENGTH = 40, 1, 7
LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 2, 32, 4, 2, 8
PREFIX = 1 + IMAGE_LENGTH


@dataclass(frozen=True, slots=True)
class Point:
    """A coordinate from 0 to 1."""

    at: float


@dataclass(frozen=True, slots=True)
class Box:
    """A width and a height, above 0 and at most 1."""

    width: float
    height: float


Token = int | Point | Box
Kind = Literal["text", "point", "box"]


def key_of(token: Token) -> TypedToken:
    """A token as the tree knows it."""
    if isinstance(token, Point):
        return Coordinate.nearest(token.at)
    return Size.nearest(token.width, token.height) if isinstance(token, Box) else Text(token)


class Answer(NamedTuple):
    """What was generated, the logits of each token, and the positions that the prompt hit."""

    tokens: tuple[Token, ...]
    logits: torch.Tensor
    hit: int


class PointingModel(torch.nn.Module):
    """Random weights, the same in every run."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(shape, generator=random) * shape[0] ** -0.5)

        self.text = weight(VOCAB, HIDDEN)
        self.waves = weight(3, 16)  # of a value, or two, and whether there are two
        self.value = weight(32, HIDDEN)
        self.patch = weight(12, HIDDEN)
        self.place = weight(512, HIDDEN)
        self.layers = torch.nn.ParameterList(weight(HIDDEN, (HEADS + 2 * KV_HEADS) * HEAD_DIM) for _ in range(LAYERS))
        self.out = torch.nn.ParameterList(weight(HEADS * HEAD_DIM, HIDDEN) for _ in range(LAYERS))
        self.heads = torch.nn.ParameterDict(
            {"text": weight(HIDDEN, VOCAB), "point": weight(HIDDEN, BINS), "box": weight(HIDDEN, 2 * BINS)}
        )

    def embed(self, token: Token) -> torch.Tensor:
        """[hidden]. Points and boxes are embedded by what they are, not by their bins."""
        if isinstance(token, int):
            return self.text[token] * 4
        given = (token.at, 0.0, 0.0) if isinstance(token, Point) else (token.width, token.height, 1.0)
        turns = torch.tensor(given) @ self.waves * (2 * math.pi)
        return torch.cat([turns.sin(), turns.cos()]) @ self.value

    def embed_image(self, pixels: NDArray[np.uint8]) -> torch.Tensor:
        """[7, hidden] of pixels [7, 12]."""
        return torch.from_numpy(pixels / 255.0).float() @ self.patch

    def forward(self, rows: torch.Tensor, start: int, table: NDArray[np.int32], pool: KVPool) -> torch.Tensor:
        """Computes rows [n, hidden] at positions from `start`, and writes their KV; returns the last one's state."""
        plan = plan_batch([Extent(len(rows), start, table, ((0, PREFIX),))], pool)
        x = rows + self.place[start : start + len(rows)]
        sizes = [heads * HEAD_DIM for heads in (HEADS, KV_HEADS, KV_HEADS)]
        for layer, (to_qkv, out) in enumerate(zip(self.layers, self.out, strict=True)):
            normed = torch.nn.functional.layer_norm(x, (HIDDEN,))
            q, k, v = (part.view(len(x), -1, HEAD_DIM) for part in (normed @ to_qkv).split(sizes, dim=-1))
            x = x + SdpaAttention().attend(layer, q, k, v, HEAD_DIM**-0.5, plan).flatten(1) @ out
        return torch.nn.functional.layer_norm(x[-1], (HIDDEN,))

    def choose(self, kind: Kind, logits: torch.Tensor) -> Token:
        """The likeliest token: a point or a box in the middle of its bins."""
        if kind == "text":
            return int(logits.argmax())
        bins = [int(part.argmax()) for part in logits.split(BINS)]
        if kind == "point":
            return Point(bins[0] / (BINS - 1))
        return Box(*(2.0 ** (10 * at / (BINS - 1) - 10) for at in bins))


class PointingEngine:
    """One request at a time over a prefix cache. `cached=False`: nothing is reused."""

    def __init__(self, model: PointingModel, *, page_size: int = 4, cached: bool = True) -> None:
        self._model = model
        self._pool = KVPool(KVShape(LAYERS, KV_HEADS, HEAD_DIM, HEAD_DIM), 64, page_size, torch.float32)
        keys = TypedKeys(VOCAB)
        self.cache = PrefixCache(64, page_size, keys=keys, enabled=cached, copy_page=self._pool.copy_page)

    def answer(self, pixels: NDArray[np.uint8], tokens: Sequence[Token], kinds: Sequence[Kind]) -> Answer:
        """Generates a token of each of `kinds` after BOS, the image and `tokens`."""
        model, made, logits = self._model, list[Token](), []
        identity = image_identity(pixels)
        prompt = [Text(BOS), Image(identity, IMAGE_LENGTH), *map(key_of, tokens)]
        namespace = Namespace(extra=(f"image:{identity.hex()}",))
        with torch.inference_mode(), self.cache.lease(prompt, namespace) as lease:
            rows = torch.cat(
                [model.embed(BOS)[None], model.embed_image(pixels), *(model.embed(token)[None] for token in tokens)]
            )
            hit = start = lease.hit
            for kind in kinds:
                lease.reserve(max(0, lease.length - lease.reserved))
                state = model(rows[start:], start, lease.page_table, self._pool)
                lease.publish(lease.length)
                logits.append(state @ model.heads[kind])
                made.append(model.choose(kind, logits[-1]))
                lease.append([key_of(made[-1])])
                start, rows = len(rows), torch.cat([rows, model.embed(made[-1])[None]])
            lease.finish()
        return Answer(tuple(made), torch.cat(logits), hit)
