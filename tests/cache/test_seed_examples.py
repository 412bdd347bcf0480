"""Behaviour that earlier prefix caches describe: their worked examples and test plans, as tests.

Docstrings name the source: "test plan n" is the numbered plan of the typed-token design, "sharing example" the paged
image requests, "demo" the small tree that is printed step by step, "block hashes" the index over hashed blocks.

Rules that other tests of the cache hold are not repeated here. Of the test plan these are:

    1     test_match_splits_where_the_keys_part
    3     test_locks_are_counted, test_unlock_without_a_lock_changes_nothing, test_a_split_keeps_locks_on_both_halves
    4, 5  test_a_second_request_hits_the_pages_of_the_first, test_finish_publishes_a_prompt_whole
    6, 7  test_insert_of_an_existing_prefix_adopts_nothing, test_insert_at_its_own_end_does_nothing
    14    test_stateful
    16    test_a_namespace_goes_with_its_last_page
"""

from __future__ import annotations

import numpy as np
import pytest
from rigs.cache import owners, prefill

from mainstem.cache.keys import HashKeys, Image, Text, TypedKeys, hash_blocks
from mainstem.cache.namespaces import Namespace
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.tree import Tree
from mainstem.errors import OutOfPages

BOS = 1
PHOTO = Image(bytes(range(16)), 729)


def ids(start: int, end: int) -> np.ndarray:
    return np.arange(start, end, dtype=np.int32)


# ---------------------------------------------------------------- the tree


def test_an_image_counts_as_all_its_positions() -> None:
    """Test plan 2."""
    tree = Tree(page_size=1, keys=TypedKeys())
    tree.insert([Text(BOS), PHOTO, Text(1), Text(2)], ids(0, 732))
    assert tree.match([Text(BOS), PHOTO, Text(1), Text(2)]).length == 732
    partial = tree.match([Text(BOS), PHOTO])
    assert (partial.length, partial.page_ids.tolist()) == (730, list(range(730)))


def test_a_lease_that_publishes_what_it_has_keeps_one_lock() -> None:
    """Test plan 7, as a lease does it."""
    cache = PrefixCache(10, 1)
    lease = prefill(cache, [1, 2, 3])
    for _ in range(3):
        lease.publish(3)
    assert cache.stats().pool.locked == 3
    lease.finish()
    assert cache.stats().pool.locked == 0
    assert cache.flush() == 3


def test_a_lookup_creates_no_namespace() -> None:
    """Test plan 17."""
    tree, cache = Tree(page_size=1), PrefixCache(10, 1)
    for number in range(100):
        found = tree.match([BOS, 1, 2], f"image {number}")
        assert (found.node, found.length) == (0, 0)
        assert cache.peek([BOS, 1, 2], f"image {number}") == 0
        cache.lease([BOS, 1, 2], f"image {number}").abort()
    assert tree.stats().namespaces == cache.stats().tree.namespaces == 0
    tree.insert([BOS, 1, 2], ids(0, 3), "image 42")
    assert (tree.stats().namespaces, tree.match([BOS, 1, 2], "image 42").length) == (1, 3)


def test_pages_after_an_image_are_counted_in_positions() -> None:
    """Test plan 18."""
    tree = Tree(page_size=1, keys=TypedKeys())
    prefix = [Text(BOS), PHOTO]
    tree.insert(prefix, ids(0, 730))
    whole = [*prefix, *map(Text, range(10))]
    found = tree.match(whole)
    sequence = tree.keys.sequence()
    sequence.append(whole)
    assert (found.length, sequence.tokens_at(found.length)) == (730, 2)
    added = tree.insert(whole, ids(0, 740), after=found.node)
    assert (added.length - added.existing, added.page_ids.tolist()) == (10, list(range(730, 740)))
    assert tree.page_ids(added.node)[730:].tolist() == list(range(730, 740))


# ---------------------------------------------------------------- the owners of pages


