"""Components and tiers: where a match may end, and what splits, locks and evictions do, for each row of the table."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from mainstem.cache.components import Chunked, Full, Local, State, Window, by_name
from mainstem.cache.prefix_cache import PrefixCache
from mainstem.cache.tree import Tree
from mainstem.errors import BadArgument


def windowed(window: int = 3, size: int = 1) -> Tree:
    return Tree(page_size=size, components=(Full(), Window(window)))


def stateful() -> Tree:
    return Tree(page_size=1, components=(Full(), State(weigh_flops=False)))


def freed(parts: list[Any]) -> list[list[int]]:
    return [sorted(part.tolist()) for part in parts]


# ---------------------------------------------------------------- window


def test_a_match_may_end_where_the_last_symbols_are_present() -> None:
    tree = windowed()
    tree.insert(list(range(8)), [range(8), [-1] * 3 + [13, 14, 15, 16, 17]])
    lengths = [tree.match(list(range(end))).length for end in range(9)]
    assert lengths == [0, 0, 0, 0, 0, 0, 6, 7, 8]
    assert tree.match(list(range(5))).reach == 5
    tree.check()


def test_a_short_prefix_needs_all_of_itself() -> None:
    tree = windowed()
    tree.insert([1, 2, 3, 4, 5], [range(5), range(10, 15)])
    assert [tree.match([1, 2, 3, 4, 5][:end]).length for end in range(6)] == list(range(6))


def test_a_window_counts_symbols_and_needs_whole_pages() -> None:
    tree = windowed(window=5, size=4)
    tree.insert(list(range(16)), [range(4), [-1, 11, 12, 13]])
    assert [tree.match(list(range(end))).length for end in (4, 8, 12, 16)] == [0, 0, 12, 16]
    tree.check()


def test_window_pages_go_oldest_first_and_leave_the_full_ones() -> None:
    tree = windowed()
    tree.insert(list(range(8)), [range(8), range(10, 18)])
    assert freed(tree.evict(5, "window")) == [[], [10, 11, 12, 13, 14]]
    assert tree.match(list(range(8))).length == 8
    assert freed(tree.evict(1, "window")) == [[], [15]]
    found = tree.match(list(range(8)))
    assert (found.length, found.reach) == (0, 8)
    tree.check()


def test_full_pages_take_the_window_with_them() -> None:
    tree = windowed()
    tree.insert(list(range(4)), [range(4), range(10, 14)])
    assert freed(tree.evict(2)) == [[2, 3], [12, 13]]
    assert tree.match(list(range(4))).length == 2
    assert freed(tree.flush()) == [[0, 1], [10, 11]]
    tree.check()


def test_a_lock_holds_the_whole_prefix_and_the_last_window() -> None:
    tree = windowed()
    node = tree.insert(list(range(8)), [range(8), range(10, 18)]).node
    tree.lock(node)
    assert freed(tree.evict(9)) == [[], []]
    assert freed(tree.evict(9, "window")) == [[], [10, 11, 12, 13, 14]]
    assert tree.match(list(range(8))).length == 8
    tree.unlock(node)
    assert freed(tree.evict(9, "window")) == [[], [15, 16, 17]]
    tree.check()


def test_a_window_that_was_evicted_can_be_published_again() -> None:
    tree = windowed()
    prefix = list(range(8))
    tree.insert(prefix, [range(8), range(10, 18)])
    tree.evict(8, "window")
    assert tree.match(prefix).length == 0
    tree.insert(prefix, [range(20, 28), [-1] * 5 + [25, 26, 27]])
    assert tree.match(prefix).length == 8
    assert tree.page_ids(tree.match(prefix).node, "window").tolist() == [-1] * 5 + [25, 26, 27]
    tree.check()


def test_pages_before_the_windows_of_inserted_prefixes_are_evicted_first() -> None:
    tree = windowed(4)
    tree.insert(range(900, 905), [range(5)] * 2)
    tree.insert(range(20), [range(10, 30)] * 2)
    assert freed(tree.evict(3, "window")) == [[], [0, 10, 11]]
    assert tree.peek(range(900, 905)) == 5
    assert freed(tree.evict(14, "window")) == [[], list(range(12, 26))]
    assert (tree.peek(range(900, 905)), tree.peek(range(20))) == (5, 20)
    assert freed(tree.evict(1, "window")) == [[], [1]]  # now the older prefix loses its end
    assert (tree.peek(range(900, 905)), tree.peek(range(20))) == (0, 20)
    tree.check()


def test_a_hit_keeps_the_window_that_it_used_and_no_other() -> None:
    tree = windowed(2)
    for first in (0, 100):
        tree.insert([first, first + 1], [[first, first + 1]] * 2)
        tree.match([first, first + 1])  # others part here
        whole = list(range(first, first + 6))
        tree.insert(whole, [whole, [-1, -1, *whole[2:]]])
    tree.match(list(range(6)))
    tree.evict(4, "window")  # the pages outside all windows
    assert freed(tree.evict(4, "window")) == [[], [0, 1, 100, 101]]
    assert (tree.peek(list(range(6))), tree.peek(list(range(100, 106)))) == (6, 6)
    tree.check()


# ---------------------------------------------------------------- state


def test_a_match_may_end_only_at_a_state() -> None:
    tree = stateful()
    tree.insert([1, 2], [range(2), [50]])
    tree.insert([1, 2, 3, 4, 5], [range(5), [51]])
    lengths = [tree.match([1, 2, 3, 4, 5][:end]).length for end in range(6)]
    assert lengths == [0, 0, 2, 2, 2, 5]
    found = tree.match([1, 2, 3, 4, 9])
    assert (found.length, found.reach, found.page_ids.tolist()) == (2, 4, [0, 1])
    tree.check()


def test_a_split_leaves_the_state_with_the_lower_half() -> None:
    tree = stateful()
    tree.insert([1, 2, 3, 4], [range(4), [50]])
    tree.insert([1, 2, 9], [[0, 1, 8], [51]])
    assert tree.match([1, 2]).length == 0
    assert tree.match([1, 2, 3, 4]).length == 4
    assert tree.match([1, 2, 9]).length == 3
    tree.insert([1, 2], [[0, 1], [52]])
    assert tree.match([1, 2, 7]).length == 2
    tree.check()


def test_what_saves_more_computing_outlives_what_was_used_later() -> None:
    tree = Tree(page_size=1, components=(Full(), State()))
    tree.insert(list(range(8)), [range(8), [50]])
    for at, state in ((20, 51), (30, 52), (40, 53)):
        tree.insert([at, at + 1], [[at, at + 1], [state]])
    assert [freed(tree.evict(1, "state"))[1] for _ in range(3)] == [[51], [52], [53]]
    tree.check()


def test_an_unused_state_ages() -> None:
    """The inflation follows each evicted state a tenth of the way."""
    tree = Tree(page_size=1, components=(Full(), State()))
    tree.insert(list(range(8)), [range(8), [50]])
    gone = []
    for at in range(100, 200, 4):
        tree.insert(range(at, at + 4), [range(at, at + 4), [at]])
        gone += freed(tree.evict(1, "state"))[1]
    assert gone.index(50) in (10, 11)
    tree.check()


def test_a_superseded_state_counts_a_tenth_of_what_it_saves() -> None:
    tree = Tree(page_size=1, components=(Full(), State()))
    tree.insert(range(15), [range(15), [50]])
    tree.insert(range(18), [range(18), [51]])  # the first one counts 1.5 now
    tree.insert([100], [[100], [52]])
    tree.insert([200, 201], [[200, 201], [53]])
    assert [freed(tree.evict(1, "state"))[1] for _ in range(2)] == [[52], [50]]
    assert freed(tree.evict(1, "state"))[1] == [53]
    assert freed(tree.evict(1, "state"))[1] == [51], "it saves 18 since the other one is gone, not 3"
    tree.check()


def test_a_superseded_state_counts_again_when_the_newer_one_is_gone() -> None:
    tree = Tree(page_size=1, components=(Full(), State()))
    tree.insert(range(15), [range(15), [50]])
    tree.insert(range(16), [range(16), [51]])
    tree.insert([100, 101], [[100, 101], [52]])
    assert [freed(tree.evict(1, "state"))[1] for _ in range(3)] == [[51], [52], [50]]
    tree.check()


def test_uses_count_by_their_fourth_root() -> None:
    def first_gone(uses: int) -> list[int]:
        tree = Tree(page_size=1, components=(Full(), State()))
        tree.insert(range(4), [range(4), [50]])
        tree.insert(range(20, 27), [range(20, 27), [51]])
        for _ in range(uses):
            tree.match(list(range(4)))
        return freed(tree.evict(1, "state"))[1]

    assert (first_gone(8), first_gone(9)) == ([50], [51])  # 4 * 9 ** 0.25 = 6.93 and 4 * 10 ** 0.25 = 7.11, beside 7


def test_a_state_saves_only_what_follows_the_state_above_it() -> None:
    tree = Tree(page_size=1, components=(Full(), State()))
    tree.insert(list(range(8)), [range(8), [50]])
    tree.insert([*range(8), 70], [[*range(8), 70], []])  # so that the first one is not superseded
    tree.insert(list(range(9)), [range(9), [51]])
    tree.insert([20, 21], [[20, 21], [52]])
    assert [freed(tree.evict(1, "state"))[1] for _ in range(3)] == [[51], [52], [50]]


@pytest.mark.parametrize("weigh", [True, False])
def test_a_hit_keeps_the_state_that_it_used_and_no_other(weigh: bool) -> None:
    tree = Tree(page_size=1, components=(Full(), State(weigh_flops=weigh)))
    a, b = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]
    for at, tokens in enumerate((a[:3], a, b[:3], b)):
        tree.insert(tokens, [range(10 * at, 10 * at + len(tokens)), [at]])
    for tokens in (a, b, a):
        tree.match(tokens)
    assert [freed(tree.evict(1, "state"))[1] for _ in range(2)] == [[0], [2]]
    assert (tree.peek(a), tree.peek(b)) == (6, 6)
    tree.check()


@pytest.mark.parametrize("parts", [False, True])
def test_a_state_that_its_sequence_has_grown_past_goes_first_unless_others_part_there(parts: bool) -> None:
    tree = stateful()
    tree.insert([20], [[20], [51]])
    tree.insert([1, 2], [range(2), [50]])
    if parts:
        tree.insert([1, 2, 9], [[0, 1, 9], []])
    tree.insert([1, 2, 3], [range(3), [52]])
    assert freed(tree.evict(1, "state"))[1] == ([51] if parts else [50])


def test_a_state_that_was_hit_from_another_branch_is_not_superseded_when_that_branch_is_gone() -> None:
    tree = stateful()
    tree.insert([20], [[20], [51]])
    tree.insert([1, 2], [range(2), [50]])
    tree.insert([1, 2, 3], [range(3), [52]])
    assert tree.match([1, 2, 9]).length == 2
    tree.insert([1, 2, 3, 4], [range(4), [53]])
    assert [freed(tree.evict(1, "state"))[1] for _ in range(3)] == [[52], [51], [50]]


def test_a_state_that_is_hit_again_is_no_longer_the_first_to_go() -> None:
    tree = stateful()
    tree.insert([1, 2], [range(2), [50]])
    tree.insert([1, 2, 3], [range(3), [52]])
    tree.insert([20], [[20], [51]])
    tree.match([1, 2])
    assert [freed(tree.evict(1, "state"))[1] for _ in range(3)] == [[52], [51], [50]]


def test_a_cap_leaves_states_that_others_part_from() -> None:
    cache = PrefixCache({Full(): 400, State(most_on_path=2): 50}, 1, copy_state=lambda source, target: None)

    def turn(tokens: list[int]) -> None:
        with cache.lease([*tokens, 999]) as lease:
            lease.reserve(lease.length - lease.reserved)
            lease.checkpoint(len(tokens))
            lease.publish(len(tokens))
            lease.finish(len(tokens))

    system = [0, 1, 2]
    for tokens in (system, [*system, 70], [*system, 71]):
        turn(tokens)
    cache.remove([*system, 70])  # the branch is gone, but it existed
    for grown in range(10):
        turn([*system, 71, *range(100, 101 + grown)])
        assert cache.peek([*system, 5]) == 3
        assert cache.pools["state"].cached <= 3
    cache.check()


def test_a_state_goes_alone_or_with_its_leaf() -> None:
    tree = stateful()
    tree.insert([1, 2], [range(2), [50]])
    tree.insert([1, 2, 3], [range(3), [51]])
    assert freed(tree.evict(1, "state")) == [[], [50]]
    assert (tree.match([1, 2]).length, tree.match([1, 2, 3]).length) == (0, 3)
    assert freed(tree.evict(1)) == [[2], [51]]
    assert (tree.match([1, 2, 3]).length, tree.match([1, 2, 3]).reach) == (0, 2)
    tree.check()


def test_a_lock_holds_the_state_it_ends_at() -> None:
    tree = stateful()
    tree.insert([1, 2], [range(2), [50]])
    node = tree.insert([1, 2, 3], [range(3), [51]]).node
    tree.lock(node)
    assert freed(tree.evict(9, "state")) == [[], [50]]
    tree.unlock(node)
    assert freed(tree.evict(9, "state")) == [[], [51]]
    tree.check()


def test_a_second_state_at_the_same_place_is_not_taken() -> None:
    tree = stateful()
    tree.insert([1, 2], [range(2), [50]])
    node = tree.insert([1, 2], [range(2), [60]]).node
    assert tree.page_ids(node, "state").tolist() == [-1, 50]


@pytest.mark.parametrize(
    "page_ids",
    [
        [range(3)],
        [range(3), range(3)],
        [range(3), [-5]],
        [range(2), []],
        [range(3), [1], [2]],
    ],
)
def test_ids_that_do_not_fit_the_components_are_refused(page_ids: list[Any]) -> None:
    tree = stateful()
    with pytest.raises(BadArgument):
        tree.insert([1, 2, 3], page_ids)
    assert tree.stats().nodes == 0


def test_a_hole_inside_a_window_is_refused() -> None:
    with pytest.raises(BadArgument):
        windowed().insert([1, 2, 3], [range(3), [10, -1, 12]])


def test_an_unknown_component_is_refused() -> None:
    for call in (lambda tree: tree.evict(1, "state"), lambda tree: tree.page_ids(0, "window")):
        with pytest.raises(BadArgument, match="full"):
            call(Tree())


# ---------------------------------------------------------------- tiers


def backed_up() -> tuple[Tree, int]:
    """Makes a tree with [1, 2, 3] on the device (pages 0 to 2) and on the host (pages 10 to 12)."""
    tree = Tree(page_size=1, tiers=2)
    node = tree.insert([1, 2, 3], range(3)).node
    tree.attach(node, range(10, 13), tier=1)
    tree.commit(node, tier=1)
    return tree, node


def test_a_prefix_that_left_the_device_is_still_known_on_the_host() -> None:
    tree, node = backed_up()
    assert freed(tree.evict(2)) == [[1, 2]]
    found = tree.match([1, 2, 3, 4])
    assert (found.length, found.host_length, found.host_node) == (1, 2, node)
    assert freed(tree.evict(1)) == [[0]]
    assert (tree.match([1, 2, 3]).length, tree.match([1, 2, 3]).host_length) == (0, 3)
    tree.check()


def test_load_back_makes_it_matchable_again() -> None:
    tree, _ = backed_up()
    tree.evict(3)
    node = tree.match([1, 2, 3]).host_node
    tree.attach(node, range(20, 23), tier=0)
    assert tree.match([1, 2, 3]).length == 0
    assert freed(tree.evict(3, tier=0)) == [[]]
    tree.commit(node)
    assert tree.match([1, 2, 3]).page_ids.tolist() == [20, 21, 22]
    tree.check()


def test_what_left_the_device_is_inserted_anew_and_counted() -> None:
    tree, node = backed_up()
    tree.evict(2)
    tree.match([1, 2, 3])
    before = tree.stats()
    assert before.hit_symbols == 1, "what the host has does not count as a hit on the device"
    tree.lock(node)
    added = tree.insert([1, 2, 3, 4], range(20, 24))
    assert added.existing == 1
    assert tree.page_ids(added.node).tolist() == [0, 21, 22, 23]
    stats = tree.stats()
    assert stats.inserted_pages - before.inserted_pages == 3
    assert (stats.cached_pages, stats.locked_pages) == (4, 3)
    tree.check()
    tree.unlock(node)
    assert tree.stats().evictable_pages == 4
    tree.check()


def test_a_backup_that_fails_leaves_the_device_as_it_was() -> None:
    tree = Tree(page_size=1, tiers=2)
    node = tree.insert([1, 2], range(2)).node
    tree.attach(node, [10, 11], tier=1)
    assert tree.match([1, 2, 3]).host_length == 0
    assert freed(tree.cancel(node, tier=1)) == [[10, 11]]
    assert tree.match([1, 2]).length == 2
    tree.check()


def test_a_split_divides_a_backup_that_is_on_its_way() -> None:
    tree = Tree(page_size=1, tiers=2)
    node = tree.insert([1, 2, 3, 4], range(4)).node
    tree.attach(node, range(10, 14), tier=1)
    tree.match([1, 2, 9])
    tree.check()
    tree.commit(node, tier=1)
    assert freed(tree.evict(4)) == [[0, 1, 2, 3]]
    assert tree.match([1, 2, 9]).host_length == 2
    tree.check()


def test_a_child_is_not_backed_up_before_its_parent() -> None:
    tree = Tree(page_size=1, tiers=2)
    parent = tree.insert([1], [0]).node
    tree.lock(parent)
    child = tree.insert([1, 2], [0, 1]).node
    with pytest.raises(BadArgument):
        tree.attach(child, [10], tier=1)
    tree.attach(parent, [11], tier=1)
    with pytest.raises(BadArgument):
        tree.attach(parent, [12], tier=1)
    tree.check()


def test_a_lock_on_one_tier_outlives_eviction_from_another() -> None:
    tree = Tree(page_size=1, tiers=2)
    node = tree.insert([1, 2, 3], range(3)).node
    tree.lock(node, tier=1)
    tree.evict(1)
    tree.check()
    tree.unlock(node, tier=1)
    tree.check()


def test_what_is_on_no_tier_is_gone() -> None:
    tree, _ = backed_up()
    tree.evict(3)
    assert freed(tree.evict(3, tier=1)) == [[10, 11, 12]]
    assert (tree.stats().nodes, tree.stats().namespaces) == (0, 0)
    tree.check()


# ---------------------------------------------------------------- several of a kind


def test_a_component_is_named_by_its_kind_and_by_its_tokens_where_there_are_several() -> None:
    assert list(by_name([Full(), Window(8), Chunked(4), State()])) == ["full", "window", "chunked", "state"]
    several = [Full(), Window(8), Window(2), Chunked(8), Chunked(4)]
    assert list(by_name(several)) == ["full", "window-8", "window-2", "chunked-8", "chunked-4"]
    assert list(by_name(several).values()) == several
    for twice in ([Full(), Full()], [Window(8), Window(8)], [State(), State(most_on_path=2)]):
        with pytest.raises(BadArgument, match="once"):
            by_name(twice)


def test_each_window_is_evicted_by_its_own_name_and_needed_for_itself() -> None:
    tree = Tree(page_size=1, components=(Full(), Window(4), Window(2)))
    node = tree.insert(list(range(8)), [range(8), range(10, 18), range(20, 28)]).node
    assert freed(tree.evict(4, "window-4")) == [[], [10, 11, 12, 13], []]
    assert tree.page_ids(node, "window-4").tolist() == [-1] * 4 + [14, 15, 16, 17]
    assert [tree.match(list(range(end))).length for end in (5, 6, 7, 8)] == [0, 0, 0, 8]
    assert freed(tree.evict(7, "window-2")) == [[], [], [20, 21, 22, 23, 24, 25, 26]]
    assert tree.match(list(range(8))).length == 0
    with pytest.raises(BadArgument, match="window"):
        tree.evict(1, "window")
    tree.check()


# ---------------------------------------------------------------- everything against a plain model


class Residency:
    """What is present, by component and prefix; this decides where a match may end."""

    def __init__(self, size: int, local: tuple[Local, ...], state: bool) -> None:
        self.size, self.local, self.state = size, local, state
        self.held: list[dict[tuple[int, ...], int]] = [{} for _ in range(1 + len(local) + state)]

    def first_needed(self, row: Local, end: int) -> int:
        """Returns the first page of the window or the chunk that a match ending at `end` needs."""
        back = end % row.tokens if isinstance(row, Chunked) else row.tokens
        return max(end - back, 0) // self.size

    def first_locked(self, row: Local, end: int) -> int:
        """Returns the first page that a lock keeps, which keeps the last page of a chunk, too."""
        at_boundary = isinstance(row, Chunked) and end > 0 and end % row.tokens == 0
        return (end - row.tokens) // self.size if at_boundary else self.first_needed(row, end)

    def allows(self, prefix: tuple[int, ...]) -> bool:
        fronts = [prefix[:end] for end in range(self.size, len(prefix) + 1, self.size)]
        return (
            all(front in self.held[0] for front in fronts)
            and all(
                front in self.held[1 + at]
                for at, row in enumerate(self.local)
                for front in fronts[self.first_needed(row, len(prefix)) :]
            )
            and (not self.state or prefix in self.held[-1])
        )

    def match(self, tokens: list[int]) -> int:
        ends = range(self.size, len(tokens) + 1, self.size)
        return max((end for end in ends if self.allows(tuple(tokens[:end]))), default=0)

    def kept_by(self, prefix: tuple[int, ...], component: int) -> set[tuple[int, ...]]:
        """Returns what a lock at the end of a prefix keeps."""
        fronts = [prefix[:end] for end in range(self.size, len(prefix) + 1, self.size)]
        if component == 0:
            return set(fronts)
        if component <= len(self.local):
            return set(fronts[self.first_locked(self.local[component - 1], len(prefix)) :])
        return {prefix}


class ComponentWorld:
    """A tree with several components, and a model of what is in it."""

    def __init__(self, size: int, local: tuple[Local, ...], state: bool) -> None:
        components = (Full(), *local, *([State()] if state else []))
        self.tree = Tree(page_size=size, components=components)
        self.model = Residency(size, local, state)
        self.names = list(by_name(components))
        self.locked: list[tuple[int, tuple[int, ...]]] = []
        self.next_id = 0

    def new_ids(self, count: int, outside_window: int = 0) -> list[int]:
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        return [-1] * outside_window + ids[outside_window:]

    def insert(self, tokens: list[int], rng: random.Random) -> None:
        pages = len(tokens) // self.model.size
        columns = [self.new_ids(pages)]
        for row in self.model.local:
            outside = self.model.first_needed(row, pages * self.model.size)
            columns.append(self.new_ids(pages, rng.choice([0, outside])))
        if self.model.state:
            columns.append(self.new_ids(int(pages > 0 and rng.random() < 0.7)))
        added = self.tree.insert(tokens, columns)
        assert added.length == pages * self.model.size
        for component, (name, column) in enumerate(zip(self.names, columns, strict=True)):
            in_tree = self.tree.page_ids(added.node, name).tolist() if pages else []
            offered = [-1] * (pages - len(column)) + column if name == "state" else column
            for page, (real, given) in enumerate(zip(in_tree, offered, strict=True)):
                front = tuple(tokens[: (page + 1) * self.model.size])
                assert real == self.model.held[component].get(front, given)
                if real >= 0:
                    self.model.held[component][front] = real

    def match(self, tokens: list[int], lock: bool) -> None:
        found = self.tree.match(tokens)
        assert found.length == self.model.match(tokens)
        prefix = tuple(tokens[: found.length])
        assert found.page_ids.tolist() == [self.model.held[0][front] for front in sorted(self.model.kept_by(prefix, 0))]
        if lock and found.node:
            self.tree.lock(found.node)
            self.locked.append((found.node, prefix))

    def unlock(self, rng: random.Random) -> None:
        node, prefix = self.locked.pop(rng.randrange(len(self.locked)))
        assert self.tree.peek(list(prefix)) == len(prefix)
        self.tree.unlock(node)

    def evict(self, count: int, component: int) -> None:
        parts = self.tree.evict(count, self.names[component])
        assert len(parts[component]) <= count
        for row, part in enumerate(parts):
            kept = {front for _, prefix in self.locked for front in self.model.kept_by(prefix, row)}
            places = {page: front for front, page in self.model.held[row].items()}
            for page in part.tolist():
                assert places[page] not in kept
                del self.model.held[row][places[page]]
        full = self.model.held[0]
        assert all(len(front) == self.model.size or front[: -self.model.size] in full for front in full)

    def step(self, rng: random.Random) -> None:
        tokens = [int(rng.random() < 0.3) for _ in range(rng.randrange(8 * self.model.size))]
        roll = rng.random()
        if roll < 0.4:
            self.insert(tokens, rng)
        elif roll < 0.7:
            self.match(tokens, rng.random() < 0.3)
        elif roll < 0.8 and self.locked:
            self.unlock(rng)
        else:
            self.evict(rng.randrange(5), rng.randrange(len(self.names)))
        self.tree.check()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(
    ("local", "state"),
    [
        ((), True),
        *itertools.product(
            [(row,) for row in (Window(3), Window(1), Chunked(4), Chunked(3), Chunked(1))], [False, True]
        ),
        *itertools.product([(Window(2), Window(5)), (Window(4), Window(3), Chunked(2), Chunked(5))], [False, True]),
    ],
    ids=str,
)
def test_a_match_ends_where_every_component_allows_it(size: int, local: tuple[Local, ...], state: bool) -> None:
    world, rng = ComponentWorld(size, local, state), random.Random(f"{size} {local} {state}")
    for _ in range(600):
        world.step(rng)
    for node, _ in world.locked:
        world.tree.unlock(node)
    world.tree.flush()
    assert (world.tree.stats().nodes, world.tree.stats().cached_pages) == (0, 0)


# ---------------------------------------------------------------- the order in which windows are evicted


def grown(tree: Tree, tokens: list[int], first_id: int, part: int) -> None:
    """Inserts a sequence into the tree part by part, as a chunked prefill does."""
    after = 0
    for begin in range(0, len(tokens), part):
        end = min(begin + part, len(tokens))
        ids = range(first_id + begin, first_id + end)
        after = tree.insert(tokens[:end], [[*range(first_id, first_id + begin), *ids]] * 2, after=after).node


def test_pages_outside_all_windows_are_evicted_first_however_young() -> None:
    tree = Tree(page_size=1, components=(Full(), Window(2)))
    grown(tree, [1, 2, 3, 4], 0, part=4)
    grown(tree, list(range(10, 18)), 10, part=2)
    gone = freed(tree.evict(8, "window"))[1]
    assert sorted(gone) == [0, 1, 10, 11, 12, 13, 14, 15]
    assert [tree.match(tokens).length for tokens in ([1, 2, 3, 4], list(range(10, 18)))] == [4, 8]
    assert freed(tree.evict(2, "window"))[1] == [2, 3], "then the oldest"
    tree.check()


def test_a_window_in_which_a_match_ended_stays_when_its_prefix_grows() -> None:
    tree = Tree(page_size=1, components=(Full(), Window(2)))
    grown(tree, [1, 2, 3, 4], 0, part=4)
    end = tree.match([1, 2, 3, 4, 9]).node
    tree.lock(end)  # splits the node where the window begins
    longer = tree.insert([1, 2, 3, 4, 5, 6, 7], [range(7)] * 2, after=end).node
    tree.lock(longer)
    for node in (end, longer):
        tree.unlock(node)
    assert sorted(freed(tree.evict(3, "window"))[1]) == [0, 1, 4]
    assert tree.match([1, 2, 3, 4, 9]).length == 4
    tree.check()


# ---------------------------------------------------------------- chunks


def chunked(size: int = 1, chunk: int = 4) -> Tree:
    return Tree(page_size=size, components=(Full(), Chunked(chunk)))


def test_a_match_that_ends_at_a_boundary_needs_no_page_of_a_chunk() -> None:
    tree = chunked()
    tree.insert(range(8), [range(8), [-1] * 8])
    assert tree.match(range(8)).length == 8
    assert tree.match(range(7)).length == 4, "to compute position 7, pages 4 to 6 are read"
    tree.check()


def test_a_match_inside_a_chunk_needs_its_pages_and_none_before() -> None:
    tree = chunked()
    tree.insert(range(10), [range(10), range(10, 20)])
    assert freed(tree.evict(8, "chunked")) == [[], list(range(10, 18))], "what lies before the boundary goes first"
    assert [tree.match(range(end)).length for end in (10, 9, 8, 7)] == [10, 9, 8, 4]
    tree.check()


def test_a_lock_holds_the_chunk_of_the_last_page() -> None:
    """At a boundary a match needs nothing; but who copies the pages of a prefix locks it, so its lock holds a chunk."""
    for end, kept in ((10, [18, 19]), (8, [14, 15, 16, 17]), (7, [14, 15, 16])):
        tree = chunked()
        tree.insert(range(10), [range(10), range(10, 20)])
        match = tree.match(range(end))
        tree.lock(match.node)
        gone = freed(tree.evict(99, "chunked"))[1]
        assert sorted({*range(10, 20)} - set(gone)) == kept
        tree.unlock(match.node)
        tree.check()


def test_pages_that_lie_across_a_boundary_are_kept() -> None:
    tree = chunked(size=2, chunk=3)  # page 1 has positions 2 and 3, and position 3 begins a chunk
    tree.insert(range(4), [range(2), [-1, 9]])
    assert tree.match(range(4)).length == 4
    tree.evict(1, "chunked")
    assert tree.match(range(4)).length == 0
    tree.check()


def test_an_insertion_that_ends_at_a_boundary_needs_no_id() -> None:
    tree = Tree(page_size=1, components=(Chunked(4),))
    nothing = tree.insert(range(8), [-1] * 8)
    assert (nothing.node, nothing.length, tree.stats().nodes) == (0, 0, 0), "and then there is nothing to keep"
    with pytest.raises(BadArgument, match="an id of some component at the end of the key"):
        tree.insert(range(7), [-1] * 7)
    added = tree.insert(range(10), [*[-1] * 8, 5, 6])
    assert (added.length, tree.match(range(10)).length) == (10, 10)
    assert tree.insert(range(8), [-1] * 8).length == 8
    tree.check()


def test_a_chunk_has_at_least_one_token() -> None:
    with pytest.raises(BadArgument, match="tokens"):
        Chunked(0)
