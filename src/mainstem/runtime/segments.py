"""Segment: the new tokens of one request in a forward. What the scheduler asks a runner to compute."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mainstem.cache.components import Attended
from mainstem.errors import BadArgument
from mainstem.runtime.models.adapters import Adapter
from mainstem.runtime.request import ImageInput
from mainstem.runtime.sampling.pooling import Pooling
from mainstem.tiers.host.transfer import LayerTicket


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
        """Numbers that ranks compare before a forward: its start, its state, and checksums of its tokens and pages."""
        arrays = (self.tokens, *self.tables)
        return (self.start, self.state, *(zlib.crc32(array.tobytes()) for array in arrays))

    def part(self, begin: int, end: int) -> Segment:
        """Returns the part of the segment at positions [begin, end), with those of the logits that are in it."""
        rows = slice(begin - self.start, end - self.start)
        positions = None if self.positions is None else self.positions[:, rows]
        logits = max(0, end - max(begin, self.end - self.logits))
        return replace(self, tokens=self.tokens[rows], start=begin, positions=positions, logits=logits)

    @property
    def inside(self) -> list[ImageInput]:
        """The images that have positions in the segment."""
        return [image for image in self.images if image.start < self.end and image.end > self.start]

    @property
    def is_step(self) -> bool:
        """Whether it is one token of the base model, with logits, and nothing before it is on its way."""
        is_plain = all(each is None for each in (self.adapter, self.arriving, self.positions, self.pooling))
        return is_plain and len(self.tokens) == self.logits == 1 and self.start > 0 and not self.inside

    def spans(self, both_ways: bool) -> tuple[tuple[int, int], ...]:
        """Returns the positions of its images, if their tokens attend `both_ways`: an image is computed at once."""
        return tuple((image.start, image.end) for image in self.inside) if both_ways else ()


@dataclass(frozen=True, slots=True)
class SegmentRules:
    """The rules for the segments of a forward.

    Args:
        vocab_size: the upper bound of token ids, exclusive.
        max_context: positions of one segment.
        page_size: positions per page.
        attended: what the layers of each component of pages attend to, in the layout's order.
        pages: of each component.
        slots: of states; None: there are none.
        images: whether segments may have images.
        both_ways: whether the tokens of an image attend to each other both ways.
    """

    vocab_size: int
    max_context: int
    page_size: int
    attended: Mapping[str, Attended]
    pages: Mapping[str, int]
    slots: int | None
    images: bool
    both_ways: bool

    def check(self, segments: Sequence[Segment]) -> None:
        """Checks the segments of one forward.

        Raises:
            BadArgument: a segment is empty, holds a token outside the vocabulary, is longer than the context, lacks
                pages or a slot, or writes to the same page or slot as another one.
        """
        if not segments:
            raise BadArgument("segments", segments, "at least one segment")
        for index, segment in enumerate(segments):
            self._check_segment(f"segments[{index}]", segment)
        for i in range(len(self.attended)):
            _check_disjoint("page", [self._written(segment, i) for segment in segments])
        if self.slots is not None:
            _check_disjoint("slot", [np.array([segment.state]) for segment in segments])

    def _written(self, segment: Segment, component: int) -> NDArray[np.int32]:
        size = self.page_size
        return segment.tables[component][segment.start // size : -(-segment.end // size)]

    def _check_segment(self, name: str, segment: Segment) -> None:
        tokens = segment.tokens
        if tokens.ndim != 1 or len(tokens) == 0:
            raise BadArgument(f"{name}.tokens", tokens, "one dimension with at least one token")
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            raise BadArgument(f"{name}.tokens", tokens, f"token ids in [0, {self.vocab_size})")
        if not 0 <= segment.logits <= len(tokens):
            raise BadArgument(f"{name}.logits", segment.logits, f"in [0, {len(tokens)}]")
        if segment.start < 0 or segment.end > self.max_context:
            raise BadArgument(f"{name}.start", segment.start, f"in [0, {self.max_context - len(tokens)}]")
        if len(segment.tables) < len(self.attended):
            raise BadArgument(f"{name}.tables", len(segment.tables), f"one for each of {', '.join(self.attended)}")
        for i, component in enumerate(self.attended):
            self._check_table(f"{name}.tables[{i}]", segment, segment.tables[i], component)
        self._check_images(name, segment)
        if self.slots is not None and not 0 <= segment.state < self.slots:
            raise BadArgument(f"{name}.state", segment.state, f"in [0, {self.slots})")

    def _check_images(self, name: str, segment: Segment) -> None:
        images = segment.inside
        if images and not self.images:
            raise BadArgument(f"{name}.images", len(images), "none: the model reads no images")
        for low, high in segment.spans(self.both_ways):
            if low < segment.start or high > segment.end:
                raise BadArgument(f"{name}.images", (low, high), f"whole in [{segment.start}, {segment.end})")
        positions = segment.positions
        if positions is not None and positions.shape != (3, len(segment.tokens)):
            raise BadArgument(f"{name}.positions", positions.shape, f"of shape (3, {len(segment.tokens)})")

    def _check_table(self, name: str, segment: Segment, table: NDArray[np.int32], component: str) -> None:
        if table.ndim != 1 or len(table) * self.page_size < segment.end:
            raise BadArgument(name, table, f"pages for {segment.end} positions")
        read = table[self.attended[component].seen_from(segment.start) // self.page_size :]
        if read.min() < 0 or read.max() >= self.pages[component]:
            raise BadArgument(name, table, f"page ids in [0, {self.pages[component]})")


def _check_disjoint(what: str, written: Sequence[NDArray[Any]]) -> None:
    ids, counts = np.unique(np.concatenate(written), return_counts=True)
    if counts.max() > 1:
        raise BadArgument("segments", f"{what} {ids[counts.argmax()]} twice", f"one segment per written {what}")