def test_a_prompt_that_is_known_whole_still_leaves_its_last_token() -> None:
    """Test plan 8, as a lease does it."""
    cache = PrefixCache(100, 1)
    prefill(cache, [BOS, 1, 2]).finish()
    lease = cache.lease([BOS, 1, 2])
    assert lease.hit == 2
    lease.reserve(1)
    last = int(lease.page_table[2])
    assert cache.pool.owner(last) == "private"
    lease.publish(3)
    assert cache.pool.owner(last) == "free"
    lease.finish()
    assert owners(cache) == (97, 3, 0)


def test_two_sequences_share_a_prefix_and_write_to_pages_of_their_own() -> None:
    """Test plan 9, as a lease does it."""
    cache = PrefixCache(2000, 1, keys=TypedKeys())
    prompt = [Text(BOS), PHOTO, Text(1)]
    first = prefill(cache, prompt)
    second = cache.lease(prompt)
    assert second.hit == 730
    second.reserve(1)
    assert second.page_table[:730].tolist() == first.page_table[:730].tolist()
    for _ in range(10):
        for lease in (first, second):
            lease.append([Text(5)])
            lease.reserve(1)
    assert not set(first.page_table[731:].tolist()) & set(second.page_table[730:].tolist())
    assert {cache.pool.owner(int(page)) for page in second.page_table[730:]} == {"private"}
    first.finish()
    second.finish()
    owners(cache)


def test_a_prompt_known_whole_takes_one_private_page_and_frees_it() -> None:
    """Test plan 10."""
    cache = PrefixCache(100, 1)
    prefill(cache, [BOS, 1, 2, 3]).finish()
    before = owners(cache)
    lease = cache.lease([BOS, 1, 2, 3])
    assert (lease.hit, len(lease.page_table)) == (3, 3)
    lease.reserve(1)
    assert owners(cache) == (95, 4, 1)
    assert cache.pool.owner(int(lease.page_table[3])) == "private"
    lease.abort()
    assert owners(cache) == before


def test_a_hit_of_one_token_leaks_nothing() -> None:
    """Test plan 11."""
    cache = PrefixCache(99, 1)
    prefill(cache, [BOS, *range(2, 11)]).finish()
    assert owners(cache) == (89, 10, 0)
    lease = prefill(cache, [BOS, 100, 101])
    assert (lease.hit, lease.published) == (1, 3)
    lease.finish()
    assert owners(cache) == (87, 12, 0)
    assert cache.flush() == 12
    assert owners(cache) == (99, 0, 0)


@pytest.mark.parametrize("how", ["no cache", "first", "append"])
def test_every_way_to_a_prompt_reads_one_page_for_each_position(how: str) -> None:
    """Test plan 12, as a lease does it: attention reads the same number of positions with and without the cache."""
    cache = PrefixCache(100, 4, enabled=how != "no cache")
    prompt = list(range(30))
    if how == "append":
        prefill(cache, prompt).finish()
    lease = cache.lease(prompt)
    assert lease.hit == (28 if how == "append" else 0)
    lease.reserve(lease.length - lease.hit)
    assert (lease.reserved, len(lease.page_table), len(set(lease.page_table.tolist()))) == (30, 8, 8)
    lease.finish()
    owners(cache)


def test_locked_prefixes_are_not_evicted_for_room() -> None:
    """Test plan 13."""
    cache = PrefixCache(100, 1)
    leases = [prefill(cache, [number]) for number in range(100)]
    waiting = cache.lease(list(range(200, 210)))
    with pytest.raises(OutOfPages) as refused:
        waiting.reserve(10)
    assert (refused.value.free, refused.value.evictable) == (0, 0)
    assert owners(cache) == (0, 100, 0)
    for lease in leases[:50]:
        lease.finish()
    waiting.reserve(10)
    assert owners(cache) == (0, 90, 10)
    waiting.abort()


