"""Storage of every component: what a restarted process finds again, and what it does where a component is missing."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import pytest
from rigs.components import DEVICE, HOST, KINDS, SIZE, STATES, P, Rig
from rigs.hand_driven import FaultyBackend

from mainstem.cache.components import by_name
from mainstem.storage.base import Limit
from mainstem.storage.memory import MemoryBackend
from mainstem.tiers.storage.sealer import HEADER_BYTES

Q = [*P, *range(20, 28)]  # 8 pages
MORE = [30, 31, 32, 33]


def stored(kind: str, *prompts: list[int], empty: int | None = None) -> FaultyBackend:
    """Returns a store that another process has filled: with every page, and a state after each."""
    backend = FaultyBackend()
    for tokens in prompts:
        rig = Rig(kind, backend=backend, empty=empty, slots=24)
        rig.serve(tokens)
        rig.settle()
        rig.close()
    return backend


def keys(backend: FaultyBackend, rig: Rig, name: str, tokens: list[int]) -> list[bytes]:
    """Returns the keys of a component's pages, whether it is stored or not."""
    assert rig.store is not None
    sealer = rig.store.sealer
    symbols = rig.cache.tree.keys.encode(tokens)
    return sealer.keys(sealer.names(sealer.root(b""), symbols, rig.cache.tree.page_bytes), name)


def fetched(rig: Rig, tokens: list[int]) -> int:
    """Prefetches and loads a prompt; returns its hit, whose content is checked."""
    rig.tiers.prefetch([*tokens, 99])
    rig.settle()
    lease = rig.lease(tokens)
    load = rig.tiers.load(lease)
    if load is not None:
        load.ticket.wait()
        assert load.wait()
    rig.holds(lease, tokens[: lease.hit])
    hit = lease.hit
    lease.abort()
    rig.settle()
    return hit


@pytest.mark.parametrize("batch_pages", [1, 3, 32])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restarted_process_finds_every_component_again(kind: str, batch_pages: int) -> None:
    backend = stored(kind, Q)
    rig = Rig(kind, backend=backend, batch_pages=batch_pages)
    assert fetched(rig, Q) == 16
    assert not rig.store or not rig.store.faults


def test_a_model_without_attention_needs_states_only() -> None:
    backend = stored("full state", Q, empty=0)
    rig = Rig("full state", backend=backend, empty=0)
    assert sorted(backend.stored_keys()) == sorted(keys(backend, rig, "state", Q))
    backend.delete(keys(backend, rig, "state", Q)[6:])
    assert fetched(rig, Q) == 12
    assert backend.calls.count("get") == 1


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "full"])
def test_one_lookup_asks_for_all_components(kind: str) -> None:
    backend = stored(kind, Q)
    rig = Rig(kind, backend=backend)
    before = backend.calls.count("exists")
    rig.tiers.prefetch([*Q, 99])
    rig.settle()
    assert backend.calls.count("exists") == before + 1


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, "absent") for kind in KINDS),
        *(("full window state", how) for how in ("altered", "length", "misdirected")),
    ],
)
def test_a_missing_or_damaged_value_of_any_component_shortens_what_depends_on_it(kind: str, how: str) -> None:
    for name in by_name(KINDS[kind]):
        for page in range(8):
            backend = stored(kind, Q)
            rig = Rig(kind, backend=backend)
            key = keys(backend, rig, name, Q)[page]
            other = keys(backend, rig, name, Q)[7 if page == 0 else page - 1]
            assert key in backend.stored_keys()
            if how == "absent":
                backend.instead["exists"] = lambda keys: [True] * len(keys)  # it lies
                backend.delete([key])
            else:
                value = bytearray(backend.value(key))
                value[-1] ^= how == "altered"
                value = bytearray(backend.value(other)) if how == "misdirected" else value
                backend.set_value(key, bytes(value[:-1] if how == "length" else value))
            hit = fetched(rig, Q)
            assert hit % SIZE == 0
            rig.cache.check()
            rig.close()
            if name == "full":
                assert hit == 2 * page
            elif name == "state":
                assert hit == (16 if page < 7 else 14)
            else:
                assert hit < 16 or page < 7


