"""The scheduler with sliding windows, recurrent states and images, over a `ghost` in place of a model."""

from __future__ import annotations

import hashlib
import random
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from rigs.ghost import Ghost, WrongKVError, complete, prompt
from rigs.scheduler import PAGE, Bench

from mainstem.cache.components import Chunked, Component, Full, State, Window
from mainstem.errors import BadArgument
from mainstem.runtime.memory.sizing import window_pages
from mainstem.runtime.request import ImageInput, Request
from mainstem.runtime.segments import Segment
from mainstem.settings.engine import SamplingParams


def image(start: int, length: int, name: str, splits: bool = False) -> ImageInput:
    return ImageInput(start, length, hashlib.sha256(name.encode()).digest()[:16], {}, splits)


# ---------------------------------------------------------------- the ghost itself


def test_a_wrong_window_page_or_state_would_be_noticed() -> None:
    sizes: dict[Component, int] = {Full(): 6, Window(3): 6, State(): 3}
    full, window = np.array([0, 1, 2, 3], np.int32), np.array([3, 4, 5], np.int32)

    def segment(tokens: list[int], start: int, window: np.ndarray, state: int, logits: bool = True) -> Segment:
        return Segment(np.array(tokens, np.int32), start, (full, window), logits, state=state)

    ghost = Ghost(sizes, 2)
    ghost.forward([segment([1, 2, 3, 4], 0, window, 0)])
    ghost.copy_state(0, 1)
    for table, state in (([-1, 3, 5], 0), ([3, -1, 5], 0), ([3, 4, 5], 2), ([3, 4, -1], 0), ([3, 5, 4], 0)):
        with pytest.raises(WrongKVError):
            ghost.forward([segment([5], 4, np.array(table, np.int32), state)])
    with pytest.raises(WrongKVError, match="copied"):
        ghost.copy_state(2, 0)
    ghost.forward([segment([5], 4, np.array([3, 4, 5], np.int32), 0)])
    with pytest.raises(WrongKVError, match="different prefixes"):
        ghost.forward([segment([6], 5, np.array([-1, 4, 5], np.int32), 1)])
    ghost.forward([segment([6], 5, np.array([3, 4, 5], np.int32), 0)])
    ghost.forward([segment([7], 6, np.array([-1, 4, 5, 0], np.int32), 0)])
    with pytest.raises(WrongKVError, match="before the window"):
        ghost.forward([segment([8], 7, np.array([3, 4, 5, 0], np.int32), 0)])


def test_a_cut_image_would_be_noticed() -> None:
    ghost = Ghost(8, 2)
    table, whole = np.arange(8, dtype=np.int32), image(2, 6, "a")
    first, rest = (
        Segment(np.arange(5, dtype=np.int32), 0, (table,), False, images=(whole,)),
        np.arange(4, dtype=np.int32),
    )
    with pytest.raises(AssertionError, match="cuts an image"):
        ghost.forward([first])
    parts = (image(2, 6, "a", splits=True),)
    ghost.forward([Segment(first.tokens, 0, (table,), False, images=parts)])
    ghost.forward([Segment(rest, 5, (table,), True, images=parts)])


# ---------------------------------------------------------------- output

KINDS = [
    "full window", "full state", "full window state", "window", "full", "full chunked", "full chunked state",
    "full wide window", "wide window state",
]  # fmt: skip


