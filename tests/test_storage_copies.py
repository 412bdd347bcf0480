"""Copies of values on several machines, by a register in a real Valkey, and without one that answers."""

from __future__ import annotations

import importlib.util
import random
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from machine import patience
from rigs.hand_driven import Clock
from rigs.servers import free_port, freeze, valkey
from rigs.stores import Values

from mainstem.errors import BadArgument
from mainstem.storage import ABSENT, open_backend
from mainstem.storage.conformance import CASES, Case, run
from mainstem.storage.copies import Copies, Register, connect
from mainstem.storage.memory import MemoryBackend

if not importlib.util.find_spec("redis"):
    pytest.skip("the package redis is not installed", allow_module_level=True)
import redis

pytestmark = pytest.mark.deadline
PAGES = Values(1000)
PREFIXES = iter(range(1 << 20))


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    port = free_port()
    try:
        with valkey(port):
            yield port
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture
def prefix() -> str:
    return f"test-{next(PREFIXES)}"


def client(port: int, timeout_s: float | None = None) -> redis.Redis:
    return connect(f"redis://127.0.0.1:{port}/0", timeout_s or patience(5))


def machine(port: int, name: str, prefix: str, clock: Clock, enough: int = 1) -> Copies:
    register = Register(client(port), name, prefix=prefix, clock=clock, ttl_s=100)
    return Copies(MemoryBackend(), register=register, enough=enough)


def holders(port: int, prefix: str, number: int) -> list[bytes]:
    return list(client(port).zrange(f"{prefix}:copies:{PAGES.keys[number].hex()}", 0, -1))  # type: ignore[arg-type]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_conformance(case: Case, port: int, prefix: str) -> None:
    spec = f"copies(redis://127.0.0.1:{port}/0?prefix={prefix}&timeout={patience(5)}s)+memory:"
    assert str(run(case, lambda: open_backend(spec))) == f"pass  {case.name}"


def test_what_has_enough_copies_is_not_written_again(port: int, prefix: str) -> None:
    clock = Clock()
    first, second, third = (machine(port, name, prefix, clock, enough=2) for name in "abc")
    for each in (first, second, third):
        assert PAGES.put(each, 1, 2) == [True, True]
    assert [each.exists(PAGES.keys[1:3]) for each in (first, second, third)] == [[True] * 2, [True] * 2, [False] * 2]
    assert (first.counts["spared"], third.counts["spared"]) == (0, 2)
    assert PAGES.put(third, 2, 3) == [True, True]
    assert third.exists(PAGES.keys[2:4]) == [False, True]
    assert PAGES.read(third, 2, 3) == [ABSENT, PAGES.size]  # what is read is what this store has
    assert holders(port, prefix, 1) == [b"a", b"b"]


def test_own_copies_do_not_keep_from_writing(port: int, prefix: str) -> None:
    only = machine(port, "a", prefix, Clock())
    assert PAGES.put(only, 1) == PAGES.put(only, 1) == [True]
    assert PAGES.read(only, 1) == [PAGES.size]


def test_a_copy_counts_for_its_time_unless_it_is_read(port: int, prefix: str) -> None:
    clock = Clock()
    first, second = (machine(port, name, prefix, clock) for name in "ab")
    PAGES.put(first, 1, 2)
    clock.now_s += 60
    PAGES.read(first, 2)
    clock.now_s += 60
    assert PAGES.put(second, 1, 2) == [True, True]
    assert second.exists(PAGES.keys[1:3]) == [True, False]


def test_a_deletion_is_one_of_the_last_copy_too(port: int, prefix: str) -> None:
    first, second = (machine(port, name, prefix, Clock()) for name in "ab")
    PAGES.put(first, 1)
    first.delete(PAGES.keys[1:2])
    assert not holders(port, prefix, 1)
    assert first.exists(PAGES.keys[1:2]) == [False]
    PAGES.put(second, 1)
    assert second.exists(PAGES.keys[1:2]) == [True]


