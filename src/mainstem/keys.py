"""Keys: what a token sequence is in bytes. A kind of key has symbols of one width; the tree compares symbols.

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
from bisect import bisect_right
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mainstem._core import encode_tokens
from mainstem.errors import BadArgument, BadTokens, check_integer

MAX_TOKEN = 2**31
BINS = 1024
IMAGE_DIGEST_BYTES = 16
IMAGE_MIN_LENGTH = 5
"""Positions from which on 30 bits a position hold the whole 128-bit identity of an image."""

TokenLike = Any
"""A list, tuple or other sequence of ints, an integer array (NumPy, `array.array`, a CPU tensor by DLPack), or bytes
holding whole symbols."""


class KeyKind(Protocol):
    """A way to write sequences as symbols."""

    @property
    def symbol_bytes(self) -> int:
        """Bytes of one symbol: 4, 8 or 16."""

    @property
    def token_limit(self) -> int:
        """Tokens are ids below it, and each is its own symbol: the core reads them itself. 0: `encode` is needed."""

    def encode(self, tokens: TokenLike) -> bytes:
        """The symbols of a sequence. Raises BadTokens."""

    def sequence(self) -> Sequence:
        """An empty sequence that can grow."""


class Sequence:
    """What must be remembered of a growing sequence to go on with its symbols. Here: one token, one position."""

    __slots__ = ("_kind",)

    def __init__(self, kind: KeyKind) -> None:
        self._kind = kind

    def append(self, tokens: TokenLike) -> bytes:
        """Adds tokens at the end; the symbols that this adds. Raises BadTokens and adds nothing."""
        return self._kind.encode(tokens)

    def floor(self, position: int) -> int:
        """The nearest position at or below that lies inside no token."""
        return position

    def tokens_at(self, position: int) -> int:
        """How many tokens lie wholly in [0, position)."""
        return position


class _TokenIds:
    """What kinds made of token ids share: the range of an id."""

    def __init__(self, vocab_size: int | None = None) -> None:
        self.limit = MAX_TOKEN if vocab_size is None else check_integer("vocab_size", vocab_size, 1, MAX_TOKEN)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.limit if self.limit < MAX_TOKEN else None})"


class TokenKeys(_TokenIds):
    """Token ids, 4 bytes each.

    Args:
        vocab_size: ids are below it; None allows all ids below 2**31.

    Raises:
        BadArgument: vocab_size is out of range.
    """

    symbol_bytes = 4

    @property
    def token_limit(self) -> int:
        """See `KeyKind.token_limit`."""
        return self.limit

    def encode(self, tokens: TokenLike) -> bytes:
        """See `KeyKind.encode`."""
        return encode_tokens(tokens, self.limit)

    def sequence(self) -> Sequence:
        """See `KeyKind.sequence`."""
        return Sequence(self)


class BigramKeys(_TokenIds):
    """Pairs of neighbouring token ids, as a draft model needs whose KV at a position also depends on the next token.

    Args:
        vocab_size: ids are below it; None allows all ids below 2**31.

    Raises:
        BadArgument: vocab_size is out of range.
    """

    symbol_bytes = 8
    token_limit = 0

    def encode(self, tokens: TokenLike) -> bytes:
        """n token ids as n - 1 symbols (ids[i], ids[i + 1]); bytes hold 4-byte ids, not pairs. Raises BadTokens."""
        return _pairs(np.frombuffer(encode_tokens(tokens, self.limit), dtype="<u4"))

    def sequence(self) -> Sequence:
        """See `KeyKind.sequence`."""
        return _BigramSequence(self)


class _BigramSequence(Sequence):
    """Keeps the last token, which begins the next pair."""

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
    """Hashes of token blocks, one symbol a block: for engines that name blocks by a chained hash.

    The tree then compares hashes instead of tokens, so the hash must be one that nobody can find collisions of.

    Args:
        width: bytes of a hash, 8 or 16.

    Raises:
        BadArgument: another width.
    """

    token_limit = 0

    def __init__(self, width: int = 16) -> None:
        if check_integer("width", width, 8, 16) not in (8, 16):
            raise BadArgument("width", width, "8 or 16")
        self.symbol_bytes = width

    def __repr__(self) -> str:
        return f"HashKeys(width={self.symbol_bytes})"

    def encode(self, tokens: TokenLike) -> bytes:
        """Hashes as bytes, a list of bytes or of non-negative ints, or an integer array whose items are as wide."""
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

    def sequence(self) -> Sequence:
        """See `KeyKind.sequence`."""
        return Sequence(self)

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
    """Chained BLAKE2b hashes of the whole blocks of a token sequence, as `HashKeys(width)` takes them.

    Each hash covers the one before it and its own tokens, so an equal hash means an equal prefix. A last block that is
    not whole is left out. RFC 7693 defines BLAKE2b; `seed` (at most 64 bytes) is its key.

    Raises:
        BadTokens: see `TokenKeys.encode`.
        BadArgument: block_size below 1, a width other than 8 or 16, or a seed over 64 bytes.
    """
    block_size = check_integer("block_size", block_size, 1, MAX_TOKEN)
    if len(seed) > hashlib.blake2b.MAX_KEY_SIZE:
        raise BadArgument("seed", seed, f"at most {hashlib.blake2b.MAX_KEY_SIZE} bytes")
    HashKeys(width)
    data = encode_tokens(tokens, MAX_TOKEN)
    step = 4 * block_size
    hashes = []
    parent = b""
    for start in range(0, len(data) - step + 1, step):
        parent = hashlib.blake2b(parent + data[start : start + step], digest_size=width, key=seed).digest()
        hashes.append(parent)
    return b"".join(hashes)


@dataclass(frozen=True, slots=True)
class Text:
    """A text token."""

    id: int


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A point on one axis, as its bin (0 to 1023)."""

    bin: int