def test_pages_are_conserved_over_misses_whole_hits_and_part_hits() -> None:
    """Test plan 15."""
    cache = PrefixCache(99, 1)
    hits = []
    for prompt in ([BOS, 1, 2], [BOS, 1, 2], [BOS, 1, 3, 4]):
        lease = prefill(cache, prompt)
        hits.append(lease.hit)
        lease.finish()
        assert owners(cache)[2] == 0
    assert hits == [0, 2, 2]
    for number in range(50):
        prefill(cache, [BOS, *range(number % 10 + 1)]).finish()
        assert owners(cache)[2] == 0
    cache.flush()
    assert owners(cache) == (99, 0, 0)


# ---------------------------------------------------------------- adapters, typed tokens


def test_adapters_share_nothing_and_adapter_none_is_not_adapter_zero() -> None:
    """Namespaces of the typed-token design."""
    cache = PrefixCache(100, 1)
    base = [None, Namespace(adapter="0"), Namespace(adapter="v1"), Namespace(adapter="v2"), Namespace(salt="v1")]
    assert [prefill(cache, [1, 2, 3], namespace).hit for namespace in base] == [0] * 5
    assert [cache.peek([1, 2, 3, 4], namespace) for namespace in base] == [3] * 5


def test_two_images_side_by_side_share_up_to_where_they_differ() -> None:
    """Images after images: the first is shared, the second is not, and no image is cut."""
    cache = PrefixCache(100, 1, keys=TypedKeys())
    cat, dog, owl = (Image(bytes([number] * 16), 20) for number in range(3))
    prefill(cache, [1, cat, dog, 2]).finish()
    assert cache.peek([1, cat, owl, 2]) == 21
    assert cache.peek([1, dog, cat, 2]) == 1
    assert cache.peek([1, cat]) == 1


# ---------------------------------------------------------------- sharing example

TEXT = list(range(100))
IMAGE1, IMAGE2, IMAGE3 = (
    list(range(start, start + length)) for start, length in ((2000, 1024), (4000, 768), (6000, 896))
)
CHUNK = 512


