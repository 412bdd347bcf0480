"""Sizes, rates and times as text: what is accepted, what is refused, and that what is shown can be read again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mainstem import units
from mainstem.errors import BadArgument
from mainstem.units import (
    counted,
    parse_bytes,
    parse_rate,
    parse_seconds,
    parse_store,
    parse_timeout,
    show_bytes,
    show_seconds,
)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("17", 17),
        ("17b", 17),
        ("2 KB", 2000),
        ("2k", 2000),
        ("2KiB", 2048),
        ("2kib", 2048),
        ("1.5MiB", 3 << 19),
        ("1.5m", 1_500_000),
        ("3G", 3 * 10**9),
        ("3GiB", 3 << 30),
        ("3gi", 3 << 30),
        (" 1TB ", 10**12),
        ("1Ti", 1 << 40),
        ("2 PB", 2 * 10**15),
        ("1e9", 10**9),
        ("9007199254740993", 2**53 + 1),
        ("0.3", 0),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes("capacity", text) == size


@pytest.mark.parametrize(
    "text", ["", "-1", "lots", "1 EB", "1" + 400 * "0", "1e400", "KiB", "1,5MB", "0x10", "1 0", ".", "5ms", "nan"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(BadArgument, match=r"^capacity = .* KiB"):
        parse_bytes("capacity", text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        ("2", 2.0),
        ("0.25", 0.25),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("250us", 0.00025),
        ("500ms", 0.5),
        (" 1.5 S ", 1.5),
        ("3m", 180.0),
        ("1.5h", 5400.0),
        ("2d", 172_800.0),
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds("ttl", text) == seconds
    if seconds:
        assert parse_timeout("timeout", text) == seconds


@pytest.mark.parametrize("text", ["", "-1", "inf", "nan", "soon", "5 weeks", "5MB", "1:30"])
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(BadArgument, match=r"^ttl = .* 500ms"):
        parse_seconds("ttl", text)
    with pytest.raises(BadArgument, match=r"^timeout = .* above 0"):
        parse_timeout("timeout", text)


@pytest.mark.parametrize("text", ["0", "0ms", "1e9", "20000d"])
def test_a_call_may_not_take_no_time_or_for_ever(text: str) -> None:
    assert parse_seconds("ttl", text) >= 0
    with pytest.raises(BadArgument, match="timeout"):
        parse_timeout("timeout", text)


def test_rates() -> None:
    assert parse_rate("bandwidth", "7GB/s") == 7e9
    assert parse_rate("bandwidth", " 64 GiB / S") == 64 << 30


def test_a_size_and_its_rate() -> None:
    assert parse_store("storage", "8TB@7GB/s") == (8 * 10**12, 7e9)
    assert parse_store("storage", "1 TiB @ 512 MiB/s") == (1 << 40, float(1 << 29))


@pytest.mark.parametrize(
    ("parse", "text", "says"),
    [
        (parse_rate, "7GB", "such as 7GB/s"),
        (parse_rate, "7/h", "such as 7GB/s"),
        (parse_rate, "0GB/s", "above 0"),
        (parse_store, "8TB", "8TB@7GB/s"),
        (parse_store, "8TB@7GB", "'7GB' is not bytes per second"),
        (parse_store, "much@7GB/s", "'much' is not bytes"),
    ],
)
def test_what_is_no_rate(parse: Callable[[str, str], Any], text: str, says: str) -> None:
    with pytest.raises(BadArgument, match=says) as error:
        parse("storage", text)
    assert (error.value.name, error.value.value) == ("storage", text)


def test_what_people_read() -> None:
    assert [show_bytes(size) for size in (0, 999, 131072, 1.5e12, 999.9e9)] == [
        "0 B",
        "999 B",
        "131 KB",
        "1.5 TB",
        "1 TB",
    ]
    assert [show_seconds(s) for s in (0, 0.0451, 1.234, 3600, 86400)] == [
        "0 ms",
        "45.1 ms",
        "1.23 s",
        "60 min",
        "24 h",
    ]


@pytest.mark.parametrize(
    ("unit", "shown"),
    [
        (units.SIZE, {0: "0", 1000: "1000", 1024: "1KiB", 20 << 20: "20MiB", 3 << 29: "1536MiB", 1 << 30: "1GiB"}),
        (units.RATE, {7e9: "7000000000/s", 512.0 * 2**20: "512MiB/s"}),
        (units.TIME, {0.0: "0ms", 0.02: "20ms", 90.0: "90000ms"}),
    ],
)
def test_what_a_unit_shows_it_reads(unit: units.Unit, shown: dict[float, str]) -> None:
    for value, text in shown.items():
        assert unit.show(value) == text
        assert unit.parse("option", text) == value


def test_one_thing_has_no_plural() -> None:
    assert [counted(count, "request") for count in (0, 1, 2, 1500)] == [
        "0 requests", "1 request", "2 requests", "1,500 requests",
    ]  # fmt: skip
