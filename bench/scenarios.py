"""The scenarios of the index benchmark: cases that a steady load does not show. Each runs in its own process.

    name         what is measured
    long         lookup of a long cached prompt, in one node and split into many
    lists        the same, with the prompt as a list of int
    miss         lookup of a long prompt of which nothing is cached
    leaves       eviction of one page at a time among many short branches; again with half of them locked
    session      a request of one chat with many turns, at its beginning and at its end
    namespaces   the first request in one of many namespaces, and the second, which hits the first
    chunks       publishing a chunk of a chunked prefill, near the beginning and far from it
    decode       publishing 16 decoded tokens, near the beginning and far from it
    busy         lookup next to a thread that computes in Python without a pause
    cold         lookup of a prompt that was not used recently, in a large tree
    memory-...   memory per cached token, by the length of the nodes
    split        memory that is still held after all but the first page of long prompts was evicted

A scenario takes a function that creates systems, and returns a `Result`. All inputs are created before the clock
starts. It raises if a system has wrong hits or frees the wrong number of pages: its figures would be meaningless.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import repeat
from statistics import median

import numpy as np
from numpy.typing import NDArray

from bench.clock import freeze, percentile, resident_bytes, sample
from bench.systems import Ints, Make, System
from bench.workload import Chats

VOCAB = 150_000
PARTING = VOCAB
"""A token that no prompt has: a branch that begins with it forks from all others."""

DECODED = 16
"""Tokens of one step of `decode`: a page."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of the scenarios. Lengths are in tokens.

    Args:
        page_size: tokens per page, except in `long`.
        long_pages: page sizes of `long`.
        prompt: length of the long prompts.
        nodes: numbers of nodes into which `long` splits its prompt.
        calls: maximum number of lookups of one prompt.
        leaves: branches of `leaves`.
        evictions: maximum number of pages that it evicts.
        turns: turns of the one chat of `session`.
        ends: requests to count at its beginning and at its end.
        namespaces: number of namespaces.
        chunk: tokens to publish at a time.
        chunk_prompts: prompts to compute in chunks.
        near, far: tokens before the first and before the last counted chunks.
        steps: chunks to count at each place; `decode` counts twelve times as many steps.
        decode_chunk: length of the chunks before the steps of `decode`.
        decode_far: tokens before its far steps; its near steps have `near`.
        busy_prompt: length of the prompt of `busy`.
        busy_calls: maximum number of its lookups.
        cold_roots: branches at the root of the large tree; each has 255 nodes.
        cold_calls: number of its lookups.
        memory_tokens: tokens of each `memory` scenario.
        split_prompts: prompts to split, at least 2.
        budget_s: seconds after which a loop of calls ends early.
        limit_s: seconds after which a scenario is killed.
    """

    page_size: int = 16
    long_pages: tuple[int, ...] = (1, 16)
    prompt: int = 131_072
    nodes: tuple[int, ...] = (1, 64, 1024)
    calls: int = 200
    leaves: int = 50_000
    evictions: int = 5_000
    turns: int = 500
    ends: int = 50
    namespaces: int = 10_000
    chunk: int = 512
    chunk_prompts: int = 3
    near: int = 1_024
    far: int = 122_880
    steps: int = 16
    decode_chunk: int = 100
    decode_far: int = 100_000
    busy_prompt: int = 3_400
    busy_calls: int = 20_000
    cold_roots: int = 3_137
    cold_calls: int = 10_000
    memory_tokens: int = 2_097_152
    split_prompts: int = 16
    budget_s: float = 1.5
    limit_s: float = 60.0


QUICK = Sizes(
    long_pages=(16,), calls=50, leaves=5_000, evictions=1_000, turns=100, ends=20, namespaces=1_000, chunk_prompts=1,
    decode_far=50_000, busy_calls=4_000, cold_roots=314, cold_calls=4_000, memory_tokens=1_048_576, split_prompts=4,
    budget_s=0.2, limit_s=15.0,
)  # fmt: skip


@dataclass(slots=True)
class Result:
    """The result of a scenario on a system.

    Attributes:
        measures: measures for the tables, by name; the last word of a name is the unit.
        facts: further figures.
        note: how the scenario differed for this system.
    """

    measures: dict[str, float] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    note: str = ""


Scenario = Callable[[Make, Sizes, bool], Result]
"""scenario(make, sizes, small): with `small`, the largest trees have a tenth of the size."""


class WrongAnswer(Exception):
    """A system did not do what the scenario measures."""


def long(make: Make, sizes: Sizes, small: bool = False) -> Result:
    """Looks up a long prompt, at each page size and for each number of nodes that the system supports."""
    result = Result()
    for page_size in sizes.long_pages:
        for nodes in sizes.nodes:
            try:
                system = make(page_size, 2 * sizes.prompt)
            except ValueError as error:  # the system refuses this page size
                result.note = str(error)
                continue
            if nodes > 1 and "nodes" in system.lacks:
                result.note = system.lacks["nodes"]
                continue
            prompt = _tokens(1, sizes.prompt)
            cut(system, prompt, nodes, page_size)
            times = _look_ups(system, np.append(prompt, _PART), len(prompt), sizes)
            name = f"page {page_size}, {nodes} node{'s' * (nodes > 1)}"
            result.measures[f"{name}, µs"] = median(times)
            result.facts[f"{name}, p99 µs"] = percentile(times, 0.99)
            result.facts[f"{name}, calls"] = len(times)
    return result


def cut(system: System, prompt: Ints, nodes: int, page_size: int) -> None:
    """Caches a prompt in that many nodes, each split off by a branch of one page.

    Splits from the end: each new branch then descends through a single node, regardless of the splits after it.
    """
    system.serve(system.prepare(prompt))
    step = len(prompt) // nodes // page_size * page_size
    for at in range(step * (nodes - 1), 0, -step):
        branch = np.append(prompt[:at], np.full(page_size, PARTING, np.int32))
        _expect("tokens found of a branch", system.serve(system.prepare(branch)), at)


def lists(make: Make, sizes: Sizes, small: bool = False) -> Result:
    """Looks up a long prompt given as a list, converted if the system needs it."""
    system = make(sizes.page_size, 2 * sizes.prompt)
    prompt = _tokens(1, sizes.prompt)
    system.serve(system.prepare(prompt))
    given = [*prompt.tolist(), PARTING]

    def convert_and_look_up(tokens: list[int]) -> int:
        return system.look_up(system.prepare(tokens))

    call = convert_and_look_up if system.lists == "converted" else system.look_up
    taken = repeat((system.prepare(given) if system.lists == "own" else given,), sizes.calls)
    freeze()
    timed = sample(call, taken, sizes.budget_s)
    _expect("tokens found", set(timed.results), {len(prompt)})
    return Result({"µs": median(timed.us)}, _spread(timed.us))


def miss(make: Make, sizes: Sizes, small: bool = False) -> Result:
    """Looks up a long prompt in a tree of other prompts."""
    system = make(sizes.page_size, 3 * sizes.prompt)
    system.serve(system.prepare(_tokens(1, sizes.prompt)))
    for seed in range(64):
        system.serve(system.prepare(_tokens(100 + seed, sizes.prompt // 64)))
    times = _look_ups(system, _tokens(2, sizes.prompt), 0, sizes)
    return Result({"µs": median(times)}, _spread(times))


def leaves(make: Make, sizes: Sizes, small: bool = False) -> Result:
    """Evicts page after page, with all branches free and with half of them locked."""
    result = Result()
    for name, locked in (("all free", False), ("half locked", True)):
        system, free = _branches(make, sizes, locked)
        freeze()
        timed = sample(system.evict, repeat((1,), min(sizes.evictions, free)), sizes.budget_s)
        if min(timed.results) < 1:
            raise WrongAnswer("an eviction freed nothing")
        result.measures |= _p50_p99(name, timed.us)
        result.facts |= {f"{name}, calls": len(timed.us), f"{name}, pages freed": sum(timed.results)}
        result.facts[f"{name}, free leaves"] = free
    return result


def _branches(make: Make, sizes: Sizes, lock_half: bool) -> tuple[System, int]:
    """Fills a pool with two-page branches after a shared prompt, used in random order; returns how many are free."""
    two = 2 * sizes.page_size
    system = make(sizes.page_size, two * (sizes.leaves + 1))
    shared = _tokens(1, two)
    tails = _tokens(2, sizes.leaves * two).reshape(sizes.leaves, two)
    for tail in tails:
        system.serve(system.prepare(np.append(shared, tail)))
    free = 0
    for n, at in enumerate(np.random.default_rng(3).permutation(sizes.leaves)):
        key = system.prepare(np.concatenate([shared, tails[at], _PART]))
        if lock_half and n % 2:
            system.hold(key)
        else:
            _expect("tokens found of a branch", system.look_up(key), 2 * two)
            free += 1
    return system, free


def session(make: Make, sizes: Sizes, small: bool = False) -> Result:
    """Serves each request of one long chat."""
    chat = Chats(chats=1, turns=sizes.turns, systems=1, system_length=512, question_lengths=(32, 160), answer_length=96)
    prompts = list(chat.prompts())
    system = make(sizes.page_size, 2 * len(prompts[-1]))
    freeze()
    timed = sample(system.serve, ((system.prepare(prompt),) for prompt in prompts))
    missed = [len(prompt) - hit for prompt, hit in zip(prompts, timed.results, strict=True)][1:]
    if max(missed) > 160 + 96 + sizes.page_size:
        raise WrongAnswer(f"a turn missed {max(missed)} tokens of the chat")
    first, last = median(timed.us[: sizes.ends]), median(timed.us[-sizes.ends :])
    measures = {f"first {sizes.ends} turns, µs": first, f"last {sizes.ends} turns, µs": last}
    return Result(measures, {"tokens at the end": len(prompts[-1])})


def namespaces(make: Make, sizes: Sizes, small: bool = False) -> Result:
    """Serves the same prompt in each namespace, then again with a question after it."""
    pages = 8
    system = make(sizes.page_size, (pages + 2) * sizes.page_size * sizes.namespaces)
    prompt = _tokens(1, pages * sizes.page_size)
    longer = np.append(prompt, _tokens(2, 2 * sizes.page_size))
    names = [f"tenant-{n}" for n in range(sizes.namespaces)]
    result = Result()
    for visit, tokens, known in (("first", prompt, 0), ("second", longer, len(prompt))):
        keys = [(system.prepare_in(tokens, name), name) for name in names]
        order = np.random.default_rng(3).permutation(len(keys))
        freeze()
        timed = sample(system.serve, (keys[at] for at in order))
        _expect(f"tokens found at the {visit} visits", set(timed.results), {known})
        result.measures |= _p50_p99(f"{visit} visit", timed.us)
    return result


def chunks(make: Make, sizes: Sizes, small: bool = False) -> Result:
    """Computes prompts chunk by chunk; counts the chunks after `near` and after `far` tokens."""
    system = make(sizes.page_size, (sizes.chunk_prompts + 1) * sizes.prompt)
    near, far, begins = list[float](), list[float](), list[float]()
    for seed in range(sizes.chunk_prompts):
        tokens = _tokens(seed, sizes.prompt)
        key = system.prepare(tokens)
        freeze()
        began = sample(system.grow, [(key,)])
        (growth,) = began.results
        us = sample(growth.publish, [(end,) for end in range(sizes.chunk, sizes.prompt + 1, sizes.chunk)]).us
        growth.finish()
        near += us[sizes.near // sizes.chunk :][: sizes.steps]
        far += us[sizes.far // sizes.chunk :][: sizes.steps]
        begins += began.us
        _expect("tokens found", system.look_up(system.prepare(np.append(tokens, _PART))), len(tokens))
    result = _near_and_far(near, far)
    result.measures["before the first, µs"] = median(begins)
    return result


def decode(make: Make, sizes: Sizes, small: bool = False) -> Result:
    """Publishes steps of 16 tokens after a short and after a long chain of chunks."""
    steps = 12 * sizes.steps
    us: list[list[float]] = []
    for length in (sizes.near, sizes.decode_far):
        length -= length % sizes.page_size
        system = make(sizes.page_size, 2 * length + DECODED * (steps + sizes.page_size))
        tokens = _tokens(1, length)
        growth = system.grow(system.prepare(tokens))
        ends = [end - end % sizes.page_size for end in range(sizes.decode_chunk, length, sizes.decode_chunk)]
        for end in [*ends, length]:
            growth.publish(end)
        parts = _tokens(2, DECODED * steps).reshape(steps, DECODED)
        given = [(system.prepare(part),) for part in parts]
        freeze()
        us.append(sample(growth.append, given, sizes.budget_s).us)
        growth.finish()
        whole = np.concatenate([tokens, parts[: len(us[-1])].ravel(), _PART])
        _expect("tokens found", system.look_up(system.prepare(whole)), len(whole) - 1)
    return _near_and_far(*us)


def _near_and_far(near: Sequence[float], far: Sequence[float]) -> Result:
    close, distant = median(near), median(far)
    measures = {"near, µs": close, "far, µs": distant, "far / near": distant / close}
    return Result(measures, {"far, p99 µs": percentile(far, 0.99), "calls at each place": len(far)})


def busy(make: Make, sizes: Sizes, small: bool = False) -> Result:
    """Looks up a prompt while another thread competes for the interpreter."""
    system = make(sizes.page_size, 4 * sizes.busy_prompt)
    prompt = _tokens(1, sizes.busy_prompt - sizes.busy_prompt % sizes.page_size)
    for part in (len(prompt) // 3, 2 * len(prompt) // 3, len(prompt)):
        whole = prompt[: part - part % sizes.page_size]
        system.serve(system.prepare(whole))
        system.serve(system.prepare(np.append(whole, np.full(sizes.page_size, PARTING, np.int32))))
    stop = threading.Event()
    thread = threading.Thread(target=_compute, args=(stop,))
    thread.start()
    try:
        times = _look_ups(system, np.append(prompt, _PART), len(prompt), sizes, sizes.busy_calls)
    finally:
        stop.set()
        thread.join()
    return Result(_p50_p99("", times), {"calls": len(times)})


def _compute(stop: threading.Event) -> None:
    """Computes in plain Python without waiting; rarely checks whether it should stop."""
    n = 0
    while not stop.is_set():
        for step in range(1000):
            n += step


def cold(make: Make, sizes: Sizes, small: bool = False) -> Result:
    """Looks up prompts of 512 tokens in eight nodes, each once, in a tree far larger than any CPU cache."""
    forest = Forest(max(sizes.cold_roots // 10, 1) if small else sizes.cold_roots, sizes.page_size)
    system = make(sizes.page_size, forest.tokens + 2 * forest.length)
    chance = np.random.default_rng(5)
    for prompt in forest.prompts(chance.permutation(forest.leaves)):
        system.serve(system.prepare(prompt))
    asked = chance.choice(forest.leaves, min(sizes.cold_calls, forest.leaves), replace=False)
    keys = [(system.prepare(np.append(prompt, _PART)),) for prompt in forest.prompts(asked)]
    freeze()
    timed = sample(system.look_up, keys, 4 * sizes.budget_s)
    _expect("tokens found", set(timed.results), {forest.length})
    facts: dict[str, float] = {"tokens in the tree": forest.tokens, "nodes": forest.nodes, "calls": len(timed.us)}
    note = f"a tree of {forest.tokens / 1e6:.1f} million tokens: a tenth" if small else ""
    return Result(_p50_p99("", timed.us), facts, note)


class Forest:
    """Binary trees of random tokens, eight nodes deep, four pages per node. A prompt is a path to a leaf.

        root -- [........]-+-[........]- ...     level 0: `roots` nodes; level k: roots * 2**k of them
                           +-[........]- ...

    Each inner node has two children, so that no index can join two nodes.
    """

    DEPTH = 8

    def __init__(self, roots: int, page_size: int) -> None:
        node = 4 * page_size
        self.levels = [_tokens(level, (roots << level) * node).reshape(-1, node) for level in range(self.DEPTH)]
        self.leaves = len(self.levels[-1])
        self.nodes = sum(map(len, self.levels))
        self.tokens = self.nodes * node
        self.length = self.DEPTH * node

    def prompts(self, leaves: NDArray[np.int64]) -> Iterator[Ints]:
        """Yields the paths to these leaves."""
        for start in range(0, len(leaves), 1000):
            some = leaves[start : start + 1000]
            nodes = [level[some >> (self.DEPTH - 1 - at)] for at, level in enumerate(self.levels)]
            yield from np.concatenate(nodes, axis=1)


class Meadow:
    """Prompts of random tokens that share nothing: each is a node below the root."""

    def __init__(self, leaves: int, length: int) -> None:
        self.leaves, self.tokens = leaves, leaves * length
        self.rows = _tokens(1, self.tokens).reshape(leaves, length)

    def prompts(self, leaves: NDArray[np.int64]) -> Iterator[Ints]:
        """Yields the prompts of these leaves."""
        return (self.rows[leaf] for leaf in leaves)


def memory(make: Make, sizes: Sizes, small: bool = False, *, node: int) -> Result:
    """Measures the growth of the process per token when nodes of this length are cached. Creates prompts before."""
    source = _source(node, sizes)
    throw_away = make(sizes.page_size, 4096)  # imports and allocations of the first use are not the cache's
    throw_away.serve(throw_away.prepare(_tokens(9, 2048)))
    del throw_away
    at_first = resident_bytes()
    tokens = source.tokens
    system = make(sizes.page_size, tokens)
    empty = resident_bytes()
    for prompt in source.prompts(np.random.default_rng(5).permutation(source.leaves)):
        system.serve(system.prepare(prompt))
    full = resident_bytes()  # includes the source, like the other two
    result = Result(
        {"bytes a token": (full - empty) / tokens, "with its pool, bytes a token": (full - at_first) / tokens}
    )
    held = system.held_bytes()
    if held is not None:
        result.measures["as it says itself, bytes a token"] = held / tokens
    return result


def _source(node: int, sizes: Sizes) -> Forest | Meadow:
    if node == 4 * sizes.page_size:
        return Forest(max(sizes.memory_tokens // node // 255, 1), sizes.page_size)
    return Meadow(max(sizes.memory_tokens // node, 1), node)


def split(make: Make, sizes: Sizes, small: bool = False) -> Result:
    """Measures the memory of prompts after each was split after its first page, and the rest was evicted."""
    page_size = sizes.page_size
    prompts = _tokens(1, sizes.split_prompts * sizes.prompt).reshape(sizes.split_prompts, sizes.prompt)
    system = make(page_size, 2 * sizes.prompt)
    heads = [np.append(prompt[:page_size], _PART) for prompt in prompts]
    times = [_split_one(system, prompts[0], heads[0], page_size)]
    before = resident_bytes()  # the first split makes the pool allocate memory that belongs to no prompt
    times += [_split_one(system, *each, page_size) for each in zip(prompts[1:], heads[1:], strict=True)]
    grown = resident_bytes() - before
    result = Result({"look-up that splits, µs": median(times), "held, bytes a prompt": grown / len(times[1:])})
    held = system.held_bytes()
    if held is not None:
        result.measures["held / the same without the rest"] = held / _held_by(make, heads, sizes)
        result.facts["held, bytes"] = held
    return result


def _split_one(system: System, prompt: Ints, head: Ints, page_size: int) -> float:
    """Caches a prompt, locks its first page, evicts the rest; returns the microseconds of the lookup that split it."""
    system.serve(system.prepare(prompt))
    timed = sample(system.look_up, [(system.prepare(head),)])
    _expect("tokens found", timed.results, [page_size])
    system.hold(system.prepare(head))
    rest = len(prompt) // page_size - 1
    _expect("pages freed", system.evict(rest), rest)
    return timed.us[0]


def _held_by(make: Make, heads: Sequence[Ints], sizes: Sizes) -> int:
    """Returns the bytes of a tree that never had more than these first pages."""
    system = make(sizes.page_size, 2 * sizes.prompt)
    for head in heads:
        system.serve(system.prepare(head[: sizes.page_size]))
        system.hold(system.prepare(head))
    held = system.held_bytes()
    assert held is not None
    return held


SCENARIOS: dict[str, Scenario] = {
    "long": long,
    "lists": lists,
    "miss": miss,
    "leaves": leaves,
    "session": session,
    "namespaces": namespaces,
    "chunks": chunks,
    "decode": decode,
    "busy": busy,
    "cold": cold,
    "memory-4096": partial(memory, node=4096),
    "memory-256": partial(memory, node=256),
    "memory-64": partial(memory, node=64),
    "split": split,
}

_PART = np.array([PARTING], np.int32)


def _tokens(seed: int, n: int) -> Ints:
    """Returns n random tokens."""
    return np.random.default_rng(seed).integers(0, VOCAB, n, dtype=np.int32)


def _look_ups(system: System, prompt: Ints, expected: int, sizes: Sizes, calls: int | None = None) -> list[float]:
    """Looks up one prompt many times; returns the microseconds of each."""
    key = system.prepare(prompt)
    _expect("tokens found", system.look_up(key), expected)
    freeze()
    timed = sample(system.look_up, repeat((key,), calls or sizes.calls), sizes.budget_s)
    _expect("tokens found", set(timed.results), {expected})
    return timed.us


def _p50_p99(name: str, us: Sequence[float]) -> dict[str, float]:
    lead = f"{name}, " if name else ""
    return {f"{lead}p50 µs": median(us), f"{lead}p99 µs": percentile(us, 0.99)}


def _spread(us: Sequence[float]) -> dict[str, float]:
    return {"p99 µs": percentile(us, 0.99), "calls": len(us)}


def _expect(what: str, got: object, expected: object) -> None:
    if got != expected:
        raise WrongAnswer(f"{what}: {got}, not {expected}")
