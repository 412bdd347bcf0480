"""Namespaces: prefixes are shared only within one, and different namespaces have different encodings."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mainstem.cache.namespaces import Namespace, describe_namespace, encode_namespace, owner_of
from mainstem.cache.tree import Tree
from mainstem.errors import BadArgument

LOOKALIKES: list[Any] = [
    None,
    "",
    b"",
    "a",
    b"a",
    "None",
    "a\0b",
    Namespace(adapter="a"),
    Namespace(salt="a"),
    Namespace(extra=("a",)),
    Namespace(adapter=""),
    Namespace(salt=""),
    Namespace(extra=("",)),
    Namespace(adapter="a", salt="b"),
    Namespace(adapter="b", salt="a"),
    Namespace(adapter="ab"),
    Namespace(adapter="a", extra=("b",)),
    Namespace(salt="a", extra=("b",)),
    Namespace(extra=("a", "b")),
    Namespace(extra=("ab",)),
    Namespace(extra=("a", "", "b")),
    Namespace(extra=("a\0", "b")),
    Namespace(extra=("a", "\0b")),
    Namespace(adapter="None"),
    Namespace(tenant="a"),
    Namespace(tenant=""),
    Namespace(adapter="a", tenant="b"),
    Namespace(salt="a", tenant="b"),
    Namespace(salt="b", tenant="a"),
]


def test_namespaces_that_look_alike_share_nothing() -> None:
    tree = Tree(page_size=1)
    for page, namespace in enumerate(LOOKALIKES):
        tree.insert([1, 2], np.array([2 * page, 2 * page + 1], dtype=np.int32), namespace)
    assert tree.stats().namespaces == len(LOOKALIKES)
    for page, namespace in enumerate(LOOKALIKES):
        assert tree.match([1, 2], namespace).page_ids.tolist() == [2 * page, 2 * page + 1]
    tree.check()


def test_equal_namespaces_share() -> None:
    tree = Tree(page_size=1)
    tree.insert([1], np.array([0], dtype=np.int32), Namespace("a", "b", ("c",)))
    assert tree.peek([1], Namespace(adapter="a", salt="b", extra=("c",))) == 1


def test_the_empty_namespace_is_none() -> None:
    tree = Tree(page_size=1)
    tree.insert([1], np.array([0], dtype=np.int32))
    assert tree.peek([1], Namespace()) == 1


@given(st.data())
def test_no_two_different_namespaces_meet(data: st.DataObject) -> None:
    text = st.none() | st.text("ab\0", max_size=3)
    kinds = st.builds(Namespace, text, text, st.lists(st.text("ab\0", max_size=2), max_size=3).map(tuple))
    first, second = data.draw(kinds), data.draw(kinds)
    tree = Tree(page_size=1)
    tree.insert([1], np.array([0], dtype=np.int32), first)
    assert (tree.peek([1], second) == 1) == (first == second)


def test_every_field_of_a_namespace_counts() -> None:
    base = {"adapter": "a", "salt": "s", "extra": ("e",)}
    tree = Tree(page_size=1)
    tree.insert([1], np.array([0], dtype=np.int32), Namespace(**base))
    for field, other in itertools.product(base, ("x", None)):
        changed = {**base, field: ((other,) if other else ()) if field == "extra" else other}
        assert tree.peek([1], Namespace(**changed)) == 0


@pytest.mark.parametrize("namespace", [1, 1.5, ["a"], ("a",), object()])
def test_other_kinds_of_namespace_are_refused(namespace: Any) -> None:
    tree = Tree(page_size=1)
    with pytest.raises(BadArgument):
        tree.match([1], namespace)
    with pytest.raises(BadArgument):
        tree.insert([1], np.array([0], dtype=np.int32), namespace)
    assert tree.stats().namespaces == 0


def test_a_namespace_goes_with_its_last_page() -> None:
    tree = Tree(page_size=1)
    for page in range(10):
        tree.insert([1], np.array([page], dtype=np.int32), f"tenant {page}")
    tree.evict(4)
    assert tree.stats().namespaces == 6
    tree.flush()
    assert tree.stats().namespaces == 0
    tree.insert([1], np.array([0], dtype=np.int32), "tenant 0")
    assert tree.stats().namespaces == 1


def test_an_encoding_is_a_tag_a_length_in_bytes_and_utf_8() -> None:
    """Stores keep it in their keys: with other bytes, nothing that was stored is found again."""
    encoded = Namespace(adapter="ä", salt="s", extra=("", "x")).encode()
    fields = [(b"a", "ä".encode()), (b"s", b"s"), (b"e", b""), (b"e", b"x")]
    assert encoded == b"".join(tag + len(data).to_bytes(8, "little") + data for tag, data in fields)
    assert describe_namespace(encoded) == "adapter='ä', salt='s', extra='', extra='x'"


@pytest.mark.parametrize(
    ("namespace", "same"),
    [
        (None, Namespace(adapter="x", extra=("weights 1",))),
        ("a", "a"),
        (b"a", b"a"),
        (Namespace(salt="s"), Namespace(adapter="x", salt="s", extra=("e",))),
        (Namespace(tenant="t"), Namespace("x", "s", ("e",), "t")),
    ],
)
def test_adapters_and_what_else_kv_depends_on_make_no_other_owner(namespace: Any, same: Any) -> None:
    assert owner_of(encode_namespace(namespace)) == owner_of(encode_namespace(same))


def test_tenants_salts_and_names_are_owners_of_their_own() -> None:
    spaces = [
        None,
        "a",
        b"a",
        "b",
        Namespace(salt="a"),
        Namespace(salt="b"),
        Namespace(tenant="a"),
        Namespace(tenant="b"),
    ]
    assert len({owner_of(encode_namespace(space)) for space in spaces}) == len(spaces)
