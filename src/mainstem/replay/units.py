"""Parses and formats sizes, rates and times: 1TB, 7GB/s, 8TB@7GB/s, 500ms."""

from __future__ import annotations

import re

from mainstem.errors import BadArgument
from mainstem.storage.base import parse_bytes

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_rate(name: str, text: str) -> float:
    """Parses a rate in bytes per second, above 0: 7GB/s, 64GiB/s.

    Raises:
        BadArgument: it is not a rate.
    """
    allowed = "bytes per second above 0, such as 7GB/s"
    size, _, second = text.strip().rpartition("/")
    if second.strip().lower() != "s":
        raise BadArgument(name, text, allowed)
    try:
        rate = float(parse_bytes(name, size))
    except BadArgument:
        rate = 0.0
    if rate <= 0:
        raise BadArgument(name, text, allowed)
    return rate


def parse_store(name: str, text: str) -> tuple[int, float]:
    """Parses a size and its read rate, 8TB@7GB/s: bytes, and bytes per second.

    Raises:
        BadArgument: it is not a size and a rate.
    """
    size, at, rate = text.partition("@")
    if not at:
        raise BadArgument(name, text, "a size and its read rate, such as 8TB@7GB/s")
    try:
        return parse_bytes(name, size), parse_rate(name, rate)
    except BadArgument as wrong:
        allowed = f"a size and a rate, such as 8TB@7GB/s; {wrong.value!r} is not {wrong.allowed}"
        raise BadArgument(name, text, allowed) from wrong


def parse_duration(name: str, text: str) -> float:
    """Parses a time in seconds, 0 or more: 500ms, 1.5s, 2m.

    Raises:
        BadArgument: it is not a time.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s|m|h|d|)", text.strip().lower())
    if not found:
        raise BadArgument(name, text, "a time, such as 500ms or 2s")
    return float(found[1]) * _SECONDS[found[2]]


def show_bytes(size: float) -> str:
    """Formats bytes with at most three digits: 131 KB, 1.5 TB."""
    for power, unit in ((15, "PB"), (12, "TB"), (9, "GB"), (6, "MB"), (3, "KB")):
        if size >= 0.9995 * 10**power:
            return f"{size / 10**power:.3g} {unit}"
    return f"{size:.0f} B"


def show_duration(seconds: float) -> str:
    """Formats a time with at most three digits: 45 ms, 1.2 s, 3.4 h."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 600:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 36000 else f"{seconds / 3600:.3g} h"
