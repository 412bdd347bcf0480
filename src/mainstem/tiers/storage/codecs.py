"""Codecs for stored pages: numbers are kept as they are, or in 8 bits each with a stated loss.

    none   |  payload                                             |   no loss
    int8   |  float32 scale of each group  |  int8 of each number |   2 bytes become 1.06
    fp8    |  exponent of each group, 1 B  |  e4m3 of each number |   2 bytes become 1.02

A group is 64 consecutive numbers of the payload; the last group may be shorter. All numbers of a group share one scale,
so an outlier affects its own group only. A page is encoded before it is sealed and decoded after it is verified, so a
decoder may trust everything about its input except its length.

e4m3 is the 8-bit format of the OCP (OCP 8-bit Floating Point Specification, revision 1.0): 4 bits of exponent with bias
7, 3 of mantissa, no infinities, largest value 448, smallest 2**-9. A group's exponent is stored as E8M0 of the OCP
Microscaling specification: a power of two with bias 127.

This module handles arrays of bytes. It knows nothing of pages, layouts or stores.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from mainstem.cache.identity import Identity
from mainstem.errors import BadArgument

GROUP = 64
"""Numbers that share one scale."""

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""The dtypes that can be stored in 8 bits, and the size of one number in bytes."""

Float32s = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


class Page(NamedTuple):
    """The place of a payload.

    Args:
        component: its name in the tree.
        number: of the page, counted from the beginning of its prompt.
    """

    component: str
    number: int


UNPLACED = Page("", 0)
"""For codecs to whom all pages are alike."""


class Codec(ABC):
    """One encoding of numbers. A codec has no state; several threads use it at once."""

    name: str
    loss: str
    """The error that a number may suffer, in words; the tests enforce it."""

    def check(self, identity: Identity) -> None:
        """Checks that it can encode pages of this identity.

        Raises:
            BadArgument: it was made for others.
        """
        del identity

    @abstractmethod
    def encoded_bytes(self, payload_bytes: int, dtype: str) -> int:
        """Returns the length of a payload once it is encoded.

        Args:
            payload_bytes: the length in memory.
            dtype: the dtype of the numbers, by its PyTorch name.

        Raises:
            BadArgument: the dtype is not supported, or the length is not a whole count of numbers.
        """

    @abstractmethod
    def encode(self, payload: memoryview, out: memoryview, dtype: str, page: Page = UNPLACED) -> None:
        """Encodes the payload of a page into `out`, which has the length given by `encoded_bytes`.

        Raises:
            BadArgument: a number is infinite or NaN, or a length is wrong; the content of `out` is then undefined.
        """

    @abstractmethod
    def decode(self, data: memoryview, out: memoryview, dtype: str) -> None:
        """Decodes into `out`, which has the length of the original payload.

        Raises:
            BadArgument: a length is wrong.
        """


class Plain(Codec):
    """Stores bytes as they are, of any dtype."""

    name = "none"
    loss = "none"

    def encoded_bytes(self, payload_bytes: int, dtype: str) -> int:
        del dtype
        return payload_bytes

    def encode(self, payload: memoryview, out: memoryview, dtype: str, page: Page = UNPLACED) -> None:
        """Copies the bytes, NaN and infinities included."""
        del dtype, page
        check_length("out", out, len(payload))
        out[:] = payload

    def decode(self, data: memoryview, out: memoryview, dtype: str) -> None:
        self.encode(data, out, dtype)


