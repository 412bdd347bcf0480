"""Keys: how token sequences become bytes. All symbols of a key kind have one width; the tree compares symbols.

    TokenKeys    token id                          4 bytes, little endian, top bit clear
    BigramKeys   token id and its successor        8 bytes: n tokens are n - 1 symbols
    HashKeys     hash of a block of tokens         8 or 16 bytes
    TypedKeys    text, coordinate, size or image   4 bytes; top bit set for all but text:
                 1 00 ... bin                      coordinate
                 1 01 ... width bin, height bin    size
                 1 1  30 bits of a digest          image, kv_length symbols of it

Knows nothing of pages or trees.
"""

from __future__ import annotations

import hashlib
import math
from bisect import bisect_right
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mainstem import _core
from mainstem._core import encode_tokens
from mainstem.errors import BadArgument, BadTokens, check_integer

MAX_TOKEN = 2**31
BINS = 1024
IMAGE_DIGEST_BYTES = 16
IMAGE_MIN_LENGTH = 5
"""The fewest positions that hold the whole 128-bit identity of an image, at 30 bits per position."""

_MAX_SEED_BYTES = 64  # of a key of BLAKE2b

TokenLike = Any
"""A list, tuple or other sequence of ints, an integer array (NumPy, `array.array`, a CPU tensor by DLPack), or bytes
of whole symbols."""


class KeyKind(Protocol):
    """An encoding of token sequences as symbols."""

    @property
    def symbol_bytes(self) -> int:
        """Width of a symbol in bytes: 4, 8 or 16."""

    @property
    def token_limit(self) -> int:
        """Exclusive upper bound of ids that are their own symbols, which the core reads itself. 0: call `encode`."""

    def encode(self, tokens: TokenLike) -> bytes:
        """Returns the symbols of a sequence. Raises BadTokens."""

    def sequence(self) -> KeySequence:
        """Returns an empty sequence that can grow."""


class KeySequence:
    """The state needed to encode a growing sequence incrementally. Here: one token is one position."""

    __slots__ = ("_kind",)

    def __init__(self, kind: KeyKind) -> None:
        self._kind = kind

    def append(self, tokens: TokenLike) -> bytes:
        """Appends tokens; returns the symbols that this adds. Raises BadTokens and appends nothing."""
        return self._kind.encode(tokens)

    def floor(self, position: int) -> int:
        """Returns the nearest position, at or before this one, that is not inside a token."""
        return position

    def tokens_at(self, position: int) -> int:
        """Returns the number of tokens that are wholly in [0, position)."""
        return position


@dataclass(frozen=True, slots=True, eq=False)
class Encoded:
    """A sequence that is already encoded, for callers that look it up repeatedly.

    Args:
        symbols: the symbols of the whole sequence.
        sequence: the state to append to it.
    """

    symbols: bytes
    sequence: KeySequence

    @classmethod
    def of(cls, kind: KeyKind, tokens: TokenLike) -> Encoded:
        """Encodes a sequence.

        Raises:
            BadTokens: see the kind's `encode`.
        """
        sequence = kind.sequence()
        return cls(sequence.append(tokens), sequence)


class _TokenIds:
    """Base of the kinds made of token ids: holds the range of an id."""

    def __init__(self, vocab_size: int | None = None) -> None:
        self.limit = MAX_TOKEN if vocab_size is None else check_integer("vocab_size", vocab_size, 1, MAX_TOKEN)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.limit if self.limit < MAX_TOKEN else None})"


class TokenKeys(_TokenIds):
    """Token ids, 4 bytes each.

    Args:
        vocab_size: exclusive upper bound of ids; None allows all ids below 2**31.

    Raises:
        BadArgument: vocab_size is out of range.
    """

    symbol_bytes = 4

    @property
    def token_limit(self) -> int:
        return self.limit

    def encode(self, tokens: TokenLike) -> bytes:
        return encode_tokens(tokens, self.limit)

    def sequence(self) -> KeySequence:
        return KeySequence(self)


class BigramKeys(_TokenIds):
    """Pairs of neighbouring token ids, for draft models whose KV at a position also depends on the next token.

    Args:
        vocab_size: exclusive upper bound of ids; None allows all ids below 2**31.

    Raises:
        BadArgument: vocab_size is out of range.
    """

    symbol_bytes = 8
    token_limit = 0

    def encode(self, tokens: TokenLike) -> bytes:
        """Encodes n ids as n - 1 symbols (ids[i], ids[i + 1]); bytes hold 4-byte ids, not pairs. Raises BadTokens."""
        return _pairs(np.frombuffer(encode_tokens(tokens, self.limit), dtype="<u4"))

    def sequence(self) -> KeySequence:
        return _BigramSequence(self)


