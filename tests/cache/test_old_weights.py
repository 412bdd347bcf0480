from __future__ import annotations

import pytest

from mainstem.cache.namespaces import (
    Namespace,
    describe_namespace,
    encode_namespace,
    of_weights,
    owner_of,
    split_weights,
)
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.errors import BadArgument

PAGE = 2
SPACES: list[Namespace | str | None] = [
    None,
    "a",
    Namespace("a"),
    Namespace(salt="a", extra=("w",)),
    Namespace(tenant="a"),
]


def put(cache: PrefixCache, tokens: list[int], namespace: Namespace | str | None) -> None:
    with cache.lease([*tokens, 0], namespace) as lease:
        lease.reserve(len(tokens) - lease.reserved)
        lease.finish(len(tokens))


@pytest.mark.parametrize("namespace", SPACES)
def test_a_version_is_part_of_a_namespace_and_no_part_of_its_owner(namespace: Namespace | str | None) -> None:
    plain = encode_namespace(namespace)
    assert of_weights(namespace, None) is namespace
    for weights in ("", "w", "x"):
        versioned = of_weights(namespace, weights)
        encoded = encode_namespace(versioned)
        assert split_weights(encoded) == (weights, plain) and split_weights(plain) == (None, plain)
        assert owner_of(encoded) == owner_of(plain)
        assert encode_namespace(of_weights(versioned, None)) == plain
        assert describe_namespace(encoded).endswith(f"weights={weights!r}")
    names = {encode_namespace(of_weights(each, weights)) for each in SPACES for weights in (None, "", "w", "a")}
    assert len(names) == 4 * len(SPACES), "none is another"


def test_a_name_stands_alone() -> None:
    with pytest.raises(BadArgument, match="name"):
        Namespace(name="a", salt="s")


def test_what_older_weights_have_computed_goes_first() -> None:
    cache = PrefixCache(pages=6, page_size=PAGE)
    put(cache, [2, 2, 2, 2], of_weights("a", "w"))
    put(cache, [1, 1, 1, 1], "a")  # used last
    assert cache.old_weights.keep("w", [None, "w"]) == 0
    assert cache.peek([1, 1, 1, 1, 0], "a") == 4, "it is still found"
    put(cache, [3] * 8, of_weights("b", "w"))
    assert cache.peek([1, 1, 1, 1, 0], "a") == 0 and cache.peek([2, 2, 2, 2, 0], of_weights("a", "w")) == 4


def test_what_no_version_finds_is_removed_retained_or_not() -> None:
    cache = PrefixCache(pages=64, page_size=PAGE)
    for number, namespace in enumerate(["a", of_weights("a", "w"), of_weights(Namespace(salt="s"), "v")]):
        put(cache, [number + 1] * 4, namespace)
        cache.retention.retain([number + 1] * 4, 1e9, namespace)
    cache.old_weights.keep("w", ["v"])
    assert cache.retention.stats().prefixes == 1, "of the newest weights alone"
    found = [cache.peek([1] * 5, "a"), cache.peek([2] * 5, of_weights("a", "w"))]
    assert [*found, cache.peek([3] * 5, of_weights(Namespace(salt="s"), "v"))] == [0, 4, 4]
    cache.old_weights.keep("w")
    assert cache.pool.cached == 2
    cache.check()
