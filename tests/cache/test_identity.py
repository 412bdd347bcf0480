"""Identity: two that differ in any field have different bytes, so they never share a stored page."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mainstem.cache.identity import Identity
from mainstem.errors import BadArgument
from mainstem.tiers.storage.sealer import Sealer

FIELDS = [field.name for field in fields(Identity)]
NUMBERS = {"page_size", "tp_rank", "tp_size"}
STRINGS = [name for name in FIELDS if name not in NUMBERS | {"extra"}]
WORDS: dict[str, Any] = {name: name for name in STRINGS}
GOOD = Identity(**WORDS, page_size=16, tp_rank=1, tp_size=4, extra=("a", "b"))

# Few letters, so that different splits often concatenate to the same text; a lone surrogate is also a str.
TEXT = st.text("ab\0\ud800é", max_size=4)


def other_value(name: str) -> Any:
    """Returns another valid value of a field, whatever its type, so new fields are covered automatically."""
    value = getattr(GOOD, name)
    if isinstance(value, str):
        return value + "'"
    return value + 1 if isinstance(value, int) else (*value, "c")


@st.composite
def identities(draw: st.DrawFn) -> Identity:
    size = draw(st.integers(1, 3))
    values: dict[str, Any] = {name: draw(TEXT) for name in STRINGS}
    values["attention"] = draw(st.sampled_from(["gqa", "mha", "mla"]))
    values |= {"page_size": draw(st.integers(1, 3)), "tp_rank": draw(st.integers(0, size - 1)), "tp_size": size}
    return Identity(**values, extra=draw(st.lists(TEXT, max_size=3).map(tuple)))


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[Identity, Identity]:
    """Draws two identities that differ in few fields, if any, and may have the same text in another place."""
    one = draw(identities())
    changes: dict[str, Any] = draw(st.dictionaries(st.sampled_from(STRINGS), TEXT, max_size=2))
    extra = draw(st.just(one.extra) | st.lists(TEXT, max_size=3).map(tuple))
    return one, replace(one, **changes, extra=extra)


def shared(identity: Identity) -> Any:
    """Returns what two identities must have equal for their pages to have the same names."""
    return replace(identity, tp_rank=0, tp_size=1)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(neighbours() | st.tuples(identities(), identities()))
def test_equal_bytes_mean_equal_identities(pair: tuple[Identity, Identity]) -> None:
    one, two = pair
    assert (one.encode() == two.encode()) == (shared(one) == shared(two))


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({"extra": ("a", "b")}, {"extra": ("b", "a")}),
        ({"extra": ("ab",)}, {"extra": ("a", "b")}),
        ({"extra": ("ab", "c")}, {"extra": ("a", "bc")}),
        ({"extra": ()}, {"extra": ("",)}),
        ({"model": "ab", "weights": "c"}, {"model": "a", "weights": "bc"}),
        ({"model": "a", "weights": "b"}, {"model": "b", "weights": "a"}),
        ({"symbols": "TokenKeys/4", "extra": ()}, {"symbols": "", "extra": ("TokenKeys/4",)}),
        ({"page_size": 1, "extra": ("1",)}, {"page_size": 11, "extra": ("",)}),
        ({"model": "\ud800"}, {"model": "\ud801"}),
        ({"model": "e\u0301"}, {"model": "\u00e9"}),
    ],
)
def test_the_same_text_in_another_place_is_another_identity(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert replace(GOOD, **one).encode() != replace(GOOD, **two).encode()


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_changes_every_key(name: str) -> None:
    other = replace(GOOD, **{name: other_value(name)})
    shard = name in ("tp_rank", "tp_size")
    assert (other.encode() == GOOD.encode()) == shard
    assert (other.shard == GOOD.shard) != shard
    mine, theirs = Sealer(GOOD), Sealer(other)
    assert (mine.root(b"") == theirs.root(b"")) == shard
    assert mine.record("n") != theirs.record("n")
    keys = [sealer.keys(sealer.names(sealer.root(b""), bytes(64), 16), "full") for sealer in (mine, theirs)]
    assert not {*keys[0]} & {*keys[1]}


def test_ranks_share_what_is_the_same_on_each() -> None:
    mla = replace(GOOD, attention="mla")
    assert mla.replicated and not GOOD.replicated
    for rank, size in ((0, 4), (3, 4), (0, 1)):
        assert replace(mla, tp_rank=rank, tp_size=size).shard == mla.shard == ""
        assert replace(GOOD, tp_rank=rank, tp_size=size).shard != GOOD.shard


@pytest.mark.parametrize("name", [name for name in FIELDS if name not in ("tp_rank", "tp_size", "attention")])
def test_of_mla_every_other_field_still_counts(name: str) -> None:
    mla = replace(GOOD, attention="mla")
    assert replace(mla, **{name: other_value(name)}).encode() != mla.encode()


@pytest.mark.parametrize("name", STRINGS)
@pytest.mark.parametrize("value", [None, 1, b"bytes", ["list"]])
def test_a_word_that_is_no_str_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(BadArgument, match=f"^{name} ") as caught:
        replace(GOOD, **{name: value})
    assert (caught.value.name, caught.value.value) == (name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("page_size", 0),
        ("page_size", 1.5),
        ("page_size", True),
        ("page_size", "16"),
        ("page_size", 2**31),
        ("tp_size", 0),
        ("tp_rank", -1),
        ("tp_rank", 4),
        ("extra", ["a"]),
        ("extra", "ab"),
        ("extra", ("a", 1)),
        ("extra", None),
    ],
)
def test_a_value_outside_its_range_is_refused_by_its_name(name: str, value: Any) -> None:
    with pytest.raises(BadArgument) as caught:
        replace(GOOD, **{name: value})
    assert caught.value.name == name


def test_an_encoding_names_each_field_and_counts_its_strings() -> None:
    """Stores keep keys made of it: with other bytes, nothing that was stored is found again."""

    def string(text: str) -> bytes:
        return len(text.encode()).to_bytes(8, "little") + text.encode()

    named = replace(GOOD, model="é")
    whole = [name for name in FIELDS if name not in ("tp_rank", "tp_size")]
    values = {**{name: [str(getattr(named, name))] for name in whole}, "extra": ["a", "b"]}
    parts = [
        string(name) + len(values[name]).to_bytes(8, "little") + b"".join(map(string, values[name])) for name in whole
    ]
    assert named.encode() == b"".join(parts)