@pytest.mark.parametrize("kind", STATES)
def test_a_prefetch_brings_the_deepest_point_from_which_all_can_go_on(kind: str) -> None:
    backend = stored(kind, Q)
    rig = Rig(kind, backend=backend)
    backend.delete([key for page, key in enumerate(keys(backend, rig, "state", Q)) if page not in (2, 4)])
    rig.tiers.prefetch([*Q, 99])
    rig.settle()
    assert rig.lease(Q).loadable == 10
    assert rig.tiers.stats().prefetch_short == {"state": 3}


def test_what_stands_in_the_way_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mainstem.tiers.prefetch.reader")
    backend = stored("full state", Q, list(reversed(Q)))
    rig = Rig("full state", backend=backend)
    for tokens in (Q, list(reversed(Q))):
        backend.delete(keys(backend, rig, "state", tokens)[4:])
        assert fetched(rig, tokens) == 8
    assert rig.tiers.stats().prefetch_short == {"state": 8}
    assert [record.message for record in caplog.records] == [
        "storage has 4 pages further than its state allows; more of this is only counted"
    ]


def test_what_the_host_has_is_not_read_again() -> None:
    backend = stored("full window state", Q)
    rig = Rig("full window state", backend=backend)
    assert fetched(rig, Q) == 16
    rig.evict(DEVICE)
    rig.evict(HOST, "state")
    before = rig.tiers.stats().prefetched
    assert fetched(rig, Q) == 16
    assert rig.tiers.stats().prefetched == before + 1, "the state alone"
    rig.evict(DEVICE)
    rig.evict(HOST, "window")
    before = rig.tiers.stats().prefetched
    assert fetched(rig, Q) == 16
    assert rig.tiers.stats().prefetched == before + 2, "the window alone: 3 positions in pages of 2"


def test_what_was_read_waits_while_any_component_of_the_node_above_is_in_flight() -> None:
    rig = Rig("full window", backend=stored("full window", P))
    rig.serve(P[:4])
    rig.settle()
    rig.evict(HOST, "window")
    assert rig.tiers.back_up(rig.cache.tree.match(P[:4]).node)  # its window pages, again
    rig.tiers.prefetch([*P, 99])
    for _ in range(4):
        rig.readers.run_all()
        rig.tiers.poll()
    assert rig.tiers.host_pools[0].cached == 2 and rig.tiers.copying
    assert fetched(rig, P) == 8 and rig.tiers.host_pools[0].cached == 4


def test_window_pages_before_the_window_are_not_read() -> None:
    backend = stored("full window", Q)
    rig = Rig("full window", backend=backend)
    backend.delete(keys(backend, rig, "window", Q)[:6])
    assert fetched(rig, Q) == 16
    assert rig.tiers.stats().prefetched == 8 + 2


@pytest.mark.parametrize("kind", KINDS)
def test_a_removal_deletes_every_component(kind: str) -> None:
    backend = FaultyBackend()
    rig = Rig(kind, backend=backend)
    rig.serve(Q)
    rig.settle()
    assert len(backend.stored_keys()) > 0
    rig.cache.remove(Q[:1])
    rig.settle()
    assert backend.stored_keys() == []


@pytest.mark.parametrize("kind", KINDS)
def test_the_hottest_prefixes_are_warm_after_a_restart(kind: str) -> None:
    backend = FaultyBackend()
    before = Rig(kind, backend=backend)
    before.serve(Q)
    before.settle()
    before.tiers.remember()
    before.settle()
    rig = Rig(kind, backend=backend)
    rig.tiers.warm()
    rig.settle()
    assert rig.lease(Q).loadable == 16


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_kept_exact(kind: str) -> None:
    rig = Rig(kind, backend=FaultyBackend())
    assert rig.tiers.writes is not None
    assert [(row.number, row.name) for row in rig.tiers.writes.rows] == list(enumerate(rig.names))
    assert {row.name for row in rig.tiers.writes.rows if row.exact} == {"state"} & set(rig.names)