@dataclass(frozen=True, slots=True)
class Size:
    """A width and a height, as their bins (0 to 1023)."""

    width_bin: int
    height_bin: int


@dataclass(frozen=True, slots=True)
class Image:
    """An image as one token that fills `kv_length` positions.

    Args:
        identity: 16 bytes of a cryptographic hash over all that shapes the image's KV (pixels, shape, mode, processor).
        kv_length: positions that it fills; at least 5.
    """

    identity: bytes
    kv_length: int


TypedToken = Text | Coordinate | Size | Image | int

_TYPED = 1 << 31
_SIZE = 1 << 29
_IMAGE = 1 << 30


class TypedKeys(_TokenIds):
    """Text, coordinates, sizes and images in one sequence; plain ints are text.

    An image is never cut: a match that would end inside one ends in front of it.

    Args:
        vocab_size: text ids are below it; None allows all ids below 2**31.

    Raises:
        BadArgument: vocab_size is out of range.
    """

    symbol_bytes = 4
    token_limit = 0

    def encode(self, tokens: Items[TypedToken]) -> bytes:
        """See `KeyKind.encode`."""
        if isinstance(tokens, (str, bytes, bytearray, memoryview)) or not isinstance(tokens, (Items, np.ndarray)):
            raise BadTokens(f"tokens are of type {type(tokens).__name__}: must be a list or tuple of typed tokens")
        return b"".join(self._symbols(token, at) for at, token in enumerate(tokens))

    def sequence(self) -> Sequence:
        """See `KeyKind.sequence`."""
        return _TypedSequence(self)

    def _symbols(self, token: TypedToken, at: int) -> bytes:
        if isinstance(token, Image):
            return _image_symbols(token, at)
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


class _TypedSequence(Sequence):
    """Knows where each token ends, so that none is cut."""

    __slots__ = ("_ends",)

    def __init__(self, kind: TypedKeys) -> None:
        super().__init__(kind)
        self._ends: list[int] = [0]

    def append(self, tokens: Items[TypedToken]) -> bytes:
        symbols = self._kind.encode(tokens)
        for token in tokens:
            self._ends.append(self._ends[-1] + (token.kv_length if isinstance(token, Image) else 1))
        return symbols

    def floor(self, position: int) -> int:
        return self._ends[self.tokens_at(position)]

    def tokens_at(self, position: int) -> int:
        return bisect_right(self._ends, position) - 1


def _bin(value: int, token: TypedToken, at: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < BINS:
        raise BadTokens(f"token {token!r} at position {at}: bins are integers from 0 to {BINS - 1}")
    return value


def _image_symbols(image: Image, at: int) -> bytes:
    """kv_length symbols cut from an extendable digest (SHAKE-128, FIPS 202) of the identity and the length."""
    if not isinstance(image.identity, bytes) or len(image.identity) != IMAGE_DIGEST_BYTES:
        raise BadTokens(f"image at position {at}: identity must be {IMAGE_DIGEST_BYTES} bytes")
    try:
        length = check_integer("kv_length", image.kv_length, IMAGE_MIN_LENGTH, MAX_TOKEN)
    except BadArgument:
        raise BadTokens(
            f"image at position {at}: kv_length = {image.kv_length!r}: must be {IMAGE_MIN_LENGTH} or more, "
            "so that its symbols hold the whole identity"
        ) from None
    digest = hashlib.shake_128(image.identity + length.to_bytes(8, "little")).digest(4 * length)
    symbols = np.frombuffer(digest, dtype="<u4") & np.uint32(_IMAGE - 1) | np.uint32(_TYPED | _IMAGE)
    return symbols.astype("<u4").tobytes()
