"""The order of a batch: a depth-first walk of the tree of its prompts.

One after another, with a cache that evicts the least recently used, this computes as few tokens as any order with any
eviction can: whoever shares most with a prompt came right before it, and its path is what was used last. So a prompt
finds all that it shares with any earlier one, up to what the cache holds. Several at once need room for what runs
beside that path.

Siblings, prompts or whole subtrees, begin with the one that has the longest answer, so that a batch does not end with
one slow request. What is shared always decides first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import TypeAlias

from mainstem.cache.keys import HashKeys, TokenKeys, TokenLike
from mainstem.errors import BadArgument, BadTokens, check_integer

_KINDS = (TokenKeys(), HashKeys(8), HashKeys(16))
_EQUAL = 2**62
"""The depth at which equal prompts part: below all that goes on from them."""

Branch: TypeAlias = "tuple[int, int, list[Branch]]"
"""A prompt or a subtree: minus its longest answer, its first prompt, and what begins with it; of a prompt nothing."""


def order(
    prompts: Sequence[TokenLike],
    capacity: int | None = None,
    *,
    lengths: Sequence[int] | None = None,
    page_size: int = 1,
) -> list[int]:
    """Returns the indices of prompts in the order in which a cache computes the fewest tokens.

    Prompts that begin alike are neighbours, and equal ones as well. Ties are broken by the index.

    Args:
        prompts: token ids, or hashes of blocks: 64-bit integers, or 16 bytes. All are of one kind.
        capacity: tokens that the cache holds; None: all. Nobody finds more than that of an earlier prompt, so the order
            of prompts that share as much is that of their answers. A cache that holds the longest prompt changes
            nothing.
        lengths: tokens of the answer that is expected for each prompt; None: all are equally long.
        page_size: tokens of a page, the least that prompts share. 1: what hashes name, or any page; with the size of
            the engine's pages, answers decide between prompts that share less than one.

    Raises:
        BadTokens: a prompt is no sequence of ids.
        BadArgument: capacity or page size is below 1; the lengths are negative, or not as many as the prompts.

    >>> order([[1, 2, 3], [7, 8], [1, 2, 4]])
    [0, 2, 1]
    >>> order([[1, 2, 3], [7, 8], [1, 2, 4]], lengths=[5, 9, 7])
    [1, 2, 0]
    """
    page_size = check_integer("page_size", page_size, 1, 2**31 - 1)
    room = None if capacity is None else check_integer("capacity", capacity, 1, 2**62)
    answers = _checked(lengths, len(prompts))
    keys, width = encoded(prompts)
    ranked = sorted(range(len(keys)), key=keys.__getitem__)
    page = page_size * width
    pairs = ((keys[one], keys[other]) for one, other in pairwise(ranked))
    depths = [_EQUAL if one == other else shared(one, other) // page for one, other in pairs]
    found = _walk(_tree(ranked, depths, answers))
    if room is None or lengths is None:
        return found
    reach = room // page_size * page
    groups = groupby(found, key=lambda index: keys[index][:reach])
    return [index for _, group in groups for index in sorted(group, key=lambda each: -answers[each])]


def encoded(prompts: Sequence[TokenLike]) -> tuple[list[bytes], int]:
    """Returns the prompts as bytes, which sort as a tree is walked, and the bytes of an item.

    Raises:
        BadTokens: see `order`.
    """
    for kind in _KINDS:
        keys: list[bytes] = []
        try:
            keys.extend(kind.encode(prompt) for prompt in prompts)
        except BadTokens as error:
            failed = BadTokens(f"prompt {len(keys)}: {error}")
        else:
            return keys, kind.symbol_bytes
    raise failed


def shared(one: bytes, other: bytes) -> int:
    """Returns how many bytes at the beginning are the same."""
    length = min(len(one), len(other))
    differ = int.from_bytes(one[:length], "little") ^ int.from_bytes(other[:length], "little")
    return ((differ & -differ).bit_length() - 1) // 8 if differ else length


def _checked(lengths: Sequence[int] | None, count: int) -> list[int]:
    if lengths is None:
        return [0] * count
    if len(lengths) != count:
        raise BadArgument("lengths", f"{len(lengths)} of them", f"one for each of the {count} prompts")
    return [check_integer(f"lengths[{at}]", length, 0, 2**62) for at, length in enumerate(lengths)]


def _tree(ranked: Sequence[int], depths: Sequence[int], answers: Sequence[int]) -> Branch:
    """Builds the tree of prompts.

    Args:
        ranked: prompts, so that those that begin alike are neighbours.
        depths: how much each of them shares with the next one.
    """
    path: list[tuple[int, list[Branch]]] = [(0, [])]  # depths, and what begins with them so far
    for index, depth in zip(ranked, [*depths, 0], strict=False):
        if depth > path[-1][0]:
            path.append((depth, []))
        path[-1][1].append((-answers[index], index, []))
        while path[-1][0] > depth:
            _, below = path.pop()
            if path[-1][0] < depth:
                path.append((depth, []))
            path[-1][1].append(_branch(below))
    return _branch(path[0][1])


def _branch(below: list[Branch]) -> Branch:
    below.sort(reverse=True)  # `_walk` takes the last one first
    return min((longest for longest, _, _ in below), default=0), min((first for _, first, _ in below), default=0), below


def _walk(tree: Branch) -> list[int]:
    found, waiting = [], tree[2]
    while waiting:
        _, index, below = waiting.pop()
        if below:
            waiting += below
        else:
            found.append(index)
    return found