@pytest.mark.parametrize(("size", "hit"), [(1, 1124), (4, 1124), (16, 1120), (64, 1088)])
def test_a_second_request_reuses_the_text_and_the_first_image(size: int, hit: int) -> None:
    """Sharing example: 1,124 tokens are shared and their whole pages are reused: at page size 16, 1,120 tokens."""
    cache = PrefixCache(5000 // size, size)
    prefill(cache, TEXT + IMAGE1 + IMAGE2).finish()
    lease = cache.lease(TEXT + IMAGE1 + IMAGE3)
    assert (lease.hit, lease.length) == (hit, 2020)


def test_the_tail_of_the_common_part_is_copied_where_that_is_possible() -> None:
    """Sharing example: the four tokens after the last whole page need no compute either."""
    copies: list[int] = []
    cache = PrefixCache(400, 16, copy_page=lambda source, target, positions: copies.append(positions))
    prefill(cache, TEXT + IMAGE1 + IMAGE2).finish()
    assert cache.lease(TEXT + IMAGE1 + IMAGE3).hit == 1124
    assert copies == [4]


def test_a_request_shares_with_one_that_still_runs() -> None:
    """Sharing example: each chunk is visible once it is published; the shared part is locked until both have ended."""
    cache = PrefixCache(400, 16)
    first = cache.lease(TEXT + IMAGE1 + IMAGE2)
    first.reserve(first.length)
    asked = TEXT + IMAGE1 + IMAGE3
    seen = []
    for end in (CHUNK, 2 * CHUNK, 3 * CHUNK):
        first.publish(end)
        seen.append(cache.peek(asked))
    assert seen == [512, 1024, 1120]
    third = cache.lease(asked)
    assert third.page_table.tolist() == first.page_table[:70].tolist()
    third.reserve(third.length - third.reserved)
    third.publish(third.hit + CHUNK)
    first.finish()
    assert cache.stats().pool.locked == (1120 + CHUNK) // 16
    third.finish()
    assert cache.stats().pool.locked == 0
    assert [view.start + view.length for view in cache.tree.nodes() if view.children == 2] == [1120]
    assert cache.pool.cached == 70 + (1892 - 1120) // 16 + (2020 - 1120) // 16


def test_the_same_prompt_catches_up_while_the_first_runs() -> None:
    """Sharing example, equal prompts: the later one reuses what is published and frees what both computed."""
    cache = PrefixCache(300, 16)
    prompt = list(range(2048))
    first = cache.lease(prompt)
    first.reserve(2048)
    first.publish(1024)
    third = cache.lease(prompt)
    assert third.hit == 1024
    third.reserve(1024)
    first.publish(1536)
    third.publish(1536)
    assert third.page_table[:96].tolist() == first.page_table[:96].tolist()
    first.finish()
    third.finish()
    assert owners(cache) == (172, 128, 0)


def test_the_tree_of_four_sequences() -> None:
    """Structure example: a shared beginning, two branches, one of them longer, and an unrelated sequence."""
    tree = Tree(page_size=1)
    for start, tokens in enumerate(([1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 4, 5, 6, 7], [8, 9, 10, 11, 12])):
        tree.insert(tokens, ids(10 * start, 10 * start + len(tokens)))
    shape = [(view.start, view.length, view.children) for view in tree.nodes()]
    # [3] and the [4, 5] that came after it are one node: nothing ends between them.
    assert shape == [(0, 2, 2), (2, 3, 0), (2, 4, 0), (0, 5, 0)]
    found = tree.match([1, 2, 3, 4, 5, 6])
    assert (found.length, found.page_ids.tolist()) == (5, [0, 1, 2, 13, 14])


# ---------------------------------------------------------------- demo


def test_the_two_prompts_of_the_first_steps() -> None:
    """Demo: 27 characters, then a split at 17 with branches of 10 and 11; 38 in all."""
    tree = Tree(page_size=1)
    first, second = b"hello, what your first name", b"hello, what your second name"
    tree.insert(list(first), ids(0, 27))
    assert [(view.length, view.key[::4]) for view in tree.nodes()] == [(27, first)]
    tree.insert(list(second), ids(100, 128))
    assert [(view.length, view.key[::4]) for view in tree.nodes()] == [
        (17, b"hello, what your "),
        (10, b"first name"),
        (11, b"second name"),
    ]
    assert tree.stats().cached_pages == 38


def test_insert_match_insert_evict() -> None:
    """Demo: eight tokens; four of them match; a branch is added; evicting four takes the older branch."""
    tree = Tree(page_size=1)
    tree.insert([1, 2, 3, 4, 5, 6, 7, 8], ids(1, 9))
    assert tree.match([1, 2, 3, 4, 9, 10, 11, 12]).page_ids.tolist() == [1, 2, 3, 4]
    tree.insert([1, 2, 3, 4, 9, 10, 11, 12], ids(11, 19))
    assert [view.length for view in tree.nodes()] == [4, 4, 4]
    assert tree.stats().cached_pages == 12
    assert sorted(tree.evict(4)[0].tolist()) == [5, 6, 7, 8]
    assert [view.length for view in tree.nodes()] == [4, 4]
    assert tree.match([1, 2, 3, 4, 9, 10, 11, 12]).page_ids.tolist() == [1, 2, 3, 4, 15, 16, 17, 18]


# ---------------------------------------------------------------- block hashes


@pytest.mark.parametrize("width", [8, 16])
def test_blocks_are_found_by_their_hashes(width: int) -> None:
    """Block hashes: one symbol per block, page size 1; equal hashes mean equal prefixes."""
    tree = Tree(page_size=1, keys=HashKeys(width))
    tokens = list(range(64))
    tree.insert(hash_blocks(tokens, 16, width), ids(100, 104))
    assert tree.match(hash_blocks([*tokens[:32], 7, *tokens[33:]], 16, width)).page_ids.tolist() == [100, 101]
    assert tree.match(hash_blocks([7, *tokens[1:]], 16, width)).length == 0