class _BigramSequence(KeySequence):
    """Keeps the last token, which starts the next pair."""

    __slots__ = ("_last", "_limit")

    def __init__(self, kind: BigramKeys) -> None:
        super().__init__(kind)
        self._limit = kind.limit
        self._last = b""

    def append(self, tokens: TokenLike) -> bytes:
        ids = encode_tokens(tokens, self._limit)
        symbols = self._kind.encode(self._last + ids)
        self._last = (self._last + ids)[-4:]
        return symbols

    def tokens_at(self, position: int) -> int:
        return position + 1 if position else 0


def _pairs(ids: NDArray[np.uint32]) -> bytes:
    return np.stack([ids[:-1], ids[1:]], axis=1).tobytes() if len(ids) > 1 else b""


class HashKeys:
    """Hashes of token blocks, one symbol per block: for engines that name blocks by a chained hash.

    The tree then compares hashes instead of tokens, so the hash must be collision-resistant.

    Args:
        width: bytes of a hash, 8 or 16.

    Raises:
        BadArgument: the width is neither 8 nor 16.
    """

    token_limit = 0

    def __init__(self, width: int = 16) -> None:
        if not isinstance(width, int | np.integer) or width not in (8, 16):
            raise BadArgument("width", width, "8 or 16")
        self.symbol_bytes = int(width)

    def __repr__(self) -> str:
        return f"HashKeys(width={self.symbol_bytes})"

    def encode(self, tokens: TokenLike) -> bytes:
        """Encodes hashes: bytes, a list of bytes or of non-negative ints, or an integer array of the same width."""
        if isinstance(tokens, (bytes, bytearray, memoryview)):
            data = bytes(tokens)
        elif isinstance(tokens, np.ndarray):
            data = self._from_array(tokens)
        elif isinstance(tokens, Items) and not isinstance(tokens, str):
            data = b"".join(self._symbol(item, at) for at, item in enumerate(tokens))
        else:
            raise BadTokens(f"hashes are of type {type(tokens).__name__}: must be bytes, a sequence or an array")
        if len(data) % self.symbol_bytes:
            raise BadTokens(f"bytes of length {len(data)}: must hold whole {self.symbol_bytes}-byte hashes")
        return data

    def sequence(self) -> KeySequence:
        return KeySequence(self)

    def _from_array(self, hashes: NDArray[Any]) -> bytes:
        if hashes.dtype.kind not in "iu" or hashes.dtype.itemsize != 8 or self.symbol_bytes != 8 or hashes.ndim != 1:
            raise BadTokens(
                f"hashes are a {hashes.dtype} array of shape {hashes.shape}: must be 64-bit, one-dimensional, "
                "of width 8"
            )
        return hashes.astype(hashes.dtype.newbyteorder("<")).tobytes()

    def _symbol(self, item: object, at: int) -> bytes:
        width = self.symbol_bytes
        if isinstance(item, bytes) and len(item) == width:
            return item
        if isinstance(item, int) and not isinstance(item, bool) and 0 <= item < 1 << 8 * width:
            return item.to_bytes(width, "little")
        raise BadTokens(
            f"hash {item!r} at position {at}: must be {width} bytes, or an integer from 0 to 2**{8 * width} - 1"
        )


def hash_blocks(tokens: TokenLike, block_size: int, width: int = 16, seed: bytes = b"") -> bytes:
    """Returns the chained BLAKE2b hashes of the whole blocks of a token sequence, for `HashKeys(width)`.

    Each hash covers the previous hash and the block's own tokens, so equal hashes mean equal prefixes. An incomplete
    last block is ignored. RFC 7693 defines BLAKE2b; `seed` (at most 64 bytes) is its key.

    Raises:
        BadTokens: see `TokenKeys.encode`.
        BadArgument: block_size is below 1, width is neither 8 nor 16, or seed is longer than 64 bytes.
    """
    block_size = check_integer("block_size", block_size, 1, MAX_TOKEN)
    if len(seed) > _MAX_SEED_BYTES:
        raise BadArgument("seed", seed, f"at most {_MAX_SEED_BYTES} bytes")
    HashKeys(width)
    return _core.hash_blocks(tokens, block_size, width, seed)