# ---------------------------------------------------------------- which states are written


def written_states(backend: FaultyBackend, rig: Rig, tokens: list[int]) -> list[int]:
    """Returns the ends, in pages, of the states of a prompt in storage."""
    return [page + 1 for page, key in enumerate(keys(backend, rig, "state", tokens)) if key in backend.stored_keys()]


def backed_up(rig: Rig, *prompts: list[int]) -> None:
    """Serves prompts and backs them up; nothing is written."""
    for tokens in prompts:
        rig.serve(tokens)
        for _ in range(4):
            for ticket in rig.memory.tickets:
                ticket.wait()
            rig.tiers.poll()


def test_states_where_prompts_part_or_end_are_written_first() -> None:
    backend = FaultyBackend()
    rig = Rig("full state", backend=backend, writes=1, slots=24)
    backed_up(rig, Q, [*Q[:6], 50, 51])
    order: list[int] = []
    while rig.writers.waiting:
        have = written_states(backend, rig, Q)
        rig.writers.run()
        rig.tiers.poll()
        order += [end for end in written_states(backend, rig, Q) if end not in have]
    begun = order[: order.index(8)]  # before the prompts had ended
    assert len(begun) <= 2
    late = [end for end in order if end not in begun]
    assert late[0] == 8 and late.index(3) < min(late.index(end) for end in late if end not in (3, 8))
    saved = [end - max((one for one in order[: order.index(end)] if one < end), default=0) for end in late[2:]]
    assert saved == sorted(saved, reverse=True), "then those that save the most"
    assert sorted(order) == list(range(1, 9)), "all of them in the end"


@pytest.mark.parametrize("writes", [1, 2, 3])
def test_pages_and_states_together_are_no_more_writes_at_once_than_are_allowed(writes: int) -> None:
    rig = Rig("full state", backend=FaultyBackend(), writes=writes, slots=24)
    backed_up(rig, Q, [*Q[:6], 50, 51])
    seen = set[int]()
    while rig.writers.waiting:
        seen.add(len(rig.writers.waiting))
        rig.writers.run()
        rig.tiers.poll()
    assert max(seen) == writes and rig.tiers.stats().queued == 0


def test_a_full_queue_drops_the_state_of_the_least_worth() -> None:
    backend = FaultyBackend()
    rig = Rig("full state", backend=backend, writes=1, queue_pages=3)
    backed_up(rig, Q)
    rig.settle()
    written = written_states(backend, rig, Q)
    assert 8 in written and len(written) < 8
    assert rig.tiers.stats().write_dropped > 0


@pytest.mark.parametrize("states_alone", [False, True])
@pytest.mark.parametrize("empty", [None, 0])
def test_a_state_that_could_not_be_written_is_written_when_it_is_used_again(
    empty: int | None, states_alone: bool
) -> None:
    """A store without room refuses all, or only what comes after the pages. When it is used, other writes wait."""
    backend = FaultyBackend()
    rig = Rig("full state", backend=backend, empty=empty, slots=48, host=64, device=64, writes=1)
    states = {*keys(backend, rig, "state", Q)}

    def full(given: Sequence[bytes], buffers: Sequence[memoryview]) -> list[bool]:
        return [
            states_alone and key not in states and MemoryBackend.put(backend, [key], [buffer])[0]
            for key, buffer in zip(given, buffers, strict=True)
        ]

    backend.instead["put"] = full
    rig.serve(Q)
    rig.settle()
    assert not states & {*backend.stored_keys()}
    del backend.instead["put"]
    backed_up(rig, list(range(100, 116)), list(range(200, 216)))
    rig.serve(Q)
    rig.settle()
    assert 8 in written_states(backend, rig, Q)


# ---------------------------------------------------------------- where each key is a request


