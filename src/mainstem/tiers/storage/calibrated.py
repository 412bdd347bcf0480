"""A codec calibrated for one model: principal components, equal steps, entropy coding. After KVTC (arXiv 2511.01815).

    page        keys and values of its positions
      |         keys are turned back by the rotary embedding: the page knows its place in the prompt
    position    of a group of neighbouring layers: keys and values of all heads, less their mean
      |         times the group's basis: components, scaled so that an error of 1 in any costs the model the same
    numbers     rounded to steps, all equally long, as fine as the page's length allows
      |         entropy coding, with the table that fits the size of the component
    value       level 1 B | component of the tree 1 B | zeros 2 B | page 4 B | code | zeros

Every page becomes one fixed fraction of its length, so stores hold values of one length, and a lookup needs no lengths.
A page that is easy to code has finer steps. The first position of a prompt has a mean of its own: models park attention
there, with keys and values unlike all others.

What was calibrated is a file (`mainstem calibrate`), and its digest is part of the identity of stored pages. A
decoder needs the same file. Values are whole numbers, so machines agree on them; what they decode to may differ in the
last digit, because it is computed in float32.

This module handles arrays. How models are run to find the basis is known to `mainstem.runtime.models.calibration`.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mainstem._core import EntropyCoder
from mainstem.cache.identity import Identity
from mainstem.errors import BadArgument
from mainstem.tiers.storage import codecs
from mainstem.tiers.storage.codecs import Codec, Float32s, Page

CLASSES = 48
"""Tables of the entropy coder. Each is for components of a mean magnitude, of half an octave."""

LEVELS = 256
"""Lengths of a step: 2**(level / 8)."""

KEPT = 0.42
"""A magnitude grows by this before it is rounded down: less than half, because small numbers are more likely."""

_SMALLEST = 20  # the class of components whose mean magnitude is a step
_EIGHTHS = 4  # of an octave in a class
_GREATEST = 32767  # magnitude that the entropy coder takes
_HEADER = struct.Struct("<BBHI")
_CODE_BYTES = 16  # of the shortest code
_FORMAT = "mainstem calibration 1"


@dataclass(frozen=True)
class Basis:
    """The calibration of one component of the tree. A position of a layer has `width` numbers: of all planes and heads.

    Args:
        planes: heads, and numbers of each, in the order of the payload: those of keys, then of values.
        means: float32 [layers, width].
        first: float32 [layers, width], of the first position of a prompt.
        decode: of each group of neighbouring layers, float32 [numbers, numbers] of all its layers: row i is what 1 of
            component i is worth.
        sizes: int16 [layers x width]: mean magnitude of each component, as a level.
        rotary: float64 [pairs]: radians a position, by which number i and number i + pairs of a key were turned.
        level: that most pages need.
    """

    planes: tuple[tuple[int, int], ...]
    means: Float32s
    first: Float32s
    decode: tuple[Float32s, ...]
    sizes: npt.NDArray[np.int16]
    rotary: npt.NDArray[np.float64]
    level: int

    @property
    def layers(self) -> int:
        """Layers of the component."""
        return len(self.means)

    def content(self, dtype: str, page_size: int) -> str:
        """Returns the name of the format of its payloads, as host memory has it."""
        planes = (f"{dtype}{[self.layers, page_size, heads, numbers]}" for heads, numbers in self.planes)
        return f"page_first/v1 {' '.join(planes)}"

    @cached_property
    def parts(self) -> list[slice]:
        """The numbers of each group, and its components."""
        ends = np.cumsum([len(each) for each in self.decode]).tolist()
        return [slice(*each) for each in itertools.pairwise([0, *ends])]

    @cached_property
    def encode(self) -> tuple[Float32s, ...]:
        """Of each group, [numbers, numbers]: the inverse of `decode`, transposed."""
        inverses = (np.linalg.inv(each.astype(np.float64)).T for each in self.decode)
        return tuple(np.ascontiguousarray(each, np.float32) for each in inverses)

    def classes(self, level: int) -> npt.NDArray[np.uint8]:
        """Returns the table of each component at a level."""
        found = (self.sizes - level) // _EIGHTHS + _SMALLEST
        return np.clip(found, 0, CLASSES - 1).astype(np.uint8)

    def split(self, numbers: Float32s, page: int) -> Float32s:
        """Returns the components of a payload, [components, positions]."""
        x = np.empty((len(numbers) // self.means.size, *self.means.shape), np.float32)
        at = 0
        for plane in self._planes(x):
            plane[...] = numbers[at : at + plane.size].reshape(self.layers, len(x), -1).transpose(1, 0, 2)
            at += plane.size
        self._turn(x, page, -1)
        self._shift(x, page, -1)
        rows, y = x.reshape(len(x), -1), np.empty((self.means.size, len(x)), np.float32)
        for part, encode in zip(self.parts, self.encode, strict=True):
            np.matmul(encode, rows[:, part].T, out=y[part])
        return y

    def join(self, y: Float32s, page: int) -> Float32s:
        x = np.empty((y.shape[1], *self.means.shape), np.float32)
        rows = x.reshape(len(x), -1)
        for part, decode in zip(self.parts, self.decode, strict=True):
            np.matmul(y[part].T, decode, out=rows[:, part])
        self._shift(x, page, 1)
        self._turn(x, page, 1)
        return np.concatenate([plane.transpose(1, 0, 2).reshape(-1) for plane in self._planes(x)])

    def _planes(self, x: Float32s) -> list[Float32s]:
        """Returns views of positions [positions, layers, width]."""
        return np.split(x, np.cumsum([heads * size for heads, size in self.planes])[:-1], axis=2)

    def _shift(self, x: Float32s, page: int, sign: int) -> None:
        rest = x if page else x[1:]
        rest += sign * self.means
        if not page:
            x[0] += sign * self.first

    def _turn(self, x: Float32s, page: int, sign: int) -> None:
        turn(x, self.planes[0], self.rotary, page * len(x), sign)


def class_size(number: int) -> float:
    """Returns the mean magnitude, in steps, of the components of a class."""
    return float(2 ** ((_EIGHTHS * (number - _SMALLEST) + _EIGHTHS / 2 - 0.5) / 8))


def turn(x: npt.NDArray[Any], plane: tuple[int, int], rotary: npt.NDArray[np.float64], begin: int, sign: int) -> None:
    """Turns keys from position `begin` on, in place.

    Args:
        x: [positions, layers, width], keys first.
        plane: heads, and numbers of each.
        rotary: radians a position of each pair; none: nothing is turned.
        begin: the first position.
        sign: 1, or -1 to turn back.
    """
    pairs, (heads, size) = len(rotary), plane
    angles = np.outer(np.arange(begin, begin + len(x)), rotary)
    cos, sin = (part.astype(np.float32)[:, None, :] for part in (np.cos(angles), sign * np.sin(angles)))
    for at in range(0, heads * size, size):
        left, right = x[..., at : at + pairs], x[..., at + pairs : at + 2 * pairs]
        left[...], right[...] = left * cos - right * sin, right * cos + left * sin


class Calibrated(Codec):
    """The codec of a calibration.

    Args:
        ratio: how many times smaller a payload becomes.
        bases: for each component of the tree that is coded, by name.
        frequencies: uint16 [CLASSES, EntropyCoder.TOKENS], of the entropy coder.
        weights: the identity's digest of the weights of the model that was calibrated.
        digest: of the file; "" before there is one.

    Raises:
        BadArgument: the ratio is below 1, the frequencies are no tables, or the arrays do not fit each other.
    """

    loss = (
        "at most 0.58 of a step in each component of its basis, and one rounding to its own dtype; a step is as long "
        "as the page needs to become as short as it is"
    )

    def __init__(
        self,
        ratio: float,
        bases: Mapping[str, Basis],
        frequencies: npt.NDArray[np.uint16],
        weights: str,
        digest: str = "",
    ) -> None:
        if not 1 <= ratio <= 1000:
            raise BadArgument("ratio", ratio, "1 to 1000")
        self.name = f"calibrated {digest}"
        self.ratio, self.bases, self.frequencies, self.weights = float(ratio), dict(bases), frequencies, weights
        self._coder, self._names = EntropyCoder(frequencies), list(bases)

    def check(self, identity: Identity) -> None:
        """Checks that pages of this identity are of the model that was calibrated.

        Raises:
            BadArgument: its weights or the format of its pages differ.
        """
        layouts = identity.layout.split(" + ")
        for name, basis in self.bases.items():
            if (own := basis.content(identity.dtype, identity.page_size)) not in layouts:
                raise BadArgument("storage_codec", f"a calibration of {own} ({name})", f"one of {identity.layout}")
        if identity.weights != self.weights:
            allowed = f"one of {identity.model} in {identity.dtype}, whose digest begins with {identity.weights[:12]}"
            raise BadArgument("storage_codec", f"a calibration of the weights {self.weights[:12]}", allowed)

    def encoded_bytes(self, payload_bytes: int, dtype: str) -> int:
        """Returns the payload's length divided by the ratio, rounded down; but room for the header at least."""
        codecs.count_numbers(payload_bytes, dtype)
        return max(int(payload_bytes / self.ratio), _HEADER.size + _CODE_BYTES)

    def encode(self, payload: memoryview, out: memoryview, dtype: str, page: Page = codecs.UNPLACED) -> None:
        """Codes with the finest steps whose code fits."""
        codecs.check_length("out", out, self.encoded_bytes(len(payload), dtype))
        basis = self._basis(page.component)
        numbers = codecs.load_numbers(payload, dtype)
        if not np.isfinite(numbers).all():
            raise BadArgument("payload", "numbers that are not finite", "finite numbers")
        self._check_count(basis, len(numbers))
        y = basis.split(numbers, page.number)
        room = np.frombuffer(out, np.uint8)
        level = self._pack(basis, y, room[_HEADER.size :])
        _HEADER.pack_into(out, 0, level, self._names.index(page.component), 0, page.number)

    def decode(self, data: memoryview, out: memoryview, dtype: str) -> None:
        """Decodes, and adds up the components.

        Raises:
            BadArgument: a length is wrong, or the data are no code of this calibration.
        """
        codecs.check_length("data", data, self.encoded_bytes(len(out), dtype))
        level, index, zeros, page = _HEADER.unpack_from(data)
        if index >= len(self._names) or zeros:
            raise BadArgument("data", "an unknown header", "a value of this codec")
        basis = self.bases[self._names[index]]
        positions = self._check_count(basis, codecs.count_numbers(len(out), dtype))
        steps = np.empty((basis.sizes.size, positions), np.int16)
        self._coder.decode(np.frombuffer(data, np.uint8)[_HEADER.size :], basis.classes(level), steps)
        y = steps * np.float32(2 ** (level / 8))
        codecs.store_numbers(basis.join(y, page), out, dtype)

    def _basis(self, component: str) -> Basis:
        if component not in self.bases:
            raise BadArgument("component", component, "one of " + ", ".join(self.bases))
        return self.bases[component]

    def _check_count(self, basis: Basis, numbers: int) -> int:
        positions, rest = divmod(numbers, basis.sizes.size)
        if rest or not positions:
            raise BadArgument("payload", f"{numbers} numbers", f"a multiple of {basis.sizes.size}")
        return positions

    def _pack(self, basis: Basis, y: Float32s, room: npt.NDArray[np.uint8]) -> int:
        """Writes the code at the finest level at which it fits, and zeros after it. Returns the level.

        Raises:
            BadArgument: it fits at no level.
        """
        signed = np.copysign(np.float32(KEPT), y)
        greatest = max(float(np.abs(y).max()), 1.0)
        low, high = max(math.ceil(8 * math.log2(greatest / _GREATEST)) - 1, -1), LEVELS
        level, longer, best = basis.level, np.empty(2 * y.size + _CODE_BYTES, np.uint8), b""
        while high - low > 1:
            level = min(max(level, low + 1), high - 1)
            steps = (y * np.float32(2 ** (-level / 8)) + signed).astype(np.int16)
            length = self._coder.encode(steps, basis.classes(level), longer) or len(longer)
            if length <= len(room):
                high, best = level, longer[:length].tobytes()
            else:
                low = level
            level += round(64 * (length - len(room)) / max(int(np.count_nonzero(steps)), 1))  # 1/8 bit each
        if high == LEVELS:
            raise BadArgument("payload", "numbers that its calibration does not expect", "those of the same model")
        room[: len(best)] = np.frombuffer(best, np.uint8)
        room[len(best) :] = 0
        return high