def some_sizes(rng: random.Random, kind: str, page_size: int, longest: int, chunk: int) -> dict[Component, int]:
    """Pools for `kind`, from sizes that hold just one request to sizes that hold all."""
    window = rng.choice([2, 3, max(2, page_size), page_size + 1, 2 * page_size + 3, 3 * page_size])
    pages = -(-longest // page_size)
    least, wide = (
        window_pages(w, min(chunk, longest), page_size, states="state" in kind) for w in (window, window + 5)
    )
    rows: dict[str, tuple[Component, int]] = {
        "full": (Full(), rng.choice([1, 1, 2, 3, 8]) * pages),
        "window": (Window(window), rng.choice([least, least, least + 2, 2 * least, 8 * least])),
        "wide": (Window(window + 5), rng.choice([wide, wide, wide + 2, 2 * wide])),
        "chunked": (Chunked(window), rng.choice([least, least, least + 2, 2 * least, 8 * least])),
        "state": (State(rng.choice([None, 1, 2, 8]), rng.random() < 0.5), rng.choice([3, 3, 4, 8, 60])),
    }
    return dict(rows[name] for name in kind.split())


def some_images(rng: random.Random, length: int) -> tuple[ImageInput, ...]:
    found, at = [], 0
    while rng.random() < 0.6:
        at += rng.choice([0, 1, 3, 4, 6])
        n = rng.choice([5, 6, 8, 11])
        if at + n > length:
            break
        found.append(image(at, n, rng.choice("ab"), splits=False))
        at += n
    return tuple(found)


@pytest.mark.parametrize("page_size", [4, *(pytest.param(size, marks=pytest.mark.slow) for size in (1, 16))])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_random_work_gives_what_it_would_give_without_a_cache(seed: int, kind: str, page_size: int) -> None:
    rng = random.Random(f"{seed} {kind} {page_size}")
    chunk, longest, images = rng.choice([1, 3, 7, 16, 64]), 80, rng.random() < 0.4
    bench = Bench(
        some_sizes(rng, kind, page_size, longest, max(chunk, 11)),
        page_size,
        cache=rng.random() < 0.9,
        images=images,
        token_budget=chunk,
        max_running=rng.choice([1, 2, 5, 12]),
        draft_tokens=rng.choice([0, 3, 20]),
        age_limit_s=rng.choice([0.0, 5.0, 1e9]),
        checkpoint_tokens=rng.choice([0, 0, page_size, 3 * page_size]),
        states_per_path=rng.choice([1, 3, 8]),
    )
    stems = [prompt(rng.random(), rng.randint(1, 34)) for _ in range(3)]
    cancelled = set()
    for _ in range(22):
        stem = rng.choice(stems)
        tokens = stem[: rng.randint(1, len(stem))] + prompt(rng.random(), rng.choice([0, 0, 1, 2, 4]))
        if rng.random() < 0.3 and (ended := [id for id in bench.requests if bench.ended(id)]):
            before = rng.choice(ended)
            tokens = [*bench.requests[before].tokens.tolist(), *bench.output(before)[0]][:34] + tokens[:2]
        id = bench.add(
            tokens,
            some_images(rng, len(tokens)) if images else (),
            rng.choice([None, None, None, "a"]),
            marks=sorted(rng.sample(range(len(tokens) + 1), min(rng.choice([0, 0, 1, 3]), len(tokens)))),
            max_tokens=rng.choice([1, 2, 5, 12, 40]),
            temperature=rng.choice([0.0, 0.0, 1.0]),
            seed=rng.randrange(2**32),
            ignore_eos=rng.random() < 0.7,
        )
        bench.step(rng.choice([0, 0, 1, 1, 5, 12]))
        if rng.random() < 0.12:
            victim = rng.choice([id, rng.choice(list(bench.requests))])
            cancelled |= {victim} - {i for i in bench.requests if bench.ended(i)}
            bench.scheduler.cancel(victim)
            bench.check()
    bench.run()
    bench.assert_complete(*(set(bench.requests) - cancelled))
    for id in cancelled:
        tokens, text, _ = complete(bench.requests[id])
        got_tokens, got_text, reason = bench.output(id)
        assert reason == "cancelled" and tokens[: len(got_tokens)] == got_tokens
        assert text.startswith(got_text)
    assert len(bench.ghost.computed) == bench.scheduler.totals.computed_tokens
    assert bench.cache.enabled or bench.scheduler.totals.cached_tokens == 0
    bench.check_at_rest()


# ---------------------------------------------------------------- recurrent states: where prompts part


def some_rows(kind: str, window: int = 6, windows: int = 60) -> dict[Component, int]:
    rows: dict[str, tuple[Component, int]] = {
        "full": (Full(), 90),
        "window": (Window(window), windows),
        "wide": (Window(window + 5), windows),
        "chunked": (Chunked(window), windows),
        "state": (State(), 9),
    }
    return dict(rows[name] for name in kind.split())


def with_states(pages: int = 400, slots: int = 100, most_on_path: int | None = None) -> dict[Component, int]:
    return {Full(): pages, State(most_on_path): slots}


def states_at(bench: Bench, tokens: Sequence[int]) -> list[int]:
    """The positions of a sequence at which the tree has a state."""
    ends = range(PAGE, len(tokens) + 1, PAGE)
    return [end for end in ends if bench.cache.peek([*tokens[:end], 0]) == end]


@pytest.mark.parametrize("shared", [12, 13, 15])
@pytest.mark.parametrize("window", [(), (Window(6),)])
def test_the_second_request_keeps_the_state_from_which_the_third_starts(shared: int, window: tuple[Window]) -> None:
    bench = Bench({Full(): 200, **dict.fromkeys(window, 100), State(): 20})
    a = prompt("a", shared)
    first, second, third = (bench.one(a + [i] + prompt(i, 9)) for i in range(3))
    assert [bench.hit(id) for id in (first, second, third)] == [0, 0, 12]
    assert states_at(bench, a) == [12]


@pytest.mark.parametrize("shared", [12, 13, 15])
@pytest.mark.parametrize("window", [(), (Window(6),)])
def test_with_a_mark_the_first_request_keeps_the_state_from_which_the_second_starts(
    shared: int, window: tuple[Window]
) -> None:
    bench = Bench({Full(): 200, **dict.fromkeys(window, 100), State(): 20})
    a = prompt("a", shared)
    ids = [bench.one(a + [i] + prompt(i, 9), marks=[shared]) for i in range(3)]
    assert [bench.hit(id) for id in ids] == [0, 12, 12]
    assert bench.scheduler.totals.checkpoints == {"branch": 0, "mark": 1, "end": 3, "regular": 0}
    assert bench.scheduler.totals.stateless_tokens == 0


def test_without_a_mark_the_second_request_starts_from_the_last_state_that_was_kept() -> None:
    bench = Bench(with_states(), checkpoint_tokens=8)
    a = prompt("a", 21)
    first, second, third = (bench.one(a + [i] + prompt(i, 9)) for i in range(3))
    assert [bench.hit(id) for id in (first, second, third)] == [0, 16, 20]
    assert bench.scheduler.totals.stateless_tokens == 4, "the KV of one page was there, but no state at its end"
    assert bench.scheduler.totals.checkpoints == {"branch": 1, "mark": 0, "end": 3, "regular": 5}


def test_the_state_at_a_mark_outlives_what_is_used_once() -> None:
    bench = Bench(with_states(slots=5))
    system = prompt("system", 24)
    bench.one(system + prompt("question", 8), marks=[24], max_tokens=9)
    for i in range(4):
        bench.one(prompt(i, 9), max_tokens=9)
    assert bench.hit(bench.one(system + prompt("other", 8), marks=[24])) == 24


@pytest.mark.parametrize("token_budget", [4, 6, 24, 512])
@pytest.mark.parametrize("shared", [40, 42])
def test_a_system_prompt_of_concurrent_requests_is_computed_once(shared: int, token_budget: int) -> None:
    bench = Bench(with_states(), token_budget=token_budget)
    system = prompt("system", shared)
    ids = [bench.add(system + [i] + prompt(i, 8), max_tokens=3, ignore_eos=True) for i in range(8)]
    bench.run_and_flush()
    assert [bench.hit(id) for id in ids] == [0] + [40] * 7
    assert len(bench.ghost.computed) == 40 + 8 * (shared - 40 + 9 + 2)


def test_a_request_that_shares_a_running_prompt_waits_for_the_state_where_they_part() -> None:
    bench = Bench(with_states(), token_budget=8)
    first = bench.add(prompt(1, 60), max_tokens=1)
    bench.step(2)
    second = bench.add(prompt(1, 37) + [1, 2, 3], max_tokens=1)
    third = bench.add(prompt(1, 25) + [1, 2, 3], max_tokens=1)
    bench.run_and_flush()
    assert [bench.hit(id) for id in (first, second, third)] == [0, 36, 24]


@pytest.mark.parametrize("kind", ["full", "full state", "full window", "window", "full window state"])
@pytest.mark.parametrize("asked", [15, 16, 17])
@pytest.mark.parametrize("answer", [2, 4, 5, 9, 30])
def test_the_next_turn_starts_at_the_last_page_boundary_of_the_answer(asked: int, answer: int, kind: str) -> None:
    bench = Bench(some_rows(kind))
    turn = prompt("turn", asked)
    for _ in range(3):
        before = len(turn)
        id = bench.one(turn, max_tokens=answer)
        turn += list(bench.output(id)[0]) + [1, 2, 3]
        again = bench.one(turn)
        assert bench.hit(again) >= (before + answer - 1) // PAGE * PAGE


# ---------------------------------------------------------------- windows


@pytest.mark.parametrize("kind", ["full window", "window", "full window state"])
@pytest.mark.parametrize("token_budget", [1, 6, 16])
@pytest.mark.parametrize("window", [3, 8, 17])
def test_a_long_request_holds_its_window_and_a_chunk(window: int, token_budget: int, kind: str) -> None:
    bench = Bench(some_rows(kind, window), token_budget=token_budget)
    bench.add(prompt(1, 100), max_tokens=100, ignore_eos=True)
    peak = 0
    while bench.scheduler.busy:
        bench.step()
        pool = bench.cache.stats().pools["window"]
        peak = max(peak, pool.private + pool.locked)
    bench.assert_complete()
    assert -(-window // PAGE) <= peak <= window_pages(window, token_budget, PAGE, states="state" in kind)


def test_where_prompts_part_the_window_stays_in_a_small_pool() -> None:
    bench = Bench({Full(): 400, Window(6): 24}, token_budget=8)
    shared = prompt("shared", 32)
    hits = []
    for i in range(6):
        hits.append(bench.hit(bench.one(shared + [i] + prompt(i, 9))))
        bench.one(prompt(f"other {i}", 90))
    assert hits[2:] == [32] * 4, "the second request may be too late"


@pytest.mark.parametrize("kind", ["full window", "window", "full window state"])
@pytest.mark.parametrize("page_size", [1, 3, 4])
def test_a_request_alone_goes_on_with_the_least_window_pages(page_size: int, kind: str) -> None:
    for window in (2, 4, 7, 9):
        for chunk in (1, 5, 12):
            least = window_pages(window, chunk, page_size, states="state" in kind)
            bench = Bench(some_rows(kind, window, least), page_size, token_budget=chunk)
            bench.one(prompt(1, 31), max_tokens=25)
            assert bench.scheduler.totals.preemptions == 0
            less = Bench(some_rows(kind, window, least - 1), page_size, token_budget=chunk)
            with pytest.raises(
                BadArgument, match=rf"need {least} window pages of {page_size} positions, .* {least - 1}$"
            ):
                less.add(prompt(1, 31), max_tokens=25)


# ---------------------------------------------------------------- preemption, failures


@pytest.mark.parametrize("kind", ["full state", "full window state", "full window"])
def test_a_preempted_prompt_goes_on_where_it_was(kind: str) -> None:
    bench = Bench({**some_rows(kind), Full(): 19}, token_budget=8)
    bench.add(prompt(1, 20), max_tokens=10, ignore_eos=True)
    bench.step(4)
    newer = bench.add(prompt(2, 50), max_tokens=2, ignore_eos=True)
    while not bench.scheduler.totals.preemptions:
        bench.step()
    assert bench.cache.peek(prompt(2, 50)) == 24 and not bench.deltas[newer]
    bench.run_and_flush()
    assert bench.scheduler.totals.preemptions == 1
    assert len(bench.ghost.computed) == len(set(bench.ghost.computed)) == 29 + 51, "nothing is computed twice"
    bench.check_at_rest()


@pytest.mark.parametrize("kind", ["full state", "full window", "full window state", "window"])
@pytest.mark.parametrize("before", range(7))
def test_nothing_that_a_failed_forward_left_is_used(before: int, kind: str) -> None:
    """The prompt takes three chunks, the answer the rest."""
    bench = Bench(some_rows(kind), token_budget=8)
    failed = bench.add(prompt(1, 22), max_tokens=8, ignore_eos=True)
    bench.step(before)
    bench.ghost.fail_next = RuntimeError("no memory")
    bench.step()
    assert bench.output(failed)[2] == "error"
    assert all(pool.private == 0 for pool in bench.cache.pools.values())
    done = len(bench.ghost.computed)
    again = bench.one([*prompt(1, 22), *bench.output(failed)[0]], max_tokens=8)
    assert bench.hit(again) <= done
    assert bench.hit(again) >= (done // PAGE * PAGE if "state" not in kind or before > 2 else 0)
    bench.check_at_rest()


def test_a_state_that_is_copied_while_the_request_fails_is_not_used() -> None:
    bench = Bench(some_rows("full state"))

    def fails(source: int, target: int) -> None:
        raise RuntimeError("the device is gone")

    bench.cache._core.copy_state_with(fails)
    bench.add(prompt(1, 22), max_tokens=8)
    with pytest.raises(RuntimeError, match="gone"):
        bench.step()
    bench.check()
    assert bench.cache.stats().pools["state"].cached == 0


# ---------------------------------------------------------------- images


def illustrated(name: str, tail: object, length: int = 14, splits: bool = False) -> dict[str, object]:
    """6 tokens of text, an image, 9 tokens of text; the tokens of the image are always the same."""
    tokens = prompt("before", 6) + [3] * length + prompt(tail, 9)
    return {"tokens": tokens, "images": (image(6, length, name, splits),)}


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_images_that_differ_are_never_shared_and_the_same_image_is(kind: str, splits: bool) -> None:
    bench = Bench(some_rows(kind), images=True)
    first, second = (bench.one(**illustrated("cat", "a", splits=splits)) for _ in range(2))
    other = bench.one(**illustrated("dog", "a", splits=splits))
    assert (bench.hit(first), bench.hit(second)) == (0, 28)
    assert bench.hit(other) == (6 if kind == "full" else 0 if "state" in kind else 4)
    assert bench.output(first) == bench.output(second) != bench.output(other)


def test_an_image_that_cannot_be_encoded_ends_its_own_request_only() -> None:
    bench = Bench(some_rows("full"), images=True)

    def embed(segment: Segment) -> None:
        if any(one.identity == image(0, 8, "too large").identity for one in segment.images):
            raise RuntimeError("no memory")

    bench.ghost.embed = embed  # type: ignore[method-assign]
    params = {"max_tokens": 3, "ignore_eos": True}
    lost = bench.add(**illustrated("too large", "a"), **params)
    spared = [bench.add(**illustrated("cat", "a"), **params), bench.add(prompt("text", 20), **params)]
    bench.run()
    assert bench.output(lost)[2] == "error" and "no memory" in str(bench.last(lost).error)
    bench.assert_complete(*spared)
    bench.check_at_rest()


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_that_part_after_an_image_share_its_state(kind: str, splits: bool) -> None:
    bench = Bench(some_rows(kind), images=True)
    ids = [bench.one(**illustrated("cat", tail, splits=splits)) for tail in "abc"]
    assert [bench.hit(id) for id in ids] == [0, 0 if "state" in kind else 20, 20]


@pytest.mark.parametrize("start", [20, 40])
def test_a_state_is_kept_before_an_image_that_page_boundaries_cut(start: int) -> None:
    bench = Bench(some_rows("full state"), 16, images=True)
    both, shown = prompt("before", start) + [3] * 20, (image(start, 20, "cat"),)
    ids = [bench.add([*both, i, *prompt(i, 30)], shown, max_tokens=1) for i in range(3)]
    bench.run_and_flush()
    assert [bench.hit(id) for id in ids] == [0] + [start // 16 * 16] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_longer_than_a_chunk_is_computed_at_once(kind: str) -> None:
    for splits, forwards in ((False, [[6], [30], [8], [1]]), (True, [[8], [8], [8], [8], [8], [5]])):
        bench = Bench(some_rows(kind), images=True, token_budget=8)
        bench.one(**illustrated("cat", "a", 30, splits))
        if "state" not in kind:
            assert bench.ghost.forwards == forwards
        assert max(max(forward) for forward in bench.ghost.forwards) == (8 if splits else 30)


def test_tokens_have_the_positions_of_the_request_also_when_it_is_resumed() -> None:
    """M-RoPE: positions of an image do not rise by one; after the prompt they continue from the highest."""
    bench = Bench({Full(): 12, State(): 9}, images=True, token_budget=8)
    seen: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    forward = bench.ghost.forward

    def recorded(segments: Sequence[Segment]) -> torch.Tensor:
        for segment in segments:
            if segment.positions is not None:
                for at, column in enumerate(segment.positions.T.tolist(), segment.start):
                    seen[at].add(tuple(column))
        return forward(segments)

    bench.ghost.forward = recorded  # type: ignore[method-assign]
    positions = np.concatenate([np.arange(6), np.full(14, 6), np.arange(9, 14)])[None, :].repeat(3, 0)
    request = Request(
        np.array([*prompt(1, 6), *[3] * 14, *prompt(2, 5)]),
        SamplingParams(max_tokens=16, ignore_eos=True),
        images=(image(6, 14, "cat"),),
        positions=positions,
    )
    bench.add(prompt(3, 3), max_tokens=20, ignore_eos=True)
    bench.step()
    bench.scheduler.add("placed", request)
    bench.requests["placed"] = request
    bench.run_and_flush()
    assert bench.scheduler.totals.preemptions > 0
    expected = [*positions[0].tolist(), *range(14, 29)]
    assert seen == {at: {(place,) * 3} for at, place in enumerate(expected)}


# ---------------------------------------------------------------- the cost of a state


def test_regular_checkpoints_take_free_slots_only() -> None:
    def slots_taken(slots: int) -> Bench:
        bench = Bench(with_states(slots=slots), checkpoint_tokens=4)
        for i in range(3):
            bench.one(prompt(i, 5))
        bench.one(prompt("long", 41))
        return bench

    roomy, tight = slots_taken(30), slots_taken(4)
    assert states_at(roomy, prompt("long", 41)) == [8, 16, 24, 32, 40]
    assert states_at(tight, prompt("long", 41)) == [40]
    assert [states_at(tight, prompt(i, 5)) for i in range(3)] == [[], [4], [4]], "the end of a prompt makes room"
    assert tight.cache.stats().leases.checkpoints_missed >= 3
    tight.one(prompt("long", 21) + [1])
    assert 20 in states_at(tight, prompt("long", 41)), "so does a position where prompts part"


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_path_keeps_no_more_states_than_allowed(limit: int) -> None:
    bench = Bench(with_states(most_on_path=limit), checkpoint_tokens=4)
    turn = prompt("turn", 41)
    for _ in range(5):
        id = bench.one(turn, max_tokens=9)
        turn += list(bench.output(id)[0])
        assert 1 <= len(states_at(bench, turn)) <= limit


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_a_state_from_which_others_part_is_not_thinned_away(limit: int) -> None:
    bench = Bench(with_states(pages=4000, slots=400, most_on_path=limit))
    system = prompt("system", 24)
    for i in range(3):
        bench.one(system + prompt(i, 8))
    turn = system + prompt("turn", 9)
    for _ in range(12):
        id = bench.one(turn, max_tokens=9)
        turn += list(bench.output(id)[0])
    assert len(states_at(bench, turn)) <= limit + 1
    assert bench.hit(bench.one(system + prompt("new", 8))) == 24


def conversations(rng: random.Random, count: int) -> list[list[int]]:
    """Prompts as users send them, in order: turns of chats, most of them over one of a few documents."""
    documents = [prompt(rng.random(), rng.randint(60, 160)) for _ in range(5)]
    chats = [[*rng.choice([*documents, []]), *prompt(rng.random(), rng.randint(4, 30))] for _ in range(count)]
    turns = [chat for chat in chats for _ in range(rng.randint(1, 5))]  # each chat's own list, again and again
    rng.shuffle(turns)
    return turns


def warm_hit_rate(sizes: dict[Component, int], seed: int) -> float:
    """The fraction of prompt tokens that were cached, over the second half of a workload."""
    rng = random.Random(seed)
    bench = Bench(sizes)
    bench.check = lambda: None  # type: ignore[method-assign]
    turns = conversations(rng, 30)
    asked = found = 0
    for i, turn in enumerate(turns):
        id = bench.add(turn, max_tokens=rng.randint(2, 24), ignore_eos=True)
        bench.run()
        if i >= len(turns) // 2:
            asked, found = asked + len(turn), found + bench.hit(id)
        turn += [*bench.output(id)[0], *prompt(rng.random(), rng.randint(3, 20))]
    bench.cache.check()
    return found / asked


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_states_hit_within_5_points_of_full_attention(seed: int) -> None:
    full = warm_hit_rate({Full(): 20_000}, seed)
    states = warm_hit_rate({Full(): 20_000, State(): 4_000}, seed)
    assert states > full - 0.05 and full > 0.7, f"{states:.1%} with states, {full:.1%} with full attention"