@dataclass(frozen=True, slots=True)
class Text:
    """A text token."""

    id: int


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A point on one axis, as its bin (0 to 1023)."""

    bin: int

    @classmethod
    def nearest(cls, position: float) -> Coordinate:
        """Returns the bin nearest to a position in [0, 1]: bins are evenly spaced, bin b at b / 1023; ties round up.

        Raises:
            BadArgument: the position is outside [0, 1].
        """
        if not 0.0 <= position <= 1.0:
            raise BadArgument("position", position, "from 0 to 1")
        return cls(_nearest_bin(position))


@dataclass(frozen=True, slots=True)
class Size:
    """A width and a height, as their bins (0 to 1023)."""

    width_bin: int
    height_bin: int

    @classmethod
    def nearest(cls, width: float, height: float) -> Size:
        """Returns the bins of a width and a height, as fractions of the whole: bin b is 2 ** (10 * b / 1023 - 10).

        Bins are evenly spaced on a logarithmic scale, from 2**-10 to 1; smaller values are in bin 0.

        Raises:
            BadArgument: one of them is outside (0, 1].
        """
        for name, value in (("width", width), ("height", height)):
            if not 0.0 < value <= 1.0:
                raise BadArgument(name, value, "above 0, and at most 1")
        return cls(*(_nearest_bin(max(1 + math.log2(value) / 10, 0.0)) for value in (width, height)))


def _nearest_bin(part: float) -> int:
    return math.floor(part * (BINS - 1) + 0.5)


@dataclass(frozen=True, slots=True)
class Image:
    """An image as one token that fills `kv_length` positions.

    Args:
        identity: 16 bytes of a cryptographic hash of all that its KV depends on (pixels, shape, mode, processor).
        kv_length: positions that it fills; at least 5.
        splits: a match may end inside it, for models with causal attention in images; never within its first 5
            positions, so a match always covers the whole identity.
    """

    identity: bytes
    kv_length: int
    splits: bool = False
    _symbols: NDArray[np.uint32] | None = field(default=None, init=False, repr=False, compare=False)

    def symbols(self) -> NDArray[np.uint32]:
        """Returns kv_length symbols of an extendable digest (SHAKE-128, FIPS 202) of identity and length; cached.

        Raises:
            BadTokens: the identity or the length is invalid.
        """
        if self._symbols is None:
            object.__setattr__(self, "_symbols", _image_symbols(self))
        assert self._symbols is not None
        return self._symbols


def _image_symbols(image: Image) -> NDArray[np.uint32]:
    if not isinstance(image.identity, bytes) or len(image.identity) != IMAGE_DIGEST_BYTES:
        raise BadTokens(f"identity of an image: must be {IMAGE_DIGEST_BYTES} bytes")
    try:
        length = check_integer("kv_length", image.kv_length, IMAGE_MIN_LENGTH, MAX_TOKEN)
    except BadArgument:
        raise BadTokens(
            f"an image of kv_length = {image.kv_length!r}: must be {IMAGE_MIN_LENGTH} or more, "
            "so that its symbols hold the whole identity"
        ) from None
    digest = hashlib.shake_128(image.identity + length.to_bytes(8, "little")).digest(4 * length)
    symbols = np.frombuffer(digest, dtype="<u4") & np.uint32(_IMAGE - 1) | np.uint32(_TYPED | _IMAGE)
    symbols.flags.writeable = False
    return symbols.astype("<u4", copy=False)


@dataclass(frozen=True, slots=True, eq=False)
class Spliced:
    """Text with images in it, as engines hold it: one id per position; the ids at positions of images are ignored.

    Args:
        ids: [n] integers; anything at the positions of images.
        images: each with the position where it starts, in order and without overlap.
    """

    ids: NDArray[Any]
    images: tuple[tuple[int, Image], ...]


TypedToken = Text | Coordinate | Size | Image | int

_TYPED = 1 << 31
_SIZE = 1 << 29
_IMAGE = 1 << 30

# An image of a sequence: start, end, and whether a match may end inside.
_Span = tuple[int, int, bool]


class TypedKeys(_TokenIds):
    """Text, coordinates, sizes and images in one sequence: a list of typed tokens, or `Spliced`; plain ints are text.

    An image is never cut, unless it `splits`: a match that would end inside one ends before it.

    Args:
        vocab_size: exclusive upper bound of text ids; None allows all ids below 2**31.

    Raises:
        BadArgument: vocab_size is out of range.
    """

    symbol_bytes = 4
    token_limit = 0

    def encode(self, tokens: Items[TypedToken] | Spliced) -> bytes:
        return self.parse(tokens)[0]

    def sequence(self) -> KeySequence:
        return _TypedSequence(self)

    def parse(self, tokens: Items[TypedToken] | Spliced) -> tuple[bytes, list[_Span]]:
        """Returns the symbols, and the spans of the images among them."""
        if isinstance(tokens, Spliced):
            return self._parse_spliced(tokens)
        if isinstance(tokens, (str, bytes, bytearray, memoryview)) or not isinstance(tokens, (Items, np.ndarray)):
            raise BadTokens(
                f"tokens are of type {type(tokens).__name__}: must be a list or tuple of typed tokens, or Spliced"
            )
        try:
            return encode_tokens(tokens, self.limit), []  # most sequences are all text
        except BadTokens:
            return self._parse_each(tokens)

    def _parse_each(self, tokens: Items[TypedToken]) -> tuple[bytes, list[_Span]]:
        parts: list[bytes] = []
        spans: list[_Span] = []
        length = 0
        for at, token in enumerate(tokens):
            parts.append(self._symbols(token, at))
            end = length + len(parts[-1]) // self.symbol_bytes
            if isinstance(token, Image):
                spans.append((length, end, token.splits))
            length = end
        return b"".join(parts), spans

    def _parse_spliced(self, tokens: Spliced) -> tuple[bytes, list[_Span]]:
        ids = np.array(tokens.ids)  # a copy
        spans: list[_Span] = []
        end = 0
        for start, image in tokens.images:
            symbols = image.symbols()
            if not end <= start <= len(ids) - len(symbols):
                raise BadTokens(
                    f"image at position {start}: must lie in [{end}, {len(ids)}), after the previous images, "
                    f"with all of its {len(symbols)} positions"
                )
            end = start + len(symbols)
            ids[start:end] = 0
            spans.append((start, end, image.splits))
        keys = np.frombuffer(bytearray(encode_tokens(ids, self.limit)), dtype="<u4")
        for start, image in tokens.images:
            keys[start : start + image.kv_length] = image.symbols()
        return keys.tobytes(), spans

    def _symbols(self, token: TypedToken, at: int) -> bytes:
        if isinstance(token, Image):
            try:
                return token.symbols().tobytes()
            except BadTokens as error:
                raise BadTokens(f"token at position {at}: {error}") from None
        if isinstance(token, Coordinate):
            return (_TYPED | _bin(token.bin, token, at)).to_bytes(4, "little")
        if isinstance(token, Size):
            bins = _bin(token.width_bin, token, at) << 10 | _bin(token.height_bin, token, at)
            return (_TYPED | _SIZE | bins).to_bytes(4, "little")
        value = token.id if isinstance(token, Text) else token
        try:
            return encode_tokens([value], self.limit)
        except BadTokens:
            raise BadTokens(
                f"token {token!r} at position {at}: must be a text id from 0 to {self.limit - 1}, "
                "a Coordinate, a Size or an Image"
            ) from None


class _TypedSequence(KeySequence):
    """Keeps the spans of the images, so that none is cut that must not be."""

    __slots__ = ("_ends", "_length", "_saved", "_spans", "_typed")

    def __init__(self, kind: TypedKeys) -> None:
        super().__init__(kind)
        self._typed = kind
        self._length = 0
        self._spans: list[_Span] = []
        self._ends: list[int] = []
        self._saved = [0]  # positions minus tokens of the first i images

    def append(self, tokens: Items[TypedToken] | Spliced) -> bytes:
        symbols, spans = self._typed.parse(tokens)
        for start, end, splits in spans:
            self._spans.append((self._length + start, self._length + end, splits))
            self._ends.append(self._length + end)
            self._saved.append(self._saved[-1] + end - start - 1)
        self._length += len(symbols) // self._typed.symbol_bytes
        return symbols

    def floor(self, position: int) -> int:
        start, _, splits = self._span_after(position)
        inside = start < position and not (splits and position - start >= IMAGE_MIN_LENGTH)
        return start if inside else min(position, self._length)

    def tokens_at(self, position: int) -> int:
        images = bisect_right(self._ends, position)
        return min(position, self._span_after(position)[0]) - self._saved[images]

    def _span_after(self, position: int) -> _Span:
        """Returns the image that holds a position, else the next image, else the end of the sequence."""
        images = bisect_right(self._ends, position)
        return self._spans[images] if images < len(self._spans) else (self._length, self._length, False)


def _bin(value: int, token: TypedToken, at: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < BINS:
        raise BadTokens(f"token {token!r} at position {at}: bins are integers from 0 to {BINS - 1}")
    return value