class _Scaled(Codec):
    """Numbers of a byte each, and before them the scales of their groups."""

    SCALE_BYTES: ClassVar[int]

    @abstractmethod
    def _quantize(self, groups: Float32s, greatest: Float32s) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Returns the scales of groups, given their greatest magnitudes, and the codes of their numbers."""

    @abstractmethod
    def _restore(self, scales: Bytes, codes: Bytes) -> tuple[Float32s, Float32s]:
        """Returns what the codes are worth in a group of scale 1, and the scales."""

    def encoded_bytes(self, payload_bytes: int, dtype: str) -> int:
        numbers = count_numbers(payload_bytes, dtype)
        return numbers + self.SCALE_BYTES * _groups(numbers)

    def encode(self, payload: memoryview, out: memoryview, dtype: str, page: Page = UNPLACED) -> None:
        """Scales, then rounds to the nearest code, halves to even."""
        check_length("out", out, self.encoded_bytes(len(payload), dtype))
        numbers = load_numbers(payload, dtype)
        groups = _in_groups(numbers)
        scales, codes = self._quantize(groups, _greatest(groups))
        written, head = np.frombuffer(out, np.uint8), self.SCALE_BYTES * len(groups)
        written[:head] = scales.view(np.uint8)
        written[head:] = codes.view(np.uint8).reshape(-1)[: len(numbers)]

    def decode(self, data: memoryview, out: memoryview, dtype: str) -> None:
        check_length("data", data, self.encoded_bytes(len(out), dtype))
        count = count_numbers(len(out), dtype)
        head, read = self.SCALE_BYTES * _groups(count), np.frombuffer(data, np.uint8)
        numbers, scales = self._restore(read[:head], _in_groups(read[head:]))
        with np.errstate(over="ignore"):
            store_numbers((numbers * scales[:, None]).reshape(-1)[:count], out, dtype)


class Int8(_Scaled):
    """A number is q * scale, with an integer q in [-127, 127] and scale = the group's greatest magnitude / 127.

    The steps are uniform: a number much smaller than the greatest of its group loses most of its digits.
    """

    name = "int8"
    loss = (
        "at most 1/253 of the greatest magnitude of its group, and one rounding to its own dtype; a group whose "
        "greatest magnitude is below 2**-119 becomes zeros"
    )
    SCALE_BYTES = 4

    SMALLEST = 2.0**-119
    """Below this magnitude, the scale would not be a normal number."""

    def _quantize(self, groups: Float32s, greatest: Float32s) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        scales = np.where(greatest < self.SMALLEST, 0, greatest / np.float32(127)).astype(np.float32)
        inverse = np.divide(1, scales, out=np.zeros_like(scales), where=scales > 0)
        return scales, np.clip(np.rint(groups * inverse[:, None]), -127, 127).astype(np.int8)

    def _restore(self, scales: Bytes, codes: Bytes) -> tuple[Float32s, Float32s]:
        return codes.view(np.int8).astype(np.float32), scales.view(np.float32)


class Float8(_Scaled):
    """A number is an e4m3 float times a power of two that brings the greatest number of its group into [224, 448].

    The steps grow with the number: small numbers keep their leading digits, down to 2**-13 of the group's greatest.
    """

    name = "fp8"
    loss = (
        "at most 1/15 of itself, or 2**-17 of the greatest magnitude of its group where that is more; and 2**-25 more "
        "in float16, 2**-133 in the others"
    )
    SCALE_BYTES = 1

    LOW, HIGH = -126, 120
    """Bounds of a group's exponent: what float32 can scale by, and what its greatest number needs."""

    def _quantize(self, groups: Float32s, greatest: Float32s) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        part, exponent = np.frexp(greatest)  # greatest = part * 2**exponent, part in [0.5, 1)
        exponent = np.clip(exponent - np.where(part > 448 / 512, 8, 9), self.LOW, self.HIGH)
        scaled = (groups * np.ldexp(np.float32(1), -exponent)[:, None]).astype(np.float16)  # exact but for the rounding
        return (exponent + 127).astype(np.uint8), _FROM_HALF[scaled.view(np.uint16)]

    def _restore(self, scales: Bytes, codes: Bytes) -> tuple[Float32s, Float32s]:
        return _E4M3[codes], np.ldexp(np.float32(1), scales.astype(np.int32) - 127)


CODECS: dict[str, Codec] = {codec.name: codec for codec in (Plain(), Int8(), Float8())}
"""All codecs by name."""


