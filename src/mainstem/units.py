"""Sizes, rates and times as text: the one grammar of options, of the specs of stores, and of printed values;
and the bytes of number types.

    number     digits with an optional fraction and exponent: 5, 1.5, .5, 1e3; never negative
    size       number [unit]; B, or K, M, G, T, P (powers of 1000) or Ki, Mi, Gi, Ti, Pi (powers of 1024), each with or
               without B: 500000000, 500MB, 2GiB; without a unit: bytes
    rate       size "/s": 7GB/s, 64GiB/s
    store      size "@" rate: 8TB@7GB/s
    time       number [unit]; us, ms, s, m, h, d: 500ms, 1.5s, 2m; without a unit: seconds

Upper and lower case mean the same. Blanks may surround every part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, NamedTuple

from mainstem.errors import BadArgument

_NUMBER = r"\+?((?:\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})(?:e[+-]?\d{1,2})?)"  # short enough to be computed exactly
_SIZE = re.compile(_NUMBER + r"\s*([kmgtp]i?|)b?")
_TIME = re.compile(_NUMBER + r"\s*(us|ms|s|m|h|d|)")
_BYTES = {"": 1} | {
    prefix + suffix: base**power
    for suffix, base in (("", 1000), ("i", 1024))
    for power, prefix in enumerate("kmgtp", start=1)
}
_SECONDS = {
    "us": Fraction(1, 10**6), "ms": Fraction(1, 1000), "s": Fraction(1), "": Fraction(1),
    "m": Fraction(60), "h": Fraction(3600), "d": Fraction(86400),
}  # fmt: skip
_LONGEST_S = 1e9  # the longest wait of a system call


def parse_bytes(name: str, text: str) -> int:
    """Parses a size, 0 or more; parts of a byte are dropped.

    Args:
        name: the argument that the error names.
        text: see the module.

    Raises:
        BadArgument: the text is not a size.
    """
    match = _SIZE.fullmatch(text.strip().lower())
    if not match:
        raise BadArgument(name, text, "bytes, or a number with KB, MB, GB, TB, PB, KiB, MiB, GiB, TiB or PiB")
    return int(Fraction(match[1]) * _BYTES[match[2]])


def parse_rate(name: str, text: str) -> float:
    """Parses a rate in bytes per second, above 0.

    Raises:
        BadArgument: the text is not a rate.
    """
    size, _, second = text.strip().rpartition("/")
    try:
        rate = float(parse_bytes(name, size))
    except BadArgument:
        rate = 0.0
    if rate <= 0 or second.strip().lower() != "s":
        raise BadArgument(name, text, "bytes per second above 0, such as 7GB/s")
    return rate


def parse_store(name: str, text: str) -> tuple[int, float]:
    """Parses a size and its read rate: bytes, and bytes per second.

    Raises:
        BadArgument: the text is not a size and a rate.
    """
    size, at, rate = text.partition("@")
    if not at:
        raise BadArgument(name, text, "a size and its read rate, such as 8TB@7GB/s")
    try:
        return parse_bytes(name, size), parse_rate(name, rate)
    except BadArgument as wrong:
        allowed = f"a size and a rate, such as 8TB@7GB/s; {wrong.value!r} is not {wrong.allowed}"
        raise BadArgument(name, text, allowed) from wrong


def parse_seconds(name: str, text: str) -> float:
    """Parses a time, 0 or more, as seconds.

    Raises:
        BadArgument: the text is not a time.
    """
    match = _TIME.fullmatch(text.strip().lower())
    if not match:
        raise BadArgument(name, text, "a time, such as 500ms, 2s or 5m")
    return float(Fraction(match[1]) * _SECONDS[match[2]])


def parse_timeout(name: str, text: str) -> float:
    """Parses a time that a call may take, above 0 and below 1e9 seconds, as seconds.

    Raises:
        BadArgument: the text is not such a time.
    """
    try:
        seconds = parse_seconds(name, text)
    except BadArgument:
        seconds = 0.0
    if not 0 < seconds < _LONGEST_S:
        raise BadArgument(name, text, "a time above 0 s and below 1e9 s, such as 500ms or 5s")
    return seconds


def show_bytes(size: float) -> str:
    """Formats bytes with at most three digits: 131 KB, 1.5 TB."""
    for power, unit in ((15, "PB"), (12, "TB"), (9, "GB"), (6, "MB"), (3, "KB")):
        if size >= 0.9995 * 10**power:
            return f"{size / 10**power:.3g} {unit}"
    return f"{size:.0f} B"


def show_seconds(seconds: float) -> str:
    """Formats a time with at most three digits: 45 ms, 1.2 s, 3.4 h."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 36000 else f"{seconds / 3600:.3g} h"


def counted(count: int, thing: str) -> str:
    """Formats a number of things: 1 request, 1,500 requests."""
    return f"{count:,} {thing}{'' if count == 1 else 's'}"


def exact_bytes(size: float) -> str:
    """Formats bytes exactly, as `parse_bytes` reads them: 1GiB, 20MiB, 1000."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size and size % (1 << power) == 0:
            return f"{int(size) >> power}{unit}"
    return f"{size:.0f}"


DTYPE_BYTES: Mapping[str, float] = MappingProxyType(
    {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5, "mxfp4": 17 / 32}
)
"""Bytes per number. mxfp4 has one byte of scale for 32 numbers of half a byte (OCP Microscaling Formats 1.0)."""


def dtype_bytes(name: str, dtype: str) -> float:
    """Returns the bytes of one number of a type.

    Args:
        name: the argument that the error names.
        dtype: see `DTYPE_BYTES`.

    Raises:
        BadArgument: there is no such type.
    """
    if dtype not in DTYPE_BYTES:
        raise BadArgument(name, dtype, f"one of {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[dtype]


class Unit(NamedTuple):
    """How the values of a setting are written: `parse(name, text)` and `show(value)`."""

    parse: Callable[[str, str], Any]
    show: Callable[[Any], str] = str


SIZE = Unit(parse_bytes, exact_bytes)
RATE = Unit(parse_rate, lambda rate: f"{exact_bytes(rate)}/s")
STORE = Unit(parse_store)
TIME = Unit(parse_seconds, lambda seconds: f"{seconds * 1000:g}ms")