class OneByOne(FaultyBackend):
    """A store where each key is a request; it counts those of a lookup."""

    capabilities = replace(FaultyBackend.capabilities, batched=False)

    def __init__(self, other: FaultyBackend | None = None) -> None:
        super().__init__()
        self.asked = 0
        for key in other.stored_keys() if other else ():
            self.set_value(key, other.value(key) if other else b"")

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        self.asked += len(keys)
        return super().exists(keys)


LONG = list(range(1, 201))  # 100 pages


def long_rig(kind: str, backend: FaultyBackend) -> Rig:
    return Rig(kind, backend=backend, device=128, host=128, slots=128, queue_pages=1000, writes=64)


@pytest.mark.parametrize("kind", KINDS)
def test_a_store_without_batches_is_asked_for_few_pages(kind: str) -> None:
    filled = FaultyBackend()
    rig = long_rig(kind, filled)
    rig.serve(LONG)
    rig.settle()
    rig.close()
    cold, warm = OneByOne(), OneByOne(filled)
    for backend, hit in ((cold, 0), (warm, 200)):
        rig = long_rig(kind, backend)
        rig.tiers.prefetch([*LONG, 99])
        rig.settle()
        asked = backend.asked
        assert fetched(rig, LONG) == hit
        assert asked <= (64 if hit else 16 if "full" in rig.names else 100)
        rig.close()


@pytest.mark.parametrize("kind", STATES)
def test_without_batches_a_state_that_is_lost_costs_the_way_to_the_one_above(kind: str) -> None:
    filled = FaultyBackend()
    rig = long_rig(kind, filled)
    rig.serve(LONG)
    rig.settle()
    MemoryBackend.delete(filled, keys(filled, rig, "state", LONG)[40:])
    rig.close()
    rig = long_rig(kind, OneByOne(filled))
    assert fetched(rig, LONG) == 80


# ---------------------------------------------------------------- what storage loses

PARTS = [kind for kind in KINDS if kind != "full"]


def lose(backend: FaultyBackend, rig: Rig, *names: str) -> None:
    for name in names:
        MemoryBackend.delete(backend, keys(backend, rig, name, [*Q, *MORE]))


@pytest.mark.parametrize("kind", PARTS)
def test_what_storage_lost_is_written_again_when_its_prefix_is_used(kind: str) -> None:
    backend = FaultyBackend()
    rig = Rig(kind, backend=backend, slots=24)
    rig.serve(Q)
    rig.settle()
    puts = backend.calls.count("put")
    rig.serve(Q)
    rig.settle()
    assert backend.calls.count("put") == puts, "nothing is lost"
    lose(backend, rig, *(name for name in rig.names if name != "full"))
    rig.serve(Q)
    rig.settle()
    assert fetched(Rig(kind, backend=backend), Q) == 16


@pytest.mark.parametrize("kind", PARTS)
def test_a_gap_in_storage_heals_with_all_that_the_path_has(kind: str) -> None:
    backend = FaultyBackend()
    rig = Rig(kind, backend=backend, slots=24)
    rig.serve(Q)
    rig.settle()
    MemoryBackend.clear(backend)
    rig.serve([*Q, *MORE])
    rig.settle()
    assert fetched(Rig(kind, backend=backend), Q) == 16, "prompts part where the path goes on"


@pytest.mark.parametrize("kind", STATES)
def test_a_state_that_was_backed_up_again_is_written_again(kind: str) -> None:
    backend = FaultyBackend()
    rig = Rig(kind, backend=backend, slots=24)
    rig.serve(Q)
    rig.settle()
    lose(backend, rig, "state")
    rig.tiers.flush()
    rig.serve([*Q, *MORE])
    rig.settle()
    assert {8, 10} <= set(written_states(backend, rig, [*Q, *MORE]))


def test_a_start_names_the_component_that_a_store_never_takes(caplog: pytest.LogCaptureFixture) -> None:
    backend = FaultyBackend()
    backend.longest = Limit(HEADER_BYTES + 8, "its option slot raises that")
    rig = Rig("full state", backend=backend, empty=0)
    rig.close()
    assert [line.split(":")[1] for line in caplog.messages] == [" state is never stored"]