# ---------------------------------------------------------------- files


def save(path: Path, codec: Calibrated) -> None:
    """Writes a calibration.

    Raises:
        OSError: the file cannot be written.
    """
    arrays: dict[str, npt.NDArray[Any]] = {"frequencies": codec.frequencies}
    components = []
    for number, (name, basis) in enumerate(codec.bases.items()):
        components.append({"name": name, "planes": basis.planes, "level": basis.level, "groups": len(basis.decode)})
        arrays |= {f"{number} {field}": getattr(basis, field) for field in _DTYPES}
        arrays |= {f"{number} decode {group}": each for group, each in enumerate(basis.decode)}
    about = {"format": _FORMAT, "ratio": codec.ratio, "weights": codec.weights, "components": components}
    with path.open("wb") as file:
        np.savez(file, allow_pickle=False, about=np.array(json.dumps(about)), **arrays)


def open_codec(name: str) -> Codec:
    """Returns the codec with a name, or that of a calibration's file.

    Raises:
        BadArgument: there is neither such a codec nor such a file, or the file holds no calibration.
    """
    path = Path(name)
    if name in codecs.CODECS or not path.is_file():
        return codecs.find_codec(name)
    data = path.read_bytes()
    try:
        with np.load(io.BytesIO(data)) as arrays:
            return _codec_of(arrays, hashlib.sha256(data).hexdigest()[:32])
    except (ValueError, KeyError, TypeError, AttributeError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise BadArgument("storage_codec", name, f"a file written by `mainstem calibrate` ({error})") from error


_DTYPES = {"means": "f4", "first": "f4", "sizes": "i2", "rotary": "f8"}


def _codec_of(arrays: Mapping[str, npt.NDArray[Any]], digest: str) -> Calibrated:
    """Raises one of several errors if the arrays are no calibration."""
    about = json.loads(str(arrays["about"]))
    if about["format"] != _FORMAT:
        raise ValueError(f"its format is {about['format']}")
    bases = {}
    for number, each in enumerate(about["components"]):
        fields = {field: arrays[f"{number} {field}"] for field in _DTYPES}
        planes = tuple((int(heads), int(size)) for heads, size in each["planes"])
        layers, width = len(fields["means"]), sum(heads * size for heads, size in planes)
        shapes = {"sizes": (layers * width,), "rotary": (fields["rotary"].size,)}
        for field, array in fields.items():
            _check_array(field, array, shapes.get(field, (layers, width)), _DTYPES[field])
        decode = [arrays[f"{number} decode {group}"] for group in range(each["groups"])]
        for group, array in enumerate(decode):
            _check_array(f"decode {group}", array, (len(array), len(array)), "f4")
        if sum(map(len, decode)) != layers * width or 2 * fields["rotary"].size > planes[0][1]:
            raise ValueError("its fields do not fit each other")
        if not 0 <= each["level"] < LEVELS:
            raise ValueError(f"its level is {each['level']}")
        bases[str(each["name"])] = Basis(planes, **fields, decode=tuple(decode), level=int(each["level"]))
    return Calibrated(float(about["ratio"]), bases, arrays["frequencies"], str(about["weights"]), digest)


def _check_array(name: str, array: npt.NDArray[Any], shape: tuple[int, ...], dtype: str) -> None:
    """Raises ValueError if it is another array, or not finite."""
    if array.shape != shape or array.dtype.str[1:] != dtype:
        raise ValueError(f"its {name} is {array.dtype}{list(array.shape)}")
    if not np.isfinite(array).all():
        raise ValueError(f"its {name} is not finite")
