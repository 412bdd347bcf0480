"""Workers on threads: what a call gives back, and that neither a hanging one nor `close` blocks for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from machine import patience

from mainstem.tiers.workers import Call, ThreadWorkers

pytestmark = pytest.mark.deadline
PATIENCE_S = patience(20)  # of the test, for what must happen


@pytest.fixture
def release() -> Iterator[threading.Event]:
    """What hanging calls wait for; set at the end, so that none outlives its test."""
    event = threading.Event()
    yield event
    event.set()


def finished(call: Call[Any]) -> bool:
    end = time.monotonic() + PATIENCE_S
    while not call.done() and time.monotonic() < end:
        time.sleep(0.001)
    return call.done()


def test_a_call_gives_back_what_it_returned() -> None:
    workers = ThreadWorkers(2, "test")
    calls = [workers.submit(lambda n=n: n * n) for n in range(50)]  # type: ignore[misc]
    assert all(finished(call) for call in calls)
    assert [call.result() for call in calls] == [n * n for n in range(50)]
    assert calls[7].result() == 49  # as often as one asks
    assert workers.close(PATIENCE_S)


@pytest.mark.parametrize("error", [ValueError("no"), StopIteration(), SystemExit(3), KeyboardInterrupt()])
def test_what_a_call_raises_is_raised_to_who_asks(error: BaseException) -> None:
    def fail() -> None:
        raise error

    workers = ThreadWorkers(1, "test")
    call, after = workers.submit(fail), workers.submit(lambda: "still here")
    assert finished(call)
    with pytest.raises(type(error)):
        call.result()
    assert finished(after)
    assert after.result() == "still here"
    assert workers.close(PATIENCE_S)


def test_calls_run_on_threads_of_that_name_and_as_many_at_once() -> None:
    workers, together = ThreadWorkers(3, "of-a-test"), threading.Barrier(3)

    def meet() -> str:
        together.wait(PATIENCE_S)
        return threading.current_thread().name

    calls = [workers.submit(meet) for _ in range(3)]
    assert all(finished(call) for call in calls)
    assert sorted(call.result() for call in calls) == ["of-a-test-0", "of-a-test-1", "of-a-test-2"]
    assert workers.close(PATIENCE_S)


def test_one_thread_runs_calls_in_the_order_in_which_they_came() -> None:
    workers, order = ThreadWorkers(1, "test"), list[int]()
    calls = [workers.submit(lambda n=n: order.append(n)) for n in range(100)]  # type: ignore[misc]
    assert workers.close(PATIENCE_S)  # after what is queued
    assert all(call.done() for call in calls)
    assert order == list(range(100))


def test_a_hanging_call_is_not_done_and_holds_its_own_thread_only(release: threading.Event) -> None:
    workers = ThreadWorkers(2, "test")
    hanging = workers.submit(release.wait)
    others = [workers.submit(lambda: "fine") for _ in range(10)]
    assert all(finished(call) for call in others)
    assert not hanging.done()
    release.set()
    assert finished(hanging)
    assert hanging.result() is True
    assert workers.close(PATIENCE_S)


def test_close_leaves_a_hanging_call_behind(release: threading.Event) -> None:
    workers = ThreadWorkers(2, "test")
    hanging = workers.submit(release.wait)
    assert not workers.close(0.05)
    assert not hanging.done()
    release.set()
    assert finished(hanging)


def test_threads_do_not_keep_the_process_alive(release: threading.Event) -> None:
    workers = ThreadWorkers(1, "daemonic")
    workers.submit(release.wait)
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("daemonic"))


def test_close_may_be_called_again(release: threading.Event) -> None:
    workers = ThreadWorkers(1, "test")
    assert workers.close(PATIENCE_S)
    assert workers.close(PATIENCE_S)


def test_many_threads_may_ask_for_the_result_of_one_call() -> None:
    workers = ThreadWorkers(1, "test")
    call, seen = workers.submit(lambda: "once"), list[str]()

    def ask() -> None:
        if finished(call):
            seen.append(call.result())

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for step in (threading.Thread.start, threading.Thread.join):
        each(threads, step)
    assert seen == ["once"] * 8
    assert workers.close(PATIENCE_S)


def each(threads: list[threading.Thread], step: Callable[[threading.Thread], None]) -> None:
    for thread in threads:
        step(thread)


def test_a_slow_call_has_all_of_the_time_to_end_not_a_part_for_each_thread() -> None:
    workers = ThreadWorkers(2, "slow")
    workers.submit(lambda: time.sleep(0.6))
    assert workers.close(patience(1))