@pytest.mark.parametrize("enough", [1, 2])
def test_machines_that_write_at_once_keep_enough_copies(port: int, prefix: str, enough: int) -> None:
    machines = [machine(port, f"m{number}", prefix, Clock(), enough) for number in range(5)]
    numbers = list(range(40))
    barrier = threading.Barrier(len(machines))

    def write(one: Copies, seed: int) -> None:
        order = random.Random(seed).sample(numbers, len(numbers))
        barrier.wait()
        for number in order:
            PAGES.put(one, number)

    threads = [threading.Thread(target=write, args=(one, seed)) for seed, one in enumerate(machines)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in numbers:
        copies = sum(one.exists([PAGES.keys[number]])[0] for one in machines)
        assert copies == enough == len(holders(port, prefix, number))


def test_the_last_copy_is_not_given_up_by_two_at_once(port: int, prefix: str) -> None:
    registers = [Register(client(port), f"m{number}", prefix=prefix) for number in range(8)]
    for register in registers:
        register.add(PAGES.keys)
    given_up: list[list[bool]] = []
    barrier = threading.Barrier(len(registers))

    def give_up(register: Register) -> None:
        barrier.wait()
        given_up.append(register.give_up(PAGES.keys, 1))

    threads = [threading.Thread(target=give_up, args=(register,)) for register in registers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(len(PAGES.keys)):
        assert sum(each[number] for each in given_up) == len(registers) - 1
        assert len(holders(port, prefix, number)) == 1


# ---------------------------------------------------------------- a register that is dead


def test_without_a_register_each_writes_as_if_it_were_alone() -> None:
    clock = Clock()
    register = Register(client(free_port()), "a", monotonic=clock)
    with closing(Copies(MemoryBackend(), register=register)) as alone:
        assert PAGES.put(alone, *range(5)) == [True] * 5
        assert PAGES.read(alone, *range(6)) == [PAGES.size] * 5 + [ABSENT]
        assert register.counts["failed"] == 3  # then its breaker is open
        assert register.counts["skipped"] > 0
        alone.delete(PAGES.keys[:1])
        assert alone.exists(PAGES.keys[:2]) == [False, True]
        clock.now_s += 6
        PAGES.read(alone, 1)
        assert register.counts["failed"] == 4  # it is tried again


def test_a_register_that_dies_and_comes_back() -> None:
    port, clock = free_port(), Clock()
    register = Register(client(port), "b", monotonic=clock)
    with closing(Copies(MemoryBackend(), register=register)) as second:
        try:
            with valkey(port):
                Register(client(port), "a").add(PAGES.keys[:2])
                assert PAGES.put(second, 0) == [True]
                assert second.exists(PAGES.keys[:1]) == [False]
        except FileNotFoundError as error:
            pytest.skip(str(error))
        for _ in range(3):
            assert PAGES.put(second, 1) == [True]
        assert second.exists(PAGES.keys[1:2]) == [True]
        with valkey(port):
            clock.now_s += 6
            PAGES.put(second, 5)
            assert client(port).zcard(f"mainstem-register:copies:{PAGES.keys[5].hex()}") == 1


def test_a_register_that_hangs_costs_its_timeout() -> None:
    own = free_port()
    try:
        with valkey(own) as server:
            freeze(server)
            register = Register(client(own, timeout_s=0.05), "a")
            with closing(Copies(MemoryBackend(), register=register)) as alone:
                assert PAGES.put(alone, 1) == [True]
                assert PAGES.read(alone, 1) == [PAGES.size]
                assert register.counts["failed"] == 3
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("brackets", "name"),
    [
        ("", "copies"),
        ("file:/a", "copies"),
        ("redis://a:1/0?enough=0", "enough"),
        ("redis://a:1/0?enough=many", "enough"),
        ("redis://a:1/0?ttl=0", "ttl"),
        ("redis://a:1/0?name=", "name"),
        ("redis://a:1/0?copies=2", "storage option"),
    ],
)
def test_a_wrong_spec_is_refused(brackets: str, name: str) -> None:
    with pytest.raises(BadArgument) as caught:
        open_backend(f"copies({brackets})+memory:")
    assert caught.value.name == name


def test_a_server_that_is_not_there_is_no_error() -> None:
    with closing(open_backend(f"copies(redis://127.0.0.1:{free_port()}/0?name=a)+memory:")) as store:
        assert PAGES.put(store, 1) == [True]