def find_codec(name: str) -> Codec:
    """Returns the codec with a name.

    Raises:
        BadArgument: there is none; the message lists the names.
    """
    if name not in CODECS:
        raise BadArgument("codec", name, "one of " + ", ".join(CODECS))
    return CODECS[name]


# ---------------------------------------------------------------- numbers


def count_numbers(payload_bytes: int, dtype: str) -> int:
    """Returns how many numbers of a dtype a payload has.

    Raises:
        BadArgument: the dtype is not supported, or the length is not a whole count of numbers.
    """
    if dtype not in ITEM_BYTES:
        raise BadArgument("dtype", dtype, "one of " + ", ".join(ITEM_BYTES))
    if payload_bytes % ITEM_BYTES[dtype]:
        raise BadArgument("payload_bytes", payload_bytes, f"a multiple of {ITEM_BYTES[dtype]}, the size of {dtype}")
    return payload_bytes // ITEM_BYTES[dtype]


def check_length(name: str, buffer: memoryview, length: int) -> None:
    """Checks the length of an argument.

    Raises:
        BadArgument: it differs; the message names both.
    """
    if len(buffer) != length:
        raise BadArgument(name, f"{len(buffer)} bytes", f"{length} bytes")


def load_numbers(payload: memoryview, dtype: str) -> Float32s:
    """Returns the numbers of a payload as float32, in memory of their own."""
    if dtype == "bfloat16":  # the upper half of a float32
        return (np.frombuffer(payload, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(payload, dtype).astype(np.float32)


def store_numbers(numbers: Float32s, out: memoryview, dtype: str) -> None:
    """Rounds to the dtype, halves to even; a number that would overflow becomes the greatest finite one."""
    if dtype == "bfloat16":
        bits = np.clip(numbers, -_BFLOAT16_MAX, _BFLOAT16_MAX).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        np.frombuffer(out, np.uint16)[:] = rounded
    else:
        limit = np.finfo(dtype).max
        np.frombuffer(out, dtype)[:] = np.clip(numbers, -limit, limit)


def _groups(numbers: int) -> int:
    return -(-numbers // GROUP)


def _in_groups(numbers: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Reshapes to one group per row; pads the last group with zeros."""
    missing = -len(numbers) % GROUP
    whole = np.concatenate([numbers, np.zeros(missing, numbers.dtype)]) if missing else numbers
    return whole.reshape(-1, GROUP)


def _greatest(groups: Float32s) -> Float32s:
    greatest: Float32s = np.abs(groups).max(axis=1)
    if not np.isfinite(greatest).all():  # abs and max keep NaN and infinities
        at = int(np.flatnonzero(~np.isfinite(groups.reshape(-1)))[0])
        raise BadArgument("payload", f"{groups.reshape(-1)[at]} as number {at}", "finite numbers")
    return greatest


_BFLOAT16_MAX = np.array([0x7F7F0000], np.uint32).view(np.float32)[0]


def _make_e4m3() -> Float32s:
    """Returns the value of each of the 256 codes; 0x7F and 0xFF are NaN."""
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values[127] = np.nan
    return np.concatenate([values, -values]).astype(np.float32)


def _make_from_half(values: Float32s) -> Bytes:
    """Returns the nearest code for each of the 65,536 float16 values: halves to even, values too great to 448."""
    middles = (values[:126] + values[1:127]) / 2
    middles[1::2] = np.nextafter(middles[1::2], np.float32(0))  # a half above an odd code rounds up
    halves = np.arange(1 << 16, dtype=np.uint16)
    codes = np.searchsorted(middles, np.abs(halves.view(np.float16)).astype(np.float32), side="left")
    codes[np.isnan(halves.view(np.float16))] = 127
    return (codes | (halves >> 8 & 0x80)).astype(np.uint8)


_E4M3 = _make_e4m3()
_FROM_HALF = _make_from_half(_E4M3)
